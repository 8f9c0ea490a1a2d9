"""fp32 master weights for models in 16 bits.

A bf16 number has 8 bits of precision: an update smaller than about |w|/256 rounds away, and at the learning rates of
reinforcement learning most do. The optimizer therefore works on fp32 masters, in which small updates add up, and the
model's weights are the masters rounded (mixed-precision training, arXiv:1710.03740).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from colo.errors import Unsupported
from colo.memory.region import ALIGNMENT_BYTES
from colo.memory.storage import assembly_of, is_dtensor, local_shard
from colo.memory.uninterrupted import uninterrupted
from colo.trainer.gradients import TakenGradients
from colo.trainer.optimizers import REGROUPED, asks_for_closure, listed_twice, parameters_of, why_not_separable
from colo.trainer.remainders import (
    DIGEST_ELEMENTS,
    MASTER_DIGESTS,
    MASTER_REMAINDER,
    MASTER_WEIGHT,
    OF_MASTERS,
    block_digests,
    close_masters,
    open_masters,
    split,
    written_blocks,
)
from colo.units import MIB, align_up, batches

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]
"""Builds an optimizer from parameters or parameter groups, such as `lambda params: AdamW(params, lr=1e-6)`."""


class MasterWeights:
    """Makes optimizers that keep fp32 masters: give one to `colo.launch`, or call it with the model's parameters.

    optimizer = MasterWeights(lambda params: torch.optim.AdamW(params, lr=1e-6))(model.parameters())
    """

    def __init__(
        self, make_optimizer: MakeOptimizer, *, bucket_bytes: int | None = 512 * MIB, remainders: bool | None = None
    ) -> None:
        """See `MasterWeightsOptimizer`."""
        if not callable(make_optimizer):
            raise TypeError(
                "MasterWeights takes a function that makes an optimizer, such as lambda params: AdamW(params, "
                f"lr=1e-6), not an instance of {type(make_optimizer).__name__}"
            )
        self._make_optimizer = make_optimizer
        self._options: dict[str, Any] = {"bucket_bytes": bucket_bytes, "remainders": remainders}

    def __call__(self, params: Any) -> MasterWeightsOptimizer:
        """Build the optimizer over `params`: an iterable of parameters, or of parameter groups."""
        return MasterWeightsOptimizer(params, self._make_optimizer, **self._options)


def fraction_of(num_changed: torch.Tensor, num_elements: int) -> float:
    """The fraction of elements that have changed. Waits for the device."""
    return float(num_changed) / max(1, num_elements)


class MasterWeightsOptimizer(torch.optim.Optimizer):
    """An optimizer that wraps another one, which works on fp32 copies ("masters") of 16-bit parameters.

    Its parameters are the model's. Its state is the inner optimizer's, and what is kept of the masters: `master_weight`
    in fp32 or, with `remainders`, for each bf16 parameter the 16 bits that its weight is short of the master
    (`master_remainder`), which is made for each step anew, bit for bit. By default that is so where the inner optimizer
    is known to update each parameter by itself (`colo.optim.register_separable`). Sharded ones have whole masters.

    Each step hands the hyperparameters of its groups, which schedulers change, to the inner optimizer, and takes over
    what that one writes there, such as a count of steps.
    What is written to its state, or cleared from it, holds from the next step on.
    Each step compares parameters with their masters. A value that anybody has written to a parameter since the last
    step replaces its master; with remainders, the block of elements in which it lies becomes its master as it is.
    The inner optimizer gets parameters that are fp32 or wider as they are.

    A step handles `bucket_bytes` of fp32 gradients at a time, by calling the inner optimizer's `step` once for each
    bucket with the other gradients absent, and its groups as they were before the first: a count of steps that it keeps
    there goes up by one. One that looks at all gradients at once needs `bucket_bytes=None`, and then memory for all of
    them in fp32.

    A step that raises leaves every gradient where it was. The next step goes on with the bucket that failed. Where
    gradients of earlier buckets have changed since, it takes those in as well. A rollout in between changes none.
    """

    def __init__(
        self,
        params: Any,
        make_optimizer: MakeOptimizer,
        *,
        bucket_bytes: int | None = 512 * MIB,
        remainders: bool | None = None,
    ) -> None:
        if bucket_bytes is not None and bucket_bytes <= 0:
            raise ValueError(f"bucket_bytes must be positive or None, not {bucket_bytes}")
        groups = _as_groups(params)
        self.masters: dict[torch.Tensor, Master] = {}  # of each 16-bit parameter
        self.bucket_bytes = bucket_bytes  # fp32 gradients that a step handles at a time; `None` for all
        self.is_streamed = False
        """True while a runtime streams the state; the runtime then loads masters from state dicts."""

        self._taken = TakenGradients()
        self.changes: tuple[torch.Tensor, int] | None = None
        """16-bit elements that the last step changed, and how many there are; `None` where it changed none."""

        self._counted: list[tuple[torch.Tensor, int]] = []
        self._published: dict[torch.Tensor, dict[str, Any]] = {}  # what `publish_state` has entered
        self._loading: dict[Any, Any] = {}
        self._remainders = bucket_bytes is not None if remainders is None else remainders
        self.inner = make_optimizer([self._with_masters(group) for group in groups])
        _check_inner(self.inner)
        # the inner optimizer is known only once it is made, so that it is made again with whole masters
        if self._remainders and remainders is None and why_not_separable(self.inner) is not None:
            self._remainders = False  # it may look at all masters at once, or as it is made
            self.masters.clear()
            self.inner = make_optimizer([self._with_masters(group) for group in groups])
        self._shown: list[dict[str, Any]] = []  # hyperparameters of the inner groups, as ours have shown them
        self._at_start: list[dict[str, Any]] = []  # the same before the first bucket of a step that has not ended
        super().__init__(groups, self.inner.defaults)
        self.show_hyperparameters()  # the inner optimizer may have made tensors of them
        self._is_made_up = False  # the inner optimizer's state, of no step
        self._hook_state_dicts()
        self.publish_state()

    def _hook_state_dicts(self) -> None:
        self.register_state_dict_pre_hook(lambda _: self._before_save())
        self.register_state_dict_post_hook(lambda _, state_dict: self._after_save(state_dict))
        self.register_load_state_dict_pre_hook(lambda _, state_dict: self._before_load(state_dict))
        self.register_load_state_dict_post_hook(lambda _: self._after_load())

    def __getstate__(self) -> dict[str, Any]:
        """List what a copy or a pickle has: as of torch's optimizers no hooks, and of an unfinished step no notes."""
        names = ("inner", "masters", "bucket_bytes", "changes", "_remainders", "_shown", "_at_start")
        fresh: dict[str, Any] = {"is_streamed": False, "_counted": [], "_loading": {}, "_is_made_up": False}
        return {**super().__getstate__(), **{name: getattr(self, name) for name in names}, **fresh}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """See `__getstate__`. torch sets groups and state in this way, too, where it loads a state dict."""
        super().__setstate__(state)
        if "inner" in state:
            self._taken = TakenGradients()
            self._hook_state_dicts()
            self.publish_state()

    @property
    def changed_fraction(self) -> float | None:
        """Fraction of the 16-bit elements that the last step changed, of those on this rank; `None` before the first.

        Waits for the device."""
        return None if self.changes is None else fraction_of(*self.changes)

    def note_changes(self, changes: Iterable[tuple[torch.Tensor, int]]) -> None:
        """Add up change counts of parts into those of the whole step."""
        counts, sizes = zip(*changes, strict=True)
        # on one device: the parameters of a model may be on several
        self.changes = torch.stack([count.to(counts[0].device) for count in counts]).sum(), sum(sizes)

    def master_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """The master of a parameter (fp32, in its shape), as the next step would find it. Raises: `KeyError`."""
        return self.masters[parameter].value()

    def expected_master_bytes(self, parameter: torch.Tensor) -> int:
        """Bytes that the first step will keep of a parameter's master, where it keeps nothing yet."""
        master = self.masters.get(parameter)
        # whole masters are there from the beginning, and state that is there is counted itself
        if not isinstance(master, SplitMaster) or master.state or not parameter.requires_grad:
            return 0
        sizes = 2 * parameter.numel(), 8 * -(-parameter.numel() // DIGEST_ELEMENTS)
        return sum(align_up(size_bytes, ALIGNMENT_BYTES) for size_bytes in sizes)

    def transient_bytes(self, parameter: torch.Tensor) -> int:
        """Bytes in fp32 that a step has while it handles a parameter: its gradient, and a master made for the step."""
        master = self.masters.get(parameter)
        if master is None or not parameter.requires_grad:
            return 0
        return (8 if isinstance(master, SplitMaster) else 4) * local_shard(parameter).numel()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with masters of their own; see `torch.optim.Optimizer.add_param_group`."""
        # what is no dict torch refuses
        super().add_param_group(_with_names(param_group) if isinstance(param_group, dict) else param_group)
        # not for the first groups: torch's own `__init__` adds them by this method, and the inner optimizer has them
        if len(self.param_groups) > len(self.inner.param_groups):
            self.inner.add_param_group(self._with_masters(self.param_groups[-1]))
            self.publish_state()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the masters from the parameters' gradients, and the parameters from the masters."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if parameters := parameters_of(self):  # none where the runtime has stepped them: colo/trainer/streamed.py
            self.take_state()
            self.step_part(parameters)
            self._taken.clear()
            self._at_start = []
        return loss

    def step_part(self, parameters: Iterable[torch.Tensor]) -> None:
        """Step some parameters, those with gradients, within a step whose end the caller knows."""
        self.copy_hyperparameters()
        self.changes, self._counted = None, []
        parameters = list(parameters)
        try:
            self._go_on(set(map(id, parameters)))
            # those in `_taken` were stepped before the last attempt failed
            waiting = [p for p in parameters if p.grad is not None and p not in self._taken]
            for bucket in batches(waiting, lambda parameter: 4 * parameter.numel(), self.bucket_bytes):
                with uninterrupted():  # masters, gradients and the note of what was taken in change together
                    self._step_bucket(bucket)
        finally:
            with uninterrupted():
                self.show_hyperparameters()
                self.publish_state()
                if self._counted:
                    self.note_changes(self._counted)

    def end_step(self) -> None:
        """Forget which gradients the parts of a step have used: it has ended."""
        self._taken.clear()
        self._at_start = []
        self.show_hyperparameters()

    def _step_bucket(self, bucket: list[torch.Tensor]) -> None:
        # the inner optimizer steps every parameter that has a gradient, those of other buckets too
        hidden = self._hide_gradients(except_for=bucket)
        masters = [self.masters[parameter] for parameter in bucket if parameter in self.masters]
        try:
            for master in masters:
                assert master.parameter.grad is not None, "buckets are of parameters with gradients"
                master.prepare()
                # a cast per bucket, not per model: all gradients in fp32 would take as much as the masters
                master.tensor.grad = master.parameter.grad.to(torch.float32)
            self._return_to_start()
            self.inner.step()
            # noted as soon as the step is made: an interrupt before rounding is made good by `_go_on`
            self._taken.note(bucket)
        except BaseException:
            for master in masters:
                master.abandon()
            raise
        finally:
            for parameter, gradient in hidden:
                parameter.grad = gradient
            for master in masters:
                master.tensor.grad = None
        for master in masters:
            self._round(master)

    def _go_on(self, ids: set[int]) -> None:
        """After a step that failed: forget gradients that have changed since, and round the masters of the others.

        Just of parameters that are stepped now: masters of others may be in host memory.
        """
        self._taken.drop_changed()
        for parameter in self._taken.present():
            if parameter in self.masters and id(parameter) in ids:
                self.masters[parameter].follow()
                self._round(self.masters[parameter])

    def _round(self, master: Master) -> None:
        self._counted.append(master.round())

    def _hide_gradients(self, except_for: list[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Take away the gradients of parameters without masters whose turn is not now."""
        turn = {id(parameter) for parameter in except_for}
        others = [p for p in parameters_of(self) if p not in self.masters and id(p) not in turn]
        hidden = [(parameter, parameter.grad) for parameter in others if parameter.grad is not None]
        for parameter, _ in hidden:
            parameter.grad = None
        return hidden

    def _with_masters(self, group: dict[str, Any]) -> dict[str, Any]:
        """The inner optimizer's group for one of ours."""
        return {**group, "params": [self._master_of(parameter) for parameter in group["params"]]}

    def _master_of(self, parameter: torch.Tensor) -> torch.Tensor:
        if not parameter.is_floating_point() or parameter.element_size() >= 4:
            return parameter
        is_split = self._remainders and can_be_split(parameter)
        master = self.masters[parameter] = SplitMaster(parameter) if is_split else WholeMaster(parameter)
        return master.tensor

    def _note_start(self) -> None:
        self._at_start = [_without_parameters(group) for group in self.inner.param_groups]

    def _return_to_start(self) -> None:
        """Give the inner optimizer its groups as they were before the first bucket of the step, if there was one."""
        for group, start in zip(self.inner.param_groups, self._at_start, strict=False):
            for name in group.keys() - start.keys() - {"params"}:
                del group[name]
            group.update(start)

    def copy_hyperparameters(self) -> None:
        """Give the inner optimizer the hyperparameters that were written to our groups since the last step.

        Raises: `Unsupported` for parameters that have changed their group.
        """
        ours = [[self.masters[p].tensor if p in self.masters else p for p in g["params"]] for g in self.param_groups]
        if [list(map(id, params)) for params in ours] != [list(map(id, g["params"])) for g in self.inner.param_groups]:
            raise Unsupported(REGROUPED)
        self._return_to_start()
        shown = itertools.chain(self._shown, itertools.repeat({}))
        for outer, inner, before in zip(self.param_groups, self.inner.param_groups, shown, strict=False):
            # only what differs from what we have shown: the inner optimizer's own counters must not be set back
            inner.update({k: v for k, v in _without_parameters(outer).items() if k not in before or before[k] is not v})
        # a step may fail before it shows them: what is set back then differs from these
        self._shown = [_without_parameters(outer) for outer in self.param_groups]
        self._note_start()

    def show_hyperparameters(self) -> None:
        """Copy hyperparameters and counters of the inner optimizer's groups into our own groups."""
        for outer, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            outer.update(_without_parameters(inner))
        self._shown = [_without_parameters(outer) for outer in self.param_groups]

    def publish_state(self) -> None:
        """Enter the inner optimizer's state and the masters into `self.state`, keyed by the model's parameters."""
        self._published = {}
        for outer, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            # both lists have the same order: `_with_masters` made one of the other
            for parameter, stepped in zip(outer["params"], inner["params"], strict=True):
                state = dict(self.inner.state.get(stepped, {}))
                if parameter in self.masters:
                    state |= self.masters[parameter].state
                if state:
                    self.state[parameter] = state
                    self._published[parameter] = dict(state)

    @torch.no_grad()
    def take_state(self) -> None:
        """Give the inner optimizer and the masters what somebody has replaced or cleared in our state meanwhile."""
        for parameter in parameters_of(self):
            state, before = self.state.get(parameter, {}), self._published.get(parameter, {})
            if state.keys() == before.keys() and all(value is before[name] for name, value in state.items()):
                continue
            master = self.masters.get(parameter)
            of_master = {name: state[name] for name in OF_MASTERS if name in state}
            if master is not None and any(of_master.get(name) is not before.get(name) for name in OF_MASTERS):
                master.load(of_master)
            stepped = parameter if master is None else master.tensor
            self.inner.state[stepped] = {name: value for name, value in state.items() if name not in OF_MASTERS}
            if not self.inner.state[stepped]:
                del self.inner.state[stepped]  # else optimizers would take it for state that is there

    def _before_save(self) -> None:
        """Make state of the inner optimizer for a state dict that would have masters alone.

        `torch.distributed.checkpoint` loads only the keys of the present state dict. For an optimizer without any
        state it first runs a step with zero gradients; here whole masters are state already, so that it does not.
        """
        if self.inner.state or not self.state:
            return
        # private to torch: the function by which a checkpoint's loader makes state too
        from torch.distributed.checkpoint.state_dict import _init_optim_state

        split_masters = [master for master in self.masters.values() if isinstance(master, SplitMaster)]
        self._note_start()
        try:
            for master in split_masters:
                master.prepare()
            _init_optim_state(self.inner)
        finally:
            for master in split_masters:
                master.abandon()
            self._return_to_start()
            self._at_start = []
        self.publish_state()
        self._is_made_up = True

    def _after_save(self, state_dict: dict[str, Any]) -> None:
        """Leave made-up state to the state dict alone: no step has been taken, and the first is to find none."""
        if self._is_made_up:
            self._is_made_up = False
            for entries in state_dict["state"].values():
                if "step" in entries:
                    entries["step"] = 0 * entries["step"]
            self.inner.state.clear()
            self.state.clear()
            self.publish_state()

    def _before_load(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Keep the state from torch's own loading, which would round fp32 state to the dtype of the parameters."""
        if not self.is_streamed:
            self.check_loaded(state_dict)
        self._loading = state_dict
        return {**state_dict, "state": {}}

    def check_loaded(self, state_dict: dict[str, Any]) -> None:
        """Raise `ValueError` for a state dict that lacks masters, or has some of parameters that have none here."""
        state = state_dict["state"]
        # torch refuses other groups afterwards
        pairs = [pair for pair in zip(_numbers(state_dict), parameters_of(self), strict=False) if pair[0] in state]
        wide = [(i, parameter) for i, parameter in pairs if parameter not in self.masters]
        if others := [(i, p) for i, p in wide if not state[i].keys().isdisjoint(OF_MASTERS)]:
            number, parameter = others[0]
            raise ValueError(
                f"the state of {len(others)} parameters, number {number} for one, has masters of 16-bit weights, and "
                f"here they are {parameter.dtype}, which has none: load the model in the dtype of that checkpoint, or "
                f"take {', '.join(OF_MASTERS)} out of its state to go on from the rounded weights"
            )
        with_master = [i for i, parameter in pairs if parameter in self.masters]
        if lacking := [i for i in with_master if not {MASTER_WEIGHT, MASTER_REMAINDER} & state[i].keys()]:
            raise ValueError(
                f"the state of {len(lacking)} parameters, number {lacking[0]} for one, has no {MASTER_WEIGHT}: it was "
                "saved by an optimizer without master weights; begin anew from the weights of that checkpoint, or go "
                "on with the model in float32, which needs none"
            )

    @torch.no_grad()
    def _after_load(self) -> None:
        loaded, self._loading = self._loading, {}
        self._taken.clear()
        self._at_start = []
        inner_state = {}
        for index, parameter in zip(_numbers(loaded), parameters_of(self), strict=True):
            state = dict(loaded["state"].get(index, {}))
            of_master = {key: state.pop(key) for key in OF_MASTERS if key in state}
            # where there is nothing of the parameter, its master is the weight: the old one is another training's
            if of_master or (parameter in self.masters and index not in loaded["state"]):
                # new memory rather than a copy into the old, which may be offloaded
                self.masters[parameter].load(of_master)
            if state:
                inner_state[index] = state
        self.inner.load_state_dict({"state": inner_state, "param_groups": loaded["param_groups"]})
        self._shown = [_without_parameters(outer) for outer in self.param_groups]
        # first the old: entries of parameters without loaded state would stay
        self.state.clear()
        self.publish_state()


class WholeMaster:
    """One parameter's master, kept in fp32."""

    def __init__(self, parameter: torch.Tensor) -> None:
        self.parameter = parameter
        self.tensor = parameter.detach().to(torch.float32, copy=True).requires_grad_(parameter.requires_grad)
        """The tensor that the inner optimizer works on."""

        self._unrounded: int | None = None  # with a step under way, the writes to the parameter before it

    def prepare(self) -> None:
        """Put the master into `tensor` for a step, with any values written to the parameter since the last one.

        Elements that nobody has written keep the master's precision.
        """
        self.follow()
        self._unrounded = self.parameter._version

    def follow(self) -> None:
        """After a step that failed before it was rounded: take over what somebody has written since."""
        # Where a step has failed, the parameter is not yet its master rounded: then torch's count of writes must do.
        if self._unrounded != self.parameter._version:
            master, weight = self.tensor, self.parameter
            # `out=` keeps the tensor object, which the inner optimizer's state is keyed by
            torch.where(self._rounded() == weight, master, weight.to(torch.float32), out=master)

    def round(self) -> tuple[torch.Tensor, int]:
        """Make the parameter its master, rounded; the number of elements that changed and of all on this rank."""
        rounded = self._rounded()
        shard = local_shard(self.parameter)
        changed = (local_shard(rounded) != shard).sum()
        self.parameter.copy_(rounded)
        self._unrounded = None
        return changed, shard.numel()

    def abandon(self) -> None:
        """Drop what a failed step may have written, where there is another copy: here there is none."""

    def _rounded(self) -> torch.Tensor:
        """The master in the parameter's dtype; bf16 as `SplitMaster` rounds it, so that both train alike."""
        if self.parameter.dtype is not torch.bfloat16:
            return self.tensor.to(self.parameter.dtype)
        return assembly_of(self.tensor)(split(local_shard(self.tensor))[0])

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """Entries of the optimizer's state for this master, by key."""
        return {MASTER_WEIGHT: self.tensor}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over the master from a state of either kind, into new memory; the weight itself from an empty one."""
        self._unrounded = None
        device = self.parameter.device
        part = local_shard(self.tensor)  # a `DTensor` would ignore new data
        if not state:
            part.data = local_shard(self.parameter).detach().to(torch.float32, copy=True)
        elif MASTER_WEIGHT in state:
            part.data = local_shard(state[MASTER_WEIGHT]).to(device, torch.float32, copy=True)
        elif is_dtensor(self.parameter):
            raise ValueError(
                f"the state has {MASTER_REMAINDER} of a whole weight, and this one is sharded: save it by an optimizer "
                "with MasterWeights(..., remainders=False)"
            )
        else:
            self.tensor.data = _joined(self.parameter, state[MASTER_REMAINDER], state[MASTER_DIGESTS])

    def value(self) -> torch.Tensor:
        """The master (fp32)."""
        return self.tensor.detach()


class SplitMaster:
    """A master of which 16 bits are the bf16 weight, and a remainder has the other 16.

    The fp32 tensor exists while it is stepped. Digests of the weight's blocks tell whether somebody has written to it
    since; a block that was written to becomes its master, without a remainder.
    """

    def __init__(self, parameter: torch.Tensor) -> None:
        self.parameter = parameter
        # one element expanded: the inner optimizer needs a tensor of the right shape before any step
        self.tensor = _placeholder(parameter).requires_grad_(parameter.requires_grad)
        self._state: dict[str, torch.Tensor] = {}
        self._is_open = False

    def prepare(self) -> None:
        """See `WholeMaster.prepare`."""
        # an attempt that failed before its rounding has left the stepped master in `tensor`
        if not self._is_open:
            self.tensor.data = self.value()
            self._is_open = True

    def follow(self) -> None:
        """See `WholeMaster.follow`."""
        if self._is_open and self._state:
            weight = self.parameter.detach()
            flat = self.tensor.detach().view(-1)
            changed = written_blocks(weight, self._state[MASTER_DIGESTS])
            torch.where(changed, weight.reshape(-1).to(torch.float32), flat, out=flat)

    def round(self) -> tuple[torch.Tensor, int]:
        """See `WholeMaster.round`."""
        # never opened: nothing was stepped, as of a parameter that another attempt has rounded
        if not self._is_open:
            return torch.zeros((), dtype=torch.int64, device=self.parameter.device), 0
        parameter, master = self.parameter.detach(), self.tensor.detach().reshape(-1)
        weight = parameter.reshape(-1)  # a copy, where the parameter is not contiguous
        state = self._state or {
            MASTER_REMAINDER: torch.empty(parameter.shape, dtype=torch.int16, device=parameter.device),
            MASTER_DIGESTS: weight.new_empty(-(-weight.numel() // DIGEST_ELEMENTS), dtype=torch.int64),
        }
        changed = torch.zeros((), dtype=torch.int64, device=parameter.device)
        close_masters(master, weight, state[MASTER_REMAINDER].view(-1), state[MASTER_DIGESTS], changed)
        # only now: what a step that fails before has not written would be read as state
        self._state.update(state)
        if weight.data_ptr() != parameter.data_ptr():
            parameter.copy_(weight.view(parameter.shape))
        # a kernel has written: autograd has to know, which refuses backward passes of before
        torch.autograd.graph.increment_version(self.parameter)
        self.abandon()
        return changed, parameter.numel()

    def abandon(self) -> None:
        """See `WholeMaster.abandon`: weight and remainder are as before the step."""
        self.tensor.data = _placeholder(self.parameter)
        self._is_open = False

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """See `WholeMaster.state`. There is none before the first step, whose masters are the weights."""
        return self._state

    def adopt(self, state: dict[str, torch.Tensor]) -> None:
        """Keep the tensors of `state` from now on; they hold what a step has made."""
        self._state = state

    def load(self, state: Mapping[str, Any]) -> None:
        """See `WholeMaster.load`."""
        self.abandon()
        device = self.parameter.device
        if not state:
            self._state = {}
        elif MASTER_WEIGHT in state:
            # by the file's master alone: where the weight differs, its digest does too, and the weight wins
            weight, remainder = split(state[MASTER_WEIGHT].to(device, torch.float32))
            self._state = {MASTER_REMAINDER: remainder, MASTER_DIGESTS: block_digests(weight)}
        else:
            self._state = {key: state[key].to(device, copy=True) for key in (MASTER_REMAINDER, MASTER_DIGESTS)}

    def value(self) -> torch.Tensor:
        """See `WholeMaster.value`."""
        if self._is_open:
            return self.tensor.detach()
        if not self._state:
            return self.parameter.detach().to(torch.float32)
        return _joined(self.parameter, self._state[MASTER_REMAINDER], self._state[MASTER_DIGESTS])


Master = WholeMaster | SplitMaster


def can_be_split(parameter: torch.Tensor) -> bool:
    """Tell whether a master can be a weight and a remainder: of bf16, and not sharded over ranks."""
    return parameter.dtype is torch.bfloat16 and not is_dtensor(parameter)


def _placeholder(parameter: torch.Tensor) -> torch.Tensor:
    """A tensor of a parameter's shape in fp32, with the memory of one element."""
    return torch.zeros((), dtype=torch.float32, device=parameter.device).expand(parameter.shape)


def _joined(parameter: torch.Tensor, remainder: torch.Tensor, digests: torch.Tensor) -> torch.Tensor:
    """Join a weight with its master's remainder, which may be in host memory."""
    device, weight = parameter.device, parameter.detach().reshape(-1)
    master = torch.empty(parameter.shape, dtype=torch.float32, device=device)
    open_masters(weight, remainder.to(device).reshape(-1), digests.to(device), master.view(-1))
    return master


def _check_inner(made: Any) -> None:
    kind = type(made).__name__
    if not isinstance(made, torch.optim.Optimizer):
        raise TypeError(f"the function that MasterWeights was given returned a {kind} in place of an optimizer")
    if asks_for_closure(made):
        raise Unsupported(
            f"{kind}.step asks for a closure, and masters are stepped from the gradients that are there: take another "
            "optimizer, or keep the weights in fp32 and leave MasterWeights out"
        )


def _numbers(state_dict: dict[str, Any]) -> list[int]:
    """The parameters' numbers in a state dict, in the order of the groups."""
    return [number for group in state_dict["param_groups"] for number in group["params"]]


def _without_parameters(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _as_groups(params: Any) -> list[dict[str, Any]]:
    """Parameter groups with lists, from whatever a torch optimizer accepts."""
    items = _ordered(params)
    if not items:
        raise ValueError("the optimizer got an empty parameter list")
    return [_with_names(item) for item in (items if isinstance(items[0], dict) else [{"params": items}])]


def _with_names(group: dict[str, Any]) -> dict[str, Any]:
    given = group["params"]
    parameters = [given] if isinstance(given, torch.Tensor) else _ordered(given)
    if parameters and isinstance(parameters[0], tuple):
        # torch takes (name, parameter) pairs too, and keeps the names under this key
        group = {**group, "param_names": [name for name, _ in parameters]}
        parameters = [parameter for _, parameter in parameters]
    if others := [p for p in parameters if not isinstance(p, torch.Tensor)]:
        raise TypeError(f"the optimizer takes parameters, such as model.parameters(), not {others[0]!r:.80}")
    if (twice := listed_twice(parameters)) is not None:
        raise ValueError(
            f"the parameter of shape {tuple(twice.shape)} is twice in a group of the optimizer, and has one master: "
            "list it once"
        )
    return {**group, "params": parameters}


def _ordered(given: Any) -> list[Any]:
    if isinstance(given, set | frozenset):  # a state dict goes by the parameters' numbers
        raise TypeError("the optimizer got a set of parameters, whose order is another in each run: pass a list")
    if not isinstance(given, Iterable):
        raise TypeError(f"the optimizer takes parameters, such as model.parameters(), not a {type(given).__name__}")
    return list(given)
