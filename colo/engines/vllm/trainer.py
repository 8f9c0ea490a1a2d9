"""The trainer's end of the weight-transfer backend `colo`, for loops that drive a vLLM by its own four calls.

    vllm serve MODEL --host 127.0.0.1 --load-format colo --weight-transfer-config '{"backend": "colo"}'

    from vllm.distributed.weight_transfer import ModuleSource, WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient

    info = ColoTrainerInitInfo(rank=rank, address="10.0.0.1", num_workers=4)
    client, source = HTTPVLLMWeightSyncClient(url), ModuleSource(model)
    sender = WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)  # on every rank
    sender.send_weights()  # on every rank, while generation is paused; reset the prefix cache after

Each rank sends each worker the parts that the worker's loader would copy (colo/weights/transports/remote.py), and every
byte is compared. The four calls answer nothing, so that workers answer through a store of the sender's.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn
from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine

from colo.engines.vllm.client.elsewhere import AsksForSlices
from colo.engines.vllm.wire import COLO
from colo.errors import TransferError, Unsupported
from colo.weights.meeting import meet_at
from colo.weights.sources.module import ModuleSource
from colo.weights.transports.remote import RemoteSlices, SliceTaker


@dataclass
class ColoTrainerInitInfo(TrainerInitInfo):  # type: ignore[misc]  # vLLM ships no types for mypy
    """The trainer's side of a transfer; `rank` 0 makes vLLM's calls."""

    backend: ClassVar[str] = COLO

    num_workers: int = 1
    """Workers of the vLLM, of all of its ranks."""

    address: str = field(default_factory=socket.gethostname)
    """The address of rank 0's machine, as workers and other ranks reach it."""

    deadline_s: float = 600.0
    """Seconds that ranks wait for one another."""


class ColoTrainerWeightTransferEngine(TrainerWeightTransferEngine):  # type: ignore[misc]  # as above
    """A rank of the trainer, whose model may be sharded by FSDP2."""

    init_info_cls = ColoTrainerInitInfo

    _transport: RemoteSlices | None
    """`None` on ranks that hold the same whole weights as the first."""

    @classmethod
    def trainer_init(
        cls, init_info: ColoTrainerInitInfo, *, client: Any, source: Any = None
    ) -> ColoTrainerWeightTransferEngine:
        """Plan the transfer with the workers, and meet them. A collective.

        Raises: `Unsupported` for another source than vLLM's `ModuleSource`, and for workers that take no slices.
        """
        module = getattr(source, "_module", None)  # vLLM's has no other way to it, and whole weights are not wanted
        if not isinstance(module, nn.Module):
            raise Unsupported(
                f"this backend sends parts of a module's weights: give vLLM's ModuleSource(model), not {source!r}"
            )
        weights, device = ModuleSource(module), next(module.parameters()).device
        self = cls(client=client, source=source, is_sender=init_info.is_sender)
        self._transport = None
        if not weights.is_sharded and not init_info.is_sender:
            return self
        taker: SliceTaker = _FourCalls(client, init_info) if init_info.is_sender else SliceTaker()
        self._transport = RemoteSlices(weights, taker, device=device, why_not_shared="vLLM's own calls were asked for")
        weights.settle_names()
        return self

    def send_weights(self, weight_version: str | None = None) -> None:
        """Send the weights as they are now, and compare them. A collective.

        Raises: `TransferError` with a name or the cause, on every rank; vLLM's update has failed then.
        """
        if self._transport is None:
            return
        ranks = self._transport.source.ranks
        try:
            with ranks.fail_together("beginning an update"):
                self._transport.check()
                if self.is_sender:
                    self.client.start_weight_update()
            self._transport.transfer()
            self._transport.verify()
        except BaseException:
            if self.is_sender:
                with suppress(Exception):  # a step that fails ends vLLM's update; `finish` would leave it as it is
                    self.client.update_weights({"step": "abandon_slices"})
            raise
        with ranks.fail_together("ending an update"):
            if self.is_sender:
                self.client.update_weights({"step": "accept_slices"})
                self.client.finish_weight_update(weight_version)

    def shutdown(self) -> None:
        """Leave the workers."""
        if self._transport is not None:
            self._transport.close()
        if self.is_sender:
            with suppress(Exception):  # they may have ended
                self.client.init_weight_transfer_engine({"step": "release"})


_ANSWERED = ("list_slices", "sum_slices")
_OF_AN_UPDATE = ("begin_slices", "take_slices", "sum_slices")


class _FourCalls(AsksForSlices):
    """A `SliceTaker` by vLLM's four calls, with a store through which workers answer."""

    def __init__(self, client: Any, info: ColoTrainerInitInfo) -> None:
        super().__init__(info.address, info.deadline_s)
        self._client, self._num_workers = client, info.num_workers
        self._meeting, self._store = meet_at(info.address, torch.device("cpu"), 1 + info.num_workers, info.deadline_s)
        self._count = 0  # of questions

    def _run(self, step: str, **arguments: Any) -> list[Any]:
        self._count += 1
        key = f"answer-{self._count}"
        if step in _ANSWERED:
            arguments["answer"] = {"meeting": asdict(self._meeting), "key": key}
        is_update = step in _OF_AN_UPDATE
        with _in_words(step):
            call = self._client.update_weights if is_update else self._client.init_weight_transfer_engine
            call({"step": step, "arguments": arguments})
        return self._answers(step, key) if step in _ANSWERED else []

    def _answers(self, step: str, key: str) -> list[Any]:
        """Read what each worker has left in the store."""
        keys = [f"{key}-{number}" for number in range(self._num_workers)]
        try:
            answers = [json.loads(self._store.get(one)) for one in keys]
            for one in keys:
                self._store.delete_key(one)
            return answers
        except RuntimeError as error:
            raise TransferError(
                f"not all of {self._num_workers} workers have answered {step}: num_workers is the number of all ranks "
                f"of the vLLM, and they have to reach this machine at {self.address} ({error})"
            ) from error


@contextmanager
def _in_words(step: str) -> Iterator[None]:
    """Raise `TransferError` with what vLLM has answered: its client's error has the status alone."""
    try:
        yield
    except Exception as error:
        said = getattr(getattr(error, "response", None), "text", "")
        raise TransferError(f"vLLM's workers have failed at {step}: {error} {said}".rstrip()) from error
