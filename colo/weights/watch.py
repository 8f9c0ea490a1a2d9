"""Noticing that weights have changed by other ways than the optimizer: `load_state_dict`, another active adapter."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from torch import nn

from colo.weights.sources.module import saved_buffers
from colo.weights.sources.peft import active_adapter, is_peft_model

if TYPE_CHECKING:
    from peft import PeftModel


class WriteWatch:
    """Remembers how often torch has written to a model's weights in place, and which adapter is active.

    Writes through `.data` leave no trace that it could see.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
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
        tensors = (*self._model.parameters(), *(buffer for _, buffer in saved_buffers(self._model)))
        return sum(tensor._version for tensor in tensors), adapter
