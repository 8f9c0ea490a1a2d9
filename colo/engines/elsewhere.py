"""Ways of weights to engines elsewhere: versions in a folder, and broadcasts over a process group.

A version is a checkpoint of safetensors shards with a manifest, which has a checksum for every weight. It is written
beside the others and renamed when it is whole, so that who looks for versions finds whole ones only.

A process group for broadcasts has the trainer, rank 0, and an engine's ranks (colo/weights/meeting.py).
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from colo.engine import check_number
from colo.engines.buckets import buckets, bytes_of
from colo.errors import BudgetError, TransferError
from colo.memory.digest import Digest
from colo.units import GIB, format_bytes
from colo.weights.meeting import GroupEnd, Meeting, in_thread, join, meet_at, result

MANIFEST = "colo.json"
"""Name of a version's manifest: `weights` has the file, dtype, shape and CRC-32 of each."""


@dataclass(frozen=True)
class Broadcast:
    """A process group with each server, NCCL between GPUs and gloo between CPUs.

    Workers of vLLM's servers are sent the parts of weights that they take, straight from each rank of the trainer that
    holds some. Whole weights are broadcast to SGLang's servers, and where vLLM's loader does more than copy.
    """

    address: str = field(default_factory=socket.gethostname)
    """This machine's, as servers reach it."""

    delta: bool = False
    """Broadcast to vLLM's servers what has changed since the last version, not all; see `colo.weights.delta`."""

    def __str__(self) -> str:
        return f"broadcasts from {self.address}"


# ---- versions in a folder --------------------------------------------------------------------------------------------


class WeightsFolder:
    """Complete versions of weights in a folder that trainer and engines see, the newest few of them.

    Several trainers may write to one folder, each a version of its own.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, keep: int = 2, shard_bytes: int = GIB, delta: bool = False
    ) -> None:
        """`path` is made when it is first written to; the newest `keep` versions stay.

        A shard has `shard_bytes` at most, or one weight that is larger, and lies in host memory as it is written. With
        `delta` vLLM's servers read what has changed since the last version, from `path`/changes, once they have one.
        """
        for name, size in (("keep", keep), ("shard_bytes", shard_bytes)):
            check_number(name, size, int, "a whole number")
        if not isinstance(delta, bool):
            raise TypeError(f"delta must be True or False, not {delta!r}")
        if keep < 1:
            raise ValueError(f"keep must be at least 1, the version that engines read, not {keep}")
        self.path = Path(path).absolute()
        self.delta = delta
        self._keep, self._shard_bytes = keep, shard_bytes
        self._naming = threading.Lock()
        """Held while a version gets its name: engines of a fleet write the same one at the same time."""

    def __str__(self) -> str:
        return f"versions of weights in {self.place}"

    @property
    def place(self) -> str:
        """The folder, or the URL."""
        return str(self.path)

    @cached_property
    def of_changes(self) -> WeightsFolder:
        """The folder of what has changed from version to version."""
        return WeightsFolder(self.path / "changes", keep=self._keep, shard_bytes=self._shard_bytes)

    def versions(self) -> list[Path]:
        """Folders of complete versions, the oldest first."""
        return sorted(path.parent for path in self.path.glob(f"v*/{MANIFEST}"))

    def write(self, weights: Iterable[tuple[str, torch.Tensor]], config: Any = None) -> Any:
        """Write a version, with the model's `config` where it is given; return its folder.

        If the newest version has these very weights already, that one is returned and nothing stays of the writing.
        Raises: `BudgetError` where the disk has no room, `TransferError` where it fails; versions stay as they were.
        """
        part = self._begin()
        try:
            known = self._write(weights, part)
            if config is not None:
                config.save_pretrained(part)
            with self._naming:
                if (newest := self._newest_of(known)) is not None:
                    return newest
                return self._named(part)
        except OSError as error:
            raise TransferError(f"weights could not be written to {self.place}: {error}") from error
        finally:
            shutil.rmtree(part, ignore_errors=True)

    def check(self, version: Path | str) -> None:
        """Read every weight of a version. Raises: `TransferError`, with a name, for one that is not as it was written.

        And for a version without its manifest or a shard.
        """
        for _ in read_version(version):
            pass

    def _begin(self) -> Path:
        """Make a folder for a version to be written to."""
        self.path.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=".part-", dir=self.path))

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

    def _newest_of(self, known: Mapping[str, Any]) -> Path | str | None:
        """The newest version, if it has these weights and is whole."""
        for newest in self.versions()[-1:]:
            try:
                if _manifest(newest) == known:
                    self.check(newest)
                    return newest
            except (OSError, ValueError, KeyError, TransferError):
                break  # somebody has spoilt it, or removed it: another is written
        return None

    def _named(self, part: Path) -> Path | str:
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


class WeightsBucket(WeightsFolder):
    """Complete versions of weights in an object store that trainer and engines reach, the newest few of them.

    A version is complete when its manifest is there, which is written last. A shard at a time lies on the disk of who
    reads it, and a whole version on that of who writes. vLLM's servers read from one.
    """

    def __init__(self, url: str, *, keep: int = 2, shard_bytes: int = GIB, delta: bool = False) -> None:
        """`url` is one of fsspec's, such as `s3://bucket/run`, whose package (`s3fs`, `gcsfs`) is there.

        It finds credentials as usual. For the rest see `WeightsFolder`.
        """
        if not isinstance(url, str) or "://" not in url:
            raise TypeError(f"a bucket has a URL, such as s3://bucket/run, not {url!r}: a folder is a WeightsFolder")
        super().__init__(tempfile.gettempdir(), keep=keep, shard_bytes=shard_bytes, delta=delta)
        self.url = url.rstrip("/")

    @property
    def place(self) -> str:
        """The URL."""
        return self.url

    @cached_property
    def of_changes(self) -> WeightsFolder:
        """The place of what has changed from version to version."""
        return WeightsBucket(f"{self.url}/changes", keep=self._keep, shard_bytes=self._shard_bytes)

    def versions(self) -> list[str]:  # type: ignore[override]
        """URLs of complete versions, the oldest first."""
        with _store(self.url) as (files, root):
            files.invalidate_cache()
            found = (manifest.rsplit("/", 2)[-2] for manifest in files.glob(f"{root}/v*/{MANIFEST}"))
            return [f"{self.url}/{name}" for name in sorted(found)]

    def _begin(self) -> Path:
        return Path(tempfile.mkdtemp(prefix="colo-version-"))

    def _named(self, part: Path) -> str:
        """Copy it there, the manifest last, and remove what is too old."""
        last = max((int(_base(version)[1:].partition("-")[0]) for version in self.versions()), default=0)
        # the rest of the name is of this version alone: a store has no rename that a second trainer would lose
        name = f"v{last + 1:08}-{secrets.token_hex(4)}"
        with _store(self.url) as (files, root):
            try:
                files.makedirs(f"{root}/{name}", exist_ok=True)  # which means something to a disk
                for path in sorted(part.iterdir(), key=lambda path: path.name == MANIFEST):
                    files.put_file(str(path), f"{root}/{name}/{path.name}")
            except BaseException:
                with suppress(Exception):  # nobody would ever list it
                    files.rm(f"{root}/{name}", recursive=True)
                raise
            for old in self.versions()[: -self._keep]:
                with suppress(Exception):  # somebody else has removed it
                    files.rm(f"{root}/{_base(old)}", recursive=True)
        return f"{self.url}/{name}"


def _base(url: str) -> str:
    return url.rpartition("/")[2]


@contextmanager
def _store(url: str) -> Iterator[tuple[Any, str]]:
    """The file system of a URL, and the path in it. Raises: `OSError` for whatever a store fails of."""
    import fsspec

    try:
        yield fsspec.url_to_fs(url)
    except (OSError, TransferError):
        raise
    except Exception as error:
        raise OSError(f"{url}: {type(error).__name__}: {error}") from error


@contextmanager
def _at_hand(version: Path | str, file: str) -> Iterator[Path]:
    """A file of a version, on this machine's disk."""
    if isinstance(version, Path):
        yield version / file
        return
    with tempfile.TemporaryDirectory(prefix="colo-shard-") as folder:
        with _store(version) as (files, root):
            files.get_file(f"{root}/{file}", str(Path(folder, file)))
        yield Path(folder, file)


def version_at(place: str) -> Path | str:
    """The version of a path or a URL, as `WeightsFolder.write` has returned it."""
    return place if "://" in place else Path(place)


def read_version(version: Path | str) -> Iterator[dict[str, torch.Tensor]]:
    """Read a version, a shard at a time, into host memory. Raises: as `WeightsFolder.check`."""
    try:
        told = _manifest(version)
        for file in sorted({weight["file"] for weight in told.values()}):
            tensors: dict[str, torch.Tensor] = {}
            with _at_hand(version, file) as path, safe_open(path, framework="pt") as shard:
                held = set(shard.keys())
                for name in (name for name, weight in told.items() if weight["file"] == file):
                    tensors |= {name: shard.get_tensor(name)} if name in held else {}
                    if name not in tensors or _described({name: tensors[name]}, file)[name] != told[name]:
                        raise TransferError(f"{name} in {version}/{file} is not what was written")
            yield tensors
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise TransferError(f"{version} is not a whole version of weights: {error}") from error


def _manifest(version: Path | str) -> dict[str, Any]:
    with _at_hand(version, MANIFEST) as path:
        weights: dict[str, Any] = json.loads(path.read_text())["weights"]
    return weights


def _described(tensors: Mapping[str, torch.Tensor], file: str) -> dict[str, Any]:
    """A manifest's entries for tensors of the host, whose digests are CRC-32."""
    sums = Digest.of(tensors).sums
    return {
        name: {"file": file, "dtype": str(t.dtype), "shape": list(t.shape), "crc32": sums[name]}
        for name, t in tensors.items()
    }


# ---- broadcasts ------------------------------------------------------------------------------------------------------


class Broadcaster:
    """A trainer's end of a group with an engine's ranks.

    A group in which a broadcast has failed is not used again: what it has sent may still be on its way.
    """

    def __init__(self, address: str, device: torch.device, num_ranks: int, deadline_s: float) -> None:
        """`address` is this machine's, as the engine of `num_ranks` reaches it."""
        self._address, self._device, self._size, self._deadline_s = address, device, 1 + num_ranks, deadline_s
        self.backend = "nccl" if device.type == "cuda" else "gloo"
        self.name = ""
        self.end: GroupEnd | None = None
        """This process's end of the group, while there is one."""

    @property
    def is_whole(self) -> bool:
        """True if there is a group, in which nothing has failed."""
        return self.end is not None and self.end.is_whole

    def close(self) -> None:
        """Let go of the group, if there is one. Idempotent."""
        if self.end is not None:
            self.end.give_up(TransferError("the trainer has let go of the engine"))
        self.end = None

    @contextmanager
    def meeting(self) -> Iterator[Meeting]:
        """Make a group, which the engine is told to join within. Raises: `TransferError` where it does not."""
        where, store = meet_at(self._address, self._device, self._size, self._deadline_s)
        self.close()
        self.name = where.name
        joining = in_thread(lambda: join(where, 0, self._deadline_s, store))
        yield where
        try:
            self.end = result(joining, "the server")
        except RuntimeError as error:
            said = f"the server has not joined the trainer's group at {self._address}:{where.port}: {error}"
            raise TransferError(said) from error

    @contextmanager
    def sending(self, bucket: Iterable[tuple[str, torch.Tensor]]) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Send weights while the engine is told of them, within; they are in the order in which their bytes travel.

        Raises: `TransferError` where that fails.
        """
        # the engine takes bytes one after another, and wide elements have to begin at multiples of their size
        ordered = sorted(bucket, key=lambda one: -one[1].element_size())
        whole = torch.cat([bytes_of(tensor) for _, tensor in ordered])
        assert self.end is not None, "a server has joined"
        try:
            # NCCL connects in the first broadcast of a group, in which a server joins once it is told of one
            begun = in_thread(partial(self.end.broadcast, whole), self._device)
            yield ordered
            result(begun, "the server")
            self.end.settle(self._device)  # `whole` is gone by then
        except BaseException as error:
            self.end.give_up(error)
            if isinstance(error, RuntimeError):
                raise TransferError(f"the broadcast of weights to the server failed: {error}") from error
            raise


def receive(
    end: GroupEnd, shapes: Sequence[tuple[str, torch.dtype, Sequence[int]]], device: torch.device
) -> dict[str, torch.Tensor]:
    """Receive weights, on an engine's rank: views of one piece of memory, by name. Raises: as `GroupEnd.settle`."""
    sizes = [torch.empty(tuple(shape), dtype=dtype, device="meta").nbytes for _, dtype, shape in shapes]
    whole = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    end.broadcast(whole)
    end.settle(device)
    parts = zip(shapes, whole.split(sizes), strict=True)
    return {name: part.view(dtype).view(tuple(shape)) for (name, dtype, shape), part in parts}
