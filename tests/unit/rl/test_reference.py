"""The policy that a KL term compares with is the one that training began with, whatever an adapter began with."""

import pytest
import torch
from peft import (
    EvaConfig,
    LoftQConfig,
    LoraConfig,
    LoraGAConfig,
    PeftModel,
    get_peft_model,
    initialize_lora_eva_weights,
    preprocess_loraga,
)
from peft.tuners.lora.config import CordaConfig
from peft.tuners.lora.corda import preprocess_corda
from transformers import AutoModelForCausalLM

import colo
from colo.config import RuntimeConfig
from colo.rl.loop import GRPOConfig, Problem, Reference, grpo
from colo.rl.loss import GRPOLossConfig
from colo.units import MIB
from colo.weights.sources.peft import adds_nothing
from tests.models import add_adapter, tiny_qwen3
from tests.runtimes import make_engine

CONFIG = tiny_qwen3(num_hidden_layers=2)
IDS = torch.tensor([[5, 6, 7, 3, 4, 1, 2, 8]])
TARGETS = ["q_proj", "v_proj", "down_proj"]


def base_model():
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIG).eval()


def adapted(init, **options):
    return get_peft_model(base_model(), LoraConfig(r=4, target_modules=TARGETS, init_lora_weights=init, **options))


def corda(method):
    model = base_model()
    config = LoraConfig(
        r=4, target_modules=TARGETS, init_lora_weights="corda", corda_config=CordaConfig(corda_method=method)
    )
    preprocess_corda(model, config, run_model=lambda: [model(input_ids=IDS.roll(k, 1)) for k in range(8)])
    return get_peft_model(model, config)


def lora_ga():
    model = base_model()
    config = LoraConfig(r=4, target_modules=TARGETS, init_lora_weights="lora_ga", lora_ga_config=LoraGAConfig())
    preprocess_loraga(model, config, lambda: model(input_ids=IDS, labels=IDS).loss.backward())
    return get_peft_model(model, config)


def eva():
    model = adapted("eva", eva_config=EvaConfig(rho=1.0))
    batches = [{"input_ids": IDS.roll(k, 1), "attention_mask": torch.ones_like(IDS)} for k in range(6)]
    initialize_lora_eva_weights(model, batches, show_progress_bar=False)
    return model


def loftq():
    pytest.importorskip("scipy")  # PEFT's LoftQ computes quantiles with it
    return adapted("loftq", loftq_config=LoftQConfig(loftq_bits=4))


def trained(tmp_path):
    model = adapted(True)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "adapter")
    return PeftModel.from_pretrained(base_model(), tmp_path / "adapter", is_trainable=True)


def of_transformers(init):
    model = base_model()
    add_adapter(model, LoraConfig(r=4, target_modules=TARGETS, init_lora_weights=init))
    return model


KINDS = {
    "default": lambda _: adapted(True),
    "gaussian": lambda _: adapted("gaussian"),
    "rslora": lambda _: adapted(True, use_rslora=True),
    "eva": lambda _: eva(),
    "random": lambda _: adapted(False),
    "pissa": lambda _: adapted("pissa"),
    "pissa_niter": lambda _: adapted("pissa_niter_4"),
    "pissa with ranks": lambda _: adapted("pissa", rank_pattern={"v_proj": 2}, alpha_pattern={"q_proj": 3}),
    "olora": lambda _: adapted("olora"),
    "mica": lambda _: adapted("mica"),
    "orthogonal": lambda _: adapted("orthogonal"),
    "loftq": lambda _: loftq(),
    "corda, knowledge": lambda _: corda("kpm"),
    "corda, instruction": lambda _: corda("ipm"),
    "lora_ga": lambda _: lora_ga(),
    "trained": trained,
    "transformers, random": lambda _: of_transformers(False),
    "transformers, pissa": lambda _: of_transformers("pissa"),
}
ADD_NOTHING = {"default", "gaussian", "rslora", "eva", "mica"}


def logprobs(model):
    return model(input_ids=IDS).logits[:, :-1].log_softmax(-1).gather(-1, IDS[:, 1:, None])


@pytest.mark.filterwarnings("ignore:lora with eva initialization")
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_is_the_policy_that_training_began_with(kind, tmp_path):
    model = KINDS[kind](tmp_path)
    assert adds_nothing(model) is (kind in ADD_NOTHING)
    trains = [p for p in model.parameters() if p.requires_grad]
    rt = colo.share(
        make_engine(config=CONFIG), model, torch.optim.SGD(trains, lr=0.3), config=RuntimeConfig(kv_cache_bytes=MIB)
    )
    with torch.no_grad():
        began = logprobs(rt.model)
    config = GRPOConfig(group_size=4, max_tokens=4, seed=0, loss=GRPOLossConfig(kl_coefficient=0.1))
    problems = [[Problem(prompt=(3, 4, 5))]] * 3
    reference = Reference(rt.model)
    steps = list(grpo(rt, problems, lambda completion, _: float(completion.token_ids[0]), config))
    assert steps[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert steps[2]["kl"] > 1e-6
    before = {name: p.detach().clone() for name, p in rt.model.named_parameters()}
    assert torch.allclose(reference.run(logprobs), began, atol=1e-6)
    assert all(torch.equal(before[name], p) for name, p in rt.model.named_parameters())
    assert reference.size_bytes == (0 if kind in ADD_NOTHING else sum(p.nbytes for p in trains))
    rt.close()
