"""The protocol of transports, which bring weights from the trainer to an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from colo.weights.sources.base import WeightSource


class Transport(Protocol):
    """One way for weights to reach an engine."""

    source: WeightSource  # the trainer's weights
    reason: str  # why this transport was chosen, in a sentence for the user
    name: str  # short name for reports, such as `shared`
    shares: bool  # true if trainer and engine have one copy of the weights, so that a publication copies nothing
    replaces_all: bool
    """True if a transfer writes every weight of the engine, so that their earlier contents do not matter."""

    @property
    def working_bytes(self) -> int:
        """Memory of the device that a transfer or a comparison takes for its time, such as for weights gathered."""

    def transfer(self, version: int = 0) -> int:
        """Bring the trainer's weights, of `version`, to the engine; return the bytes that were copied.

        The engine is paused, its weights are resident. `StaleWeights` and `TransferError` may leave them half written.
        """

    def verify(self) -> None:
        """Raise `StaleWeights` or `TransferError`, naming a tensor, unless the engine holds the trainer's weights."""

    def check(self) -> None:
        """Raise `StaleWeights` when names or memory of the model's weights have changed. Looks at no contents."""

    def is_current(self) -> bool:
        """True if the engine's weights are the trainer's at this moment, as far as can be told. Sends nothing."""

    def reconnect(self) -> None:
        """Describe everything anew to an engine that has been started again, if anything is remembered of it."""
        return

    def move_out(self, device: torch.device) -> None:
        """Give parameters that lie in the engine's memory memory of their own on `device`, if there are any."""
        return

    def close(self) -> None:
        """Let go of what is held for the engine, if anything is. Ordering: before the engine is closed. Idempotent."""
        return


class CopyingTransport(Transport):
    """The common part of transports with a copy each for trainer and engine. It holds nothing for the engine."""

    shares = False
    replaces_all = False

    def check(self) -> None:
        """Raise `StaleWeights` when the model has other weights, by name, than the engine was given."""
        self.source.check_names()
