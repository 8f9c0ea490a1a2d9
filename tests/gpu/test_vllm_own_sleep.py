"""colo's sleep under vLLM's own API, on CUDA."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_vllm import CUDA, KV_CACHE_BYTES, MARKS, PROMPTS, config
from transformers import AutoModelForCausalLM

from colo.memory.probe import free_device_bytes

pytestmark = MARKS


def test_vllms_own_sleep_keeps_an_adapter_at_every_level(tmp_path, monkeypatch):
    """The sleep-mode backend `colo` under vLLM's own API: weights in slabs stay, and everything else comes back."""
    vllm = pytest.importorskip("vllm")
    lora = pytest.importorskip("vllm.lora.request")
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # as vLLM itself does once CUDA is in use
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(), dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "model")
    adapter = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    adapter.save_pretrained(tmp_path / "adapter")
    llm = vllm.LLM(
        str(tmp_path / "model"),
        load_format="colo",
        worker_extension_cls="colo.engines.vllm.worker.ColoWorker",
        kv_cache_memory_bytes=KV_CACHE_BYTES,
        skip_tokenizer_init=True,
        enable_sleep_mode=True,
        enable_lora=True,
        enforce_eager=True,
        max_model_len=256,
    )
    params = vllm.SamplingParams(temperature=0, max_tokens=16, logprobs=0, detokenize=False)
    request = lora.LoRARequest("tuned", 1, str(tmp_path / "adapter"))

    def sampled():
        llm.reset_prefix_cache()
        return [sample_of(prompt) for prompt in PROMPTS]  # one at a time, as `greedy`

    def sample_of(prompt):
        (out,) = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False, lora_request=request)
        return out.outputs[0].token_ids, out.outputs[0].cumulative_logprob

    before = sampled()
    for level in (1, 2):
        free_bytes = free_device_bytes(CUDA)
        llm.sleep(level)
        assert free_device_bytes(CUDA) - free_bytes > 0.9 * KV_CACHE_BYTES
        llm.wake_up()
        assert sampled() == before
    llm.llm_engine.engine_core.shutdown()
