"""What types that travel between processes have in common: whatever arrives is checked where it arrives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from colo.errors import TransferError


@contextmanager
def arriving(kind: type) -> Iterator[None]:
    """Raise `TransferError`, with what is wrong, where what arrived is no `kind`."""
    try:
        yield
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        missing = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise TransferError(f"what arrived is no {kind.__name__}: {missing}") from error


def check_whole(owner: str, **numbers: object) -> None:
    """Raise `TypeError` unless all of `numbers` are integers."""
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(f"{name} of a {owner} is an integer, not {number!r}")
