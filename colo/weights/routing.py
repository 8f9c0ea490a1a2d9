"""Routing replay: a trainer's pass through a mixture of experts, by the experts that the engine has chosen.

    completions = rt.generate(prompts)  # of an engine that returns routed experts
    with colo.replay_routing(model, completions, length=ids.shape[1]):
        loss = ...  # of `ids`: the prompts and completions as a batch
        loss.backward()

Two implementations of one model differ in the last bits of a router's scores, and so now and then in an expert; that
token's log-probabilities are then far apart, and its importance weight is wrong. Here the trainer's router computes its
scores, with gradients, for the engine's experts.

A router calls `torch.topk`, whose answer is replaced while it runs, by a mode of torch's that its own hooks enter and
leave: what it makes of the scores stays its own, and no class is changed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from colo.engine import Completion
from colo.errors import Unsupported
from colo.log import logger

_LAYER = re.compile(r"\.(\d+)\.")
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def is_routed(completions: Sequence[Completion]) -> bool:
    """True if all of them tell the experts that their tokens took."""
    return bool(completions) and all(c.routed_experts is not None for c in completions)


def routing_of(completions: Sequence[Completion], *, length: int | None = None, left_padded: bool = False) -> Tensor:
    """Experts that engines chose for a batch of prompts with their completions: int64 (B, T, layers, experts a token).

    T is `length`, or that of the longest sequence; padding is on the right, or before each sequence (`left_padded`).
    Padding, and the last token, which no engine has passed through the model, have -1: there a router chooses itself.
    Raises: `ValueError` for completions without routing, or a `length` that is too short.
    """
    if not isinstance(completions, Sequence) or not all(isinstance(each, Completion) for each in completions):
        raise TypeError("routing is that of a list of completions, as rt.generate(...) returns, or a tensor of theirs")
    lacking = sum(c.routed_experts is None for c in completions)
    if lacking or not completions:
        raise ValueError(
            f"{lacking} of {len(completions)} completions have no routed experts: start vLLM with "
            "engine_options={'enable_return_routed_experts': True}, an SGLang server with "
            "--enable-return-routed-experts"
        )
    import numpy as np  # which is there where such an array is; torch needs none

    rows = [torch.from_numpy(np.array(c.routed_experts, dtype=np.int64)) for c in completions]
    sizes = [len(c.prompt_token_ids) + len(c.token_ids) for c in completions]
    wide = max(sizes) if length is None else length
    if wide < max(sizes):
        raise ValueError(f"length {wide} is shorter than a sequence of {max(sizes)} tokens")
    routing = torch.full((len(rows), wide, *rows[0].shape[1:]), -1, dtype=torch.int64, device="cpu")
    for into, row, size in zip(routing, rows, sizes, strict=True):
        if not size - 1 <= len(row) <= size:
            raise ValueError(f"routed experts of {len(row)} tokens for a sequence of {size}: the engine left some out")
        start = wide - size if left_padded else 0
        into[start : start + len(row)] = row
    return routing


@contextmanager
def replay_routing(
    model: nn.Module,
    routing: Tensor | Sequence[Completion],
    *,
    length: int | None = None,
    left_padded: bool = False,
) -> Iterator[None]:
    """A block in which the routers of `model` choose the experts that engines have chosen for the same tokens.

    Every pass in it is over a batch of `routing`: completions, padded as `routing_of` says, or a tensor that it makes,
    (B, T, layers, experts a token), integer, in which -1 leaves the choice to the router. Backward passes that compute
    activations again belong in it too.
    Raises: `Unsupported` for a model without such routers; of a pass, where a router chooses in another way than by
    `torch.topk`; and at the end where none has run, as in a compiled pass. `ValueError` as `routing_of`, and for
    another number of tokens, layers or experts.
    """
    if not isinstance(routing, Tensor):
        routing = routing_of(routing, length=length, left_padded=left_padded)
    with _replayed(model, routing, _raise):
        yield


@contextmanager
def replaying(model: nn.Module, completions: Sequence[Completion]) -> Iterator[None]:
    """`replay_routing` of completions that tell their experts, for passes that nobody has asked that for.

    Where it cannot be done the routers choose for themselves, and the log says why, once.
    """
    with ExitStack() as block:
        if is_routed(completions):
            try:
                block.enter_context(_replayed(model, routing_of(completions), _warn))
            except (Unsupported, ValueError) as error:
                _warn(str(error))
        yield


def _raise(why: str) -> None:
    raise Unsupported(f"{why}: train it without replay_routing")


@cache
def _warn(why: str) -> None:
    logger.warning("experts that the engine has told are not replayed: %s", why)


@contextmanager
def _replayed(model: nn.Module, routing: Tensor, object_to: Callable[[str], None]) -> Iterator[None]:
    num_experts, top_k = _sizes(model)
    routers = _routers(model)
    if not routers:
        raise Unsupported(f"{type(model).__name__} has no router that chooses by torch.topk in a module of its own")
    if routing.dim() != 4 or routing.shape[-1] != top_k:
        raise ValueError(f"routing has shape {tuple(routing.shape)}, not (B, T, layers, {top_k})")
    if max(layer for layer, _ in routers) >= routing.shape[2]:
        raise ValueError(f"routing has {routing.shape[2]} layers, and the model a router in layer {routers[-1][0]}")
    replays = [_Replay(routing[:, :, n].reshape(-1, top_k), num_experts, n, object_to) for n, _ in routers]
    with ExitStack() as hooks:
        for replay, (_, router) in zip(replays, routers, strict=True):
            hooks.callback(replay.leave)
            hooks.callback(router.register_forward_pre_hook(replay.begin).remove)
            hooks.callback(router.register_forward_hook(replay.end, always_call=True).remove)
        yield
    if not any(replay.has_run for replay in replays):
        object_to(f"no router of {type(model).__name__} ran, since a compiled pass runs without hooks")


class _Replay:
    """The choice of one router. Its hooks run in whichever thread a pass does, such as that of a backward pass."""

    def __init__(self, experts: Tensor, num_experts: int, layer: int, object_to: Callable[[str], None]) -> None:
        """`experts` has a row for each token."""
        self.has_run = False
        self._experts = experts
        self._num_experts = num_experts
        self._layer = layer
        self._object = object_to
        self._modes: list[_TopK] = []

    def begin(self, router: nn.Module, inputs: Any) -> None:
        self.has_run = True
        mode = _TopK(self._experts, self._num_experts)
        mode.__enter__()  # type: ignore[no-untyped-call]  # torch leaves the mode untyped
        self._modes.append(mode)

    def end(self, router: nn.Module, inputs: Any, output: Any) -> None:
        mode = self._modes.pop()
        mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        if output is not None and not mode.has_chosen:
            self._object(
                f"the router of layer {self._layer}, a {type(router).__name__}, chooses its experts in another way "
                "than by torch.topk"
            )

    def leave(self) -> None:
        """Let go of modes that an interrupt within a router has left: torch calls no hook then."""
        while self._modes:
            mode = self._modes.pop()
            mode.is_over = True
            if _get_current_function_mode() is mode:
                mode.__exit__(None, None, None)


class _TopK(TorchFunctionMode):
    """Answers `torch.topk` over all experts with those that are given, and their scores."""

    def __init__(self, experts: Tensor, num_experts: int) -> None:
        super().__init__()
        self._experts, self._num_experts = experts, num_experts
        self.has_chosen = self.is_over = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if self.is_over or func not in (torch.topk, Tensor.topk):
            return found
        scores, chosen = args[0] if args else kwargs["input"], found[1]
        # others choose among groups of experts
        if scores.shape[-1] != self._num_experts or chosen.shape[-1] != self._experts.shape[-1]:
            return found
        if chosen.numel() != self._experts.numel():
            raise ValueError(
                f"the pass is over {chosen.numel() // chosen.shape[-1]} tokens, and routing of "
                f"{len(self._experts)} is to be replayed"
            )
        given = self._experts.to(chosen.device).view(chosen.shape)
        replayed = torch.where(given >= 0, given, chosen)
        self.has_chosen = True
        return torch.return_types.topk((scores.gather(-1, replayed), replayed))


def _sizes(model: Any) -> tuple[int, int]:
    """Number of experts, and of those that a token takes."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        raise Unsupported(f"{type(model).__name__} is no model of transformers, whose routers are known")
    config = config.get_text_config()
    counts = [int(value) for name in _NUM_EXPERTS if (value := getattr(config, name, None))]
    top_k = getattr(config, "num_experts_per_tok", None) or getattr(config, "moe_topk", None)
    if not counts or not top_k:
        raise Unsupported(f"{type(model).__name__} is no mixture of experts: its config names no number of experts")
    return counts[0], int(top_k)


def _routers(model: nn.Module) -> list[tuple[int, nn.Module]]:
    """The innermost modules of decoder layers that say how many experts they take, with the number of their layer."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(getattr(module, "top_k", None), int) and _LAYER.search(f".{name}."):
            outer = name.rpartition(".")[0]
            while outer and outer not in found:
                outer = outer.rpartition(".")[0]
            found.pop(outer, None)
            found[name] = module
    return [(int(_LAYER.search(f".{name}.")[1]), module) for name, module in found.items()]  # type: ignore[index]
