"""vLLM's sleep on CUDA: every bit comes back, at every level."""

import pytest
import torch
from tiny_vllm import CUDA, KV_CACHE_BYTES, MARKS, OPTIONS, PROMPTS, config, difference, train_step
from torch.optim import AdamW
from transformers import AutoModelForCausalLM

import colo
from colo.config import RuntimeConfig
from colo.engine import AdapterWeights, EngineState
from colo.errors import BudgetError, PhaseError, StaleWeights
from colo.memory.probe import free_device_bytes
from colo.units import GIB

pytestmark = MARKS

FP8 = {"enforce_eager": True, "quantization": "fp8"}
SETTINGS = RuntimeConfig(kv_cache_bytes=KV_CACHE_BYTES, offload="always")


def engine_of(model, **options):
    pytest.importorskip("vllm")
    from colo.engines.vllm.client.engine import VLLMEngine

    return VLLMEngine(model, kv_cache_bytes=KV_CACHE_BYTES, device=CUDA, **(OPTIONS | options))


def greedy(engine, **options):
    """One prompt at a time: how requests fall into batches changes the last bits."""
    engine.reset_prefix_cache()
    params = engine.sampling_params(max_tokens=16, temperature=0)
    return [completion for prompt in PROMPTS for completion in engine.generate([prompt], params, **options)]


@pytest.fixture(scope="module")
def pooled():
    """An engine whose weights are vLLM's own, in its sleep pool, with LoRA buffers beside them."""
    engine = engine_of(config(), share_memory=False, enforce_eager=True, max_lora_rank=16)
    engine.commit(0)
    yield engine
    engine.close()


@pytest.mark.parametrize("level", [1, "keep-weights", 1])
def test_what_slept_generates_what_it_did(pooled, level):
    before = greedy(pooled)
    free_bytes = free_device_bytes(CUDA)
    pooled.sleep(level)
    assert free_device_bytes(CUDA) - free_bytes > 0.9 * KV_CACHE_BYTES
    with pytest.raises(PhaseError, match="asleep"):
        pooled.generate(PROMPTS, None)
    pooled.wake()
    pooled.resume()
    after = greedy(pooled)
    assert [c.token_ids for c in after] == [c.token_ids for c in before]
    assert [c.logprobs for c in after] == [c.logprobs for c in before]


def test_a_wake_that_cannot_succeed_leaves_the_engine_asleep_and_usable(pooled):
    before = greedy(pooled)
    pooled.sleep(1)
    hog = torch.empty(free_device_bytes(CUDA) - 2 * GIB, dtype=torch.uint8, device=CUDA)
    with pytest.raises(BudgetError, match="free"):
        pooled.wake()
    assert pooled.state is EngineState.ASLEEP
    del hog
    torch.cuda.empty_cache()
    pooled.wake()
    pooled.resume()
    assert [c.token_ids for c in greedy(pooled)] == [c.token_ids for c in before]


def test_level_2_asks_for_weights_and_keeps_what_no_loader_brings(pooled):
    pooled.sleep(2)
    with pytest.raises(PhaseError, match="wake"):
        pooled.load_weights([])
    pooled.wake()
    pooled.resume()
    with pytest.raises(StaleWeights, match="dropped"):
        pooled.generate(PROMPTS, None)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(), dtype=torch.bfloat16).to(CUDA)
    pooled.pause()
    pooled.load_weights(model.named_parameters())
    pooled.commit(1)
    pooled.resume()
    assert difference(model, greedy(pooled)) < 0.02  # wrong rotary buffers would show here


@pytest.mark.parametrize("level", [1, 2])
def test_an_adapter_survives_every_level(pooled, level):
    torch.manual_seed(level)
    model = AutoModelForCausalLM.from_config(config(), dtype=torch.bfloat16).to(CUDA)
    pooled.pause()
    pooled.load_weights(model.named_parameters())
    pooled.commit(level)
    pooled.resume()
    a, b = (torch.randn(*shape, dtype=torch.bfloat16, device=CUDA) * 0.1 for shape in ((16, 512), (512, 16)))
    name = "model.layers.0.self_attn.q_proj"
    pooled.load_adapter("tuned", AdapterWeights(a={name: a}, b={name: b}, scalings={name: 2.0}))
    before = greedy(pooled, adapter="tuned")
    assert [c.logprobs for c in before] != [c.logprobs for c in greedy(pooled)]
    pooled.sleep(level)
    pooled.wake()
    if level == 2:
        pooled.load_weights(model.named_parameters())
        pooled.commit(level)
    pooled.resume()
    after = greedy(pooled, adapter="tuned")
    assert [c.logprobs for c in after] == [c.logprobs for c in before]
    pooled.remove_adapter("tuned")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A model, and the folder that it is saved in."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(), dtype=torch.bfloat16)
    folder = tmp_path_factory.mktemp("checkpoint")
    model.save_pretrained(folder)
    return model, folder


@pytest.fixture(scope="module")
def quantizing(checkpoint):
    """An engine that quantizes, in a process of its own, and a model that a trainer has beside it."""
    pytest.importorskip("vllm")
    engine, model = colo.start(checkpoint[1], engine="vllm", engine_options=OPTIONS | FP8, device=CUDA, config=SETTINGS)
    yield engine, model
    engine.close()


def assert_reloads_exactly(engine, model):
    engine.commit(0)
    loaded = greedy(engine)
    plan = engine.record_plan(dict(model.named_parameters()))
    assert "fp8" in next(iter(plan.fallbacks.values()))
    engine.pause()
    engine.load_weights((n, torch.randn_like(p).to(CUDA) * 0.02) for n, p in model.named_parameters())
    engine.load_weights((n, p.to(CUDA)) for n, p in model.named_parameters())
    engine.commit(1)
    engine.resume()
    again = greedy(engine)
    assert [c.token_ids for c in again] == [c.token_ids for c in loaded]
    assert [c.logprobs for c in again] == [c.logprobs for c in loaded]


def test_an_engine_that_quantizes_in_this_process_is_reloaded_exactly(checkpoint):
    model, folder = checkpoint
    engine = engine_of(folder, own_process=False, **FP8)
    assert_reloads_exactly(engine, model)
    engine.close()


def test_an_engine_that_quantizes_in_its_own_process_is_reloaded_exactly(checkpoint, quantizing):
    assert_reloads_exactly(quantizing[0], checkpoint[0])


def test_an_engine_that_quantizes_follows_a_trainer(quantizing):
    engine, model = quantizing
    rt = colo.share(engine, model, AdamW(model.parameters(), lr=1e-3, fused=True), config=SETTINGS)
    with rt.rollout():
        first = rt.generate(PROMPTS, max_tokens=16, temperature=0)
        gap = difference(rt.model, first)
    for step in range(3):
        train_step(rt, step)
    with rt.rollout():
        followed = difference(rt.model, rt.generate(PROMPTS, max_tokens=16, temperature=0))
    moved = difference(rt.model, first)
    rt.close()
    assert gap < 0.1, f"before training fp8 is {gap} from bf16"
    assert followed < moved / 3, f"after training it is {followed} from weights that have moved by {moved}"
