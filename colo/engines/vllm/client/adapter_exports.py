"""A trainer's adapter that workers in another process read where it lies: what they have mapped, and whether they can.

The tensors are exported once, while their addresses last. A later version costs a call that says no more than that
there is one, and the worker's copies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from colo.engine import AdapterWeights
from colo.errors import Unsupported
from colo.memory.storage import num_references
from colo.weights.meter import uncounted
from colo.weights.transports.ipc.export import Exported


class AdapterExport:
    """The tensors of one adapter, by name, in memory that workers map.

    Ownership: keeps that memory until `close`, also when the trainer's tensors have left it.
    """

    def __init__(self) -> None:
        self._exported: list[Exported] = []
        """The last one, and those before that workers may not have let go of yet."""

        self._known: tuple[Exported, Mapping[str, float]] | None = None
        """What the workers have answered to hold; `None` while that is unknown."""

        self.num_bytes = 0
        """Bytes of the tensors that are exported."""

    def holds(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether these tensors are exported, and still where they were then."""
        return bool(self._exported) and self._exported[-1].is_current(tensors)

    def add(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Export these instead. Raises: `Unsupported` for memory that cannot be, and nothing has changed then."""
        self._known = None
        with uncounted():  # on a CPU the trainer's tensors move
            self._exported.append(Exported(tensors))
        self.num_bytes = sum(tensor.nbytes for tensor in tensors.values())

    def is_known(self, scalings: Mapping[str, float]) -> bool:
        """Whether the workers have mapped what is exported, and have these scalings."""
        return self._known == (self._exported[-1], scalings)

    def to_wire(self) -> dict[str, Any]:
        """What is exported, as `set_adapter` takes it: `Place.to_wire` of every tensor, and the memory of all."""
        last = self._exported[-1]
        return {"tensors": [place.to_wire() for place in last.places], "memory": last.memory}

    def forget(self) -> None:
        """Know that workers may have mapped anything of what was exported, until `confirm`."""
        self._known = None

    def confirm(self, scalings: Mapping[str, float]) -> None:
        """Know that the workers have mapped what is exported now and have these scalings, and nothing of before."""
        self._known = (self._exported[-1], dict(scalings))
        while len(self._exported) > 1:
            self._exported.pop(0).close()

    def close(self) -> None:
        """Let go of the memory. Ordering: the workers have let go of it, or have ended. Idempotent."""
        self._known = None
        while self._exported:
            self._exported.pop().close()


def check_exportable(adapter: AdapterWeights, tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Raise `Unsupported`, with the reason, unless these tensors of an adapter may be exported to workers on `device`.

    On a CPU an export moves them into a memory file, and what shares their memory would stay behind.
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
