"""Parts of weights that are spread over ranks: which elements of which tensor lie where."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class PlacedPart:
    """A box of elements of one weight, on one rank."""

    name: str
    """Hugging Face name of the weight."""

    offset: tuple[int, ...]
    """Where the box begins in the whole weight, an index for each dimension."""

    shape: tuple[int, ...]
    """Its size in each dimension; a zero anywhere is a part without elements."""

    rank: int
    """Global rank of the process that holds it."""

    tensor: torch.Tensor | None = None
    """The elements, of shape `shape`, with the trainer's dtype and its memory; `None` for a part of another rank."""

    def __post_init__(self) -> None:
        if len(self.offset) != len(self.shape) or min((*self.offset, *self.shape), default=0) < 0:
            raise ValueError(f"{self.name} has no part of shape {self.shape} at {self.offset}")
        if self.tensor is not None and tuple(self.tensor.shape) != self.shape:
            raise ValueError(f"a part of {self.name} has shape {tuple(self.tensor.shape)}, its place {self.shape}")
