"""What `train()` makes of a TRL trainer's model and optimizer, made before weights are shared."""

from __future__ import annotations

import warnings
from typing import Any

from colo.errors import Unsupported
from colo.memory.dtensor import local_shard
from colo.trainer.master_weights import MasterWeightsOptimizer
from colo.trainer.optimizer_state import unwrapped
from colo.weights.ranks import RankGroup


def prepare(trainer: Any) -> None:
    """Make the optimizer, and shard or wrap the model where `trainer.train()` would; it leaves both as they are then.

    With accelerate's FSDP2 plugin every rank calls.
    Raises: `Unsupported` for an optimizer that cannot be made so, by name; with FSDP2 also for a rank that holds
    nothing of several weights, and then `TransferError` on the others.
    """
    if trainer.is_fsdp_enabled:
        _shard(trainer)
    _make_optimizer(trainer)
    if trainer.is_fsdp_enabled:
        _prepare_sharded(trainer)
    elif trainer.accelerator.num_processes > 1 and trainer.accelerator.device.type == "cpu":
        # Before the memory is shared: accelerate would copy it to `cpu:0`.
        trainer.model_wrapped = trainer.accelerator.prepare_model(trainer.model, device_placement=False)


def _make_optimizer(trainer: Any) -> None:
    """Make the optimizer that `trainer.train()` would make, with fp32 masters for weights in 16 bits."""
    model, made = trainer.model, trainer.optimizer
    in_16_bits = any(p.requires_grad and p.is_floating_point() and p.element_size() < 4 for p in model.parameters())
    if made is None and in_16_bits:
        known = trainer.optimizer_cls_and_kwargs
        kind, options = known or trainer.get_optimizer_cls_and_kwargs(trainer.args, model)
        if not isinstance(kind, type):
            raise Unsupported(
                f"optim={trainer.args.optim!r} makes several optimizers, and colo keeps fp32 masters for one: load the "
                "model in float32, or take another optim"
            )

        class WithMasters(MasterWeightsOptimizer):  # a class, since transformers takes a function for a factory
            def __init__(self, groups: Any, **given: Any) -> None:
                super().__init__(groups, lambda params: kind(params, **given))

        trainer.optimizer_cls_and_kwargs = WithMasters, options
        try:
            trainer.create_optimizer()
        finally:
            trainer.optimizer_cls_and_kwargs = known
    elif made is None:
        trainer.create_optimizer()
    elif in_16_bits and not hasattr(unwrapped(made), "inner"):
        warnings.warn(
            "weights in 16 bits swallow updates smaller than 1/256 of them: give the trainer an optimizer made by "
            "colo.optim.MasterWeights, or none",
            stacklevel=4,
        )
    _prepare_optimizer(trainer)


def _prepare_optimizer(trainer: Any) -> None:
    """Wrap the optimizer in place, where accelerate's own preparation copies all state to the host and back."""
    if not getattr(trainer.optimizer, "_is_accelerate_prepared", False):
        trainer.optimizer = trainer.accelerator.prepare_optimizer(trainer.optimizer, device_placement=False)
        trainer.optimizer._is_accelerate_prepared = True


def _shard(trainer: Any) -> None:
    """Shard the model in place, and switch an optimizer that exists to the shards."""
    from accelerate.utils import fsdp2_prepare_model

    if trainer.optimizer is None:
        trainer.model = fsdp2_prepare_model(trainer.accelerator, trainer.model)
    elif hasattr(unwrapped(trainer.optimizer), "inner"):
        raise Unsupported(
            "the masters of this optimizer are of whole weights, and FSDP shards those: give the trainer no optimizer, "
            "colo makes it with masters of the shards"
        )
    else:
        _prepare_sharded(trainer)
    trained = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
    with RankGroup(trained.values()).fail_together("sharding the model"):
        empty = [name for name, p in trained.items() if not local_shard(p).numel()]
        if len(empty) > 1:
            raise Unsupported(
                f"this rank holds nothing of {empty[0]} and {len(empty) - 1} other weights, which accelerate takes for "
                "one another in the optimizer: use fewer ranks"
            )


def _prepare_sharded(trainer: Any) -> None:
    """Have accelerate know model and optimizer; it shards a model that is not."""
    _prepare_optimizer(trainer)
    trainer.model, trainer.optimizer = trainer.accelerator.prepare(trainer.model, trainer.optimizer)
    trainer.model_wrapped = trainer.model
