"""fp32 master weights for models in 16 bits.

A bf16 number has 8 bits of precision: an update smaller than about |w|/256 rounds away, and at the learning rates of
reinforcement learning most do. The optimizer therefore works on fp32 masters, in which small updates add up, and the
model's weights are the masters rounded (mixed-precision training, arXiv:1710.03740).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.weak import TensorWeakRef

from colo.memory.dtensor import is_dtensor, local_shard
from colo.memory.uninterrupted import uninterrupted
from colo.trainer.gradients import parameters_of
from colo.trainer.inventory import MASTER_WEIGHT
from colo.trainer.snapshot import detach_state
from colo.units import MIB

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]
"""Builds an optimizer from parameters or parameter groups, such as `lambda params: AdamW(params, lr=1e-6)`."""


class MasterWeights:
    """Makes optimizers that keep fp32 masters: give one to `colo.launch`, or call it with the model's parameters.

    optimizer = MasterWeights(lambda params: torch.optim.AdamW(params, lr=1e-6))(model.parameters())
    """

    def __init__(self, make_optimizer: MakeOptimizer, *, bucket_bytes: int | None = 512 * MIB) -> None:
        if not callable(make_optimizer):
            raise TypeError(
                "MasterWeights takes a function that makes an optimizer, such as lambda params: AdamW(params, "
                f"lr=1e-6), not an instance of {type(make_optimizer).__name__}"
            )
        self._make_optimizer = make_optimizer
        self._bucket_bytes = bucket_bytes

    def __call__(self, params: Any) -> MasterWeightsOptimizer:
        """Build the optimizer over `params`: an iterable of parameters, or of parameter groups."""
        return MasterWeightsOptimizer(params, self._make_optimizer, bucket_bytes=self._bucket_bytes)


class MasterWeightsOptimizer(torch.optim.Optimizer):
    """An optimizer that wraps another one, which works on fp32 copies ("masters") of 16-bit parameters.

    Its parameters are the model's. Its state is the inner optimizer's, with the masters under `master_weight`. Each
    step hands the hyperparameters of its groups, which schedulers change, to the inner optimizer, and takes over what
    that one writes there, such as a count of steps.
    Each step compares parameters with their masters. A value that anybody has written to a parameter since the last
    step replaces its master.
    The inner optimizer gets parameters that are fp32 or wider as they are.

    A step handles `bucket_bytes` of fp32 gradients at a time, by calling the inner optimizer's `step` once for each
    bucket with the other gradients absent. Optimizers that count steps per group rather than per parameter need
    `bucket_bytes=None`, and then memory for all gradients in fp32.

    A step that raises leaves every gradient where it was. The next step goes on with the bucket that failed. Where
    gradients of earlier buckets have changed since, it takes those in as well. A rollout in between changes none.
    """

    def __init__(self, params: Any, make_optimizer: MakeOptimizer, *, bucket_bytes: int | None = 512 * MIB) -> None:
        if bucket_bytes is not None and bucket_bytes <= 0:
            raise ValueError(f"bucket_bytes must be positive or None, not {bucket_bytes}")
        groups = _as_groups(params)
        self._masters: dict[torch.Tensor, torch.Tensor] = {}
        self._unrounded: dict[torch.Tensor, int] = {}  # masters under way, and writes to their parameters before
        self._bucket_bytes = bucket_bytes
        self._taken: dict[torch.Tensor, tuple[TensorWeakRef, int]] = {}  # gradients, of a step that has not ended
        self._changed: torch.Tensor | None = None
        self._num_elements = 0
        self._loading: dict[Any, Any] = {}
        self._inner = make_optimizer([self._with_masters(group) for group in groups])
        self._shown: list[dict[str, Any]] = []  # of the inner optimizer's groups, what ours have had since
        super().__init__(groups, self._inner.defaults)
        self.register_state_dict_pre_hook(lambda _: self._before_save())
        self.register_load_state_dict_pre_hook(lambda _, state_dict: self._before_load(state_dict))
        self.register_load_state_dict_post_hook(lambda _: self._after_load())
        self._publish_state()

    @property
    def inner(self) -> torch.optim.Optimizer:
        """The optimizer that works on the masters."""
        return self._inner

    @property
    def changed_fraction(self) -> float | None:
        """Fraction of the 16-bit elements that the last step changed, of those on this rank; `None` before the first.

        Waits for the device."""
        return None if self._changed is None else float(self._changed) / max(1, self._num_elements)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with masters of their own; see `torch.optim.Optimizer.add_param_group`."""
        super().add_param_group(param_group)
        if len(self.param_groups) > len(self._inner.param_groups):
            self._inner.add_param_group(self._with_masters(self.param_groups[-1]))
            self._publish_state()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the masters from the parameters' gradients, and the parameters from the masters."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._copy_hyperparameters()
        self._changed, self._num_elements = None, 0
        try:
            self._go_on()
            for bucket in self._buckets():
                with uninterrupted():  # masters, gradients and the note of what was taken in change together
                    self._step_bucket(bucket)
        finally:
            with uninterrupted():
                self._show_hyperparameters()
                self._publish_state()
        self._taken.clear()
        return loss

    def consumed(self) -> list[torch.Tensor]:
        """Parameters whose present gradients a step that failed has taken in; see `StepsInParts`."""
        return [
            parameter
            for parameter, (gradient, version) in self._taken.items()
            if parameter.grad is not None and gradient() is parameter.grad and parameter.grad._version == version
        ]

    def mark_consumed(self, parameters: Iterable[torch.Tensor]) -> None:
        """Treat the present gradients of `parameters` as taken in; see `StepsInParts`."""
        self._taken.update((p, (TensorWeakRef(p.grad), p.grad._version)) for p in parameters if p.grad is not None)

    def _step_bucket(self, bucket: list[torch.Tensor]) -> None:
        hidden = self._hide_gradients(except_for=bucket)
        try:
            for parameter in bucket:
                master = self._masters.get(parameter)
                if master is not None and parameter.grad is not None:
                    self._follow(parameter, master)
                    self._unrounded[parameter] = parameter._version
                    master.grad = parameter.grad.to(torch.float32)
            self._inner.step()
            self.mark_consumed(bucket)
        finally:
            for parameter, gradient in hidden:
                parameter.grad = gradient
            for parameter in bucket:
                if parameter in self._masters:
                    self._masters[parameter].grad = None
        for parameter in bucket:
            self._round(parameter)

    def _go_on(self) -> None:
        """After a step that failed: forget gradients that have changed since, and round the masters of the others."""
        self._taken = {parameter: self._taken[parameter] for parameter in self.consumed()}
        for parameter in self._taken:
            if parameter in self._masters:
                self._follow(parameter, self._masters[parameter])
                self._round(parameter)

    def _follow(self, parameter: torch.Tensor, master: torch.Tensor) -> None:
        """Copy elements that somebody else has written to a parameter; others keep the master's precision."""
        # Where a step has failed, the parameter is not yet its master rounded: then torch's count of writes must do.
        if self._unrounded.get(parameter) != parameter._version:
            torch.where(master.to(parameter.dtype) == parameter, master, parameter.to(torch.float32), out=master)

    def _round(self, parameter: torch.Tensor) -> None:
        master = self._masters.get(parameter)
        if master is None:
            return
        rounded = master.to(parameter.dtype)
        changed = (local_shard(rounded) != local_shard(parameter)).sum(dtype=torch.float64)
        self._changed = changed if self._changed is None else self._changed + changed.to(self._changed.device)
        self._num_elements += local_shard(parameter).numel()
        parameter.copy_(rounded)
        self._unrounded.pop(parameter, None)

    def _hide_gradients(self, except_for: list[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Take away the gradients of parameters without masters whose turn is not now."""
        turn = {id(parameter) for parameter in except_for}
        others = [p for p in parameters_of(self) if p not in self._masters and id(p) not in turn]
        hidden = [(parameter, parameter.grad) for parameter in others if parameter.grad is not None]
        for parameter, _ in hidden:
            parameter.grad = None
        return hidden

    def _buckets(self) -> Iterable[list[torch.Tensor]]:
        bucket: list[torch.Tensor] = []
        taken_bytes = 0
        for parameter in parameters_of(self):
            if parameter.grad is None or parameter in self._taken:
                continue
            size_bytes = 4 * parameter.numel()
            if bucket and self._bucket_bytes is not None and taken_bytes + size_bytes > self._bucket_bytes:
                yield bucket
                bucket, taken_bytes = [], 0
            bucket.append(parameter)
            taken_bytes += size_bytes
        if bucket:
            yield bucket

    def _with_masters(self, group: dict[str, Any]) -> dict[str, Any]:
        return {**group, "params": [self._master_of(parameter) for parameter in group["params"]]}

    def _master_of(self, parameter: torch.Tensor) -> torch.Tensor:
        if not parameter.is_floating_point() or parameter.element_size() >= 4:
            return parameter
        master = parameter.detach().to(torch.float32, copy=True)
        master.requires_grad_(parameter.requires_grad)
        self._masters[parameter] = master
        return master

    def _copy_hyperparameters(self) -> None:
        """Give the inner optimizer the hyperparameters that were written to our groups since the last step."""
        shown = itertools.chain(self._shown, itertools.repeat({}))
        for outer, inner, before in zip(self.param_groups, self._inner.param_groups, shown, strict=False):
            inner.update({k: v for k, v in _without_parameters(outer).items() if k not in before or before[k] is not v})

    def _show_hyperparameters(self) -> None:
        for outer, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            outer.update(_without_parameters(inner))
        self._shown = [_without_parameters(outer) for outer in self.param_groups]

    def _publish_state(self) -> None:
        """Show the inner optimizer's state, by the model's parameters and with the masters, as our own."""
        for outer, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            for parameter, master in zip(outer["params"], inner["params"], strict=True):
                state = dict(self._inner.state.get(master, {}))
                if parameter in self._masters:
                    state[MASTER_WEIGHT] = master
                if state:
                    self.state[parameter] = state

    def _before_save(self) -> None:
        """Have the inner optimizer make its state, before a first step, where parameters are sharded.

        `torch.distributed.checkpoint` loads what a state dict of the present state names. It makes such state itself,
        by the same step without gradients, where an optimizer has none at all; the masters are some.
        """
        if self._inner.state or not any(is_dtensor(parameter) for parameter in self._masters):
            return
        from torch.distributed.checkpoint.state_dict import _init_optim_state

        _init_optim_state(self._inner)
        self._publish_state()

    def _before_load(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Keep the state from torch's own loading, which would round fp32 state to the dtype of the parameters."""
        state = state_dict["state"]
        pairs = zip(_numbers(state_dict), parameters_of(self), strict=False)  # torch refuses other groups afterwards
        with_master = [i for i, parameter in pairs if parameter in self._masters and i in state]
        if lacking := [i for i in with_master if MASTER_WEIGHT not in state[i]]:
            raise ValueError(
                f"the state of {len(lacking)} parameters, number {lacking[0]} for one, has no {MASTER_WEIGHT}: it was "
                "saved by an optimizer without master weights"
            )
        self._loading = detach_state(state_dict, self)
        return {**state_dict, "state": {}}

    @torch.no_grad()
    def _after_load(self) -> None:
        loaded, self._loading = self._loading, {}
        self._taken.clear()
        self._unrounded.clear()
        inner_state = {}
        for index, parameter in zip(_numbers(loaded), parameters_of(self), strict=True):
            state = dict(loaded["state"].get(index, {}))
            master = state.pop(MASTER_WEIGHT, None)
            if master is not None:  # new memory rather than a copy into the old, which may be offloaded
                part = local_shard(self._masters[parameter])  # a `DTensor` would ignore new data
                part.data = local_shard(master).to(part.device, torch.float32, copy=True)
            if state:
                inner_state[index] = state
        self._inner.load_state_dict({"state": inner_state, "param_groups": loaded["param_groups"]})
        self._shown = [_without_parameters(outer) for outer in self.param_groups]
        self.state.clear()
        self._publish_state()


def _numbers(state_dict: dict[str, Any]) -> list[int]:
    """The parameters' numbers in a state dict, in the order of the groups."""
    return [number for group in state_dict["param_groups"] for number in group["params"]]


def _without_parameters(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _as_groups(params: Any) -> list[dict[str, Any]]:
    """Parameter groups with lists, from whatever a torch optimizer accepts."""
    items = list(params)
    if not items:
        raise ValueError("the optimizer got an empty parameter list")
    if not isinstance(items[0], dict):
        items = [{"params": [item[1] if isinstance(item, tuple) else item for item in items]}]
    members = [item["params"] for item in items]
    lists = [[given] if isinstance(given, torch.Tensor) else list(given) for given in members]
    return [{**item, "params": parameters} for item, parameters in zip(items, lists, strict=True)]
