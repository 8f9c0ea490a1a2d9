"""LoRA adapters by name, on the trainer's side; `colo.engines.vllm.worker.adapters` is the workers'.

An adapter is a set of tensors. Workers in another process read them where the trainer has them, exported once, while
their addresses last (`Exported`), or from copies (`Staging`) where that cannot be. A later version then costs a call
that says no more than that there is one, and the worker's copies.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from colo.engine import AdapterWeights
from colo.engines.vllm import wire
from colo.engines.vllm.client.link import NamedAdapter, WorkerLink
from colo.errors import EngineLost, Unsupported
from colo.memory.fence import wait_for_queued
from colo.memory.share import Exported, Staging, Wire
from colo.memory.storage import num_references
from colo.weights.watch import count_read, uncounted

_FIRST = 1 << 20
"""Adapters are numbered from here, out of the way of those that a user loads by hand."""

_PREFIX = "base_model.model."
"""PEFT's prefix of module names, which vLLM takes off."""

_MOST_NAMES = 64


class AdapterRegistry:
    """The adapters that the workers of one link hold. They know them by number only.

    Ownership: `link` is the engine's; memory that workers map is kept until the adapter is removed, or until `close`.
    """

    def __init__(self, link: WorkerLink) -> None:
        self.numbers: dict[str, int] = {}
        self.why_staged: str | None = None
        """The reason why the adapter sent last was copied on its way; `None` if workers have read it in place."""

        self._link = link
        self._last = _FIRST
        self._sent: dict[int, _Sent] = {}
        self._cached: set[str] = set()
        """Names that vLLM's prefix cache may know."""

    @property
    def refusal(self) -> str | None:
        """The reason why the adapter loaded last is loaded anew for each version; `None` if it is written in place."""
        refusals: list[str | None] = self._link.call(wire.AdapterRefusal())
        return next(filter(None, refusals), None)

    def load(self, name: str, adapter: AdapterWeights) -> bool:
        """Send a new adapter; see `Engine.load_adapter` and `_put`. `Unsupported` also when the engine is full."""
        if name in self.numbers:
            raise ValueError(f"adapter {name} is loaded already: remove it first, or give each version its own name")
        capacity = self._link.infos[0].max_adapters
        if capacity and len(self.numbers) >= capacity:
            raise Unsupported(
                f"the engine holds {len(self.numbers)} adapters and takes no more: remove one, or start it with a "
                "larger max_loras"
            )
        self._last += 1
        return self._put(self._link.reserve_adapter(self._last, list(_tensors(adapter).items())), name, adapter)

    def replace(self, old: str, new: str, adapter: AdapterWeights) -> bool:
        """Send `adapter` in the place of `old`, whose number it takes over; see `Engine.replace_adapter` and `_put`."""
        number = self._number(old)
        if new != old and new in self.numbers:
            raise ValueError(f"adapter {new} is loaded already: give each version its own name")
        del self.numbers[old]
        return self._put(number, new, adapter)

    def remove(self, name: str) -> None:
        """Forget an adapter. `ValueError` when there is none of that name."""
        number = self._number(name)
        self._remove(number)
        del self.numbers[name]

    def forget_names(self) -> None:
        """Note that vLLM's prefix cache, which goes by the names of adapters, is empty: others come back to it."""
        self._cached = set(self.numbers)

    def close(self) -> None:
        """Let go of the memory. Ordering: the workers have let go of it, or have ended. Idempotent."""
        for sent in self._sent.values():
            sent.close()
        self._sent.clear()

    def named(self, name: str) -> NamedAdapter:
        """One of them, for a request. `ValueError` when there is none of that name."""
        return name, self._number(name)

    def _put(self, number: int, name: str, adapter: AdapterWeights) -> bool:
        """Send an adapter. Returns whether vLLM's prefix cache may hold an earlier one of its name."""
        try:
            self._send(number, adapter)
        except Exception:
            with suppress(EngineLost):
                self._remove(number)
            raise
        self.numbers[name] = number
        known = name in self._cached or self._link.goes_by_number or len(self._cached) >= _MOST_NAMES
        self._cached.add(name)
        return known

    def _number(self, name: str) -> int:
        if name not in self.numbers:
            raise ValueError(f"there is no adapter {name}; loaded are {sorted(self.numbers) or 'none'}")
        return self.numbers[name]

    def _remove(self, number: int) -> None:
        self._link.call(wire.RemoveAdapter(number=number))
        if (sent := self._sent.pop(number, None)) is not None:
            sent.close()
        self._link.release_adapter(number)

    @torch.inference_mode(False)
    def _send(self, number: int, adapter: AdapterWeights) -> None:
        """Let workers take an adapter, once all is there that the trainer has queued."""
        tensors = _tensors(adapter)
        scalings = {_PREFIX + module: float(scaling) for module, scaling in adapter.scalings.items()}
        if self._link.same_process:
            asked = wire.SetAdapter(number=number, tensors=tensors, scalings=scalings, in_process=True)
            self._link.call(asked)
            return
        sent = self._sent.setdefault(number, _Sent())
        described, self.why_staged = sent.put(adapter, tensors, self._link)
        is_known = sent.known is not None and sent.known[0] is described and sent.known[1] == scalings
        sent.known = None  # until they answer, they may have either
        wait_for_queued(self._link.device)
        if is_known:
            self._link.call(wire.SetAdapter(number=number, tensors=None))
        else:
            self._link.call(wire.SetAdapter(number=number, tensors=described, scalings=scalings))
        sent.confirm(described, scalings)
        if self.why_staged is None:
            count_read(sum(tensor.nbytes for tensor in tensors.values()))


@dataclass
class _Sent:
    """Memory from which workers read one adapter, and the part that they have mapped."""

    memory: list[Exported | Staging] = field(default_factory=list)
    """The last one, and those before that workers may not have let go of yet."""

    known: tuple[Wire, Mapping[str, float]] | None = None
    """Tensors and scalings that the workers have answered to hold; `None` while that is unknown."""

    def put(
        self, adapter: AdapterWeights, tensors: Mapping[str, torch.Tensor], link: WorkerLink
    ) -> tuple[Wire, str | None]:
        """Description of the tensors (the same object while nothing has moved), and the reason if they are copies."""
        last = self.memory[-1] if self.memory else None
        why_staged = link.ipc_refusal
        if why_staged is None and isinstance(last, Exported) and last.is_current(tensors):
            return last.wire, None
        if why_staged is None:
            try:
                _check_exportable(adapter, tensors, link.device)
                with uncounted():  # on a CPU the trainer's tensors move
                    exported = Exported(tensors)
                self.memory.append(exported)
                return exported.wire, None
            except Unsupported as error:
                why_staged = str(error)
        if not isinstance(last, Staging):
            last = Staging(link.device if link.ipc_refusal is None else torch.device("cpu"))
            self.memory.append(last)
        return last.put(tensors), why_staged

    def confirm(self, described: Wire, scalings: Mapping[str, float]) -> None:
        """Note that the workers have mapped `described`, have these scalings, and nothing of before."""
        self.known = (described, scalings)
        while len(self.memory) > 1:
            self.memory.pop(0).close()

    def close(self) -> None:
        """Let go of the memory."""
        self.known = None
        while self.memory:
            self.memory.pop().close()


def _check_exportable(adapter: AdapterWeights, tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Raise `Unsupported`, with the reason, unless these tensors of an adapter may be exported to workers on `device`.

    On a CPU an export moves them into a memory file, and whatever shares their memory would stay behind.
    """
    if not adapter.shared:
        raise Unsupported("its tensors are not said to be the trainer's own, which last (AdapterWeights.shared)")
    elsewhere = [name for name, tensor in tensors.items() if tensor.device != device]
    if elsewhere:
        raise Unsupported(f"{elsewhere[0]} is not on {device}")
    if device.type == "cuda":
        return
    addresses = {tensor.data_ptr() for tensor in tensors.values()}
    for name, tensor in tensors.items():
        is_whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
        if num_references(tensor) > 1 or not is_whole or len(addresses) < len(tensors):
            raise Unsupported(f"{name} is not alone in its memory, from which an export would move it on a CPU")


def _tensors(adapter: AdapterWeights) -> dict[str, Any]:
    """Every A, then every B, by the names that PEFT gives them."""
    tensors = {f"{_PREFIX}{module}.lora_A.weight": tensor for module, tensor in adapter.a.items()}
    return tensors | {f"{_PREFIX}{module}.lora_B.weight": tensor for module, tensor in adapter.b.items()}
