"""SGLang's own server over several ranks, and a mixture of experts, on a CPU: what each rank holds is the trainer's."""

from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3MoeConfig

import colo
from colo.errors import EngineLost, TransferError
from colo.weights.mismatch import logprob_difference
from colo.weights.routing import routing_of
from tests.integration.servers import Restarting, sharing, train_step
from tests.integration.sglang_server import Server, needs_sglang
from tests.models import SMALL

pytestmark = [needs_sglang, pytest.mark.slow]

CLOSE = 1e-4
ALL = {"max_tokens": 8, "ignore_eos": True}
PROMPTS = [[(7 * i + j * j) % 100 for j in range(20)] for i in range(4)]
LORA = ("--enable-lora", "--max-lora-rank", "8", "--lora-target-modules", "all")
TWO_RANKS = ("--tp-size", "2")


def make_model(randomize, seed=0):
    """Experts, of a size that SGLang does not pad on a CPU."""
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    config = Qwen3MoeConfig(**SMALL, **sizes, architectures=["Qwen3MoeForCausalLM"], dtype="float32")
    return randomize(AutoModelForCausalLM.from_config(config, dtype=torch.float32), seed=seed)


def make_dense(randomize, seed=0):
    config = Qwen2Config(**SMALL, architectures=["Qwen2ForCausalLM"], dtype="float32", tie_word_embeddings=True)
    return randomize(AutoModelForCausalLM.from_config(config, dtype=torch.float32), seed=seed)


@pytest.fixture(scope="module")
def folders(tmp_path_factory, randomize):
    made = [tmp_path_factory.mktemp("checkpoint") for _ in range(2)]
    for folder, make in zip(made, (make_model, make_dense), strict=True):
        make(randomize, 9).save_pretrained(folder)
    return made


@pytest.fixture(scope="module")
def served(folders, tmp_path_factory):
    made = Restarting(Server, folders, tmp_path_factory.mktemp("logs"), *TWO_RANKS, "--enable-return-routed-experts")
    yield made
    made.server.end()
    made.proxy.end()


@pytest.fixture
def share(served):
    with sharing(served.proxy, deadline_s=60) as make:
        yield make


@pytest.fixture
def model(randomize):
    return make_model(randomize)


def way_elsewhere(name, folder):
    ways = {"slab": None, "folder": colo.WeightsFolder(folder), "broadcast": colo.Broadcast("127.0.0.1")}
    return ways[name]


@pytest.mark.parametrize("way", ["slab", "folder", "broadcast"])
def test_every_rank_follows_the_trainer(share, served, model, mismatch, way, tmp_path):
    rt = share(model, through=way_elsewhere(way, tmp_path / "weights"))
    assert rt.engine.placement.endswith(", shared by 2 ranks")
    for version in range(3):
        completions = rt.generate(PROMPTS, **ALL)
        assert mismatch(model, completions) < CLOSE
        assert {c.weights_version for c in completions} == {version}
        train_step(rt)
    first, second = rt.engine._attested
    whole = {name for name in first if first[name] == second[name]}
    assert {name.split(".")[-2] for name in whole} == {
        *("q_norm", "k_norm", "input_layernorm", "post_attention_layernorm", "gate", "norm"),
    }


def test_the_experts_that_sglang_took_are_told(share, model):
    rt = share(model)
    completions = rt.generate(PROMPTS, **ALL)
    taken = routing_of(completions)
    found = {}
    for number, layer in enumerate(model.model.layers):
        layer.mlp.gate.register_forward_hook(lambda _, __, out, number=number: found.__setitem__(number, out[2]))
    model(input_ids=torch.tensor([c.prompt_token_ids + c.token_ids for c in completions]))
    for number, experts in found.items():
        own = experts.view(4, 28, 2)[:, :-1].sort().values
        assert torch.equal(taken[:, :-1, number].sort().values, own) and (taken[:, -1] == -1).all()
    assert logprob_difference(model, completions, temperature=1.0, device=rt.device, together=True) < CLOSE


def test_memory_of_one_rank_is_counted(share, model):
    rt = share(model)
    weights, cache = rt.engine.segments
    whole = sum(parameter.nbytes for parameter in model.parameters())
    assert whole / 2 < weights.size_bytes < whole * 0.6 and cache.size_bytes == rt.engine.cache_bytes / 2


@torch.no_grad()
def draw_adapter(model):
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.normal_(0, 0.3, generator=generator)


def test_a_dense_model_and_an_adapter_follow_and_a_rank_that_ends_takes_the_server_with_it(
    share, served, folders, randomize, mismatch
):
    served.start(*TWO_RANKS, *LORA, folder=folders[1])
    settings = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"], lora_alpha=8)
    model = get_peft_model(make_dense(randomize), settings)
    draw_adapter(model)
    rt = share(model)
    assert mismatch(model, rt.generate(PROMPTS, **ALL)) < CLOSE
    rt.close()

    model = make_dense(randomize)
    rt = share(model)
    assert mismatch(model, rt.generate(PROMPTS, **ALL)) < CLOSE
    train_step(rt)
    served.proxy.once("/update_weights_from_tensor", lambda _: served.server.schedulers()[1].kill())
    with pytest.raises(EngineLost, match="did not answer /update_weights_from_tensor"):
        rt.generate(PROMPTS, **ALL)

    served.start(folder=folders[1])
    rt.recover()
    assert mismatch(model, rt.generate(PROMPTS, **ALL)) < CLOSE and len(rt.engine._attested) == 1, "one rank by now"
    rt.engine._layout = replace(rt.engine._layout, ranks=replace(rt.engine._layout.ranks, tp_size=2))
    train_step(rt)
    with pytest.raises(TransferError, match="has another model than when it was connected to"):
        rt.generate(PROMPTS, **ALL)
