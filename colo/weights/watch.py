"""Noticing that weights have changed by other ways than the optimizer: `load_state_dict`, another active adapter."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, cast

from torch import nn

from colo.weights.sources.module import all_modules, fsdp_modules
from colo.weights.sources.peft import active_adapter, is_peft_model

if TYPE_CHECKING:
    from peft import PeftModel


class WriteWatch:
    """Remembers how often torch has written to a model's weights in place, and which adapter is active.

    Writes through `.data` leave no trace that it could see.
    """

    def __init__(self, model: nn.Module, *, foreign: Iterable[str] = ()) -> None:
        """Buffers called like those that are `foreign` are not watched."""
        self._model = model
        self._foreign = {name.rpartition(".")[2] for name in foreign}
        self._fsdp = fsdp_modules(model)
        self._seen = self._state()

    def accept(self) -> None:
        """Take what there is now as known: an optimizer's step has made it."""
        self._seen = self._state()

    def has_changed(self) -> bool:
        """Whether something has changed since it was last asked, or accepted."""
        seen, self._seen = self._seen, self._state()
        return seen != self._seen

    def _state(self) -> tuple[int, str | None]:
        adapter = active_adapter(cast("PeftModel", self._model)) if is_peft_model(self._model) else None
        for module in self._fsdp:
            module.reshard()
        num_writes = 0
        for module in all_modules(self._model):
            others = module._non_persistent_buffers_set | self._foreign
            num_writes += sum(p._version for p in module._parameters.values() if p is not None)
            num_writes += sum(b._version for n, b in module._buffers.items() if b is not None and n not in others)
        return num_writes, adapter
