"""What a runtime is made of: its scheduler with every segment, its publisher, and host memory prepared in advance."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from colo.config import RuntimeConfig
from colo.engine import Engine
from colo.memory.dtensor import local_bytes, local_shard
from colo.memory.offload import Mover
from colo.memory.probe import used_device_bytes
from colo.phases.phase import ENGINE_KV_CACHE, TRAINER_ADAPTER, TRAINER_PARAMETERS, Phase, Residency
from colo.phases.scheduler import Budget, Scheduler
from colo.phases.segment import FixedSegment, Segment
from colo.phases.trace import Trace
from colo.phases.transition import Action, Transition
from colo.trainer.session import LATE, TrainerSession
from colo.weights.publish import Publisher
from colo.weights.sources.peft import adapter_weights, is_peft_model
from colo.weights.transports.base import Transport

if TYPE_CHECKING:
    from peft import PeftModel


def make_scheduler(
    engine: Engine,
    model: nn.Module,
    transport: Transport,
    session: TrainerSession,
    mover: Mover,
    config: RuntimeConfig,
    trace: Trace,
    *,
    capacity_bytes: int,
) -> Scheduler:
    """A scheduler of the engine's segments, the weights, and the trainer's state."""
    budget = Budget(
        capacity_bytes=capacity_bytes,
        host_capacity_bytes=mover.arena.limit_bytes,
        offload=config.offload,
    )
    scheduler = Scheduler(
        [*engine.segments, *_weights_segments(model, transport, mover.device), *session.segments],
        budget,
        trace=trace,
        used_device_bytes=lambda: used_device_bytes(mover.device),
    )
    scheduler.working_bytes[Phase.TRAIN] = config.train_working_bytes
    scheduler.working_bytes[Phase.SYNC] = transport.working_bytes
    return scheduler


def _weights_segments(model: nn.Module, transport: Transport, device: torch.device) -> list[Segment]:
    """The weights, and an adapter beside them, as far as they are on the device: FSDP2 may keep them off it."""
    weights = transport.source.memory()
    held_bytes = sum(local_bytes(tensor) for tensor in weights if local_shard(tensor).device == device)
    residency = Residency.SHARED if transport.shares else Residency.RESIDENT
    segments: list[Segment] = [FixedSegment(TRAINER_PARAMETERS, held_bytes, residency)]
    base = {id(tensor) for tensor in weights}
    others = [p for p in model.parameters() if id(p) not in base]
    adapter_bytes = sum(local_bytes(p) for p in others if local_shard(p).device == device)
    if adapter_bytes:
        segments.append(FixedSegment(TRAINER_ADAPTER, adapter_bytes, Residency.RESIDENT))
    return segments


def make_publisher(
    engine: Engine, model: nn.Module, transport: Transport, config: RuntimeConfig, trace: Trace
) -> Publisher:
    """A publisher of the model's weights and of its adapter, if it has one."""
    adapter = (lambda: adapter_weights(cast("PeftModel", model))) if is_peft_model(model) else None
    return Publisher(
        engine,
        transport,
        trace,
        adapter=adapter,
        fingerprint=transport.source.fingerprint,
        verify=config.verify,
    )


def check_phases(scheduler: Scheduler) -> Transition:
    """Plan both phases with all the state that training will have made: the rollout that follows a step is returned.

    Raises: `BudgetError` when one of them could not be entered.
    """
    ledger = scheduler.ledger()
    for name, residency in ((ENGINE_KV_CACHE, Residency.DISCARDED), *((n, Residency.RESIDENT) for n in LATE)):
        holding = ledger.holdings[name]
        if holding.residency is not residency and (holding.away or residency is Residency.RESIDENT):
            ledger = ledger.moved(name, residency)
    rollout = scheduler.plan(Phase.ROLLOUT, ledger)
    scheduler.plan(Phase.TRAIN, rollout.after)
    return rollout


def prepare_arena(rollout: Transition, mover: Mover) -> None:
    """Pin host memory in the background for the state that will have to leave, so that no step waits for it."""
    expected_bytes = sum(step.moved_bytes for step in rollout.steps if step.action is Action.OFFLOAD)
    if mover.device.type == "cuda" and 0 < expected_bytes <= mover.arena.limit_bytes:
        mover.arena.prepare(expected_bytes)
