"""What tests of vLLM on CUDA share: a small model, a runtime, a training step, and how far the two sides are apart."""

import ctypes
import json
import os
import subprocess
import sys
from contextlib import contextmanager

import psutil
import pytest
import torch
from torch.optim import AdamW
from transformers import Qwen3Config

import colo
from colo.config import RuntimeConfig
from colo.units import GIB

MARKS = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of vLLM's own imports
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # of its sockets
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

CUDA = torch.device("cuda", 0)
KV_CACHE_BYTES = 4 * GIB
OPTIONS = {"max_model_len": 256, "disable_log_stats": True}
PROMPTS = [[(7 * i + j * j) % 900 + 1 for j in range(24)] for i in range(8)]


SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "eos_token_id": None,
    "bos_token_id": None,
    "architectures": ["Qwen3ForCausalLM"],
    "dtype": "bfloat16",
}

SIZES_OF_0_6B = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
}


def config(**changes):
    """A small Qwen3."""
    return Qwen3Config(**(SIZES | changes))


def config_of_0_6b():
    """Qwen3 0.6B."""
    return config(**SIZES_OF_0_6B)


def launch(model=None, *, offload="always", **options):
    """The small Qwen3, or `model`, on vLLM and in a trainer, on one copy of the weights where that can be."""
    pytest.importorskip("vllm")
    return colo.launch(
        model or config(),
        engine="vllm",
        engine_options=OPTIONS | options,
        optimizer=lambda params: AdamW(params, lr=1e-3, fused=True),
        device=CUDA,
        config=RuntimeConfig(kv_cache_bytes=KV_CACHE_BYTES, offload=offload),
    )


PR_SET_CHILD_SUBREAPER = 36
ENDS_WITHIN_S = 60.0
"""Time in which processes end by themselves: an engine whose driver has gone sees so within a second, and has 10."""


@contextmanager
def nothing_left():
    """Processes that are started within end with it, however it ends; after success they have to do so by themselves.

    torchrun gives every rank a session of its own, which a signal to its group does not reach. This process becomes the
    parent of those that lose theirs, so that all of them are found.
    """
    here, prctl = psutil.Process(), ctypes.CDLL(None).prctl
    before = set(here.children())

    def left():
        return [process for process in here.children() if process not in before]

    assert prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    try:
        yield
        _, remain = psutil.wait_procs(left(), timeout=ENDS_WITHIN_S)
        assert not remain, [process.cmdline() for process in remain]
    finally:
        while processes := left():  # and, in the next round, what those have started
            for process in processes:
                process.kill()
            psutil.wait_procs(processes)
        prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def torchrun(script, folder, *arguments, ranks=2):
    """Run a file in ranks of torchrun; returns what each has written to `folder`, as `{rank}.json`.

    Neither a rank nor an engine of one is left then, which would keep its memory.
    """
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--rdzv-backend", "c10d"]
    with nothing_left(), (folder / "log").open("w") as log:  # no pipe, which who is left would hold open
        done = subprocess.run(
            [sys.executable, *launcher, "--rdzv-endpoint", "127.0.0.1:0", script, *map(str, arguments)],
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
            stdout=log,
            stderr=log,
            timeout=420,
            check=False,
        )
        assert done.returncode == 0, (folder / "log").read_text()[-6000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def train_step(rt, step):
    ids = torch.randint(1, 1000, (4, 64), generator=torch.Generator().manual_seed(step)).to(rt.device)
    with rt.train():
        rt.model(input_ids=ids, labels=ids).loss.backward()
        rt.optimizer.step()
        rt.optimizer.zero_grad()


def difference(model, completions):
    """Mean |log p(engine) - log p(model)| of greedy completions."""
    ids = torch.tensor([c.prompt_token_ids + c.token_ids for c in completions], device=next(model.parameters()).device)
    start = len(PROMPTS[0])
    with torch.no_grad():
        logprobs = model(input_ids=ids).logits[:, start - 1 : -1].float().log_softmax(-1)
    mine = logprobs.gather(-1, ids[:, start:, None])[..., 0].cpu()
    return float((mine - torch.tensor([c.logprobs for c in completions])).abs().mean())
