"""A trainer's weights on the way into a vLLM worker, by vLLM's own loader: recorded as copies, or run as a reload.

Also the backend by which clients of vLLM's own four calls bring them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.distributed.weight_transfer.base import WeightTransferEngine as Base
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.utils import get_packed_modules_mapping

from colo.engines.vllm import compat
from colo.engines.vllm.wire import error_in_words
from colo.engines.vllm.worker.loader import placement_of
from colo.errors import ColoError, PhaseError, TransferError, Unsupported
from colo.memory.load_plan import Copy, LoadPlan, Part, num_covered, tensors_in
from colo.memory.share import empty
from colo.memory.specs import TensorSpec
from colo.memory.storage import storage_key
from colo.weights.meeting import Meeting, store_of
from colo.weights.packed import BITSANDBYTES, PackedWeight, refuse_quantized
from colo.weights.sources.names import checkpoint_views
from colo.weights.transports.remote import PlanWords, SliceTarget


def record(model: nn.Module, model_config: Any, device: torch.device, source: dict[str, torch.Tensor]) -> LoadPlan:
    """Record the plan of `source`, in the names of a transformers model of this config; no byte is moved.

    Raises: `TransferError` when parameters do not cover the model exactly once, or its loader does not take them;
    `Unsupported` for an engine on a quantized checkpoint, or one that has packed what the trainer has whole.
    """
    if model_config.quantization == BITSANDBYTES:
        return record_packed(model, model_config, source)
    refuse_quantized(model_config.hf_config)
    if why := _why_not_recorded(model, model_config, device):
        return LoadPlan.of(source, fallbacks=dict.fromkeys(source, why))
    load, as_checkpoint = _loader(model, model_config)
    optional = dict(compat.loadable_buffers(model))
    destinations = compat.unpadded_parameters(model)
    plan = LoadPlan.record(load, source, destinations, optional=optional, as_checkpoint=as_checkpoint)
    return replace(plan, unused=compat.unused(model, source))


def _loader(model: nn.Module, model_config: Any) -> tuple[Any, Callable[[Any], Iterable[tuple[str, torch.Tensor]]]]:
    """vLLM's loader, and a function that makes what it takes of weights by a transformers model's names.

    The loader raises `TransferError` with the weight that it has taken last.
    """
    loader: Any = model.load_weights
    rename, model_type = compat.renamer(model), getattr(model_config.hf_config, "model_type", None)
    last = "the trainer's weights"

    def as_checkpoint(tensors: Any) -> Iterable[tuple[str, torch.Tensor]]:
        nonlocal last
        for name, view in checkpoint_views(tensors, model_type):
            last = f"{name} {tuple(view.shape)}"
            yield rename(name), view

    def load(weights: Any) -> None:
        try:
            loader(weights)
        # of a stand-in that has no values, and of the device
        except (ColoError, NotImplementedError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise TransferError(
                f"vLLM's loader does not take {last}: the engine was started on another model. Start it on a "
                f"checkpoint of this architecture and these sizes ({error_in_words(error)})"
            ) from error

    return load, as_checkpoint


def _why_not_recorded(model: nn.Module, model_config: Any, device: torch.device) -> str | None:
    placement = placement_of(model)
    if placement is not None and placement.outside:
        name, reason = next(iter(placement.outside.items()))
        return f"{reason} ({name})"
    if model_config.quantization is not None:
        return f"the engine quantizes its weights ({model_config.quantization})"
    if placement is None and device.type == "cpu":
        return "vLLM packs its weights on a CPU: start the engine with load_format='colo'"
    if placement is None:  # colo's loader has seen for itself
        return compat.reworked_weights(model)
    return None


# ---- what vLLM's bitsandbytes loader leaves in a model ---------------------------------------------------------------


# In vLLM 0.26 the loader is part of vLLM, later of `vllm-bnb-plugin`, and the same in both: a fused parameter holds the
# packed layers one after another, with the state of each and where it begins.


def packed_weights(model: nn.Module) -> dict[str, PackedWeight]:
    """Every packed linear weight by its transformers name. `Unsupported` for 8 bits, and for experts in one piece."""
    parts = get_packed_modules_mapping(model)
    found = {}
    for name, parameter in _packed_parameters(model).items():
        states, starts = parameter.bnb_quant_state, getattr(parameter, "bnb_shard_offsets", None)
        if starts is None or not isinstance(states, Mapping) or parameter.data.dtype != torch.uint8:
            raise Unsupported(f"{name} is packed as no trainer can share it: only linear layers in 4 bits can be")
        module = name.removesuffix(".weight").removesuffix(".base_layer")
        owner, _, leaf = module.rpartition(".")
        # one state is one layer, whatever its name is split into
        leaves = parts.get(leaf, [leaf]) if len(states) > 1 else [leaf]
        if len(leaves) != len(states):
            raise Unsupported(f"{name} holds {len(states)} packed layers, and only {len(leaves)} have names")
        for index, part in enumerate(leaves):
            data = parameter.detach()[int(starts[index]) : int(starts[index + 1])]
            found[f"{owner}.{part}.weight"] = PackedWeight(data=data, quant_state=states[index])
    return found


def record_packed(model: nn.Module, model_config: Any, source: dict[str, torch.Tensor]) -> LoadPlan:
    """The plan of `source`: packed weights as they are, the others as vLLM's loader copies them.

    Raises: as `packed_weights`, and `Unsupported` for a weight that the engine alone has packed.
    """
    packed = packed_weights(model)
    plain = {name: tensor for name, tensor in source.items() if name not in packed}
    inside = _packed_parameters(model)
    destinations = {name: t for name, t in compat.unpadded_parameters(model).items() if name not in inside}
    load, as_checkpoint = _loader(model, model_config)
    plan = LoadPlan.record(load, plain, destinations, as_checkpoint=as_checkpoint)
    copies = list(plan.copies)
    for name in packed.keys() & source.keys():
        tensor, target = source[name], packed[name].data
        if (tensor.dtype, tensor.shape, tensor.stride()) != (target.dtype, target.shape, target.stride()):
            raise Unsupported(
                f"the engine has packed {name} (bitsandbytes), and the trainer has it in {tensor.dtype}, which vLLM "
                "packs from files alone: leave the engine's quantization out, or let colo.launch(folder, "
                "engine='vllm', engine_options={'quantization': 'bitsandbytes'}, lora=...) build both"
            )
        copies.append(
            Copy(name=name, shape=tuple(tensor.shape), stride=tuple(tensor.stride()), offset=0, target=target)
        )
    return LoadPlan.of(source, copies=copies, fallbacks=plan.fallbacks)


def _packed_parameters(model: nn.Module) -> dict[str, Any]:
    return {name: p for name, p in model.named_parameters() if hasattr(p, "bnb_quant_state")}


# ---- vLLM's own layerwise reload, for models that recorded copies cannot bring weights to ----------------------------


class Reload:
    """One reload of one model: complete, or the model cannot compute until a later one is."""

    @torch.no_grad()
    def __init__(self, model: nn.Module, model_config: Any, device: torch.device) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self.tied = _is_tied(model)
        """True if the output layer is the embedding."""

        self._model = model
        self._model_config = model_config
        self._device = device
        self._given: list[str] = []
        self._taken = _Taken()
        compat.before_reload(model)
        initialize_layerwise_reload(model)

    @torch.no_grad()
    def load(self, tensors: Mapping[str, torch.Tensor], *, keep: bool = False) -> None:
        """Load whole tensors, by the names of a transformers model.

        vLLM keeps what it is given until a layer is complete: with `keep` the tensors themselves, otherwise copies.
        """
        # the client reuses the memory of a group as soon as this returns
        given = dict(tensors) if keep else {name: tensor.clone() for name, tensor in tensors.items()}
        if not keep:
            self._synchronize()
        load, as_checkpoint = _loader(self._model, self._model_config)
        self._taken.expect(given)
        with self._taken:
            load(as_checkpoint(given))
        self._given += given

    @torch.no_grad()
    def finish(self) -> dict[str, list[Part]]:
        """Let vLLM post-process the weights; return the parts taken of tensors that were not taken whole, by name.

        Raises: `TransferError` naming layers that lack weights, which hold what they held before.
        """
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        # before the reload is ended, which drops vLLM's notes of what each layer got
        unloaded = compat.unloaded_layers(self._model)
        with self._taken:
            finalize_layerwise_reload(self._model, self._model_config)
        compat.after_reload(self._model)
        self._synchronize()
        if unloaded:
            raise TransferError(
                f"{len(unloaded)} layers of the engine's model got no weights, or not all, {unloaded[0]} for one: the "
                "trainer's model lacks them, or vLLM's loader of this model writes them past its own reload"
            )
        unused = compat.unused(self._model, self._given)
        return {name: parts for name, parts in self._taken.left_out().items() if name not in unused}

    def abandon(self) -> None:
        """End a reload that has failed: layers that are not complete hold what they held before, and can compute."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        compat.forget_loaded(self._model)
        finalize_layerwise_reload(self._model, self._model_config)
        compat.after_reload(self._model)
        self._synchronize()

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _is_tied(model: nn.Module) -> bool:
    """Tell whether the output layer is the embedding, which a model's own output layer would then overwrite.

    The configuration does not tell: vLLM 0.30 ties layers that are equal in the checkpoint, and calls them untied.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        # tied layers have one address; on meta all have none
        if parameter.numel() and parameter.device.type != "meta":
            names.setdefault(parameter.data_ptr(), []).append(name)
    return any(len(same) > 1 and any("lm_head" in name.split(".") for name in same) for same in names.values())


class _Taken(TorchDispatchMode):
    """Notes the parts of tensors that a loader copies, and those that it computes with as taken whole."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves the mode untyped
        self._waiting: dict[int, tuple[str, torch.Tensor]] = {}  # kept, so that no other storage is taken for theirs
        self._parts: dict[str, list[Part]] = {}

    def expect(self, given: Mapping[str, torch.Tensor]) -> None:
        """Note those of these too. What has been taken whole by now is let go."""
        self._waiting = {key: one for key, one in self._waiting.items() if self._lacks(*one)}
        self._waiting |= {storage_key(tensor): (name, tensor) for name, tensor in given.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            if args[0].device.type != "meta":  # where vLLM only counts for itself
                self._note(args[1])
        # computed with: taken, however much of it
        elif not func.is_view:
            for tensor in tensors_in((*args, *(kwargs or {}).values())):
                self._note(tensor, is_whole=True)
        return func(*args, **(kwargs or {}))

    def left_out(self) -> dict[str, list[Part]]:
        """Names of what was not copied whole, nor computed with, and the parts that were copied."""
        return {name: self._parts.get(name, []) for name, t in self._waiting.values() if self._lacks(name, t)}

    def _note(self, tensor: torch.Tensor, *, is_whole: bool = False) -> None:
        if (waiting := self._waiting.get(storage_key(tensor))) is not None:
            name, given = waiting
            self._parts.setdefault(name, []).append(_part_of(given if is_whole else tensor))

    def _lacks(self, name: str, tensor: torch.Tensor) -> bool:
        return num_covered(self._parts.get(name, [])) < num_covered([_part_of(tensor)])


def _part_of(tensor: torch.Tensor) -> Part:
    return int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride())


def check_begun(reload: Reload | None) -> Reload:
    """The reload that has begun. Raises: `TransferError` when none has."""
    if reload is None:
        raise TransferError("no reload has begun")
    return reload


class SliceSteps:
    """Steps that a trainer's ranks ask of a worker, of number `rank`, for slices; see `SliceTaker`."""

    def __init__(self, device: torch.device, record: Callable[..., LoadPlan], rank: int) -> None:
        """`record` makes the plan of weights, given by name without data."""
        self._device, self._record, self._rank = device, record, rank
        self._target: SliceTarget | None = None

    def run(self, step: str, arguments: Mapping[str, Any]) -> Any:
        """Run a step by its name. Raises: `TransferError` for another name, and what the step raises."""
        if step not in (known := (*_INIT_STEPS, *_TAKING_STEPS)):
            raise TransferError(f"{step!r} is no step of slices, which have {', '.join(known)}")
        return getattr(self, step)(**arguments)

    def list_slices(self, *, parameters: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Record which parts of weights this worker takes; a `Taken`."""
        self.release()
        source = {spec.name: empty(spec) for spec in map(TensorSpec.from_wire, parameters)}
        self._target = SliceTarget(self._record(source), self._device)
        return self._target.taken.to_wire()

    def plan_slices(self, *, words: Mapping[str, Any], first: int) -> None:
        """Plan what comes from the trainer's ranks: `words` are a `PlanWords`."""
        self._planned().plan(PlanWords.from_wire(words), first + self._rank)

    def meet_for_slices(self, *, meeting: Mapping[str, Any], first: int, deadline_s: float) -> None:
        """Join a process group with them."""
        self._planned().meet(Meeting(**meeting), first + self._rank, deadline_s)

    def begin_slices(self) -> None:
        """Make sure that there are a plan and a group."""
        self._planned().begin()

    def take_slices(self) -> None:
        """Receive everything that is planned."""
        self._planned().take()

    def sum_slices(self) -> list[int]:
        """Digest what lies where slices have come."""
        return self._planned().sums()

    def release(self) -> None:
        """Leave the group."""
        if self._target is not None:
            self._target.let_go("the engine has left the group")
        self._target = None

    def _planned(self) -> SliceTarget:
        if self._target is None:
            raise TransferError("no slices have been planned with this worker, or another client has connected since")
        return self._target


# ---- slices through vLLM's own four calls: the weight-transfer backend `colo` ----------------------------------------

#   vllm serve MODEL --host 127.0.0.1 --load-format colo --weight-transfer-config '{"backend": "colo"}'
#
# colo/engines/vllm/trainer.py sends the steps, those of `SliceSteps`, in JSON; errors come back, and nothing else. A
# step that fails ends the update. `colo.connect` does without all this.

_INIT_STEPS = ("list_slices", "plan_slices", "meet_for_slices", "release")
_TAKING_STEPS = ("begin_slices", "take_slices", "sum_slices")
_UPDATE_STEPS = (*_TAKING_STEPS, "accept_slices", "abandon_slices")
_ANSWER_S = 60.0


@dataclass
class TransferStep(WeightTransferInitInfo, WeightTransferUpdateInfo):  # type: ignore[misc]  # vLLM ships no types for mypy
    """A step of `SliceSteps`, or the end of an update."""

    step: str
    arguments: dict[str, Any] = field(default_factory=dict)


class ColoWeightTransferEngine(Base):  # type: ignore[misc]  # as above
    """A worker's end of the four calls. `SliceSteps` do the work."""

    init_info_cls = TransferStep
    update_info_cls = TransferStep
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        parallel = self.parallel_config
        self._number = parallel.data_parallel_rank * parallel.world_size + parallel.rank
        self._slices = SliceSteps(self.device, self._record, self._number)
        self._attested = self._has_taken = False

    def init_transfer_engine(self, init_info: TransferStep) -> None:
        """Run a step outside an update. Raises: what is wrong with it."""
        self._run(init_info, _INIT_STEPS)

    def start_weight_update(self) -> None:
        """Check that there is memory to write to. Raises: `PhaseError` while the weights are asleep."""
        # an update that was not finished must not attest the next one
        self._attested = self._has_taken = False
        pool = compat.sleep_pool(self)
        if pool is not None and any(r.tag == "weights" and r.is_asleep for r in pool.pointer_to_data.values()):
            raise PhaseError("the engine's weights are asleep: wake them before an update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Run a step of an update. Does not wait for the device, unlike vLLM's own engines: `take_slices` does."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: TransferStep) -> None:
        """Run a step of an update. Raises: what is wrong with it; vLLM ends the update then."""
        # a step after `accept_slices` may write again: only the last may attest
        self._attested = False
        self._run(update_info, _UPDATE_STEPS)
        self._attested = update_info.step == "accept_slices"

    def finish_weight_update(self) -> None:
        """End an update. Raises: `TransferError` unless its last step has attested what is in the engine."""
        attested, self._attested = self._attested, False
        if not attested:
            raise TransferError(
                "the update is not complete: no accept_slices has attested what the engine holds. Send all of it again"
            )

    def shutdown(self) -> None:
        """Let go of the group with the sender's ranks."""
        self._slices.release()

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: Any) -> NoReturn:
        """Refuse (vLLM 0.26 asks for this; 0.30 does not)."""
        raise Unsupported("the trainer's end of this backend is colo.connect(url), passed to colo.share")

    def _run(self, asked: TransferStep, steps: tuple[str, ...]) -> None:
        if asked.step not in steps:
            raise TransferError(f"{asked.step!r} is no step of this call, which takes {', '.join(steps)}")
        has_taken, self._has_taken = self._has_taken, False
        if asked.step == "abandon_slices":  # vLLM ends an update where a step fails
            raise TransferError("the trainer has given the update up")
        if asked.step == "accept_slices":
            if not has_taken:
                raise TransferError("no slices have been received in this update")
            return
        try:
            arguments = dict(asked.arguments)
            answer = arguments.pop("answer", None)
            value = self._slices.run(asked.step, arguments)
            if answer is not None:
                where = store_of(Meeting(**answer["meeting"]), _ANSWER_S)
                where.set(f"{answer['key']}-{self._number}", json.dumps(value))
        except ColoError:
            raise
        except Exception as error:
            raise TransferError(error_in_words(error)) from error
        self._has_taken = asked.step == "take_slices" or (has_taken and asked.step == "sum_slices")

    def _record(self, source: dict[str, torch.Tensor]) -> LoadPlan:
        return record(self.model, self.model_config, self.device, source)
