"""`launch` and `start`: an engine and a model on one copy of the weights, with an optimizer or without."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import nn
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedModel

from colo.assembly.arguments import (
    check_launch,
    check_optimizer,
    check_optimizer_type,
    chosen_device,
    chosen_dtype,
    default_engine,
    names_checked,
)
from colo.assembly.share import assemble, capacity, told_of_others
from colo.assembly.starting import (
    Checkpoint,
    LaunchRequest,
    Start,
    Undo,
    check_adapter,
    dtype_of,
    revision_of,
    start_torch,
    start_vllm,
)
from colo.config import RuntimeConfig
from colo.engine import Engine
from colo.misfits import named_misfits
from colo.runtime import Runtime
from colo.trainer.master_weights import MakeOptimizer, MasterWeights
from colo.weights.sources.heads import refuse_heads
from colo.weights.sources.module import ModuleSource
from colo.weights.sources.peft import TIED_WARNING, check_lora_config

if TYPE_CHECKING:
    from peft import LoraConfig

FULL_LEARNING_RATE = 1e-6
LORA_LEARNING_RATE = 1e-5


@names_checked
@named_misfits()
@torch.inference_mode(False)
def launch(
    model: Checkpoint,
    *,
    engine: Literal["torch", "vllm"] | None = None,
    engine_options: Mapping[str, Any] | None = None,
    lora: LoraConfig | None = None,
    optimizer: MakeOptimizer | None = None,
    device: str | int | torch.device | None = None,
    dtype: torch.dtype | str | None = None,
    tokenizer: Any = None,
    config: RuntimeConfig | None = None,
) -> Runtime:
    """Start an engine and build a model to train on one copy of the weights.

    `model` is a folder or a hub id with a checkpoint, a transformers config for random weights, or a transformers model
    whose weights are copied and which is otherwise left alone. `engine` is "vllm", the default on a GPU that has it, or
    "torch", the embedded one. vLLM runs in its own process unless `engine_options` has `own_process=False`; the rest of
    `engine_options` are those of `vllm.LLM`.
    With `lora` the base is frozen and shared, and an adapter is trained; with `quantization="bitsandbytes"` among the
    `engine_options`, or a checkpoint that bitsandbytes has packed, that base is in 4 bits, and vLLM in this process.
    `optimizer` builds the optimizer from the trainable parameters; by default see `default_optimizer`. `dtype`, one of
    torch's or its name, or "auto" for the checkpoint's own, defaults to bf16 on CUDA and to fp32 on the CPU, where bf16
    is slow.

    Raises: `TypeError` and `ValueError` for what it does not take; `BudgetError` before anything is allocated when
    weights and KV cache do not fit; `Unsupported` for a LoRA setting that an engine cannot apply, or an optimizer of
    other parameters; whatever transformers raises for a checkpoint it cannot read.
    """
    request, begin = _request(
        model, engine, engine_options, lora, device, dtype, config, optimizer=optimizer, tokenizer=tokenizer
    )
    with Undo() as undo:
        started, trained = _begin(request, begin, undo)
        rt = assemble(
            started,
            trained,
            _made_optimizer(optimizer or default_optimizer, trained),
            request.config,
            undo,
            source=ModuleSource(trained),
            tokenizer=tokenizer if tokenizer is not None else tokenizer_of(request.model, request.revision),
            owns_model=True,
        )
        undo.pop_all()
    return rt


@names_checked
@torch.inference_mode(False)
def start(
    model: Checkpoint,
    *,
    engine: Literal["torch", "vllm"] | None = None,
    engine_options: Mapping[str, Any] | None = None,
    lora: LoraConfig | None = None,
    device: str | int | torch.device | None = None,
    dtype: torch.dtype | str | None = None,
    config: RuntimeConfig | None = None,
) -> tuple[Engine, Any]:
    """Start an engine and build a model to train on one copy of the weights, without an optimizer.

    For trainers that make the optimizer from the model's named parameters: `colo.share(engine, model, optimizer)` is
    the runtime then. Arguments and errors are those of `launch`. Where no runtime is made, close the engine.
    """
    request, begin = _request(model, engine, engine_options, lora, device, dtype, config)
    with Undo() as undo:
        started, trained = _begin(request, begin, undo)
        undo.pop_all()
    return started, trained


def _request(
    model: Checkpoint,
    engine: str | None,
    engine_options: Mapping[str, Any] | None,
    lora: LoraConfig | None,
    device: str | int | torch.device | None,
    dtype: torch.dtype | str | None,
    config: RuntimeConfig | None,
    *,
    optimizer: MakeOptimizer | None = None,
    tokenizer: Any = None,
) -> tuple[LaunchRequest, Start]:
    """Check the arguments; return them as a request, with the function that starts the engine."""
    target = chosen_device(device)
    engine = default_engine(target) if engine is None else engine
    check_launch(
        model,
        engine=engine,
        engine_options=engine_options,
        lora=lora,
        optimizer=optimizer,
        tokenizer=tokenizer,
        config=config,
    )
    if isinstance(model, PreTrainedModel):
        refuse_heads(model)
    config, options = config or RuntimeConfig(), dict(engine_options or {})
    weights_dtype = chosen_dtype(dtype, target, lambda: dtype_of(model, revision_of(options)))
    if isinstance(model, PretrainedConfig):
        model = copy.deepcopy(model)  # in which transformers notes the dtype of what it builds
    capacity_bytes = capacity(config, target, held_bytes=0)
    request = LaunchRequest(model, target, weights_dtype, config, capacity_bytes, lora, options)
    return request, start_vllm if engine == "vllm" else start_torch


def _begin(request: LaunchRequest, start: Start, undo: Undo) -> tuple[Engine, Any]:
    """Start the engine, which `undo` closes, and make the model, with an adapter where one is asked for."""
    check_adapter(request)
    with told_of_others():
        engine, trained = start(request, undo)
    return engine, trained if request.lora is None else _adapted(trained, request.lora)


def default_optimizer(params: Any) -> torch.optim.Optimizer:
    """AdamW with fp32 masters for 16-bit parameters (learning rate 1e-6), or without for fp32 ones (1e-5)."""
    params = list(params)
    fused = all(p.device.type == "cuda" for p in params)
    if any(p.element_size() < 4 for p in params):
        return MasterWeights(lambda ps: torch.optim.AdamW(ps, lr=FULL_LEARNING_RATE, fused=fused))(params)
    return torch.optim.AdamW(params, lr=LORA_LEARNING_RATE, fused=fused)


def _adapted(model: nn.Module, lora: LoraConfig) -> Any:
    """The model with a new adapter. Raises: `Unsupported` for one that an engine cannot apply."""
    from peft import get_peft_model

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", TIED_WARNING)  # of which `warn_of_tied_head` has told
        adapted: Any = get_peft_model(cast("PreTrainedModel", model), lora)
    check_lora_config(adapted.peft_config[adapted.active_adapter])  # to which PEFT may have added a mixture's experts
    return adapted


def _made_optimizer(make: MakeOptimizer, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of what is trained. Raises: `TypeError` for another thing, `Unsupported` as `check_optimizer`."""
    made = make([p for p in model.parameters() if p.requires_grad])  # with an adapter: of the adapter alone
    check_optimizer_type(made, "optimizer is a function that returns an optimizer of the parameters it is given")
    check_optimizer(made, model)
    return made


def tokenizer_of(model: Checkpoint, revision: str) -> Any:
    """The checkpoint's tokenizer, or `None` where it has none."""
    if isinstance(model, (PretrainedConfig, PreTrainedModel)):
        return None
    folder = Path(model)
    if folder.is_dir() and not any(folder.glob("tokenizer*")):
        return None
    return AutoTokenizer.from_pretrained(os.fspath(model), revision=revision)
