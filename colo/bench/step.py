"""`colo bench step`: whole steps of GRPO's shape, and what the two tenants take of the device.

0.6B: ours (one copy; trainer state parked where it has to be, or for every rollout) against what people do today with
two copies: both tenants resident, vLLM's level 1 and level 2, each pushing the weights after every step. All with vLLM
in the trainer's process and in its own, a step of each in turn. 8B: the memory of full fine-tuning with fp32 masters.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import torch

from colo.bench.common import Result, Row, Tell, clear, silent
from colo.bench.offload import copy_limit
from colo.bench.sides import Side
from colo.bench.tenants import PARTS, Stopwatch, Tenants
from colo.bench.two_copies import LEVELS, TwoCopies
from colo.bench.workload import Setup, grpo_steps, peak_device_bytes, prepared
from colo.config import Offload
from colo.memory.probe import used_device_bytes
from colo.phases.phase import ENGINE_WEIGHTS, TRAINER_GRADIENTS, TRAINER_MASTER_WEIGHTS, TRAINER_OPTIMIZER, Phase
from colo.runtime import Runtime
from colo.units import GIB

LARGE_KV_CACHE_BYTES = 80 * GIB
SLACK_BYTES = 2 * GIB
"""Allowance for fragments of torch's memory beside the plan."""


PLACEMENTS = ("in process", "own process")
"""Where vLLM runs."""


def run(*, shape_name: str, device: str, placements: Sequence[str] = PLACEMENTS, tell: Tell = silent) -> Result:
    """Measure steps of one shape; see `prepared`. `placements`, of `PLACEMENTS`, matter to 0.6B only."""
    with prepared("step", shape_name, device, tell) as setup:
        limit = copy_limit(setup.device)
        rows = [_memory(setup)] if shape_name == "8b" else _steps(setup, placements)
        chosen = f" --placement {placements[0].replace(' ', '-')}" if len(placements) == 1 else ""
        return setup.result(rows, limit=limit, options=chosen)


# ---- time ------------------------------------------------------------------------------------------------------------


class OneCopy(Tenants):
    """colo: vLLM in this process or in one of its own, and a trainer, on one copy of the weights."""

    def __init__(self, setup: Setup, own_process: bool) -> None:
        super().__init__(setup)
        self._rt = setup.launched(own_process=own_process)

    def step(self, way: str) -> Stopwatch:
        """One step, with `offload` as `way` says."""
        rt = self._rt
        rt.scheduler.offload = Offload(way)
        first_span, sent_bytes = len(rt.trace.spans), rt.bytes_synced
        watch = Stopwatch(rt.device)
        grpo_steps(1, rt, self.setup.size)
        for span in rt.trace.spans[first_span:]:
            if span.category == "phase" and span.phase in (Phase.ROLLOUT, Phase.TRAIN):
                watch.parts_s[str(span.phase)] += span.duration_s
            elif span.name.startswith("publish"):
                watch.parts_s["publish"] += span.duration_s
        watch.stop()
        watch.sent_bytes = rt.bytes_synced - sent_bytes
        return watch

    def rest(self) -> None:
        """Enter a training phase with everything away that it does not need, and leave it."""
        self._rt.scheduler.offload = Offload.ALWAYS
        with self._rt.train():
            clear(self.setup.device)

    def close(self) -> None:
        """End the engine."""
        self._rt.close()


@dataclass(frozen=True)
class Way:
    """One way to take steps, and what its steps took."""

    name: str
    argument: str
    peak_bytes: int | None
    steps: list[Stopwatch] = field(default_factory=list)

    def row(self) -> Row:
        """Medians of the steps, the extremes of their times, and of what is neither rollout nor training, its share."""
        times = [step.total_s for step in self.steps]
        parts = {f"{part}_s": statistics.median(step.parts_s[part] for step in self.steps) for part in PARTS}
        step_s = statistics.median(times)
        return {
            "way": self.name,
            "step_s": step_s,
            "least_s": min(times),
            "most_s": max(times),
            **parts,
            "of_step": (parts["publish_s"] + parts["switch_s"]) / step_s,
            "sent_bytes": self.steps[-1].sent_bytes,
            "peak_bytes": self.peak_bytes,
        }


def _steps(setup: Setup, placements: Sequence[str]) -> list[Row]:
    """Every way a step in turn. Each kind of tenants has a process, and rests while others are measured."""
    is_cuda = setup.device.type == "cuda"
    levels = tuple(LEVELS) if is_cuda else ("both resident",)
    sides: list[tuple[Side, list[Way]]] = []
    with ExitStack() as running:
        for placement in placements:
            for name, make, ways in (("colo", OneCopy, ("auto", "always")), ("two copies", TwoCopies, levels)):
                if make is TwoCopies and placement == "own process" and not is_cuda:
                    continue  # vLLM's IPC is for GPUs
                setup.tell(f"{name}, {placement}, once")
                others_bytes = used_device_bytes(setup.device)
                side = running.enter_context(Side(make, replace(setup, tell=silent), placement == "own process"))
                side.call("step", ways[0])  # makes the optimizer's state
                peaks = [side.call("peak_bytes", argument) for argument in ways]
                side.call("rest")
                sides.append((side, []))
                for argument, peak_bytes in zip(ways, peaks, strict=True):
                    alone_bytes = peak_bytes - others_bytes if others_bytes is not None else None
                    sides[-1][1].append(Way(f"{name}, {placement}, {argument}", argument, alone_bytes))
        for turn in range(setup.size.steps):
            for side, found in sides:
                for way in found:
                    setup.tell(f"{way.name}, turn {turn + 1} of {setup.size.steps}")
                    side.call("step", way.argument)  # comes from rest, or from another way
                    way.steps.append(side.call("step", way.argument))
                side.call("rest")
    return [way.row() for _, found in sides for way in found]


# ---- memory ----------------------------------------------------------------------------------------------------------


def _memory(setup: Setup) -> Row:
    """Peak memory of two steps of full fine-tuning with fp32 masters, as the driver sees it."""
    setup.tell("full fine-tuning, two steps")
    if setup.device.type == "cuda":
        setup = setup.resized(kv_cache_bytes=LARGE_KV_CACHE_BYTES, prompts=32, new_tokens=64, train_sequences=8)
    device, size = setup.device, setup.size
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
