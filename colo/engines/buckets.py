"""Weights on their way to a server of this machine: buckets, the slab that they lie in, and what is pickled of them.

On a CPU the bytes travel within a request. On a GPU each bucket lies in a slab in its turn, and a CUDA IPC handle
travels. Payloads are pickled, as servers want them; nothing of a server's is ever unpickled here.
"""

from __future__ import annotations

import base64
import io
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.multiprocessing import reductions

from colo.memory.probe import device_id
from colo.units import MIB, align_up, batches

BUCKET_BYTES = 64 * MIB
"""Bytes of a request's tensors, which on a CPU travel within it."""

GPU_BUCKET_BYTES = 256 * MIB
"""Bytes of the tensors that a GPU broadcasts at once."""

GPU_SLAB_BYTES = 512 * MIB
"""Bytes of a GPU's slab, all of which a request tells of: SGLang takes some 12 ms for it, and as long to say that it
has read them, however many they are.
"""

ALIGNMENT_BYTES = 16
"""Bytes that a tensor begins at a multiple of: servers look at bytes as another dtype."""


def bucket_bytes(device: torch.device) -> int:
    """The most bytes of a bucket, but for one larger tensor."""
    return GPU_BUCKET_BYTES if device.type == "cuda" else BUCKET_BYTES


def buckets(weights: Iterable[tuple[str, torch.Tensor]], size_bytes: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Group weights into lists of at most `size_bytes`, or of one larger tensor."""
    return batches(weights, lambda weight: align_up(weight[1].nbytes, ALIGNMENT_BYTES), size_bytes)


def fill(
    memory: torch.Tensor, bucket: Iterable[tuple[str, torch.Tensor]], start: int = 0
) -> list[tuple[str, torch.Tensor, int]]:
    """Copy tensors into memory (uint8), one after another from `start` on; returns where each begins."""
    places = []
    for name, tensor in bucket:
        memory[start : start + tensor.nbytes].copy_(bytes_of(tensor))
        places.append((name, tensor, start))
        start = align_up(start + tensor.nbytes, ALIGNMENT_BYTES)
    return places


class Slab:
    """Memory that one bucket after another is copied into: on a GPU the same, on a CPU new memory for each.

    Ownership: owns the memory until `close`.
    """

    def __init__(self, device: torch.device, *, size_bytes: int | None = None) -> None:
        """`size_bytes` is what a bucket may have at most, but for one larger tensor."""
        self.device = device
        self.size_bytes = size_bytes or (GPU_SLAB_BYTES if device.type == "cuda" else BUCKET_BYTES)
        self.whole: torch.Tensor | None = None
        self._is_filled = False

    def fill(
        self, bucket: Sequence[tuple[str, torch.Tensor]], fence: Callable[[], object] = lambda: None
    ) -> tuple[torch.Tensor, list[tuple[str, torch.Tensor, int]]]:
        """Copy a bucket's tensors one after another; return the bytes, and where each begins in them.

        Ordering: `fence` is called before memory is written again, and must wait until the server has read it.
        """
        memory = self._memory(sum(align_up(tensor.nbytes, ALIGNMENT_BYTES) for _, tensor in bucket), fence)
        return memory, fill(memory, bucket)

    def close(self) -> None:
        """Let go of the memory, until it is filled again. Idempotent."""
        self.whole, self._is_filled = None, False

    def _memory(self, size_bytes: int, fence: Callable[[], object]) -> torch.Tensor:
        if self.device.type == "cpu":
            self.whole = torch.zeros(size_bytes, dtype=torch.uint8, device="cpu")
            return self.whole
        if self._is_filled:
            fence()
        if self.whole is None or size_bytes > len(self.whole):
            self.whole = None  # before there are two
            self.whole = torch.empty(max(size_bytes, self.size_bytes), dtype=torch.uint8, device=self.device)
        self._is_filled = True
        return self.whole[:size_bytes]


def described(name: str, tensor: torch.Tensor, start: int, size: int) -> SimpleNamespace:
    """A tensor's entry in the metadata of a flattened bucket, in bytes or elements as the server counts."""
    place = {"start_idx": start, "end_idx": start + size, "numel": size}
    return SimpleNamespace(name=name, shape=tensor.shape, dtype=tensor.dtype, **place)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def pack(payload: Any) -> str:
    """Pickle what a server wants pickled, base64: host memory by value, a GPU's by its IPC handle and UUID."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(payload)
    return base64.b64encode(buffer.getvalue()).decode()


def exported(tensor: torch.Tensor) -> tuple[Any, tuple[Any, ...]]:
    """A function and its arguments that make the tensor in another process; a GPU's is ready to be read."""
    if tensor.device.type != "cuda":
        rebuild, arguments = tensor.__reduce_ex__(2)[:2]
        return rebuild, arguments
    # the other process orders nothing by our stream
    torch.cuda.current_stream(tensor.device).synchronize()
    made: tuple[Any, tuple[Any, ...]] = reductions.reduce_tensor(tensor)
    return made


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor) or obj.device.type != "cuda":
            return NotImplemented
        rebuild, arguments = exported(obj)
        uuid = device_id(obj.device)
        # the seventh is the number of the GPU, which another process may count otherwise; SGLang takes its UUID
        return rebuild, (*arguments[:6], uuid, *arguments[7:])
