"""What colo relies on in TRL, checked when a trainer is attached."""

from __future__ import annotations

import importlib.metadata
import inspect
from typing import Any

from colo.errors import Unsupported

GENERATE = ("self", "prompts", "images", "num_generations", "profiler")
"""Parameters of `VLLMGeneration.generate`, in whose place colo's stands."""

READ_OF_TRAINER = (
    "accelerator",
    "args",
    "max_completion_length",
    "min_p",
    "model",
    "num_generations",
    "processing_class",
    "repetition_penalty",
    "reward_func_names",
    "reward_funcs",
    "state",
    "temperature",
    "top_k",
    "top_p",
    "use_vllm",
    "_metrics",
)
"""Attributes of a trainer that colo reads."""


def check_contract(trainer: Any) -> None:
    """Raise `Unsupported`, with method and version, where this TRL is not the one that colo knows (1.4 to 1.16)."""
    version = importlib.metadata.version("trl")
    try:
        from trl.generation.vllm_generation import VLLMGeneration
    except ImportError as error:
        raise Unsupported(f"TRL {version} has no trl.generation.vllm_generation.VLLMGeneration: {_TESTED}") from error
    for method, expected in (("generate", GENERATE), ("sync_weights", ("self",))):
        found = tuple(inspect.signature(getattr(VLLMGeneration, method)).parameters)
        if found != expected:
            raise Unsupported(
                f"VLLMGeneration.{method} of TRL {version} takes {', '.join(found)}, where colo gives "
                f"{', '.join(expected)}: {_TESTED}"
            )
    lacking = [name for name in READ_OF_TRAINER if not hasattr(trainer, name)]
    if lacking:
        raise Unsupported(
            f"{type(trainer).__name__} of TRL {version} has no {', '.join(lacking)}: colo attaches to GRPOTrainer, "
            f"RLOOTrainer and subclasses of them; {_TESTED}"
        )


_TESTED = "colo is tested with TRL 1.4 to 1.16"


def check_args(args: Any) -> None:
    """Raise `Unsupported` or `ValueError` for what a config asks for and colo does not do."""
    if getattr(args, "use_transformers_continuous_batching", False) or getattr(args, "use_transformers_paged", False):
        raise ValueError("use_transformers_continuous_batching and colo exclude each other: leave it out")
    if getattr(args, "vllm_tensor_parallel_size", 1) != 1:
        raise Unsupported(
            f"vllm_tensor_parallel_size={args.vllm_tensor_parallel_size}: colo runs an engine on each GPU, leave 1"
        )
    if getattr(args, "deepspeed", None):
        raise Unsupported(_DEEPSPEED)


_DEEPSPEED = "colo does not know DeepSpeed's partitioned state: train without it"


def check_trainer(trainer: Any) -> None:
    """Raise `Unsupported` or `ValueError` for what a trainer was made with and colo does not do."""
    if trainer.use_vllm:
        raise ValueError("this trainer has a vLLM of its own: leave use_vllm out, colo starts the engine")
    if getattr(trainer, "_is_vlm", False) or not hasattr(trainer.processing_class, "convert_ids_to_tokens"):
        raise Unsupported("colo generates from text: a trainer with a processor for images is not supported")
    check_args(trainer.args)
    if trainer.is_deepspeed_enabled:
        raise Unsupported(_DEEPSPEED)
    if trainer.is_fsdp_enabled:
        _check_plugin(trainer.accelerator.state.fsdp_plugin)


def _check_plugin(plugin: Any) -> None:
    """Raise `Unsupported` for a plugin of accelerate's that does not leave the shards of each weight on the device."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    if getattr(plugin, "fsdp_version", 1) != 2:
        raise Unsupported("FSDP's first version flattens weights: set fsdp_version: 2 in accelerate's fsdp_config")
    if plugin.activation_checkpointing:
        raise Unsupported("FSDP's activation_checkpointing wraps layers anew: set gradient_checkpointing=True instead")
    if isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        raise Unsupported(
            "FSDP's offload_params keeps weights in host memory, and engines take them from the device: leave it out, "
            "colo moves the optimizer's state to the host for rollouts"
        )
