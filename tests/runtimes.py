"""Runtimes of a small model on a CPU, and what tests do with them."""

import torch
from peft import LoraConfig
from torch.optim import AdamW

import colo
from colo.config import Offload, RuntimeConfig
from colo.engines.torch import TorchEngine
from colo.memory.offload import Mover
from colo.units import MIB
from tests.models import small_qwen3

PROMPTS = [[1, 2, 3], [4, 5, 6, 7], [8, 9]]
ALWAYS = RuntimeConfig(kv_cache_bytes=MIB, offload=Offload.ALWAYS)


def qwen3(**changes):
    """The small model with one matrix for its embedding and its output layer."""
    return small_qwen3(**({"tie_word_embeddings": True} | changes))


def adamw(params):
    return AdamW(params, lr=1e-2)


def launch(model=None, **options):
    """A runtime of the small model, or of `model`, with AdamW."""
    options = {"optimizer": adamw, "config": RuntimeConfig(kv_cache_bytes=MIB), "device": "cpu"} | options
    return colo.launch(model or qwen3(), **options)


def launch_lora(**options):
    """A runtime that trains an adapter of every layer, which is not zero."""
    return launch(lora=LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False), **options)


def make_engine(dtype=torch.float32, config=None):
    """An engine of the small model, or of `config`, that holds no weights yet."""
    mover = Mover(torch.device("cpu"))
    return TorchEngine(config or qwen3(), device="cpu", dtype=dtype, kv_cache_bytes=MIB, mover=mover)


def train_step(rt, tokens=((1, 2, 3, 4),)):
    """Train on `tokens`; the loss."""
    ids = torch.tensor(tokens)
    loss = rt.model(input_ids=ids, labels=ids).loss
    loss.backward()
    rt.optimizer.step()
    rt.optimizer.zero_grad()
    return float(loss.detach())


def segment(rt, name):
    return rt.scheduler.segments[name]


def assert_same_weights(model, twin):
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(mine, other, atol=1e-6)
