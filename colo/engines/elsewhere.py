"""Ways of weights to engines elsewhere: versions in a folder, and broadcasts over a process group.

A version is a checkpoint of safetensors shards with a manifest, which has a checksum for every weight. It is written
beside the others and renamed when it is whole, so that who looks for versions finds whole ones only.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from colo.engines.buckets import buckets
from colo.errors import BudgetError, TransferError
from colo.memory.digest import Digest
from colo.units import GIB, format_bytes

MANIFEST = "colo.json"
"""Name of a version's manifest: `weights` has the file, dtype, shape and CRC-32 of each."""


@dataclass(frozen=True)
class Broadcast:
    """Broadcasts from this process, NCCL between GPUs and gloo between CPUs. Each server has a group of its own."""

    address: str = field(default_factory=socket.gethostname)
    """This machine's, as servers reach it."""


class WeightsFolder:
    """Complete versions of weights in a folder that trainer and engines see, the newest few of them.

    Several trainers may write to one folder, each a version of its own.
    """

    def __init__(self, path: str | os.PathLike[str], *, keep: int = 2, shard_bytes: int = GIB) -> None:
        """`path` is made when it is first written to; the newest `keep` versions stay.

        A shard has `shard_bytes` at most, or one weight that is larger, and lies in host memory as it is written.
        """
        if keep < 1:
            raise ValueError(f"keep must be at least 1, the version that engines read, not {keep}")
        self.path = Path(path).absolute()
        self._keep, self._shard_bytes = keep, shard_bytes

    def versions(self) -> list[Path]:
        """Folders of complete versions, the oldest first."""
        return sorted(path.parent for path in self.path.glob(f"v*/{MANIFEST}"))

    def write(self, weights: Iterable[tuple[str, torch.Tensor]], config: Any = None) -> Path:
        """Write a version, with the model's `config` where it is given; return its folder.

        If the newest version has these very weights already, that one is returned and nothing stays of the writing.
        Raises: `BudgetError` where the disk has no room, `TransferError` where it fails; versions stay as they were.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=".part-", dir=self.path))
        try:
            known = self._write(weights, part)
            if config is not None:
                config.save_pretrained(part)
            if (newest := self._newest_of(known)) is not None:
                return newest
            return self._named(part)
        except OSError as error:
            raise TransferError(f"weights could not be written to {self.path}: {error}") from error
        finally:
            shutil.rmtree(part, ignore_errors=True)

    def check(self, version: Path) -> None:
        """Read every weight of a version. Raises: `TransferError`, with a name, for one that is not as it was written.

        And for a version without its manifest or a shard.
        """
        for _ in read_version(version):
            pass

    def _write(self, weights: Iterable[tuple[str, torch.Tensor]], part: Path) -> dict[str, Any]:
        known: dict[str, Any] = {}
        for number, shard in enumerate(buckets(weights, self._shard_bytes), 1):
            needed_bytes, free_bytes = sum(tensor.nbytes for _, tensor in shard), shutil.disk_usage(part).free
            if needed_bytes > free_bytes:
                raise BudgetError(
                    f"a shard of {format_bytes(needed_bytes)} does not fit the {format_bytes(free_bytes)} that are "
                    f"free in {self.path}: free some, keep fewer versions, or choose another folder",
                    needed_bytes=needed_bytes,
                    free_bytes=free_bytes,
                )
            file = f"model-{number:05}.safetensors"
            # memory of its own for each: the format takes no views that share some
            whole = torch.contiguous_format
            copies = {name: t.detach().to("cpu", copy=True, memory_format=whole) for name, t in shard}
            save_file(copies, part / file, metadata={"format": "pt"})
            known |= _described(copies, file)
        index = {"metadata": {}, "weight_map": {name: weight["file"] for name, weight in known.items()}}
        (part / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index))
        (part / MANIFEST).write_text(json.dumps({"weights": known}))
        return known

    def _newest_of(self, known: Mapping[str, Any]) -> Path | None:
        """The newest version, if it has these weights and is whole."""
        for newest in self.versions()[-1:]:
            try:
                if _manifest(newest) == known:
                    self.check(newest)
                    return newest
            except (OSError, ValueError, KeyError, TransferError):
                break  # somebody has spoilt it, or removed it: another is written
        return None

    def _named(self, part: Path) -> Path:
        """Give what has been written its name, and remove what is too old."""
        while True:
            taken = [int(path.name[1:]) for path in self.path.glob("v*") if path.name[1:].isdigit()]
            target = self.path / f"v{max(taken, default=0) + 1:08}"
            try:
                part.rename(target)
            except OSError:
                if target.exists():
                    continue  # another trainer was faster
                raise
            target.chmod(0o755)  # that of a temporary folder is for its owner alone
            for old in self.versions()[: -self._keep]:
                shutil.rmtree(old, ignore_errors=True)
            return target


def read_version(version: Path) -> Iterator[dict[str, torch.Tensor]]:
    """Read a version, a shard at a time, into host memory. Raises: as `WeightsFolder.check`."""
    try:
        told = _manifest(version)
        for file in sorted({weight["file"] for weight in told.values()}):
            tensors: dict[str, torch.Tensor] = {}
            with safe_open(version / file, framework="pt") as shard:
                held = set(shard.keys())
                for name in (name for name, weight in told.items() if weight["file"] == file):
                    tensors |= {name: shard.get_tensor(name)} if name in held else {}
                    if name not in tensors or _described({name: tensors[name]}, file)[name] != told[name]:
                        raise TransferError(f"{name} in {version / file} is not what was written")
            yield tensors
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise TransferError(f"{version} is not a whole version of weights: {error}") from error


def _manifest(version: Path) -> dict[str, Any]:
    weights: dict[str, Any] = json.loads((version / MANIFEST).read_text())["weights"]
    return weights


def _described(tensors: Mapping[str, torch.Tensor], file: str) -> dict[str, Any]:
    """A manifest's entries for tensors of the host, whose digests are CRC-32."""
    sums = Digest.of(tensors).sums
    return {
        name: {"file": file, "dtype": str(t.dtype), "shape": list(t.shape), "crc32": sums[name]}
        for name, t in tensors.items()
    }
