"""The steps of `Receiver` that a sender may ask for, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from colo.errors import TransferError
from colo.weights.transports.ipc.receiver import Receiver

STEPS: Mapping[str, Callable[..., Any]] = {
    step.__name__: step
    for step in (
        Receiver.bind,
        Receiver.stage,
        Receiver.begin,
        Receiver.copy,
        Receiver.take,
        Receiver.take_all,
        Receiver.finish,
        Receiver.differences,
        Receiver.release,
    )
}


def run_step(receiver: Receiver, step: str, arguments: Mapping[str, Any]) -> Any:
    """What a step returns. Raises: `TransferError` for one that there is not; what the step raises."""
    if step not in STEPS:
        raise TransferError(f"{step!r} is no step of a transfer, which has {', '.join(STEPS)}")
    return STEPS[step](receiver, **arguments)
