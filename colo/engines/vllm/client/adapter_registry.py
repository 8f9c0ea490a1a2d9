"""LoRA adapters by name, on the trainer's side; `colo.engines.vllm.worker.adapters` is the workers'."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

import torch

from colo.engine import AdapterWeights
from colo.engines.vllm.client.adapter_exports import AdapterExport, check_exportable
from colo.engines.vllm.client.link import NamedAdapter, WorkerLink
from colo.errors import EngineLost, Unsupported
from colo.memory.fence import wait_for_queued
from colo.weights.meter import count_read
from colo.weights.transports.ipc.staging import Staging

_FIRST = 1 << 20
"""Adapters are numbered from here, out of the way of those that a user loads by hand."""

_PREFIX = "base_model.model."
"""What PEFT puts before the names of modules, and vLLM takes off."""


class AdapterRegistry:
    """The adapters that the workers of one link hold. They know them by number only.

    Workers in another process read a trainer's tensors where they lie, or, where that cannot be, in a staging slab.
    Ownership: `link` and `staging` are the engine's; what is exported is kept until it is removed, or until `close`.
    """

    def __init__(self, link: WorkerLink, staging: Staging) -> None:
        self.numbers: dict[str, int] = {}
        self._names: set[str] = set()
        self._link = link
        self._staging = staging
        self._last = _FIRST
        self._sent: tuple[list[list[Any]], dict[str, float]] = ([], {})
        self._exports: dict[int, AdapterExport] = {}
        self.why_staged: str | None = None
        """Why the adapter that was sent last went through a slab; `None` where workers have read it in place."""

    @property
    def refusal(self) -> str | None:
        """Why the adapter that was loaded last is loaded anew for each version; `None` where it is written in place."""
        refusals: list[str | None] = self._link.call("adapter_refusal")
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
        return self._put(self._link.reserve_adapter(self._last, _tensors(adapter)), name, adapter)

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

    def close(self) -> None:
        """Let go of what is exported. Ordering: the workers have let go of it, or have ended. Idempotent."""
        for export in self._exports.values():
            export.close()
        self._exports.clear()

    def named(self, name: str) -> NamedAdapter:
        """One of them, for a request. `ValueError` when there is none of that name."""
        return name, self._number(name)

    def _put(self, number: int, name: str, adapter: AdapterWeights) -> bool:
        """Send an adapter. Returns whether an earlier one had its name, by which vLLM's prefix cache goes."""
        try:
            self._send(number, adapter)
        except Exception:
            with suppress(EngineLost):
                self._remove(number)
            raise
        self.numbers[name] = number
        known = name in self._names or self._link.goes_by_number
        self._names.add(name)
        return known

    def _number(self, name: str) -> int:
        if name not in self.numbers:
            raise ValueError(f"there is no adapter {name}; loaded are {sorted(self.numbers) or 'none'}")
        return self.numbers[name]

    def _remove(self, number: int) -> None:
        self._link.call("remove_adapter", number=number)
        self._let_go(number)
        self._link.release_adapter(number)

    @torch.inference_mode(False)
    def _send(self, number: int, adapter: AdapterWeights) -> None:
        tensors = _tensors(adapter)
        scalings = {_PREFIX + module: float(scaling) for module, scaling in adapter.scalings.items()}
        put = partial(self._link.call, "set_adapter", number=number)
        if self._link.same_process:
            put(tensors=[list(pair) for pair in tensors], scalings=scalings)
            return
        self.why_staged = self._why_staged(number, adapter, dict(tensors))
        if self.why_staged is None:
            self._have_read(number, scalings)
            return
        described, staging = self._staging.put(tensors, to_pid=0)
        places, scalings_before = self._sent
        if places is described and scalings_before == scalings:
            # The workers have kept where it all lies, and a large adapter has thousands of places.
            put(tensors=None, scalings=None, staging=staging)
        else:
            self._sent = ([], {})  # a worker that fails may have kept either
            put(tensors=described, scalings=scalings, staging=staging)
            self._sent = (described, scalings)
        self._let_go(number)

    def _why_staged(self, number: int, adapter: AdapterWeights, tensors: dict[str, torch.Tensor]) -> str | None:
        """Export an adapter's tensors, unless they are where they were exported from: `None`, or why that cannot be."""
        export = self._exports.get(number) or AdapterExport()
        if self._link.ipc_refusal is not None:
            return self._link.ipc_refusal
        if not export.holds(tensors):
            try:
                check_exportable(adapter, tensors, self._link.device)
                export.add(tensors)
            except Unsupported as error:
                return str(error)
        self._exports[number] = export
        return None

    def _have_read(self, number: int, scalings: dict[str, float]) -> None:
        """Have workers read an adapter that is exported, once all is there that the trainer has queued."""
        export = self._exports[number]
        places = {"tensors": None} if export.is_known(scalings) else export.to_wire() | {"scalings": scalings}
        export.forget()
        wait_for_queued(self._link.device)
        self._link.call("set_adapter", number=number, **places)
        export.confirm(scalings)
        count_read(export.num_bytes)

    def _let_go(self, number: int) -> None:
        """Let go of what was exported of an adapter, which the workers no longer map."""
        export = self._exports.pop(number, None)
        if export is not None:
            export.close()


def _tensors(adapter: AdapterWeights) -> list[tuple[str, torch.Tensor]]:
    """Every A, then every B, by the names that PEFT gives them."""
    tensors = [(f"{_PREFIX}{module}.lora_A.weight", tensor) for module, tensor in adapter.a.items()]
    return tensors + [(f"{_PREFIX}{module}.lora_B.weight", tensor) for module, tensor in adapter.b.items()]
