"""Several engines as one: a publication reaches all of them, prompts are spread, and the loss of one stops no other.

    rt = colo.share([colo.connect(url_of_sglang), colo.connect(url_of_vllm)], model, optimizer)

Each engine has a copy of the weights, which go through its own `load_weights`, or as slices to all of them where all
take those (colo/weights/transports/remote.py). One that did not take a version samples nothing until it has taken a
later one. One that is lost leaves; what it was asked is sampled by the others.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from queue import Empty, Full, Queue
from typing import Any, TypeVar

import torch

from colo.engine import Completion, Engine, EngineState, Recovers, SamplingParams
from colo.engines.base import DEPTH, EngineBase, EngineStatus
from colo.engines.sampling import seeded_each
from colo.errors import EngineLost, PhaseError, StaleWeights, TransferError, Unsupported
from colo.log import logger
from colo.memory.uninterrupted import end_wait
from colo.phases.phase import ENGINE_KV_CACHE, ENGINE_WEIGHTS, Move, Residency, Segment
from colo.weights.meeting import Meeting, in_thread
from colo.weights.transports.remote import PlanWords, SliceTaker, Taken, TakesSlices

T = TypeVar("T")

PREFIX_TOKENS = 64
"""Prompts that begin with the same so many tokens go to one engine, which computes those once."""

_MOST_WAITING = 4  # weights that an engine has been given and not taken yet
_LOOK_AFTER_S = 0.05
_GRACE_S = 2.0  # that engines have to answer once one has failed
_MOST_AHEAD = 1.25  # times the load of the least busy engine, up to which another prompt of a prefix follows the first


@dataclass(eq=False, slots=True)
class _Member:
    engine: Engine
    why_out: str | None = "it has not got any weights yet"  # `None` while it holds the fleet's version
    lost: str | None = None  # why, until it is recovered

    @property
    def kv_bytes(self) -> int:
        here = sum(s.size_bytes for s in self.engine.segments if s.name == ENGINE_KV_CACHE)
        return here or getattr(self.engine, "cache_bytes", 0) or 1


class Fleet(EngineBase):
    """An `Engine` over several, on one kind of device, which are closed with it. One caller at a time.

    `colo.share` makes one of a list of engines.
    """

    name = "fleet"
    called = "a fleet of engines"

    def __init__(self, engines: Iterable[Engine]) -> None:
        """Start poisoned. Raises: `ValueError` for no engines, or engines of several models."""
        self._members: list[_Member] = []
        self._homes: dict[tuple[int, ...], _Member] = {}  # by prefix
        engines = list(engines)
        if not engines:
            raise ValueError("a fleet needs an engine at least")
        for engine in engines:
            _require_engine(engine)
        segments = tuple(_FleetSegment(name, self) for name in (ENGINE_WEIGHTS, ENGINE_KV_CACHE))
        status = EngineStatus(lambda: self.segments, when_lost="call recover() once one of them answers")
        super().__init__(engines[0].device, segments, status=status)
        for engine in engines:
            self._check(engine)
            self._members.append(_Member(engine))

    # ---- who is in it ------------------------------------------------------------------------------------------------

    @property
    def engines(self) -> Sequence[Engine]:
        """All engines, lost ones among them."""
        return [member.engine for member in self._members]

    @property
    def out(self) -> Mapping[Engine, str]:
        """Engines that do not sample at the moment, and why."""
        return {member.engine: why for member in self._members if (why := member.lost or member.why_out) is not None}

    def add(self, engine: Engine) -> None:
        """Take another engine in: it gets the weights with all others before the next rollout samples.

        A fleet that had lost all of its engines goes on with it. Raises: `PhaseError` while the fleet generates, or
        after its end; `TypeError` for what is no engine; `ValueError` for one of another model or in a fleet.
        """
        _require_engine(engine)
        self._check(engine)
        if self._status.lost is not None:
            self._status.revive()
        self._status.require("take another engine in", EngineState.PAUSED, EngineState.ASLEEP, EngineState.AWAKE)
        self._align(engine)
        self._members.append(_Member(engine))
        self.poison("another engine has joined the fleet: publish weights to it")

    def remove(self, engine: Engine) -> None:
        """Let an engine go; it is not closed. Raises: `ValueError` for one that is not in it, or the last one."""
        if engine not in self.engines:
            raise ValueError("this engine is not in the fleet")
        if len(self._members) == 1:
            raise ValueError("the last engine of a fleet cannot leave it: close the fleet")
        self._members[:] = [member for member in self._members if member.engine is not engine]
        self._homes.clear()

    def recover(self) -> None:
        """Take lost engines up again, those that can be; the fleet is poisoned then.

        Raises: `PhaseError` when none is lost; what the last of them raises if none could be.
        """
        for engine in self.engines:
            if isinstance(engine, EngineBase):
                engine.look()
        present = self.present()
        lost = [member for member in self._members if member not in present]
        if not lost:
            raise PhaseError("no engine of the fleet is lost: nothing to recover")
        error: Exception | None = None
        for member in lost:
            try:
                if not isinstance(member.engine, Recovers):
                    raise PhaseError(f"the {member.engine.name} engine cannot be started again from here")
                if member.engine.state is EngineState.LOST:
                    member.engine.recover()
                self._align(member.engine)
            except Exception as failure:  # noqa: BLE001 - one that cannot be started stops no other
                error, member.lost = failure, str(failure)
                continue
            member.lost, member.why_out = None, "it was recovered and has no weights yet"
        if error is not None and all(member.lost is not None for member in lost):
            raise error
        self._status.revive()
        self.poison("an engine of the fleet was recovered: publish weights to it")

    def _align(self, engine: Engine) -> None:
        """Bring an engine to where the others are: paused, with the same memory away."""
        if self._status.paused and engine.state is EngineState.AWAKE:
            engine.pause()
        for ours in self.segments if self.present() else ():
            for segment in engine.segments:
                if segment.name == ours.name and segment.residency is not ours.residency:
                    segment.begin(ours.residency).wait()

    def _check(self, engine: Engine) -> None:
        if engine in self.engines:
            raise ValueError(f"the {engine.name} engine is in the fleet already")
        if engine.device.type != self.device.type:
            raise ValueError(f"an engine on {engine.device} beside one on {self.device}: a fleet has one kind of them")
        for first in self.engines[:1]:
            found, wanted = (engine.model_type, engine.vocab_size), (first.model_type, first.vocab_size)
            if found != wanted:
                raise ValueError(f"an engine of {found} beside one of {wanted} : not one model")

    # ---- what a runtime asks -----------------------------------------------------------------------------------------

    @property
    def weights_version(self) -> int | None:
        """Version of the weights that some engine at least holds; `None` while poisoned."""
        return self._status.version if self._status.version is None or self._holding() else None

    @property
    def placement(self) -> str:
        """A phrase for reports: how many, where each is, and which are out."""
        out = self.out
        told = [e.placement + (f" (out: {out[e]})" if e in out else "") for e in self.engines]
        return f"{len(told)} engines: " + "; ".join(told)

    @property
    def residual_bytes(self) -> Mapping[str, int]:
        """Device bytes that members keep when they sleep, added up by kind."""
        found: dict[str, int] = {}
        for member in self.present():
            for kind, num_bytes in member.engine.residual_bytes.items():
                found[kind] = found.get(kind, 0) + num_bytes
        return found

    @property
    def model_type(self) -> str | None:
        """`model_type` of the model's configuration."""
        return self.engines[0].model_type

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return self.engines[0].vocab_size

    @property
    def longest_prompt(self) -> int | None:  # type: ignore[override]
        """The most tokens of a prompt that every engine takes."""
        return min((n for e in self.engines if (n := getattr(e, "longest_prompt", None)) is not None), default=None)

    @property
    def boundary(self) -> int | None:  # type: ignore[override]
        """The tokens at which a sequence that was shorter ends on any engine; see `EngineBase`."""
        return next((n for e in self.engines if (n := getattr(e, "boundary", None)) is not None), None)

    def check_request(self, prompts: Sequence[Sequence[int]], params: Any) -> None:
        """Raise what `generate` would raise for these prompts and parameters."""
        for member in self.present():
            if (check := getattr(member.engine, "check_request", None)) is not None:
                check(prompts, member.engine.sampling_params(params))

    def sampling_temperature(self, params: Any) -> float | None:
        """The temperature that `logprobs` have in them; `None` where filters change them too, or engines differ."""
        first, *others = {member.engine.sampling_temperature(params) for member in self.present()} or {None}
        return None if others else first

    def pause(self) -> None:
        """Stop all of them. Idempotent; `PhaseError` when asleep or closed."""
        super().pause()
        self._each(lambda engine: engine.pause())

    def resume(self) -> None:
        """Let all of them generate again. Idempotent; `PhaseError` unless every segment is resident."""
        super().resume()
        self._each(lambda engine: engine.resume())

    def reset_prefix_cache(self) -> None:
        """Forget everything computed from earlier weights."""
        self._homes.clear()
        self._each(lambda engine: engine.reset_prefix_cache())

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> int:
        """Load into all at once, each by its own loader; return the bytes sent. Poisons until the next `commit`.

        Weights are asked for one after another, as the slowest engine takes them. One that refuses stays out until it
        has taken a later version. Raises: what the first refused, if all did; whatever `weights` raises.
        """
        self.poison_for_load()
        members, all_bytes, sent_bytes = self.present(), 0, 0
        for member in members:
            member.why_out = "it has some of the weights at most"
        pool, streams = ThreadPoolExecutor(max(1, len(members))), list[_Stream]()
        try:
            streams += (_Stream(pool, member.engine) for member in members)
            for name, tensor in weights:
                all_bytes += tensor.nbytes
                for stream in streams:
                    stream.put((name, tensor))
            for stream in streams:
                stream.put(None)
            for stream in streams:
                stream.wait()
        except BaseException as error:
            for stream in streams:
                stream.abandon(error)
            for stream in streams:
                stream.wait()  # each ends as it asks for the next weight
            raise
        finally:
            pool.shutdown(wait=False)  # after a second interrupt one may go on
        refused: list[BaseException] = []
        for member, stream in zip(members, streams, strict=True):
            failed = stream.loading.exception()
            if failed is None:
                member.why_out, taken_bytes = None, stream.loading.result()
                sent_bytes += all_bytes if taken_bytes is None else taken_bytes
                continue
            refused.append(failed)
            if isinstance(failed, EngineLost):
                self.lose(member, failed)
                continue
            member.why_out = f"it did not take the weights: {failed}"
            logger.warning("an engine of the fleet is out: %s %s", member.engine.name, member.why_out)
        if not any(member.why_out is None for member in self.present()):
            raise refused[0] if refused else self.none_left()
        return sent_bytes

    @property
    def slice_taker(self) -> SliceTaker | None:
        """The taker of slices for all of its engines; `None` where one takes whole weights only."""
        takers = {member: _taker_of(member.engine) for member in self.present()}
        return FleetTakesSlices(self) if takers and None not in takers.values() else None

    def commit(self, version: int) -> None:
        """Declare that those that took the weights hold `version`. `PhaseError` unless they are resident."""
        super().commit(version)
        self._each(lambda engine: engine.commit(version), [m for m in self.present() if m.why_out is None])

    def poison(self, cause: str) -> None:
        """Refuse to generate, with `cause`, until the next `commit`."""
        super().poison(cause)
        for member in self._members:
            member.engine.poison(cause)

    # ---- generation --------------------------------------------------------------------------------------------------

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, *, adapter: str | None = None
    ) -> list[Completion]:
        """Sample `params.n` completions for each prompt, on all engines at once; see `Engine.generate`.

        Prompts go by the room of each engine's KV cache, those of one prefix together. Those of an engine that is lost
        meanwhile are sampled by the others. Raises: `EngineLost` when none is left, `ValueError` for an adapter.
        """
        version = self.ready()
        if adapter is not None:
            raise ValueError(f"a fleet has no adapters, and {adapter!r} is asked for: share with fold_adapter=True")
        params = seeded_each(params, len(prompts))  # what is drawn must not depend on who draws it
        left, found = list(range(len(prompts))), list[Completion]()
        while left:
            members = self._holding()
            if not members and self.present():
                self.poison(f"none of its engines holds version {version} any more: {'; '.join(self.out.values())}")
                self._status.require_version()
            if not members:
                raise self._status.lose("none of its engines is left")
            shares = self._spread(prompts, left, members)
            with ThreadPoolExecutor(len(shares)) as pool:
                asked = {member: pool.submit(_ask, member.engine, prompts, share, params) for member, share in shares}
            left, failure = [], None
            for member, share in shares:
                error = asked[member].exception()
                if isinstance(error, EngineLost):
                    self.lose(member, error)
                elif isinstance(error, StaleWeights):
                    member.why_out = str(error)
                elif error is not None:
                    failure = error
                if error is None:
                    found += asked[member].result()
                else:
                    left += share
            if failure is not None:
                raise failure
        assert all(completion.weights_version == version for completion in found)
        return sorted(found, key=lambda c: (c.prompt_index, c.sample_index))

    def _spread(
        self, prompts: Sequence[Sequence[int]], indices: Sequence[int], members: Sequence[_Member]
    ) -> list[tuple[_Member, list[int]]]:
        """Give each prompt to the member with the least to do for its KV cache, or to that of its prefix."""
        load = dict.fromkeys(members, 0.0)
        shares: dict[_Member, list[int]] = {}
        for index in indices:
            prefix = tuple(prompts[index][:PREFIX_TOKENS])
            chosen = min(members, key=load.__getitem__)
            home = self._homes.get(prefix)
            if home in load and load[home] <= _MOST_AHEAD * load[chosen]:
                chosen = home
            self._homes[prefix] = chosen
            load[chosen] += 1 / chosen.kv_bytes
            shares.setdefault(chosen, []).append(index)
        return list(shares.items())

    # ---- members -----------------------------------------------------------------------------------------------------

    def present(self) -> list[_Member]:
        """Members that are not lost."""
        for member in self._members:
            if member.lost is None and member.engine.state is EngineState.LOST:
                self.lose(member, "its process has ended, or does not answer")
        return [member for member in self._members if member.lost is None]

    def _holding(self) -> list[_Member]:
        """Members that hold the fleet's version."""
        for member in self.present():
            if member.why_out is None and member.engine.weights_version != self._status.version:
                member.why_out = "its weights have been dropped"
        return [member for member in self.present() if member.why_out is None]

    def _each(self, call: Callable[[Engine], object], members: Sequence[_Member] | None = None) -> None:
        """Call for each that is there; who turns out to be lost leaves. Raises: `EngineLost` when none is left."""
        for member in self.present() if members is None else members:
            try:
                call(member.engine)
            except EngineLost as error:
                self.lose(member, error)
        if not self.present():
            raise self.none_left()

    def lose(self, member: _Member, why: object) -> None:
        """Let a lost member leave."""
        member.lost = member.why_out = str(why)
        self._homes.clear()
        logger.warning("an engine of the fleet is lost: %s", why)

    def none_left(self) -> EngineLost:
        """The error to raise where all are lost, as the fleet is then."""
        return self._status.lose("all of its engines are")

    def parts(self, name: str) -> list[tuple[_Member, Segment]]:
        """Segments of one name, of the members that are there."""
        return [(m, segment) for m in self.present() for segment in m.engine.segments if segment.name == name]

    def _release(self) -> None:
        for member in self._members:
            with suppress(EngineLost):
                member.engine.close()


def _ask(
    engine: Engine, prompts: Sequence[Sequence[int]], share: Sequence[int], params: SamplingParams
) -> list[Completion]:
    seed = params.seed
    if isinstance(seed, Sequence):
        params = replace(params, seed=[seed[index] for index in share])
    made = engine.sampling_params(params)
    found = engine.generate([prompts[index] for index in share], made)
    return [replace(completion, prompt_index=share[completion.prompt_index]) for completion in found]


class _Stream:
    """Weights on their way into one engine, whose `load_weights` runs in a thread: `loading` is its future."""

    def __init__(self, pool: ThreadPoolExecutor, engine: Engine) -> None:
        self._waiting: Queue[tuple[str, torch.Tensor] | None] = Queue(_MOST_WAITING)
        self._abandoned: BaseException | None = None
        self._engine = engine
        # weights may be queued in a stream of the caller's
        is_cuda = engine.device.type == "cuda"
        self._stream = torch.cuda.current_stream(engine.device) if is_cuda else None
        self.loading = pool.submit(self._load)

    def put(self, item: tuple[str, torch.Tensor] | None) -> None:
        """Pass on a weight, or `None` after the last; nothing once loading has ended.

        Waits while the engine has not taken those before.
        """
        while not self.loading.done():
            with suppress(Full):
                self._waiting.put(item, timeout=_LOOK_AFTER_S)
                return
            end_wait(f"the {self._engine.name} engine")

    def wait(self) -> None:
        """Wait until the engine has loaded, or refused."""
        while not wait([self.loading], timeout=_LOOK_AFTER_S).done:
            end_wait(f"the {self._engine.name} engine")

    def abandon(self, why: BaseException) -> None:
        """Tell the engine that no other weight follows."""
        self._abandoned = why

    def _load(self) -> int | None:
        if self._stream is None:
            return self._engine.load_weights(self._weights())
        torch.cuda.set_device(self._engine.device)  # a thread begins with the first GPU
        with torch.cuda.stream(self._stream):
            return self._engine.load_weights(self._weights())

    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        while True:
            try:
                item = self._waiting.get(timeout=_LOOK_AFTER_S)
            except Empty:
                if (why := self._abandoned) is None:
                    continue
                raise TransferError(f"the trainer has not given all of its weights: {why!r}") from why
            if item is None:
                return
            yield item


def _taker_of(engine: Engine) -> SliceTaker | None:
    return engine.slice_taker if isinstance(engine, TakesSlices) else None


class FleetTakesSlices(SliceTaker):
    """A `SliceTaker` of all engines of a fleet, one after another in a plan. One that is lost leaves the fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._takers: dict[_Member, SliceTaker] = {}
        self._counts: dict[_Member, int] = {}  # of ranks of each, as planned
        self._look()

    @property
    def members(self) -> Hashable:
        """Changes as engines come and go."""
        return tuple(map(id, self._fleet.present()))

    def taken(self, weights: Mapping[str, torch.Tensor]) -> list[list[Taken]]:
        """Ask each engine what its ranks take. Raises: `Unsupported` for an engine that takes whole weights only."""
        self._look()
        found = self._each(lambda taker, _: taker.taken(weights))
        self._counts = {member: sum(map(len, of_member)) for member, of_member in found.items()}
        return [of_engine for of_member in found.values() for of_engine in of_member]

    def plan(self, words: PlanWords, first: int) -> None:
        """Plan in each."""
        self._each(lambda taker, number: taker.plan(words, number), first)

    def meet(self, meeting: Meeting, first: int, deadline_s: float) -> None:
        """Join a group in each, all at once: each waits for the others."""
        self._each(lambda taker, place: taker.meet(meeting, place, deadline_s), first)

    def begin(self) -> None:
        """Poison all of them: slices are about to come."""
        self._fleet.poison_for_load()
        for member in self._takers:
            member.why_out = "it has some of the weights at most"
        self._each(lambda taker, _: taker.begin())

    def take(self) -> None:
        """Receive everything that is planned, all at once."""
        self._each(lambda taker, _: taker.take())
        for member in self._takers:
            member.why_out = None

    def sums(self) -> list[list[int]]:
        """Digests of what lies in each rank of each."""
        found = self._each(lambda taker, _: taker.sums())
        return [of_rank for of_engine in found.values() for of_rank in of_engine]

    def _look(self) -> None:
        takers = {member: _taker_of(member.engine) for member in self._fleet.present()}
        for member, taker in takers.items():
            if taker is None:
                raise Unsupported(
                    f"the {member.engine.name} engine ({member.engine.placement}) takes whole weights only, and the "
                    "others of the fleet are sent slices: connect all of its engines with the same `through`, and "
                    "share them anew"
                )
        if not takers:
            raise self._fleet.none_left()
        self._takers = {member: taker for member, taker in takers.items() if taker is not None}
        self.address = next(iter(self._takers.values())).address  # as the first engine reaches this machine
        self.deadline_s = max(taker.deadline_s for taker in self._takers.values())  # the most patient one's

    def _each(self, call: Callable[[SliceTaker, int], T], first: int = 0) -> dict[_Member, T]:
        """Call for all engines at once, with the number of each one's first rank. One that is lost leaves."""
        asked: dict[_Member, Future[T]] = {}
        for member, taker in self._takers.items():
            asked[member] = in_thread(partial(call, taker, first))
            first += self._counts.get(member, 0)
        left, give_up_s = set(asked.values()), math.inf
        while left and time.monotonic() < give_up_s:
            done, left = wait(left, timeout=_LOOK_AFTER_S, return_when=FIRST_EXCEPTION)
            if any(answer.exception() is not None for answer in done):
                # others may wait for this one, or have lost sight of one that is not yet known to be lost
                give_up_s = min(give_up_s, time.monotonic() + _GRACE_S)
            end_wait("engines of the fleet")
        failed = {m: e for m, answer in asked.items() if answer.done() and (e := answer.exception()) is not None}
        for member, error in failed.items():
            if isinstance(error, EngineLost):
                self._fleet.lose(member, error)
        if failed:
            raise next((e for e in failed.values() if isinstance(e, EngineLost)), next(iter(failed.values())))
        return {member: answer.result() for member, answer in asked.items()}


# ---- memory ----------------------------------------------------------------------------------------------------------


class _FleetSegment:
    """The segments of one name of all members, which move together."""

    def __init__(self, name: str, fleet: Fleet) -> None:
        self.name = name
        self._fleet = fleet

    @property
    def residency(self) -> Residency:
        """Residency of the member whose bytes are furthest away; all are alike, between two moves."""
        return max((s.residency for s in self._parts()), key=DEPTH.index, default=Residency.RESIDENT)

    @property
    def size_bytes(self) -> int:
        """Bytes of all."""
        return sum(segment.size_bytes for segment in self._parts())

    @property
    def device_bytes(self) -> int:
        """Bytes of all on the device now."""
        return sum(segment.device_bytes for segment in self._parts())

    @property
    def host_bytes(self) -> int:
        """Bytes of all in host memory."""
        return sum(segment.host_bytes for segment in self._parts())

    @property
    def away(self) -> Residency | None:
        """Residency in which all wait; `None` where some stay, or wait elsewhere than others."""
        found = {segment.away for segment in self._parts()}
        return found.pop() if len(found) == 1 else None

    def begin(self, target: Residency) -> Move:
        """Move all; one that turns out to be lost leaves. If one cannot move, those before it come back."""
        moves: list[tuple[_Member, Segment, Residency, Move]] = []
        for member, segment in self._fleet.parts(self.name):
            source = segment.residency
            try:
                moves.append((member, segment, source, segment.begin(target)))
            except EngineLost as error:
                self._fleet.lose(member, error)
            except BaseException:
                for _, other, was, _ in reversed(moves):
                    other.begin(was).wait()
                raise
        return _Moves(self._fleet, [(member, move) for member, _, _, move in moves])

    def _parts(self) -> list[Segment]:
        return [segment for _, segment in self._fleet.parts(self.name)]


class _Moves:
    """Several members' moves as one."""

    def __init__(self, fleet: Fleet, moves: Sequence[tuple[_Member, Move]]) -> None:
        self._fleet = fleet
        self._moves = moves

    @property
    def moved_bytes(self) -> int:
        """Bytes of all."""
        return sum(move.moved_bytes for _, move in self._moves)

    def wait(self) -> None:
        """Wait for all; one that turns out to be lost leaves."""
        for member, move in self._moves:
            try:
                move.wait()
            except EngineLost as error:
                self._fleet.lose(member, error)

    def poll(self) -> bool:
        """True when all have ended."""
        ended = [move.poll() for _, move in self._moves]  # all are asked: each gives back what it has freed
        return all(ended)


def _require_engine(given: object) -> None:
    if not isinstance(given, Engine):
        words = repr(given) if isinstance(given, str) else type(given).__name__
        raise TypeError(f"a fleet is of engines, such as colo.connect(url) returns, and {words} is none")
