"""The choice of a transport from a model to an engine: none where their weights can be one memory."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from colo.config import RuntimeConfig, Weights
from colo.engine import Engine, LoadPlans, PacksWeights, in_all_ranks
from colo.errors import StaleWeights, TransferError, Unsupported
from colo.memory.load_plan import LoadPlan
from colo.memory.probe import has_room
from colo.memory.storage import is_dtensor, places_of, with_own_storage
from colo.phases.phase import ENGINE_WEIGHTS
from colo.weights.packed import PackedWeight, is_packed
from colo.weights.sources.base import WeightSource
from colo.weights.sources.folded import FoldedSource
from colo.weights.sources.module import ModuleSource, check_taken, why_shared
from colo.weights.transports.base import Transport
from colo.weights.transports.ipc import IpcTransport, Peer
from colo.weights.transports.local import LocalTransport
from colo.weights.transports.remote import RemoteSlices, TakesSlices, TakesWholeWeights
from colo.weights.transports.slices import SlicesTransport, why_not_sliced


def transport_for(source: WeightSource, engine: Engine, config: RuntimeConfig) -> Transport:
    """Share memory where every parameter can be the engine's own, and copy, with the reason, where not."""
    remote = _remote(source, engine)
    if isinstance(remote, RemoteSlices):
        return remote
    with source.ranks.fail_together("choosing how weights reach the engine"):
        chosen = _choose(source, engine, config, why_whole=remote)
        source.settle_names()
    if len(set(source.ranks.gather(chosen.name).values())) > 1:  # each exchanges or gathers in an order of its own
        if not isinstance(chosen, _Sliced):
            chosen.close()
        raise Unsupported(
            f"ranks of the model would bring its weights to their engines in different ways, this one as "
            f"{chosen.name!r} ({chosen.reason}): start every rank's engine with the same options"
        )
    if isinstance(chosen, _Sliced):
        return SlicesTransport(source, chosen.plan, device=engine.device, why_not_shared=chosen.reason)
    return chosen


@dataclass(frozen=True, slots=True)
class _Sliced:
    """The choice of slices, which ranks plan together once all have chosen them."""

    plan: LoadPlan
    reason: str
    name = SlicesTransport.name


def _remote(source: WeightSource, engine: Engine) -> RemoteSlices | str | None:
    """Choose slices for engines elsewhere, or say why they are sent whole weights; `None` where none take slices."""
    taker = engine.slice_taker if isinstance(engine, TakesSlices) else None
    addresses = source.ranks.gather(None if taker is None else taker.address).values()
    if taker is None or None in addresses or not any(addresses):
        return None
    with source.ranks.fail_together("choosing how weights reach engines elsewhere"):
        _check_packed(source.tensors(), engine)
        if isinstance(source, FoldedSource):
            source.allocate()
    why = f"the engine is elsewhere ({engine.placement})"
    try:
        chosen = RemoteSlices(source, taker, device=engine.device, why_not_shared=why)
    except TakesWholeWeights as error:
        return str(error)
    source.settle_names()
    return chosen


def _choose(
    source: WeightSource, engine: Engine, config: RuntimeConfig, *, why_whole: str | None
) -> Transport | _Sliced:
    """Choose for this rank alone; asks no other rank of the trainer."""
    _check_packed(source.tensors(), engine)
    tensors, plan = record_plan(engine, source)
    if isinstance(source, FoldedSource):
        _move_apart(source.base(), plan.aliases)
    why_not = why_not_shared(plan, tensors, config)
    if why_not is None and isinstance(source, ModuleSource):
        # only now that all of them can be shared: this moves the user's parameters
        at_home = move_in(tensors, plan.aliases)
        assert isinstance(engine, LoadPlans)  # of which the plan is
        outlives = engine.share_weights()
        if any(one.name == ENGINE_WEIGHTS and one.away is not None for one in engine.segments):
            raise TypeError(
                f"share_weights() of the {engine.name} engine has to set `away` of its segment {ENGINE_WEIGHTS} to "
                "None: the trainer works on that memory from now on, and it must not leave"
            )
        return SharedTransport(source, plan.aliases, stay=at_home if outlives else ())
    why_not = why_not or "the weights are spread over the trainer's ranks"
    if isinstance(source, FoldedSource):
        source.allocate()
        _, plan = record_plan(engine, source)  # with the strides that they have now
    is_elsewhere = isinstance(engine, Peer) and not engine.same_process
    # without fallbacks the plan's targets are mapped in this process, which then copies by itself unless asked not to
    if is_elsewhere and (plan.fallbacks or config.weights is not Weights.AUTO):
        staged = config.weights is Weights.STAGED
        try:
            return IpcTransport(
                source, cast("Peer", engine), why_not_shared=why_not, staged=staged, verify=config.verify
            )
        except Unsupported as error:
            why_not = f"{why_not}; recorded copies will not do ({error})"
    if source.is_sharded:
        why_not_slices = why_not_sliced(plan)
        if why_not_slices is None:
            return _Sliced(plan, why_not)
        if not plan.fallbacks:
            why_not = f"{why_not}; they are gathered whole, because {why_not_slices}"
    if why_whole is not None:
        why_not = f"{why_not}, whole, because {why_whole}"
    return LocalTransport(source, engine, plan, why_not_shared=why_not, verify=config.verify)


def record_plan(engine: Engine, source: WeightSource) -> tuple[dict[str, torch.Tensor], LoadPlan]:
    """Record the engine's plan of the weights, and return both. Raises: as `LoadPlans.record_plan`, `check_taken`."""
    if not isinstance(engine, LoadPlans):
        why = f"the {engine.name} engine does not say where its weights lie"
        return source.tensors(), source.given_to(lambda given: LoadPlan.of(given, fallbacks=dict.fromkeys(given, why)))
    try:
        plan, left_out = in_all_ranks(
            engine, "recording a load plan", lambda: source.given_to(engine.record_plan), lambda plan: plan.left_out
        )
    except TransferError as error:
        if why := next(filter(None, map(why_shared, source.modules)), ""):
            raise TransferError(why) from error
        raise
    tensors = source.tensors()
    check_taken(tensors, left_out)
    return tensors, plan


def _check_packed(tensors: Mapping[str, torch.Tensor], engine: Engine) -> None:
    """Raise `Unsupported` for packed weights that are not the engine's memory already: none can be moved there."""
    packed = [name for name, tensor in tensors.items() if is_packed(tensor)]
    engines: Mapping[str, PackedWeight] = engine.packed_weights() if packed and isinstance(engine, PacksWeights) else {}
    apart = [n for n in packed if n not in engines or not is_same_memory(tensors[n], engines[n].data)]
    if apart:
        raise Unsupported(
            f"{len(apart)} weights are quantized by bitsandbytes, {apart[0]} for one, and cannot be moved into an "
            "engine or sent to it: load the model in 16 bits, which an adapter (lora=...) leaves as it is, or let "
            "colo.launch(folder, engine='vllm', engine_options={'quantization': 'bitsandbytes'}, lora=...) build both"
        )


def why_not_shared(plan: LoadPlan, tensors: Mapping[str, torch.Tensor], config: RuntimeConfig) -> str | None:
    """The reason why some parameter is not to be the engine's memory, or `None` when all can be."""
    if config.weights is not Weights.AUTO:
        return f"a copy each was asked for (weights={config.weights.value!r})"
    for name, tensor in tensors.items():
        if is_dtensor(tensor):
            return f"{name} cannot be shared: it is sharded over the trainer's ranks, and engines take other parts"
        if name not in plan.aliases:
            copies = [copy for copy in plan.copies if copy.name == name]
            if name in plan.fallbacks:
                return f"{name} cannot be shared: {plan.fallbacks[name]}"
            if not copies and not isinstance(tensor, nn.Parameter):
                continue  # a buffer that the engine computes itself
            if not copies:
                return f"{name} cannot be shared: the engine does not load it"
            if copies[0].target.dtype != tensor.dtype:
                return f"{name} cannot be shared: it is {tensor.dtype} here and {copies[0].target.dtype} in the engine"
            return f"{name} cannot be shared: the engine lays it out differently"
    return None


def _move_apart(base: Mapping[str, torch.Tensor], aliases: Mapping[str, torch.Tensor]) -> None:
    """Give weights beneath a folded adapter memory of their own where theirs is the engine's: others go there."""
    for name, tensor in base.items():
        if name in aliases and is_same_memory(tensor, aliases[name]):
            tensor.data = tensor.detach().clone()


def move_in(tensors: Mapping[str, torch.Tensor], aliases: Mapping[str, torch.Tensor]) -> frozenset[str]:
    """Make every parameter the engine's memory, with the values it has now. Parameters stay the same objects.

    Returns names of those that were its memory before.
    """
    at_home = frozenset(name for name, t in tensors.items() if name in aliases and is_same_memory(t, aliases[name]))
    with torch.no_grad():
        for name, parameter in tensors.items():
            if name in aliases and name not in at_home:
                aliases[name].copy_(parameter)
                # under the same object: optimizers, wrappers and hooks refer to it
                parameter.data = with_own_storage(aliases[name])
    return at_home


class SharedTransport(Transport):
    """Trainer and engine on one copy of the weights. The only work left is to check that they still are."""

    name = "shared"
    shares = True
    replaces_all = False

    def __init__(
        self, source: ModuleSource, aliases: Mapping[str, torch.Tensor], *, stay: Collection[str] = ()
    ) -> None:
        """Names in `stay` are the engine's memory to the end and beyond: somebody else has shared them before."""
        self.source = source
        self._aliases = aliases
        self._stay = stay
        self.reason = f"all {len(aliases)} weights are the engine's own memory"
        self._places: dict[str, Hashable] | None = None

    @property
    def working_bytes(self) -> int:
        """0: no byte moves."""
        return 0

    def transfer(self, version: int = 0) -> int:
        """Send nothing: 0 bytes."""
        return 0

    def verify(self) -> None:
        """Raise `StaleWeights` naming the first parameter that is no longer the engine's memory; see `check`."""
        self.check()

    def check(self) -> None:
        """Raise `StaleWeights` naming the first parameter that is no longer the engine's memory, or is new."""
        parameters = self.source.tensors()
        places = places_of(parameters)
        if places == self._places:
            return
        # a check that raises below must not leave places that let the next one pass
        self._places = None
        for name, alias in self._aliases.items():
            parameter = parameters.get(name)
            if parameter is None:
                raise StaleWeights(
                    f"the model has no parameter {name} any more, which it shared with the engine: put it back, or "
                    "close the runtime and build another with the model as it is now"
                )
            if not is_same_memory(parameter, alias):
                raise StaleWeights(
                    f"{name} is no longer the engine's memory ({_describe(parameter)}, shared was {_describe(alias)}): "
                    "something gave it other memory, such as parameter.data = x, model.to(dtype), half(), "
                    "load_state_dict(assign=True) or a quantizer. Write values into its memory instead, "
                    "parameter.data.copy_(x); for the model as it is now close the runtime and build another"
                )
        self.source.check_names(parameters)
        self._places = places

    def is_current(self) -> bool:
        """True: what the trainer holds is what the engine holds (`verify` checks that it is still so)."""
        return True

    def close(self) -> None:
        """Let go of the engine's memory. Ordering: after `move_out`, which gives the parameters memory of their own."""
        self._aliases = {}
        self._places = None
        self.source.tensors()  # lets go of those that the model no longer has

    def move_out(self, device: torch.device) -> None:
        """Give every parameter memory of its own on `device`, one at a time, or on the host where there is no room.

        But for those that were the engine's memory before it was shared here.
        """
        folded = self.source.folded if isinstance(self.source, FoldedSource) else {}  # nobody needs those any more
        for name, parameter in self.source:
            if name not in self._aliases or name in folded or name in self._stay:
                continue
            place = device if has_room(parameter, device) else "cpu"
            parameter.data = parameter.data.to(place, copy=True)


def is_same_memory(left: torch.Tensor, right: torch.Tensor) -> bool:
    """True if two tensors are the same elements at the same addresses."""
    return (
        left.data_ptr() == right.data_ptr()
        and left.dtype == right.dtype
        and left.shape == right.shape
        and left.stride() == right.stride()
    )


def _describe(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"
