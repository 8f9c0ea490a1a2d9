"""The parts of a runtime: its scheduler with every segment, its publisher, and host memory prepared in advance."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from colo.config import MomentDtype, Offload, OptimizerState, RuntimeConfig
from colo.engine import Engine
from colo.errors import BudgetError, Unsupported
from colo.memory.offload import Mover
from colo.memory.probe import used_device_bytes
from colo.memory.storage import local_bytes, local_shard
from colo.phases.phase import (
    ENGINE_KV_CACHE,
    TRAINER_ADAPTER,
    TRAINER_BASE,
    TRAINER_GRADIENTS,
    TRAINER_PARAMETERS,
    TRAINER_RESIDENT_STATE,
    FixedSegment,
    Phase,
    Residency,
    Segment,
)
from colo.phases.scheduler import Budget, Scheduler
from colo.phases.trace import Trace
from colo.phases.transition import Ledger, Transition
from colo.planning.estimate import PASS_FRACTION
from colo.runtime.versions import WeightVersions
from colo.trainer.optimizers import as_torch, base_of, is_elementwise, keeps_moments, why_not_separable
from colo.trainer.session import LATE, TrainerEvents, TrainerSession, has_other_ranks
from colo.units import format_bytes
from colo.weights.publish import Publisher
from colo.weights.ranks import RankGroup
from colo.weights.sources.folded import FoldedSource
from colo.weights.sources.heads import is_peft_model, is_transformers_model
from colo.weights.transports.base import Transport

_FITS = "resident: it fits beside weights and gradients"


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """All that a runtime is built of, checked; `optimizer` is the one that steps, without wrappers."""

    engine: Engine
    model: nn.Module
    optimizer: Any
    transport: Transport
    mover: Mover
    config: RuntimeConfig
    trace: Trace
    capacity_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerSide:
    """The trainer's part of a runtime, and the scheduler that both phases have been planned with."""

    session: TrainerSession
    scheduler: Scheduler
    rollout: Transition  # the one that will follow a step
    why: str  # the optimizer's state is where it is


def make_trainer_side(parts: Parts, events: TrainerEvents) -> TrainerSide:
    """Choose where the optimizer's state is while it steps, hook the trainer up and plan both phases.

    Raises: `Unsupported` for an optimizer that cannot be streamed and shall be; `BudgetError` when a phase could not be
    entered in any way that is allowed.
    """
    config, ranks = parts.config, parts.transport.source.ranks
    reason = why_not_separable(as_torch(parts.optimizer))
    is_rounded = config.moment_dtype is MomentDtype.BFLOAT16
    if is_rounded:
        base = base_of(parts.optimizer)
        if reason is None and not is_elementwise(base):
            reason = f"{type(base).__name__} is none of torch's classes that step element by element, such as AdamW"
        if reason is not None:
            raise Unsupported(f'moment_dtype="bfloat16" is of streamed state: {reason}')
    placement = OptimizerState.STREAMED if config.release_gradients else config.optimizer
    if placement is OptimizerState.STREAMED:
        if reason is not None:
            setting = "release_gradients=True" if config.release_gradients else "optimizer='streamed'"
            raise Unsupported(f"RuntimeConfig has {setting}: {reason}")
        return _planned(parts, events, "streamed: asked for", streamed=True, resident_bytes=config.resident_state_bytes)
    if is_rounded:
        return _streamed(parts, events, "streamed: range by range")
    if placement is OptimizerState.AUTO and config.offload is not Offload.NEVER and reason is None:
        # resident first: only where it does not fit does state pass through the host in every step
        found = _attempt(parts, events)
        with ExitStack() as undo:
            why = "streamed: another rank has no room for the whole of it"
            # a rank that has room gives its session up where another has none
            if isinstance(found, TrainerSide):
                undo.callback(found.session.close)
            else:
                why = found
            # one kind of state on all ranks: they meet in the same collectives
            if not ranks.any(isinstance(found, str), "choosing where the optimizer's state is"):
                assert isinstance(found, TrainerSide), "this rank would have said so"
                undo.pop_all()
                return found
        return _streamed(parts, events, why)
    asked = placement is OptimizerState.RESIDENT
    try:
        return _planned(parts, events, "resident: asked for" if asked else _FITS, streamed=False)
    except BudgetError as error:
        if not asked and reason is not None:
            error.add_note(f"The optimizer's state cannot be streamed either: {reason}")
        raise


def _streamed(parts: Parts, events: TrainerEvents, why: str) -> TrainerSide:
    """Plan with streamed state, as much of which stays on the device as both phases leave room for."""
    resident_bytes = parts.config.resident_state_bytes
    if resident_bytes is None and parts.config.offload is Offload.AUTO:
        resident_bytes = _spare_bytes(parts, events)
    return _planned(parts, events, why, streamed=True, resident_bytes=resident_bytes)


def _spare_bytes(parts: Parts, events: TrainerEvents) -> int:
    """Bytes of the device that neither phase uses where all state is streamed, with room for a training pass.

    Not by a plan: the host may have no room for all of the state.
    """
    session = _session(parts, events, streamed=True)
    try:
        scheduler = make_scheduler(parts, session)
        holdings = scheduler.ledger().holdings
        slot_bytes = session.slot_bytes
    finally:
        session.close()
    working_bytes = max(scheduler.working_bytes.values())
    if parts.config.device_limit_bytes is None:
        working_bytes = max(working_bytes, int(PASS_FRACTION * parts.capacity_bytes))
    sizes = {h.name: h.size_bytes for h in holdings.values() if h.residency is not Residency.SHARED}
    rollout_bytes = sum(sizes.values()) - sum(sizes[name] for name in (*LATE, TRAINER_GRADIENTS))
    # the cache leaves for training where its bytes are needed
    train_bytes = sum(sizes.values()) - sizes[ENGINE_KV_CACHE] + slot_bytes + working_bytes
    return max(0, parts.capacity_bytes - max(rollout_bytes, train_bytes))


def _attempt(parts: Parts, events: TrainerEvents) -> TrainerSide | str:
    """Plan with resident state on this rank alone, or return the reason why the state is streamed."""
    try:
        side = _side(parts, events, nullcontext(), _FITS, streamed=False)
    except BudgetError as error:
        missing = format_bytes(error.missing_bytes)
        return f"streamed: with the whole of it on the device, {missing} would be missing"
    if parts.config.device_limit_bytes is None and not _leaves_room(side, parts.capacity_bytes):
        side.session.close()
        least = format_bytes(int(PASS_FRACTION * parts.capacity_bytes))
        return f"streamed: with the whole of it on the device, less than {least} would be left for a training pass"
    return side


def _leaves_room(side: TrainerSide, capacity_bytes: int) -> bool:
    """Tell if a training pass would have room beside resident state; what one takes is known when it has been seen."""
    scheduler, known_bytes = side.scheduler, side.scheduler.working_bytes[Phase.TRAIN]
    scheduler.working_bytes[Phase.TRAIN] = max(known_bytes, int(PASS_FRACTION * capacity_bytes))
    try:
        # where they take turns the whole state moves twice in a step: as a stream it moves within the step itself
        return scheduler.plan(Phase.TRAIN, side.rollout.after).side_by_side
    except BudgetError:
        return False
    finally:
        scheduler.working_bytes[Phase.TRAIN] = known_bytes


def _planned(
    parts: Parts, events: TrainerEvents, why: str, *, streamed: bool, resident_bytes: int | None = None
) -> TrainerSide:
    planning = parts.transport.source.ranks.fail_together("planning the phases")
    return _side(parts, events, planning, why, streamed=streamed, resident_bytes=resident_bytes)


def _side(
    parts: Parts,
    events: TrainerEvents,
    planning: AbstractContextManager[None],
    why: str,
    *,
    streamed: bool,
    resident_bytes: int | None = None,
) -> TrainerSide:
    """Make a session and plan both phases with it; closes it where they do not fit."""
    session = _session(parts, events, streamed=streamed, resident_bytes=resident_bytes or 0)
    try:
        scheduler = make_scheduler(parts, session)
        with planning:
            rollout = check_phases(scheduler)
        if parts.config.moment_dtype is MomentDtype.BFLOAT16:
            has_moments = keeps_moments(base_of(parts.optimizer))
            why += ", moments in bfloat16" if has_moments else ", without moments that bfloat16 would halve"
        return TrainerSide(session=session, scheduler=scheduler, rollout=rollout, why=why)
    except BaseException:
        # the session has hooked the optimizer: without a runtime every step would call into nothing
        session.close()
        raise


def _session(parts: Parts, events: TrainerEvents, *, streamed: bool, resident_bytes: int = 0) -> TrainerSession:
    return TrainerSession(
        parts.optimizer,
        parts.mover,
        region_bytes=parts.config.region_bytes,
        events=events,
        sharded_modules=parts.transport.source.outermost_sharded(),
        model=parts.model,
        streamed=streamed,
        release_gradients=parts.config.release_gradients,
        resident_bytes=resident_bytes,
        moment_dtype=getattr(torch, parts.config.moment_dtype),
        agree=partial(_stepping_ranks(parts).min, at="drawing the seed of a step"),
    )


def _stepping_ranks(parts: Parts) -> RankGroup:
    """The ranks that weights are spread over, or all of them, each with a replica: those step alike."""
    ranks = parts.transport.source.ranks
    if ranks.is_alone and has_other_ranks():
        return RankGroup.of(torch.distributed.group.WORLD, parts.mover.device)
    return ranks


def make_scheduler(parts: Parts, session: TrainerSession) -> Scheduler:
    """Make a scheduler of the engine's segments, the weights, and the trainer's state."""
    mover, transport, trace = parts.mover, parts.transport, parts.trace
    budget = Budget(
        capacity_bytes=parts.capacity_bytes,
        host_capacity_bytes=mover.arena.limit_bytes,
        offload=parts.config.offload,
        # mapped again in milliseconds; a limit that is set is planned for as it is
        drop_cache=mover.device.type == "cuda" and parts.config.device_limit_bytes is None,
    )
    scheduler = Scheduler(
        [*parts.engine.segments, *_weights_segments(parts.model, transport, mover.device), *session.segments],
        budget,
        needs=session.needs,
        trace=trace,
        used_device_bytes=partial(used_device_bytes, mover.device),
    )
    scheduler.working_bytes[Phase.TRAIN] = parts.config.train_working_bytes
    source = transport.source
    scheduler.working_bytes[Phase.SYNC] = transport.working_bytes
    # a folded adapter is merged layer by layer while it is published
    scheduler.working_bytes[Phase.SYNC] += source.working_bytes if isinstance(source, FoldedSource) else 0
    return scheduler


def _weights_segments(model: nn.Module, transport: Transport, device: torch.device) -> list[Segment]:
    """The weights, and an adapter beside them, as far as they are on the device: FSDP2 may keep them off it.

    Of an adapter that is folded into the weights, also those that it is folded into.
    """
    weights, source = transport.source.memory(), transport.source
    base = list(source.base().values()) if isinstance(source, FoldedSource) else []
    known = {id(tensor) for tensor in (*weights, *base)}
    adapter = [p for p in model.parameters() if id(p) not in known]

    def num_bytes(tensors: Sequence[torch.Tensor]) -> int:
        return sum(local_bytes(tensor) for tensor in tensors if local_shard(tensor).device == device)

    # shared weights are the engine's bytes, and counted there
    residency = Residency.SHARED if transport.shares else Residency.RESIDENT
    segments: list[Segment] = [FixedSegment(TRAINER_PARAMETERS, num_bytes(weights), residency)]
    for name, tensors in ((TRAINER_BASE, base), (TRAINER_ADAPTER, adapter)):
        if size_bytes := num_bytes(tensors):
            segments.append(FixedSegment(name, size_bytes, Residency.RESIDENT))
    return segments


def make_versions(parts: Parts, scheduler: Scheduler) -> WeightVersions:
    """Make the versions of the model's weights, with a publisher of them and of an adapter, if there is one."""
    transport, source = parts.transport, parts.transport.source
    publisher = Publisher(
        parts.engine,
        transport,
        parts.trace,
        adapter=source.adapter if source.adapter() is not None else None,
        fingerprint=source.fingerprint,
        verify=parts.config.verify,
    )
    return WeightVersions(parts.engine, transport, publisher, scheduler, parts.config)


def has_logits(model: nn.Module) -> bool:
    """Tell if colo can compute log-probabilities with a model."""
    return is_transformers_model(model) or is_peft_model(model)


def check_phases(scheduler: Scheduler) -> Transition:
    """Plan both phases with all the state that training will have made: the rollout that follows a step is returned.

    Raises: `BudgetError` when one of them could not be entered.
    """
    # a runtime that could roll out but never train would fail after the first, long rollout
    # as it will be when the first step has been made: KV cache dropped, optimizer state on the device
    ledger = scheduler.ledger()
    on_device = [name for name in (*LATE, TRAINER_RESIDENT_STATE) if name in ledger.holdings]
    for name, residency in ((ENGINE_KV_CACHE, Residency.DISCARDED), *((n, Residency.RESIDENT) for n in on_device)):
        holding = ledger.holdings[name]
        if holding.residency is not residency and (holding.away or residency is Residency.RESIDENT):
            # a segment that never leaves cannot be discarded, not even in a plan
            ledger = ledger.moved(name, residency)
    rollout = _planned_beside_state(scheduler, Phase.ROLLOUT, ledger)
    _planned_beside_state(scheduler, Phase.TRAIN, rollout.after)
    return rollout


def _planned_beside_state(scheduler: Scheduler, phase: Phase, ledger: Ledger) -> Transition:
    """Plan a phase. Raises: `BudgetError`, also where state that is to stay on the device would leave for it."""
    try:
        plan = scheduler.plan(phase, ledger)
    except BudgetError as error:
        if TRAINER_RESIDENT_STATE in ledger.holdings:
            error.add_note(f"A smaller resident_state_bytes makes {TRAINER_RESIDENT_STATE} smaller.")
        raise
    for step in plan.steps:
        if step.segment == TRAINER_RESIDENT_STATE:  # for good, in the first cycle
            raise ledger.refuse(
                f"phase {phase} with resident_state_bytes",
                needed_bytes=plan.promised_bytes + step.size_bytes,
                free_bytes=ledger.capacity_bytes,
                advice="Make those, or the KV cache, smaller.",
            )
    return plan


def prepare_arena(rollout: Transition, mover: Mover) -> None:
    """Pin host memory in the background for the state that will have to leave, so that no step waits for it."""
    expected_bytes = rollout.after.host_bytes - mover.arena.used_bytes
    # more than the limit is refused where it is needed, with the bytes
    if mover.device.type == "cuda" and 0 < expected_bytes <= mover.arena.limit_bytes:
        mover.arena.prepare(expected_bytes)
