"""Packages built for another torch: torchvision or torchaudio that cannot be imported takes transformers along."""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

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
