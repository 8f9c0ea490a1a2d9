"""LoRA adapters for vLLM from tensors in memory: no file, and nothing of vLLM replaced.

A worker holds an adapter twice: in vLLM's `LoRAModel`, scaled and in the engine's LoRA dtype, and in one slot of every
layer's stacked buffers, where activating copies it and where the kernels read it. The first version of an adapter is
activated by vLLM, and the copies that this makes are recorded; later versions are written to both places by the same
copies. So where A and B go is vLLM's knowledge alone, whatever it fuses or shards, and vLLM may at any time evict the
adapter from its slot and activate it again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from colo.engines.vllm.compat import rank_limit
from colo.errors import Unsupported
from colo.memory.copy_plan import CopyPlan
from colo.memory.storage import storage_key

_A, _B = ".lora_A.weight", ".lora_B.weight"
_Copy = tuple[torch.Tensor, torch.Tensor]
"""Source and target."""


class WorkerAdapters:
    """The adapters of one vLLM worker."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._loaded: dict[int, _Loaded] = {}
        self._models: dict[int, Any] = {}
        """vLLM's objects of all adapters that were added, which it may evict."""

        self.plan_refusal: str | None = None
        """The reason why the adapter activated last cannot be updated in place; `None` when it can."""

    @property
    def capacity(self) -> int:
        """Number of adapters that can be used at once; 0 without LoRA."""
        manager = self._manager
        return int(manager.lora_config.max_loras) if manager is not None else 0

    @property
    def numbers(self) -> list[int]:
        """Numbers of all adapters that vLLM holds."""
        return sorted(self._manager.list_adapters()) if self._manager is not None else []

    @torch.inference_mode(False)  # or what a caller's mode leaves could not be written to outside of it
    def add(self, number: int, tensors: Mapping[str, torch.Tensor], scalings: Mapping[str, float]) -> None:
        """Make adapter `number` available, in place of one that has this number. The tensors are copied, never
        modified.

        `tensors` have PEFT's names, such as `base_model.model.layers.0.self_attn.q_proj.lora_A.weight`, `scalings` the
        part before `.lora_A`. Raises: `Unsupported` without LoRA, for a rank above the limit, or for an unknown module;
        `ValueError` for an A without a B, or no tensor at all. Nothing has changed then.
        """
        manager = self._manager
        if manager is None:
            raise Unsupported("the engine was started without LoRA: pass enable_lora=True and max_lora_rank")
        # whatever may refuse comes before anything of vLLM's is changed
        rank = _rank(tensors, int(manager.lora_config.max_lora_rank))
        matrices = _Matrices(tensors, torch.device(self._worker.device), manager.lora_config.lora_dtype)
        matrices.write(tensors, scalings)
        model = self._lora_model(manager, number, matrices.by_name, rank)
        # only now: until here anything may have refused
        self.remove(number)
        self._register(model)
        self._models[number] = model
        self._activate(number, model, matrices)

    def keep(self, number: int) -> None:
        """Give vLLM adapter `number` again, if a request for another one has had it evicted since.

        vLLM would read it from the path of a request otherwise, where none is.
        """
        model = self._models.get(number)
        if model is not None and self._adapter_manager.get_adapter(number) is None:
            self._register(model)

    def _register(self, model: Any) -> None:
        """Add an adapter, as vLLM's own manager does."""
        adapters = self._adapter_manager
        # vLLM's `add_adapter` refuses beyond its capacity
        if len(adapters) + 1 > adapters.capacity:
            adapters.remove_oldest_adapter()
        adapters.add_adapter(model)

    @torch.inference_mode(False)
    def update(self, number: int, tensors: Mapping[str, torch.Tensor], scalings: Mapping[str, float]) -> bool:
        """Replace adapter `number`, in place if names and shapes are as before, else by `add`; whether in place."""
        loaded = self._loaded.get(number)
        if loaded is None or not loaded.matrices.fit(tensors) or not self._is_registered(number, loaded):
            self.add(number, tensors, scalings)
            return False
        loaded.matrices.write(tensors, scalings)
        if self._adapter_manager.lora_index_to_id[loaded.plan.slot] == number:
            loaded.plan.replay()
        else:  # vLLM has given its slot to another
            self._activate(number, loaded.model, loaded.matrices)
        return True

    def remove(self, number: int) -> None:
        """Forget adapter `number`, if it is there."""
        self._loaded.pop(number, None)
        self._models.pop(number, None)
        if self._manager is not None:
            self._adapter_manager.remove_adapter(number)

    @property
    def _manager(self) -> Any:
        return getattr(self._worker.model_runner, "lora_manager", None)

    @property
    def _adapter_manager(self) -> Any:
        return self._manager._adapter_manager

    def _is_registered(self, number: int, loaded: _Loaded) -> bool:
        # vLLM forgets adapters past its capacity, and in some reloads.
        return self._adapter_manager.get_adapter(number) is loaded.model

    def _activate(self, number: int, model: Any, matrices: _Matrices) -> None:
        """Let vLLM copy an adapter into a slot, and keep the copies, unless it does more than copy."""
        adapters = self._adapter_manager
        self._loaded.pop(number, None)
        # an active adapter would not be copied again
        adapters.deactivate_adapter(number)
        with _Recorder(matrices.by_name.values()) as recorder:
            adapters.activate_adapter(number)
        # a rank copies its shard of each matrix only
        shards = int(self._worker.parallel_config.tensor_parallel_size)
        self.plan_refusal = recorder.refusal or matrices.why_not_covered(recorder.copies, shards)
        if self.plan_refusal is None:
            plan = SlotPlan.of(adapters.lora_index_to_id.index(number), recorder.zeroed, recorder.copies)
            self._loaded[number] = _Loaded(model=model, matrices=matrices, plan=plan)

    def _lora_model(self, manager: Any, number: int, tensors: dict[str, torch.Tensor], rank: int) -> Any:
        """vLLM's own object over `tensors`, which are scaled and in its dtype already."""
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.peft_helper import PEFTHelper

        adapters = manager._adapter_manager
        modules = sorted({name.rsplit(".", 3)[1] for name in tensors})
        helper = PEFTHelper.from_dict(
            {
                "r": rank,
                "lora_alpha": rank,  # scalings are in the matrices already
                "target_modules": modules,
                "vllm_max_position_embeddings": manager.max_position_embeddings,
            }
        )
        helper.validate_legal(manager.lora_config)
        mapper = getattr(adapters.model, "hf_to_vllm_mapper", None)
        if mapper is not None:
            # the name of the method has changed between versions
            mapper = (getattr(mapper, "get_rename_mapper", None) or mapper.get_unstacked_mapper)()
        model = LoRAModel.from_lora_tensors(
            number,
            tensors,
            helper,
            device=str(self._worker.device),
            dtype=manager.lora_config.lora_dtype,
            model_vocab_size=manager.vocab_size,
            weights_mapper=mapper,
            skip_prefixes=getattr(adapters.model, "lora_skip_prefixes", None),
        )
        missing = [name for name in model.loras if not _is_adapted(name, adapters)]
        if missing:
            limited = getattr(manager.lora_config, "target_modules", None)
            raise Unsupported(
                f"the engine has no module to adapt for {len(missing)} of the adapter's, {missing[0]}"
                + (f": it was started with lora_target_modules={sorted(limited)}" if limited else "")
            )
        if 2 * len(model.loras) != len(tensors):
            raise Unsupported(f"the engine takes {2 * len(model.loras)} of the adapter's {len(tensors)} tensors")
        return model


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotPlan:
    """An activation to be done again: zeros in a slot, then copies of an adapter's matrices, or of a rank's part."""

    slot: int
    zeroed: list[torch.Tensor]
    """Tensors to zero, but for those that a copy covers entirely."""

    copies: CopyPlan

    @classmethod
    def of(cls, slot: int, zeroed: list[torch.Tensor], copies: Sequence[_Copy]) -> SlotPlan:
        """Make a plan of what was recorded."""
        covered = {(target.data_ptr(), target.numel()) for _, target in copies if target.is_contiguous()}
        left = [t for t in zeroed if not (t.is_contiguous() and (t.data_ptr(), t.numel()) in covered)]
        return cls(slot=slot, zeroed=left, copies=CopyPlan(copies))

    @torch.no_grad()
    def replay(self) -> None:
        """Write zeros and copies again, on the current stream. A level-2 sleep leaves anything in the buffers."""
        if self.zeroed:
            torch._foreach_zero_(self.zeroed)
        self.copies.replay()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Loaded:
    model: Any
    matrices: _Matrices
    plan: SlotPlan


class _Matrices:
    """The matrices of one `LoRAModel`: contiguous, in vLLM's LoRA dtype, with the scaling in B."""

    def __init__(self, like: Mapping[str, torch.Tensor], device: torch.device, dtype: torch.dtype) -> None:
        self._shapes = {name: t.shape for name, t in like.items()}
        self._a = [name for name in like if name.endswith(_A)]
        self._b = [name for name in like if name.endswith(_B)]
        self._modules = [name.removesuffix(_B) for name in self._b]
        names = [*self._a, *self._b]
        self.by_name = {name: torch.empty(self._shapes[name], dtype=dtype, device=device) for name in names}

    def fit(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """True if `tensors` have the same names and shapes."""
        return {name: t.shape for name, t in tensors.items()} == self._shapes

    @torch.no_grad()
    def write(self, tensors: Mapping[str, torch.Tensor], scalings: Mapping[str, float]) -> None:
        """Take over the values of `tensors`. Scaled in their own dtype, so that rounding to the engine's comes last."""
        mine = list(self.by_name.values())
        a, b = ([tensors[name] for name in names] for names in (self._a, self._b))
        factors = [scalings[module] for module in self._modules]
        if all(tensor.dtype == mine[0].dtype for tensor in b) and all(map(_is_power_of_two, factors)):
            torch._foreach_copy_(mine, [*a, *b])
            torch._foreach_mul_(mine[len(a) :], factors)  # on a CPU this rounds the factors too
        else:
            torch._foreach_copy_(mine, [*a, *torch._foreach_mul(b, factors)])

    def why_not_covered(self, copies: Sequence[_Copy], shards: int) -> str | None:
        """The reason why `copies`, of every matrix or one of its `shards`, are not all that activating does."""
        parts: dict[int, set[tuple[int, torch.Size, tuple[int, ...]]]] = {}
        for source, _ in copies:
            part = (int(source.storage_offset()), source.shape, source.stride())
            parts.setdefault(storage_key(source), set()).add(part)
        for name, tensor in self.by_name.items():
            # more than once: an element that is copied twice cannot be told apart from one that is missing
            num_copied = sum(math.prod(shape) for _, shape, _ in parts.get(storage_key(tensor), ()))
            if num_copied > tensor.numel() or num_copied * shards < tensor.numel():
                return f"activating copies {num_copied} of the {tensor.numel()} elements of {name}"
        differs = bool(CopyPlan(copies).flags().any())
        return "what activating leaves is not what it copied last" if differs else None


class _Recorder(TorchDispatchMode):
    """Records what an activation writes: zeros, and copies of `known` tensors; `refusal` names another write."""

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.zeroed: list[torch.Tensor] = []
        self.copies: list[_Copy] = []
        self.refusal: str | None = None
        self._known = set(map(storage_key, known))
        self._copied_to: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.is_mutable and not self._note(func, args):
            self.refusal = self.refusal or f"activating runs {func} on {tuple(args[0].shape)}"
        return result

    def _note(self, func: Any, args: Any) -> bool:
        if func is torch.ops.aten.copy_.default and storage_key(args[1]) in self._known:
            self.copies.append((args[1], args[0]))
            self._copied_to.add(storage_key(args[0]))
            return True
        # Zeros come first when it is all done again, so none may follow a copy to the same buffer.
        is_zero = func.overloadpacket is torch.ops.aten.fill_ and float(args[1]) == 0
        if is_zero and storage_key(args[0]) not in self._copied_to:
            self.zeroed.append(args[0])
            return True
        return False


def _is_power_of_two(factor: float) -> bool:
    """True if multiplying by `factor` rounds in no dtype: a power of two that all of them can hold."""
    mantissa, exponent = math.frexp(factor)
    return mantissa == 0.5 and abs(exponent) < 14


def _rank(tensors: Mapping[str, torch.Tensor], limit: int) -> int:
    """The largest rank of an adapter, with every A checked to have its B."""
    a = {name.removesuffix(_A) for name in tensors if name.endswith(_A)}
    b = {name.removesuffix(_B) for name in tensors if name.endswith(_B)}
    if not a or a != b or len(a) + len(b) != len(tensors):
        odd = sorted(a ^ b) or [name for name in tensors if not name.endswith((_A, _B))]
        raise ValueError(f"an adapter needs an A and a B for each module, but {odd or 'there is none'}")
    rank = max(tensors[module + _A].shape[0] for module in a)
    if rank > limit:
        raise Unsupported(
            f"the adapter has rank {rank} and the engine takes {limit}: start it with max_lora_rank={rank_limit(rank)}"
        )
    return rank


def _is_adapted(name: str, adapters: Any) -> bool:
    """True if the engine adapts a module of an adapter, by itself or as a part of a fused one."""
    if name in adapters.modules:
        return True
    parent, _, own = name.rpartition(".")
    fused = [k for k, parts in adapters.packed_modules_mapping.items() if own in parts]
    # vLLM adapts `qkv_proj`, PEFT its parts
    return any(f"{parent}.{k}" in adapters.modules for k in fused)
