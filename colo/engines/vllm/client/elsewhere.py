"""Weights to workers of vLLM that are elsewhere: whole, by vLLM's own loader, or what has changed since the last time.

Both are sets of named tensors, which travel in versions of a folder or in broadcasts. With changes (`delta=True`) what
the workers hold afterwards is compared, byte by byte, whichever way it has come. Where vLLM's loader does nothing but
copy, slices come to the workers over a process group instead (`colo.weights.transports.remote`).
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

import torch

from colo.engines.buckets import bucket_bytes, buckets
from colo.engines.elsewhere import WeightsFolder
from colo.engines.vllm import wire
from colo.engines.vllm.client import WorkerLink
from colo.errors import TransferError
from colo.log import logger
from colo.memory.digest import Digest
from colo.memory.share import dtype_name, spec_of
from colo.memory.specs import TensorSpec
from colo.weights.delta import BucketSums, DeltaBase
from colo.weights.meeting import Meeting
from colo.weights.transports.remote import PlanWords, SliceTaker, Taken


class WeightsElsewhere:
    """The trainer's end. Its link has `through`, and a broadcaster where weights are broadcast."""

    def __init__(self, link: WorkerLink) -> None:
        assert link.through is not None
        self.sent_bytes = 0
        """Bytes of the tensors that were sent last."""

        self._link = link
        self._through = link.through
        self._base = DeltaBase()
        self._refusal: str | None = None if link.through.delta else "nobody has asked for changes"
        if link.through.delta and any((info.device == "cpu") is not (link.device.type == "cpu") for info in link.infos):
            self._refuse("checksums of a CPU's memory and a GPU's are of different kinds")
        self._version: str | None = None  # of the base, while the workers hold it
        self._sums: list[BucketSums] = []  # of each worker's memory

    def takes_changes(self) -> bool:
        """Begin to send changes: true if the workers hold what was sent last, and take some."""
        version, self._version = self._version, None  # until they have arrived
        return version is not None and all(self._link.call(wire.BeginChanges(base=version)))

    def send_changes(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Send what has changed, once `takes_changes`. Raises: `TransferError`, also for other weights than before."""
        for of_worker in self._sums:
            of_worker.begin()

        def changes() -> Iterator[tuple[str, torch.Tensor]]:
            for bucket in buckets(weights, bucket_bytes(self._link.device)):
                self._sum(bucket)
                yield from self._base.changes(bucket).items()
            self._base.settle()

        self._send(changes(), changes=True)
        self._attest()

    def send(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Send all of them, in a reload that has begun. Raises: `TransferError`; see also `WeightsFolder.write`."""
        self._base = DeltaBase()
        self._send(weights if self._refusal else self._kept(weights), changes=False)

    def confirm(self, specs: Mapping[str, torch.Tensor]) -> None:
        """Compare what the workers hold after a reload of `specs`; the next time they are sent what has changed then.

        Raises: `TransferError` naming a weight that is not as it was sent.
        """
        if self._refusal:
            return
        parameters = [TensorSpec(n, dtype_name(t), tuple(t.shape)) for n, t in specs.items()]
        asked = wire.Land(parameters=[spec.to_wire() for spec in parameters])
        landed = [wire.Landed.from_wire(answer) for answer in self._link.call(asked)]
        if refusal := next((one.refusal for one in landed if one.refusal is not None), None):
            self._refuse(refusal)
            return
        self._sums = [BucketSums([tuple(region) for region in one.regions], self._link.device) for one in landed]
        for bucket in self._base.kept():
            self._sum(bucket)
        self._attest()

    def _refuse(self, why: str) -> None:
        logger.warning("%s is sent all weights each time: %s", self._link.placement, why)
        self._refusal, self._base = why, DeltaBase()

    def _kept(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for bucket in buckets(weights, bucket_bytes(self._link.device)):
            self._base.keep(bucket)
            yield from bucket
        self._base.settle()

    def _sum(self, bucket: list[tuple[str, torch.Tensor]]) -> None:
        """Digest what each worker has of a bucket."""
        for of_worker in self._sums:
            of_worker.add(bucket)

    def _attest(self) -> None:
        """Compare what the workers hold with what was sent, and take it for the base of changes."""
        version = secrets.token_hex(8)
        for rank, held in enumerate(self._link.call(wire.Attest(version=version))):
            sums = self._sums[rank]
            wrong = [name for name, one, other in zip(sums.names, held, sums.numbers(), strict=True) if one != other]
            if wrong:
                raise TransferError(
                    f"{wrong[0]}, one of {len(dict.fromkeys(wrong))} weights, does not lie in rank {rank} as it is "
                    "here: another client may have written to it. All of them are sent the next time"
                )
        self._version = version

    def _send(self, tensors: Iterable[tuple[str, torch.Tensor]], *, changes: bool) -> None:
        """Bring named tensors to the workers, who take them as `changes` or as whole weights."""
        link, broadcaster = self._link, self._link.broadcaster
        self.sent_bytes = 0
        tensors = self._counted(tensors)
        if isinstance(self._through, WeightsFolder):
            folder = self._through.of_changes if changes else self._through
            version = folder.write(tensors)
            link.call(wire.ReloadVersion(folder=str(version), changes=changes))
            return
        assert broadcaster is not None
        if not broadcaster.is_whole:
            with broadcaster.meeting() as meeting:
                link.call(wire.JoinGroup(meeting=asdict(meeting), deadline_s=link.deadline_s))
        for bucket in buckets(tensors, bucket_bytes(link.device)):
            with broadcaster.sending(bucket) as sent:
                shapes = [(name, dtype_name(t), list(t.shape)) for name, t in sent]
                told = wire.ReloadBroadcast(weights=shapes, changes=changes)
                arrived = link.call(told)
            expected = Digest.of({name: tensor.detach().contiguous() for name, tensor in sent}).sums
            for rank, sums in enumerate(arrived):
                if wrong := [name for name, value in expected.items() if sums.get(name) != value]:
                    raise TransferError(
                        f"{wrong[0]}, one of {len(wrong)} weights, has not arrived at rank {rank} as it was sent"
                    )

    def _counted(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            self.sent_bytes += tensor.nbytes
            yield name, tensor


class AsksForSlices(SliceTaker, ABC):
    """A `SliceTaker` of vLLM's workers, which are asked for the steps of `SliceSteps`."""

    def __init__(self, address: str, deadline_s: float) -> None:
        """`address` is this machine's, as the workers reach it."""
        self.address, self.deadline_s = address, deadline_s

    @abstractmethod
    def _run(self, step: str, **arguments: Any) -> list[Any]:
        """Run a step in every worker; the answer of each to `list_slices` and `sum_slices`. Raises: what it raises."""

    def taken(self, weights: Mapping[str, torch.Tensor]) -> list[list[Taken]]:
        """Ask what each worker takes of weights, given whole and without data. Raises: what vLLM's loader raises."""
        parameters = [spec_of(name, tensor).to_wire() for name, tensor in weights.items()]
        return [list(map(Taken.from_wire, self._run("list_slices", parameters=parameters)))]

    def plan(self, words: PlanWords, first: int) -> None:
        """Plan in each worker, whose numbers in the plan begin with `first`."""
        self._run("plan_slices", words=words.to_wire(), first=first)

    def meet(self, meeting: Meeting, first: int, deadline_s: float) -> None:
        """Join a group in each worker, whose places there begin with `first`."""
        self._run("meet_for_slices", meeting=asdict(meeting), first=first, deadline_s=deadline_s)

    def begin(self) -> None:
        """Make sure that each worker has a plan and a group. Raises: `TransferError` for one without."""
        self._run("begin_slices")

    def take(self) -> None:
        """Receive everything that is planned; returns when it lies in the workers' memory."""
        self._run("take_slices")

    def sums(self) -> list[list[int]]:
        """Digests of what lies in each worker, in the order of the plan."""
        return self._run("sum_slices")


class WorkersTakeSlices(AsksForSlices):
    """A `SliceTaker`: workers of a link."""

    def __init__(self, link: WorkerLink, address: str, poison: Callable[[], None]) -> None:
        """`poison` is called before the first byte comes."""
        super().__init__(address, link.deadline_s)
        self._link, self._poison = link, poison

    @property
    def members(self) -> Hashable:
        """The link's number among the clients of its workers: one that is made anew has another."""
        return self._link.client

    def _run(self, step: str, **arguments: Any) -> list[Any]:
        return self._link.call(wire.SliceStep(step=step, arguments=arguments))

    def begin(self) -> None:
        """Poison the engine: slices are about to come. Raises: `TransferError` for workers without a plan."""
        super().begin()
        self._poison()
