"""Unsloth's models: a `vllm.LLM` in this process, and a model whose parameters are views of its memory.

All that colo knows of Unsloth is here, and none of it is imported. `FastLanguageModel.from_pretrained(...,
fast_inference=True)` starts vLLM and builds the model over it: `model.vllm_engine` is the `vllm.LLM`, whose attribute
`shared_weights` says so. Unsloth's trainers are TRL's, rewritten: they generate on that engine with `use_vllm=True`.
Tested: 2026.10.9.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from colo.errors import PhaseError, Unsupported

HOW_TO_SLEEP = "set UNSLOTH_VLLM_STANDBY=1 before Unsloth is imported, which starts its vLLM with a sleep mode,"
"""The way to a KV cache that can leave."""

_HIDDEN_STATES = "UNSLOTH_RETURN_HIDDEN_STATES"
"""Environment variable: while it is 1 a model's `logits` are its last hidden states."""

_OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
"""Environment variables that TRL sets for a vLLM in the trainer's process."""


def engine_of(model: Any) -> Any | None:
    """The `vllm.LLM` that Unsloth has built a model over; `None` for any other model."""
    llm = getattr(model, "vllm_engine", None)
    return llm if is_unsloths(llm) else None


def is_unsloths(llm: Any) -> bool:
    """Tell if a `vllm.LLM` is one whose memory Unsloth has built a model over."""
    return getattr(llm, "shared_weights", False) is True


def check_engine(model: Any, engine: Any, *, fold: bool = False) -> None:
    """Raise `Unsupported` for a model of Unsloth's with another engine than its own, or with an adapter to `fold`.

    Raises: `PhaseError` for an engine that is asleep. `engine` is a `vllm.LLM`, an engine of colo's, or a name.
    """
    llm = engine_of(model)
    if llm is not None and getattr(engine, "llm", engine) is not llm:
        raise Unsupported(
            "the weights of this model are memory of Unsloth's vLLM, and another engine would take them out of it: "
            "colo.share(model.vllm_engine, model, optimizer), colo.attach(trainer) without engine, or load the model "
            "with fast_inference=False"
        )
    if llm is not None and fold:
        raise Unsupported(
            "fold_adapter=True gives the weights beneath the adapter memory of their own, and these are memory of "
            "Unsloth's vLLM: leave it out, that vLLM applies LoRA by itself"
        )
    if is_unsloths(engine) and engine.llm_engine.is_sleeping():
        # its allocator marks nothing that it has unmapped: colo would unmap that once more
        raise PhaseError(
            "Unsloth's vLLM is asleep, as its standby leaves it after a rollout: call model.vllm_engine.wake_up(), "
            "then share it"
        )


def wake(llm: Any) -> None:
    """Wake an engine that a trainer has put to sleep, as Unsloth's standby does when a trainer is made."""
    if llm.llm_engine.is_sleeping():
        llm.wake_up()


def forget_rank(accelerator: Any) -> None:
    """Take out of the environment that this process is a rank, where a trainer has written so for its vLLM.

    A trainer that is made later would take itself for one. What torchrun has started, which names its run, stays.
    Raises: `Unsupported` for an `accelerator` of a trainer that was made so.
    """
    if accelerator.num_processes > 1 or "TORCHELASTIC_RUN_ID" in os.environ:
        return
    if accelerator.distributed_type != "NO":
        raise Unsupported(
            "this trainer takes itself for one of several ranks, since an earlier one has written RANK and WORLD_SIZE "
            "into the environment for its vLLM: make config and trainer anew after "
            f"`for name in {_OF_RANKS}: os.environ.pop(name, None)`"
        )
    for name in _OF_RANKS:
        os.environ.pop(name, None)


@contextmanager
def returning_logits() -> Iterator[None]:
    """Let models of Unsloth's return logits: while its trainers compute log-probabilities they do not."""
    before = os.environ.get(_HIDDEN_STATES, "0")
    if before != "1":
        yield
        return
    os.environ[_HIDDEN_STATES] = "0"
    try:
        yield
    finally:
        os.environ[_HIDDEN_STATES] = before
