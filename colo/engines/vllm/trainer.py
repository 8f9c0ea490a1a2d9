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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn
from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine

from colo.engines.vllm.wire import COLO
from colo.errors import TransferError, Unsupported
from colo.memory.share import spec_of
from colo.weights.meeting import Meeting, meet_at
from colo.weights.sources.module import ModuleSource
from colo.weights.transports.remote import NoEngine, PlanWords, RemoteSlices, SliceTaker, Taken


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
        taker: SliceTaker = _FourCalls(client, init_info) if init_info.is_sender else NoEngine()
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


class _FourCalls:
    """A `SliceTaker` by vLLM's four calls, with a store through which workers answer."""

    members = None

    def __init__(self, client: Any, info: ColoTrainerInitInfo) -> None:
        self.address, self.deadline_s = info.address, info.deadline_s
        self._client, self._num_workers = client, info.num_workers
        self._meeting, self._store = meet_at(info.address, torch.device("cpu"), 1 + info.num_workers, info.deadline_s)
        self._count = 0  # of questions

    def taken(self, weights: Mapping[str, torch.Tensor]) -> list[list[Taken]]:
        """Ask what each worker takes of weights, given whole and without data."""
        parameters = [spec_of(name, tensor).to_wire() for name, tensor in weights.items()]
        return [list(map(Taken.from_wire, self._asked(self._init, "list_slices", parameters=parameters)))]

    def plan(self, words: PlanWords, first: int) -> None:
        """Plan in each worker, whose numbers in the plan begin with `first`."""
        self._init("plan_slices", words=words.to_wire(), first=first)

    def meet(self, meeting: Meeting, first: int, deadline_s: float) -> None:
        """Join a group in each worker, whose places there begin with `first`."""
        self._init("meet_for_slices", meeting=asdict(meeting), first=first, deadline_s=deadline_s)

    def begin(self) -> None:
        """Begin in each worker. Raises: vLLM's error for one without a plan."""
        self._update("begin_slices")

    def take(self) -> None:
        """Receive everything that is planned."""
        self._update("take_slices")

    def sums(self) -> list[list[int]]:
        """Digests of what lies in each worker, in the order of the plan."""
        return self._asked(self._update, "sum_slices")

    def _init(self, step: str, **arguments: Any) -> None:
        with _in_words(step):
            self._client.init_weight_transfer_engine({"step": step, "arguments": arguments})

    def _update(self, step: str, **arguments: Any) -> None:
        with _in_words(step):
            self._client.update_weights({"step": step, "arguments": arguments})

    def _asked(self, call: Any, step: str, **arguments: Any) -> list[Any]:
        """Make a call that each worker answers in the store."""
        self._count += 1
        key = f"answer-{self._count}"
        call(step, **arguments, answer={"meeting": asdict(self._meeting), "key": key})
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
