"""Answers out of a vLLM server's workers, whose weight-transfer calls return none over HTTP.

The client owns host memory that every worker maps: whoever can answer there runs on the same machine. Each worker has
a part of it, with the length of its last answer (8 bytes, little-endian) before that answer's JSON.
"""

from __future__ import annotations

import json
import secrets
from typing import Any

import torch

from colo.errors import TransferError
from colo.memory.shared_memory import Description
from colo.memory.shared_memory import SharedMemory as Slab
from colo.memory.shared_memory import open_shared_memory as open_slab
from colo.units import MIB, format_bytes

Answer = dict[str, Any]
"""`{"value": ...}`, or `{"error": {"kind": ..., "message": ...}}`."""

_PART_BYTES = 4 * MIB
_LENGTH_BYTES = _TOKEN_BYTES = 8


class Answers:
    """The client's end. Ownership: owns the memory until `close`."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._slab = Slab(num_workers * _PART_BYTES + _TOKEN_BYTES, torch.device("cpu"))
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        _write(self._slab.bytes[-_TOKEN_BYTES:], self._token)

    def describe(self) -> dict[str, Any]:
        """Arguments of `AnswerPart`."""
        slab = self._slab.describe(to_pid=0)
        return {"slab": slab, "num_workers": self._num_workers, "token": self._token.hex()}

    def clear(self) -> None:
        """Forget what was answered before."""
        for part in self._parts():
            part[:_LENGTH_BYTES].zero_()

    def read(self) -> list[Answer]:
        """What the workers have answered, in their order; nothing of those that have not."""
        found = []
        for part in self._parts():
            length = int.from_bytes(_read(part[:_LENGTH_BYTES]), "little")
            if length:
                found.append(json.loads(_read(part[_LENGTH_BYTES : _LENGTH_BYTES + length])))
        return found

    @property
    def num_workers(self) -> int:
        """How many there are."""
        return self._num_workers

    def close(self) -> None:
        """Let go of the memory. Idempotent."""
        self._slab.close()

    def _parts(self) -> list[torch.Tensor]:
        return _parts(self._slab.bytes)


class AnswerPart:
    """A worker's end: its part of the memory."""

    def __init__(self, slab: Description, num_workers: int, token: str, *, worker: int) -> None:
        """Map the memory. Raises: `TransferError` when it is not the client's, who is on another machine then."""
        memory = open_slab(slab, torch.device("cpu"))
        if _read(memory[-_TOKEN_BYTES:]).hex() != token:
            raise TransferError("the client is on another machine: what is mapped here is not its memory")
        if not 0 <= worker < num_workers:
            raise TransferError(f"worker {worker} is not one of {num_workers}")
        self._part = _parts(memory)[worker]

    def write(self, answer: Answer) -> None:
        """Leave an answer for the client. Raises: `TransferError` for one that does not fit."""
        data = json.dumps(answer).encode()
        if len(data) > _PART_BYTES - _LENGTH_BYTES:
            raise TransferError(f"an answer of {format_bytes(len(data))} does not fit")
        _write(self._part[_LENGTH_BYTES:], data)
        _write(self._part, len(data).to_bytes(_LENGTH_BYTES, "little"))


def _parts(memory: torch.Tensor) -> list[torch.Tensor]:
    return list(memory[:-_TOKEN_BYTES].split(_PART_BYTES))


def _read(memory: torch.Tensor) -> bytes:
    return memory.numpy().tobytes()


def _write(memory: torch.Tensor, data: bytes) -> None:
    memory[: len(data)].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
