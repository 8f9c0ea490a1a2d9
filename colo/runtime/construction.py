"""What a runtime is made of: its scheduler with every segment, its publisher, and host memory prepared in advance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from colo.config import Offload, OptimizerState, RuntimeConfig
from colo.engine import Engine
from colo.errors import BudgetError, Unsupported
from colo.memory.dtensor import local_bytes, local_shard
from colo.memory.offload import Mover
from colo.memory.probe import used_device_bytes
from colo.phases.phase import ENGINE_KV_CACHE, TRAINER_ADAPTER, TRAINER_PARAMETERS, Phase, Residency
from colo.phases.scheduler import Budget, Scheduler
from colo.phases.segment import FixedSegment, Segment
from colo.phases.trace import Trace
from colo.phases.transition import Action, Transition
from colo.trainer.separable import why_not_separable
from colo.trainer.session import LATE, TrainerSession
from colo.units import format_bytes
from colo.weights.publish import Publisher
from colo.weights.ranks import RankGroup
from colo.weights.sources.peft import adapter_weights, is_peft_model
from colo.weights.transports.base import Transport

if TYPE_CHECKING:
    from peft import PeftModel


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerSide:
    """The trainer's part of a runtime, and the scheduler that both phases have been planned with."""

    session: TrainerSession
    scheduler: Scheduler
    rollout: Transition  # the one that will follow a step
    why: str  # the optimizer's state is where it is


def make_trainer_side(
    optimizer: Any,
    make_session: Callable[[bool], TrainerSession],
    scheduler_of: Callable[[TrainerSession], Scheduler],
    config: RuntimeConfig,
    ranks: RankGroup,
) -> TrainerSide:
    """Choose where the optimizer's state is while it steps. `make_session` is told whether it is streamed.

    Raises: `Unsupported` for an optimizer that cannot be streamed and shall be; `BudgetError` when a phase could not be
    entered in any way that is allowed.
    """
    placement, reason = config.optimizer, why_not_separable(optimizer)
    if config.release_gradients:
        placement = OptimizerState.STREAMED
    if placement is OptimizerState.STREAMED and reason is not None:
        raise Unsupported(f"RuntimeConfig has optimizer='streamed': {reason}")
    if placement is not OptimizerState.STREAMED:
        session = make_session(False)
        try:
            fits = "it fits beside weights and gradients" if placement is OptimizerState.AUTO else "asked for"
            return _planned(session, scheduler_of, ranks, f"resident: {fits}")
        except BaseException as error:
            may_stream = placement is OptimizerState.AUTO and config.offload is not Offload.NEVER
            if not isinstance(error, BudgetError) or not may_stream:
                raise
            if reason is not None:
                error.add_note(f"The optimizer's state cannot be streamed either: {reason}")
                raise
            missing = format_bytes(error.needed_bytes - error.free_bytes)
            why = f"streamed: with the whole of it on the device, {missing} would be missing"
    else:
        why = "streamed: asked for"
    return _planned(make_session(True), scheduler_of, ranks, why)


def _planned(
    session: TrainerSession, scheduler_of: Callable[[TrainerSession], Scheduler], ranks: RankGroup, why: str
) -> TrainerSide:
    """Plan both phases; closes the session where they do not fit."""
    try:
        scheduler = scheduler_of(session)
        with ranks.fail_together("planning the phases"):
            return TrainerSide(session=session, scheduler=scheduler, rollout=check_phases(scheduler), why=why)
    except BaseException:
        session.close()
        raise


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


def has_logits(model: nn.Module) -> bool:
    """Whether colo knows how to compute log-probabilities with a model."""
    return isinstance(model, PreTrainedModel) or is_peft_model(model)


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
    expected_bytes += sum(holding.home_bytes for holding in rollout.after.holdings.values())
    if mover.device.type == "cuda" and 0 < expected_bytes <= mover.arena.limit_bytes:
        mover.arena.prepare(expected_bytes)
