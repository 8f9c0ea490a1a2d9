"""Exceptions, one for each thing that a caller can do about a failure.

    ColoError
    +-- PhaseError      an operation that the current phase or state does not allow
    +-- BudgetError     bytes that do not fit, with the ledger that shows why
    +-- StaleWeights    generation refused: the engine's weights are not the trainer's
    +-- TransferError   bytes that did not arrive, or arrived wrong
    +-- EngineLost      the engine stopped answering
    +-- Unsupported     a combination that cannot work, named before anything has changed

Wrong arguments are `ValueError`, wrong types `TypeError`, log-probabilities that are not numbers `FloatingPointError`.
"""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import Any


class ColoError(Exception):
    """The base of every error that colo raises on purpose."""


class PhaseError(ColoError):
    """An operation that the current phase, or the state of a segment or engine, does not allow."""


class BudgetError(ColoError):
    """Bytes that do not fit. Nothing has been moved, freed or allocated when this is raised."""

    def __init__(self, message: str, *, needed_bytes: int, free_bytes: int) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes

    def __reduce__(self) -> tuple[Any, ...]:  # by default its class would be called with the message alone
        kind = partial(type(self), needed_bytes=self.needed_bytes, free_bytes=self.free_bytes)
        return kind, self.args, self.__dict__

    @property
    def missing_bytes(self) -> int:
        """Bytes to free before the request fits."""
        return max(0, self.needed_bytes - self.free_bytes)


class StaleWeights(ColoError):  # noqa: N818 - the state it reports is the name people search for
    """Generation refused, because the engine's weights are not, or may not be, the trainer's."""


class TransferError(ColoError):
    """Bytes that did not arrive, or did not arrive as they were sent."""


class EngineLost(ColoError):  # noqa: N818 - the event it reports is the name people search for
    """The engine stopped answering within the deadline."""


class Unsupported(ColoError):  # noqa: N818 - an adjective, as in the standard library's `UnsupportedOperation`
    """A combination that cannot work, refused before anything has changed."""


# ---- packages built for another torch --------------------------------------------------------------------------------

# A torchvision or torchaudio that cannot be imported takes transformers along.

MENDING = "pip uninstall -y torchvision torchaudio torchcodec"
NAMES = ("torchvision", "torchaudio")


def misfits(
    load: Callable[[str], Any] = importlib.import_module, is_there: Callable[[str], Any] = find_spec
) -> dict[str, str]:
    """Map each of `NAMES` that is installed and cannot be imported to the error, in one line."""
    found = {}
    for name in NAMES:
        if not is_there(name):
            continue
        try:
            load(name)
        except Exception as error:  # noqa: BLE001 - whatever a library of another build raises
            found[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return found


EXTRAS = {"trl": "trl", "peft": "lora", "ray": "ray"} | dict.fromkeys(
    ("accelerate", "click", "httpx", "packaging", "rich", "safetensors", "transformers"), "launch"
)
"""Packages that colo does without until something needs them, each with the extra that has it."""


@contextmanager
def named_extra(what: str) -> Iterator[None]:
    """Raise `Unsupported` with the extra to install where `what` needs a package that is not there."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        needs = f"{what} needs {error.name}, which is not installed"
        raise Unsupported(f"{needs}: pip install 'colo-rl[{EXTRAS[error.name]}]'") from error


@contextmanager
def named_misfits() -> Iterator[None]:
    """Add to an error that torchvision or torchaudio has caused what mends it."""
    try:
        yield
    except Exception as error:
        words = "".join(traceback.format_exception(error))
        if MENDING not in words and any(name in words for name in NAMES) and (wrong := misfits()):
            error.add_note(f"{' and '.join(wrong)} does not fit the installed torch, and colo needs neither: {MENDING}")
        raise
