"""Facts about a runtime and its choices, in sentences for `rt.report()`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from colo.config import RuntimeConfig
from colo.engine import Engine
from colo.memory.parking import Kept
from colo.phases.phase import ENGINE_WEIGHTS, TRAINER_BUCKET, Phase
from colo.phases.trace import Trace
from colo.units import format_bytes
from colo.weights.publish import Publisher
from colo.weights.transports.base import Transport


def facts_of(
    engine: Engine,
    transport: Transport,
    publisher: Publisher,
    trace: Trace,
    config: RuntimeConfig,
    *,
    device: torch.device,
    kept: Sequence[Kept],
    why_optimizer: str,
    num_stepped_elsewhere: int = 0,
    is_compared: bool = True,
) -> dict[str, str]:
    """Name to sentence, in the order in which a report shows them; `is_compared`: colo runs the model's own passes."""
    rollout, train, ever = (format_bytes(trace.peak_bytes(phase)) for phase in (Phase.ROLLOUT, Phase.TRAIN, None))
    facts = {
        "engine": f"{engine.name} on {device}: {engine.placement}",
        "weights": f"{transport.name}: {transport.reason}{_cost_of_copies(engine, transport)}",
        "version": f"{publisher.version}, {publisher.num_published} publications, "
        f"{format_bytes(publisher.bytes_synced)} copied",
        "peak": f"rollout {rollout}, train {train}, ever {ever}",
        "offload": f"{config.offload}: {_why_offload(trace)}",
        "optimizer": why_optimizer,
    }
    if num_stepped_elsewhere:
        facts["offload"] += f"; {num_stepped_elsewhere} parameters are stepped by an optimizer that colo was not given"
    residual = engine.residual_bytes
    if residual:
        parts = ", ".join(f"{kind} {format_bytes(num_bytes)}" for kind, num_bytes in residual.items())
        facts["asleep"] = f"{format_bytes(sum(residual.values()))} stay with the engine: {parts}"
    if kept:
        facts["kept"] = _what_is_kept(kept)
    changed = trace.metrics.get("changed_fraction")
    if changed:
        facts["changed"] = f"{changed[-1]:.1%} of the 16-bit weights in the last step"
    mismatch = trace.metrics.get("mismatch") or trace.metrics.get("mismatch_sampled")
    if mismatch:
        facts["mismatch"] = f"{mismatch[-1]:.2g} mean |log p(engine) - log p(trainer)| in the last step"
    elif not is_compared:
        facts["mismatch"] = "not measured, since colo runs no passes of this model: rt.log(mismatch=...) adds yours"
    return facts


def _cost_of_copies(engine: Engine, transport: Transport) -> str:
    """Say how much memory the engine's own copy of the weights takes; nothing where they are shared."""
    held = next((segment.size_bytes for segment in engine.segments if segment.name == ENGINE_WEIGHTS), 0)
    if transport.shares or not held:
        return ""
    return f"; the engine's copy takes {format_bytes(held)}, and each version is copied into it"


def _what_is_kept(kept: Sequence[Kept]) -> str:
    """State that stays on the device: how much, and by reason one name for all."""
    by_reason: dict[str, list[Kept]] = {}
    for item in kept:
        by_reason.setdefault(item.reason, []).append(item)
    parts = [
        f"{items[0].name}" + (f" and {len(items) - 1} others" if len(items) > 1 else "") + f": {reason}"
        for reason, items in by_reason.items()
    ]
    size = format_bytes(sum(item.size_bytes for item in kept))
    return f"{size} of the optimizer's state stay on the device: {'; '.join(parts)}"


def _why_offload(trace: Trace) -> str:
    moved = sorted({s.name.removeprefix("out ") for s in trace.spans if s.name.startswith("out ")} - {TRAINER_BUCKET})
    if moved:
        return f"{', '.join(moved)} left the device for rollouts"
    return "no state of the trainer had to leave the device"
