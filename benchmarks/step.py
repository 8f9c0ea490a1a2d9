"""`step`: whole steps of GRPO's shape, and what the two tenants take of the device.

0.6B: ours (one copy; trainer state parked where it has to be, or for every rollout, or streamed through each step)
against what people do today with two copies: both tenants resident, vLLM's level 1 and level 2, each pushing the
weights after every step. A step of each in turn, with vLLM in one placement. 8B: the memory of full fine-tuning with
fp32 masters.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from benchmarks.common import Record, Row, clear, silent
from benchmarks.offload import copy_limit
from benchmarks.tenants import LEVELS, OURS, PARTS, STREAMED, OneCopy, Side, Stopwatch, Tenants, TwoCopies
from benchmarks.workload import Setup, grpo_steps, peak_device_bytes, prepared, require_room
from colo.memory.probe import used_device_bytes
from colo.phases.phase import ENGINE_WEIGHTS, TRAINER_GRADIENTS, TRAINER_MASTER_WEIGHTS, TRAINER_OPTIMIZER, Phase
from colo.runtime import Runtime
from colo.units import GIB

LARGE_KV_CACHE_BYTES = 80 * GIB
SLACK_BYTES = 2 * GIB
"""Allowance for fragments of torch's memory beside the plan."""


def run(record: Record, *, shape: str, device: str, placement: str = "own-process") -> None:
    """Measure steps of one shape; see `prepared`. `placement`, where vLLM runs, matters to 0.6B only."""
    with prepared(record, shape, device, copies=False) as setup:
        record.limit |= copy_limit(setup.device)
        if shape == "8b":
            record.add(_memory(setup))
        else:
            _steps(record, setup, placement)


# ---- time ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """Tenants of one kind, in one placement, and the ways in which they take steps."""

    name: str
    make: Callable[[Setup, bool], Tenants]
    placement: str
    ways: Sequence[str]
    why_skipped: str | None = None


@dataclass
class Way:
    """One way to take steps, and what its steps took."""

    name: str
    argument: str
    peak_bytes: int | None = None
    """The most that was in use in the first of them, without other tenants."""

    steps: list[Stopwatch] = field(default_factory=list)

    def row(self) -> Row:
        """Median and extremes of the steps' times, and the share of what is neither rollout nor training."""
        times = [step.total_s for step in self.steps]
        step_s = statistics.median(times)
        between_s = sum(self._median_s(part) for part in ("publish", "switch"))
        return {
            "way": self.name,
            "step_s": step_s,
            "least_s": min(times),
            "most_s": max(times),
            "of_step": between_s / step_s,
            "sent_bytes": self.steps[-1].sent_bytes,
            "peak_bytes": self.peak_bytes,
        }

    def waits(self) -> Row:
        """Waiting times of a step: median and spread (largest less smallest). Copies also count within other parts."""
        row: Row = {"way": f"{self.name}: waits"}
        for part in PARTS:
            found = [step.parts_s[part] for step in self.steps]
            row |= {f"{part}_s": self._median_s(part), f"{part}_spread_s": max(found) - min(found)}
        exposed = [step.exposed_s for step in self.steps if step.exposed_s is not None]
        return row | {"copies_exposed_s": statistics.median(exposed) if exposed else None}

    def _median_s(self, part: str) -> float:
        return statistics.median(step.parts_s[part] for step in self.steps)


def _kinds(device: torch.device, placement: str) -> list[Kind]:
    on_cuda, own_process = device.type == "cuda", placement == "own-process"
    no_ipc = "vLLM's IPC transfer is for GPUs" if own_process and not on_cuda else None
    return [
        Kind("colo", OneCopy, placement, OURS),
        Kind("colo", partial(OneCopy, optimizer=STREAMED), placement, (STREAMED,)),
        Kind("two copies", TwoCopies, placement, tuple(LEVELS) if on_cuda else ("both resident",), no_ipc),
    ]


def _steps(record: Record, setup: Setup, placement: str) -> None:
    """Take every way a step in turn. Each kind of tenants has a process, and rests while others are measured."""
    kinds = _kinds(setup.device, placement)
    skipped = [
        {"way": f"{kind.name}, {kind.placement}, {way}", "skipped": kind.why_skipped}
        for kind in kinds
        if kind.why_skipped is not None
        for way in kind.ways
    ]
    with ExitStack() as running:
        sides = [_started(setup, kind, running) for kind in kinds if kind.why_skipped is None]
        ways = [way for _, found, _ in sides for way in found]
        for turn in range(setup.size.steps):
            for side, found, own_bytes in sides:
                all_bytes = used_device_bytes(setup.device)  # all of them rest
                for way in found:
                    setup.tell(f"{way.name}, turn {turn + 1} of {setup.size.steps}")
                    side.call("prepare", way.argument)
                    if turn:
                        way.steps.append(side.call("step", way.argument))
                        continue
                    step, peak_bytes = side.call("watched_step", way.argument)
                    way.steps.append(step)
                    way.peak_bytes = peak_bytes - (all_bytes - own_bytes) if all_bytes is not None else None
                side.call("rest")
                done = [way for way in ways if way.steps]
                record.show([*(way.row() for way in done), *(way.waits() for way in done), *skipped])


def _started(setup: Setup, kind: Kind, running: ExitStack) -> tuple[Side, list[Way], int]:
    """Tenants in a process of their own, which have taken a short step and rest, and the bytes that they hold then."""
    name = f"{kind.name}, {kind.placement}"
    setup.tell(f"{name}, once")
    others_bytes = used_device_bytes(setup.device) or 0
    side = running.enter_context(Side(kind.make, replace(setup, tell=silent), kind.placement == "own-process"))
    side.call("prepare", kind.ways[0])  # makes the optimizer's state
    side.call("rest")
    own_bytes = (used_device_bytes(setup.device) or 0) - others_bytes
    return side, [Way(f"{name}, {way}", way) for way in kind.ways], own_bytes


# ---- memory ----------------------------------------------------------------------------------------------------------


def _memory(setup: Setup) -> Row:
    """Peak memory of two steps of full fine-tuning with fp32 masters, as the driver sees it."""
    setup.tell("full fine-tuning, two steps")
    if setup.device.type == "cuda":
        setup = setup.resized(kv_cache_bytes=LARGE_KV_CACHE_BYTES, prompts=32, new_tokens=64, train_sequences=8)
    device, size = setup.device, setup.size
    require_room(setup, weights=1, more_bytes=size.kv_cache_bytes)  # of a rollout
    rt = setup.resized(enforce_eager=True).launched()
    rt.model.gradient_checkpointing_enable()  # type: ignore[operator]
    clear(device)
    held_bytes = sum(segment.device_bytes for segment in rt.scheduler.segments.values())
    outside_bytes = max(0, (used_device_bytes(device) or 0) - held_bytes)
    grpo_steps(2, rt, size)  # the first makes the optimizer's state, the second shows what training takes beside it
    _limit_torch(rt)
    with peak_device_bytes(device) as peak:
        grpo_steps(2, rt, size)
    segments = {name: segment.size_bytes for name, segment in rt.scheduler.segments.items()}
    phases = {phase: rt.trace.peak_bytes(phase) for phase in (Phase.ROLLOUT, Phase.TRAIN)}
    working_bytes = rt.scheduler.working_bytes[Phase.TRAIN]
    larger_bytes = max(phases[Phase.ROLLOUT], phases[Phase.TRAIN] + working_bytes)
    both_bytes = sum(segments.values()) + segments[ENGINE_WEIGHTS] + working_bytes + outside_bytes
    row = {
        "way": "full fine-tuning, a whole cycle",
        "peak_bytes": peak[0] or None,
        "rollout_bytes": phases[Phase.ROLLOUT],
        "train_bytes": phases[Phase.TRAIN],
        "train_working_bytes": working_bytes,
        "residual_bytes": outside_bytes,
        "of_larger_and_residual": peak[0] / (larger_bytes + outside_bytes) if peak[0] else None,
        "both_resident_bytes": both_bytes,
        "under_both": 1 - peak[0] / both_bytes if peak[0] else None,
        "synced_bytes": rt.bytes_synced,
    }
    rt.close()
    return row


def _limit_torch(rt: Runtime) -> None:
    """Let torch cache no more than was planned, as it must on a device without memory to spare."""
    if rt.device.type != "cuda":
        return
    clear(rt.device)
    of_trainer = (TRAINER_OPTIMIZER, TRAINER_MASTER_WEIGHTS, TRAINER_GRADIENTS)
    planned_bytes = sum(rt.scheduler.segments[name].size_bytes for name in of_trainer)
    planned_bytes += rt.scheduler.working_bytes[Phase.TRAIN] + SLACK_BYTES
    total_bytes = torch.cuda.get_device_properties(rt.device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, planned_bytes / total_bytes), rt.device)
