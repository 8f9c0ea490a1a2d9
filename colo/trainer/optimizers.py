"""Several optimizers as one that colo asks like torch's, Megatron's too, and which of them can be stepped in parts.

One of Megatron's has several of torch's within, for dense parameters and for experts, or is a chain of such. Those
step over fp32 copies of what this rank updates ("main parameters"), which Megatron keeps in their parameter groups and
nowhere in their state. Gradients are in buffers that its data-parallel wrapper keeps from step to step.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partialmethod
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from colo.errors import Unsupported
from colo.memory.parking import Kept
from colo.memory.storage import storage_key
from colo.trainer.remainders import MASTER_WEIGHT


def as_torch(optimizer: Any) -> Any:
    """Wrap several optimizers, of a list, of a container or of Megatron's, as one that answers like torch's.

    Any other object is returned as it is.
    """
    if is_megatron_optimizer(optimizer):
        return MegatronOptimizers(optimizer)
    parts = _all_parts(optimizer)
    return OptimizerParts(parts) if len(parts) > 1 or isinstance(optimizer, (list, tuple)) else optimizer


def _all_parts(optimizer: Any) -> list[torch.optim.Optimizer]:
    """List the optimizers that keep the state: those of a list, and those within a container, which steps them."""
    if isinstance(optimizer, (list, tuple)):
        return [part for one in optimizer for part in _all_parts(one)]
    if not isinstance(optimizer, torch.optim.Optimizer) or hasattr(optimizer, "master_of"):
        return [optimizer]
    held = [leaf for name, value in vars(optimizer).items() if name not in _OWN for leaf in pytree.tree_leaves(value)]
    parts = [leaf for leaf in held if isinstance(leaf, torch.optim.Optimizer) and leaf.state is not optimizer.state]
    return [optimizer, *(part for one in parts for part in _all_parts(one))]


_OWN = ("state", "param_groups", "defaults")


REGROUPED = (
    "parameters of the optimizer are in other groups than when their state was laid out, or in none, which its step "
    "does not follow: put the groups back, freeze parameters with requires_grad_(False), add new ones with "
    "add_param_group, or build another optimizer"
)
"""Words about parameter groups that the loop has changed."""


def parameters_of(optimizer: Any) -> list[torch.Tensor]:
    """List the parameters of an optimizer, group by group."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def listed_twice(parameters: Iterable[torch.Tensor]) -> torch.Tensor | None:
    """Return the first parameter that is listed again, which torch warns of and steps twice, or `None`."""
    seen = set[int]()
    for parameter in parameters:
        if id(parameter) in seen:
            return parameter
        seen.add(id(parameter))
    return None


def is_megatron_optimizer(optimizer: object) -> bool:
    """Tell whether this is one of Megatron's optimizers. Does not import Megatron."""
    module = sys.modules.get("megatron.core.optimizer.optimizer")  # without which there are none
    return module is not None and isinstance(optimizer, module.MegatronOptimizer)


class OptimizerParts:
    """Several optimizers as one: parameters and state are those of all, and hooks run at the step of each.

    Muon for matrices with AdamW for the rest comes as two optimizers, or as one that steps both and has the state of
    neither (torchtitan's `OptimizersContainer`).
    """

    def __init__(self, inner: list[torch.optim.Optimizer]) -> None:
        self.inner = inner  # torch's optimizers, in the order in which they step

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """One group of every parameter, each once."""
        found = {id(p): p for part in self.inner for group in part.param_groups for p in group["params"]}
        return [{"params": list(found.values())}]

    @property
    def state(self) -> dict[Any, Any]:
        """The state of each parameter, by the number of its optimizer and its own."""
        numbers = {id(p): number for number, p in enumerate(self.param_groups[0]["params"])}
        return {
            f"{n}.{numbers.get(id(key), key)}": kept
            for n, part in enumerate(self.inner)
            for key, kept in part.state.items()
        }

    def _register(self, kind: str, hook: Callable[..., Any]) -> Any:
        with ExitStack() as handles:  # which takes them back where a later optimizer refuses
            for optimizer in self.inner:
                handles.callback(getattr(optimizer, kind)(hook).remove)
            return SimpleNamespace(remove=handles.pop_all().close)

    # of all of them: called before or after any one steps, or loads a state dict
    register_step_pre_hook: Any = partialmethod(_register, "register_step_pre_hook")
    register_step_post_hook: Any = partialmethod(_register, "register_step_post_hook")
    register_load_state_dict_pre_hook = partialmethod(_register, "register_load_state_dict_pre_hook")
    register_load_state_dict_post_hook = partialmethod(_register, "register_load_state_dict_post_hook")


class MegatronOptimizers(OptimizerParts):
    """All optimizers of torch's within one of Megatron's, as one: parameters are the model's, main ones are state.

    Hooks of a step run once, before the first of them steps and after the last.
    """

    def __init__(self, optimizer: Any) -> None:
        """Raises: `Unsupported` where nothing is trained on this rank, or Megatron-FSDP holds the main parameters."""
        self._parts = list(_parts_of(optimizer))
        self._may_be_behind = True
        super().__init__([part.optimizer for part in self._parts])
        if not self.inner:
            raise Unsupported("Megatron's optimizer trains nothing on this rank: colo cannot tell when it steps")
        if any(chunk.ddp_config.use_megatron_fsdp for chunk in self._chunks()):
            raise Unsupported(
                "Megatron-FSDP is not supported: use Megatron's DistributedDataParallel with the distributed optimizer "
                "(use_megatron_fsdp=False)"
            )

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """One group of the model's parameters, which backward passes reach."""
        return [{"params": list({id(p): p for part in self._parts for p in _model_parameters(part)}.values())}]

    @property
    def state(self) -> dict[str, dict[str, Any]]:
        """The state of each main parameter, itself among it as a master weight."""
        # fp32 parameters are their own main parameters, which stay: autograd uses them
        own = {storage_key(parameter) for parameter in self.param_groups[0]["params"]}
        return {
            f"{number}.{index}": {
                **optimizer.state.get(main, {}),
                **({MASTER_WEIGHT: main} if storage_key(main) not in own else {}),  # else a view of the model's
            }
            for number, optimizer in enumerate(self.inner)
            for index, main in enumerate(parameters_of(optimizer))
        }

    def finish_step(self) -> None:
        """Gather what the last step has changed where Megatron does so in the next forward pass (a collective).

        That is with `overlap_param_gather`: until then ranks of one data-parallel group have different weights.
        """
        if self._may_be_behind:
            for chunk in self._chunks():
                if chunk.ddp_config.overlap_param_gather:
                    chunk.start_param_sync(force_sync=True)
        self._may_be_behind = False

    @property
    def has_buffers(self) -> bool:
        """True where gradients are in buffers of Megatron's wrapper."""
        return any(hasattr(parameter, "main_grad") for parameter in self.param_groups[0]["params"])

    def gradients(self) -> list[torch.Tensor]:
        """List the buffers of gradients and every tensor over them that Megatron has."""
        found = [p.main_grad for p in self.param_groups[0]["params"] if hasattr(p, "main_grad")]
        for chunk in self._chunks():
            if not chunk.ddp_config.nccl_ub:  # NCCL knows their addresses
                found += pytree.tree_leaves(_views_of(chunk))
        return [tensor for tensor in found if isinstance(tensor, torch.Tensor) and tensor.numel()]

    def kept(self) -> list[Kept]:
        """Gradients of main parameters, which the last step has left, unless they lie in buffers."""
        mains = [main for optimizer in self.inner for main in parameters_of(optimizer)]
        found = _bytes_by_storage(main.grad for main in mains)
        for key in _bytes_by_storage(getattr(p, "main_grad", None) for p in self.param_groups[0]["params"]):
            found.pop(key, None)
        reason = "the last step has left them: optimizer.zero_grad() drops them"
        return [Kept("gradients of main parameters", sum(found.values()), reason)] if found else []

    # ---- torch's hooks -----------------------------------------------------------------------------------------------

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Call `hook` before the first optimizer steps."""
        return self.inner[0].register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Call `hook` after the last optimizer has stepped."""

        def stepped(*told: Any) -> Any:
            self._may_be_behind = True
            return hook(*told)

        return self.inner[-1].register_step_post_hook(stepped)

    def _chunks(self) -> list[Any]:
        """Stages in their data-parallel wrappers, as far as optimizers know them: the distributed one does."""
        return list({id(chunk): chunk for part in self._parts for chunk in getattr(part, "model_chunks", ())}.values())


def _parts_of(optimizer: Any) -> Iterator[Any]:
    """Megatron's optimizers that have one of torch's, out of chains."""
    chained = getattr(optimizer, "chained_optimizers", None)
    if chained is not None:
        for part in chained:
            yield from _parts_of(part)
    elif not getattr(optimizer, "is_stub_optimizer", False):
        yield optimizer


def _model_parameters(part: Any) -> Iterator[torch.Tensor]:
    """The parameters of the model that one of Megatron's optimizers trains; the distributed one holds whole stages."""
    if chunks := getattr(part, "model_chunks", None):
        yield from (parameter for chunk in chunks for parameter in chunk.parameters() if parameter.requires_grad)
    elif hasattr(part, "float16_groups"):
        for group in (*part.float16_groups, *part.fp32_from_fp32_groups):
            yield from group
    else:
        yield from parameters_of(part.optimizer)


def _views_of(chunk: Any) -> dict[str, list[Any]]:
    """Every tensor over the gradient buffers of one stage that its data-parallel wrapper has, but for parameters'."""
    buffers = [*chunk.buffers, *chunk.expert_parallel_buffers]
    groups = [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]
    return {
        "buffers": [buffer.grad_data for buffer in buffers],
        "buckets": [bucket.grad_data for buffer in buffers for bucket in buffer.buckets],
        "shards": [group.cached_grad_buffer_shard_list for group in groups],
    }


def _bytes_by_storage(tensors: Iterable[torch.Tensor | None]) -> dict[int, int]:
    present = (tensor for tensor in tensors if tensor is not None)
    return {storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in present}


_KNOWN: dict[str, frozenset[str]] = {
    "torch.optim": frozenset(
        {"Adadelta", "Adafactor", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD"}
        | {"Muon", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"}
    ),
    "transformers.optimization": frozenset({"Adafactor"}),
    # Of these two packages the class that defines `step`, which all of its optimizers share.
    "bitsandbytes.optim": frozenset({"Optimizer8bit"}),
    "torchao.optim": frozenset({"_AdamBase"}),
}
"""By package, the classes that define such a `step`. `tests/zoo/test_streamed.py` trains with each."""

_ELEMENTWISE = frozenset(
    {"Adadelta", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"}
)
"""Classes of torch whose update of an element reads that element's gradient and state alone."""

_REGISTERED: set[type] = set()


def register_separable(kind: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Declare that the `step` of an optimizer's class updates each parameter from that one's gradient and state alone.

    It may read its groups' hyperparameters, and count its steps there: a streamed step calls it once for every bucket
    of parameters, with the gradients of others absent and the groups as before the first. May be used as a decorator.
    """
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise TypeError(f"register_separable takes a class of optimizers, such as AdamW, not {kind!r}")
    _REGISTERED.add(kind)
    return kind


def why_not_separable(optimizer: Any) -> str | None:
    """Say why an optimizer has to have all of its state at once; `None` when it can be stepped in parts."""
    name = type(optimizer).__name__
    if isinstance(optimizer, MegatronOptimizers):
        return "Megatron's optimizers step all of their buffers at once"
    if isinstance(optimizer, OptimizerParts):
        return "several optimizers are stepped by the loop, each at once"
    if (base := base_of(optimizer)) is not optimizer:
        if optimizer.bucket_bytes is None:
            return "MasterWeights(bucket_bytes=None) asks for one step of all parameters"
        return why_not_separable(base)
    if (twice := listed_twice(parameters_of(optimizer))) is not None:
        return (
            f"the parameter of shape {tuple(twice.shape)} is twice in a group, and torch steps it twice: list it once"
        )
    step = own_step(type(optimizer))
    if any(step is own_step(kind) for kind in _REGISTERED):
        return None
    for package, names in _KNOWN.items():
        if step.__module__.startswith(package) and step.__qualname__ in {f"{known}.step" for known in names}:
            return None
    if asks_for_closure(optimizer):
        return f"{name}.step asks for a closure, and looks at all parameters at once"
    return (
        f"{name} is not known to update each parameter by itself; if it does, declare it: "
        f"colo.optim.register_separable({name})"
    )


def base_of(optimizer: Any) -> Any:
    """The optimizer whose class steps: the one within `MasterWeights`, or itself."""
    inner = getattr(optimizer, "inner", None)
    # that class imports this module
    return inner if isinstance(inner, torch.optim.Optimizer) and hasattr(optimizer, "master_of") else optimizer


def asks_for_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether `step` passes through the model itself, as that of `LBFGS` does, by a function that it is given."""
    try:
        inspect.signature(optimizer.step).bind()
    except TypeError:
        return True
    return False


def is_elementwise(optimizer: Any) -> bool:
    """Tell whether an optimizer updates each element by itself, so that a step may be cut anywhere."""
    step = own_step(type(optimizer))
    return step.__module__.startswith("torch.optim") and step.__qualname__ in {f"{name}.step" for name in _ELEMENTWISE}


def keeps_moments(optimizer: Any) -> bool:
    """True if an optimizer that `is_elementwise` keeps means or sums of gradients from step to step."""
    step = own_step(type(optimizer)).__qualname__
    if step in ("SGD.step", "RMSprop.step"):  # of a centered one planes round the momentum alone
        groups = optimizer.param_groups
        return any(group["momentum"] != 0 or not group.get("centered", True) for group in groups)
    return step not in ("ASGD.step", "Rprop.step")  # averages of weights, and sizes of steps


def own_step(kind: type) -> Any:
    """The `step` of an optimizer's class, or of the base that it has it from, without torch's hooks around it."""
    step: Any = kind.step  # type: ignore[attr-defined]
    while getattr(step, "hooked", False):  # once for each class that there was an instance of
        step = step.__wrapped__
    return step
