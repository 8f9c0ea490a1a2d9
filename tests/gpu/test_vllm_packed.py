"""QLoRA on CUDA: an adapter over weights that vLLM has packed to 4 bits, in one process and on one copy."""

import pytest
import torch
from peft import LoraConfig
from tiny_vllm import CUDA, MARKS, PROMPTS, config, difference, train_step
from torch.optim import AdamW
from transformers import AutoModelForCausalLM

import colo
from colo.config import RuntimeConfig
from colo.units import GIB

pytestmark = MARKS


def test_an_adapter_is_trained_over_the_engines_own_packed_weights(tmp_path):
    pytest.importorskip("vllm")
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is missing: pip install colo-rl[qlora]")
    AutoModelForCausalLM.from_config(config(), dtype=torch.bfloat16).save_pretrained(tmp_path)
    rt = colo.launch(
        str(tmp_path),
        engine="vllm",
        engine_options={
            "quantization": "bitsandbytes",
            "max_model_len": 256,
            "disable_log_stats": True,
            "enforce_eager": True,
        },
        lora=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"),
        optimizer=lambda params: AdamW(params, lr=1e-2, fused=True),
        device=CUDA,
        config=RuntimeConfig(kv_cache_bytes=GIB, offload="always"),
    )
    assert rt.transport.name == "shared"
    packed = rt.engine.packed_weights()
    assert len(packed) == 7 * config().num_hidden_layers
    base = {n: p.detach().clone() for n, p in rt.model.named_parameters() if "lora_" not in n}
    for step in range(3):
        train_step(rt, step)
        with rt.rollout():
            assert difference(rt.model, rt.generate(PROMPTS, max_tokens=16, temperature=0)) < 0.03
    assert rt.engine.adapter_refusal is None
    assert all(publication.num_bytes == publication.adapter_bytes for publication in rt.publications)
    assert all(torch.equal(base[n], p) for n, p in rt.model.named_parameters() if n in base)
    shared = {p.data_ptr() for p in rt.model.parameters()}
    assert all(weight.data.data_ptr() in shared for weight in packed.values())
    rt.close()
    assert all(p.device.type == "cpu" for p in rt.model.parameters())
