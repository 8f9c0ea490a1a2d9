"""The folders of a run, looked at before work is lost: where it will write, and what it resumes from."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

_WHOLE, _ADAPTER = "model.safetensors", "adapter_model.safetensors"


def check_output(folder: str | os.PathLike[str]) -> None:
    """Raise `OSError` where a run could not make a folder and write to it. Makes nothing."""
    path = Path(folder).absolute()
    there = next(parent for parent in (path, *path.parents) if parent.exists())
    if not there.is_dir():
        raise NotADirectoryError(f"output_dir {folder} cannot be made, {there} is a file: choose another output_dir")
    if not os.access(there, os.W_OK | os.X_OK):
        raise PermissionError(f"output_dir {folder} cannot be written to, {there} is closed: choose another output_dir")


def check_checkpoint(folder: str | os.PathLike[str], model: nn.Module) -> None:
    """Raise `ValueError` where a checkpoint has not all weights that train in `model`, or has them in other shapes.

    transformers loads what it finds there, warns of the rest, and trains on. Only safetensors files are looked at.
    """
    found = _shapes(Path(folder))
    if found is None:
        return
    said = f"the checkpoint {folder} is not of this model:"
    change = "resume from a checkpoint of this run, or pass resume_from_checkpoint=None to begin anew"
    names = _names(model)
    missing = [shown[0] for shown, _ in names if not any(name in found for name in shown)]
    if missing:
        raise ValueError(f"{said} it lacks {len(missing)} of {len(names)} weights, {missing[0]} for one; {change}")
    for shown, shape in names:
        name = next(name for name in shown if name in found)
        if found[name] != shape:
            raise ValueError(f"{said} {name} has shape {found[name]} there, and {shape} here; {change}")


def _names(model: nn.Module) -> list[tuple[list[str], tuple[int, ...]]]:
    """For each weight that a checkpoint of `model` holds: the names that it may have there, and its shape."""
    adapter = next(iter(getattr(model, "active_adapters", None) or []), None) if hasattr(model, "peft_config") else None
    names: dict[int, list[str]] = {}
    shapes: dict[int, tuple[int, ...]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        if adapter is None or (p.requires_grad and f".{adapter}" in name):
            plain = name if adapter is None else name.replace(f".{adapter}", "", 1)
            names.setdefault(id(p), []).extend({plain: 1, plain.replace(".modules_to_save", ""): 1})
            shapes[id(p)] = tuple(p.shape)
    return [(names[key], shapes[key]) for key in names]


def _shapes(folder: Path) -> Mapping[str, tuple[int, ...]] | None:
    """Shapes by name, from the headers of a checkpoint's files; `None` where there is no safetensors file."""
    from safetensors import safe_open

    files = [path for name in (_WHOLE, _ADAPTER) if (path := folder / name).is_file()][:1]
    index = folder / f"{_WHOLE}.index.json"
    if not files and index.is_file():
        files = [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    shapes: dict[str, tuple[int, ...]] = {}
    for path in files:
        with safe_open(path, framework="pt") as opened:
            names: Any = opened.keys()
            shapes |= {name: tuple(opened.get_slice(name).get_shape()) for name in names}
    return shapes or None
