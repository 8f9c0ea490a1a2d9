"""Noticing that weights have changed by other ways than the optimizer: `load_state_dict`, another active adapter."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from colo.weights.sources.module import ModuleSource, all_modules
from colo.weights.sources.peft import active_adapter, is_peft_model

if TYPE_CHECKING:
    from peft import PeftModel


class WriteWatch:
    """Remembers how often torch has written to a model's weights in place, and which adapter is active.

    Writes through `.data` leave no trace that it could see.
    """

    def __init__(self, source: ModuleSource) -> None:
        """Buffers called like those of `source` that are foreign to its engine are not watched."""
        self._source = source
        self._foreign = {name.rpartition(".")[2] for name in source.foreign}
        self._seen = self._state()

    def accept(self) -> None:
        """Take what there is now as known: an optimizer's step has made it."""
        self._seen = self._state()

    def has_changed(self) -> bool:
        """Whether something has changed since it was last asked, or accepted."""
        seen, self._seen = self._seen, self._state()
        return seen != self._seen

    def _state(self) -> tuple[int, str | None]:
        model = self._source.model
        adapter = active_adapter(cast("PeftModel", model)) if is_peft_model(model) else None
        self._source.reshard()
        num_writes = 0
        for module in all_modules(model):
            others = module._non_persistent_buffers_set | self._foreign
            num_writes += sum(p._version for p in module._parameters.values() if p is not None)
            num_writes += sum(b._version for n, b in module._buffers.items() if b is not None and n not in others)
        return num_writes, adapter
