"""Noticing that weights have changed by other ways than the optimizer: `load_state_dict`, another active adapter."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Hashable
from typing import TYPE_CHECKING, cast

import torch

from colo.weights.sources.base import WeightSource
from colo.weights.sources.module import all_modules, held_by
from colo.weights.sources.peft import adapter_settings, is_peft_model

if TYPE_CHECKING:
    from peft import PeftModel

_version_of = operator.attrgetter("_version")


class WriteWatch:
    """Remembers a model's weights, how often torch has written to each in place, and an adapter's settings.

    Writes through `.data` are not noticed. Keeps the tensors, so that a new tensor cannot be taken for an old one.
    """

    def __init__(self, source: WeightSource) -> None:
        """Buffers called like those of `source` that are foreign to its engine are not watched."""
        self._source = source
        self._foreign = {name.rpartition(".")[2] for name in source.foreign}
        self._seen = self._state()

    def accept(self) -> None:
        """Accept the weights as they are now: an optimizer's step has written them."""
        self._seen = self._state()

    def has_changed(self) -> bool:
        """True if something has changed since the last call, or `accept`."""
        # identities first: a replaced tensor may have the count of the one before
        (tensors, counts, adapter), self._seen = self._seen, self._state()
        is_same = len(tensors) == len(self._seen[0]) and all(map(operator.is_, tensors, self._seen[0]))
        return not is_same or (counts, adapter) != self._seen[1:]

    def _state(self) -> tuple[list[torch.Tensor], list[int], Hashable]:
        models = self._source.modules
        adapters = [adapter_settings(cast("PeftModel", model)) if is_peft_model(model) else None for model in models]
        self._source.reshard()
        modules = list(itertools.chain.from_iterable(map(all_modules, models)))
        ignored = [
            id(buffer)
            for module in modules
            if module._buffers
            for name, buffer in module._buffers.items()
            if name in module._non_persistent_buffers_set or name in self._foreign
        ]
        tensors = [t for t in held_by(modules)[1] if t is not None and id(t) not in ignored]
        return tensors, list(map(_version_of, tensors)), tuple(adapters)
