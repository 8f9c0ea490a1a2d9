"""Weights to any engine that has checkpoint-engine's receiver, `update_weights_from_ipc`, on the trainer's GPU.

SGLang, LMDeploy and vLLM (`worker_extension_cls="checkpoint_engine.worker.VllmColocateWorkerExtension"`) take a mapping
of GPU UUIDs to addresses of ZeroMQ, and ask there. The protocol is checkpoint-engine's, 0.4: a handle of memory, lists
of places in it, `None` to let go of it and `None` to finish, each of which the receiver answers, with words if it
fails. While it loads out of one half of the memory the other half is filled. Messages are pickled, as it wants them;
nothing is unpickled here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import wait
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from colo.engines.buckets import ALIGNMENT_BYTES, BUCKET_BYTES, buckets, exported, fill
from colo.errors import EngineLost, TransferError, named_extra
from colo.memory.copy_plan import wait_for_queued
from colo.memory.probe import device_id
from colo.units import align_up
from colo.weights.meeting import in_thread

DEADLINE_S = 300.0
_POLL_MS = 100
_IN, _OUT = 1, 2  # zmq.POLLIN and POLLOUT


def send_weights(
    weights: Mapping[str, torch.Tensor],
    start: Callable[[dict[str, str]], object],
    *,
    device: torch.device,
    deadline_s: float = DEADLINE_S,
    bucket_bytes: int = BUCKET_BYTES,
) -> int:
    """Send weights of any dtypes, by the engine's names, to the one receiver on `device`; returns their bytes.

    `start` is called in a thread of its own with `{UUID of the GPU: address}`, and returns when the engine has taken
    all, as `POST /update_weights_from_ipc` with `{"zmq_handles": ...}` does. The engine must not generate meanwhile,
    and has to forget what it has computed from earlier weights. Nothing attests that it holds what was sent. Takes
    memory for two buckets, or for twice the largest weight.
    Raises: `TransferError` with the words of the receiver or of `start`; `EngineLost` when the receiver says nothing
    for `deadline_s`. The engine may hold some of the weights then: send all again before it generates.
    """
    with named_extra("colo.engines.checkpoint_engine"):
        import zmq
    half_bytes = align_up(max((tensor.nbytes for tensor in weights.values()), default=1), ALIGNMENT_BYTES)
    half_bytes = max(half_bytes, bucket_bytes)
    with TemporaryDirectory(prefix="colo-") as folder, zmq.Context() as context, context.socket(zmq.REQ) as socket:
        socket.setsockopt(zmq.LINGER, 0)  # closing must not wait for a receiver that is gone
        address = f"ipc://{folder}/socket"
        socket.bind(address)
        receiver = _Receiver(socket, start, {_name_of(device): address}, deadline_s)
        memory, handle = _memory(device, 2 * half_bytes, Path(folder) / "memory")
        try:
            receiver.tell(handle)
            for number, bucket in enumerate(buckets(weights.items(), half_bytes)):
                # beside the receiver, which loads out of the other half
                places = fill(memory, bucket, number % 2 * half_bytes)
                wait_for_queued(device)  # the other process orders nothing by our stream
                receiver.hear()
                receiver.tell([{"name": n, "shape": t.shape, "dtype": t.dtype, "offset": at} for n, t, at in places])
            for _ in range(2):
                receiver.hear()
                receiver.tell(None)
            receiver.hear()
        except BaseException:
            receiver.stop()
            raise
        receiver.join()
    return sum(tensor.nbytes for tensor in weights.values())


class _Receiver:
    """The other side, which answers each message before the next."""

    def __init__(self, socket: Any, start: Callable[[Any], object], handles: dict[str, str], deadline_s: float) -> None:
        self._socket = socket
        self._deadline_s = deadline_s
        self._is_asked = False  # the socket takes no message before the answer to the last one
        self._started = in_thread(partial(start, handles))

    def tell(self, message: object) -> None:
        """Send a message, once there is a receiver. Raises: see `send_weights`."""
        self._wait(_OUT)
        self._socket.send_pyobj(message)
        self._is_asked = True

    def hear(self) -> None:
        """Wait for the answer. Raises: `TransferError` for one that is an error; see `send_weights`."""
        self._wait(_IN)
        answer = self._socket.recv()
        self._is_asked = False
        if answer:
            words = answer.decode(errors="replace").strip()
            raise TransferError(f"the receiver of weights has failed: {words.splitlines()[-1]}\n{words}")

    def _wait(self, event: int) -> None:
        end_s = time.monotonic() + self._deadline_s
        while not self._socket.poll(_POLL_MS, event):
            if self._started.done():
                raise TransferError(f"the engine asks for no weights: {self._why()}") from self._started.exception()
            if time.monotonic() > end_s:
                raise EngineLost(f"the receiver of weights has said nothing for {self._deadline_s:g} s")

    def join(self) -> None:
        """Wait until `start` has returned. Raises: `TransferError` when it has failed, `EngineLost`."""
        if wait([self._started], self._deadline_s).not_done:
            raise EngineLost(f"all weights are sent, and the engine has not said so for {self._deadline_s:g} s")
        if (error := self._started.exception()) is not None:
            raise TransferError(f"all weights are sent, and the engine refuses them: {self._why()}") from error

    def stop(self) -> None:
        """End the receiver with an error, if it listens: it would wait for ever."""
        if self._is_asked and self._socket.poll(10 * _POLL_MS, _IN):
            self._socket.recv()
            self._is_asked = False
        if not self._is_asked and self._socket.poll(0, _OUT):
            self._socket.send_pyobj(RuntimeError("the trainer has stopped sending weights"))
            self._socket.poll(_POLL_MS, _IN)  # no answer comes: time for the message to leave

    def _why(self) -> str:
        error = self._started.exception()
        return "it has returned" if error is None else f"{type(error).__name__}: {error}"


def _memory(device: torch.device, size_bytes: int, path: Path) -> tuple[torch.Tensor, tuple[Any, tuple[Any, ...]]]:
    """Memory for the receiver to read, and its handle: a function with arguments, the seventh of which it replaces."""
    if device.type == "cuda":
        memory = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        return memory, exported(memory)
    memory = torch.from_file(str(path), shared=True, size=size_bytes, dtype=torch.uint8)
    return memory, (_mapped, (str(path), size_bytes, *[None] * 5))


def _mapped(path: str, size_bytes: int, *_: object) -> torch.Tensor:
    return torch.from_file(path, shared=True, size=size_bytes, dtype=torch.uint8)


def _name_of(device: torch.device) -> str:
    return f"GPU-{device_id(device)}" if device.type == "cuda" else device_id(device)
