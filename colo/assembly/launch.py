"""`launch` and `share`: the two ways to get a runtime."""

from __future__ import annotations

import copy
import os
import sys
import warnings
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import nn
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedModel

from colo.assembly.arguments import check_launch, check_optimizer_type, check_share, chosen_device, chosen_dtype
from colo.assembly.starting import Checkpoint, LaunchRequest, Start, dtype_of, revision_of, start_torch, start_vllm
from colo.config import RuntimeConfig
from colo.engine import Engine, EngineState
from colo.errors import Unsupported
from colo.memory.dtensor import local_bytes
from colo.memory.offload import Mover
from colo.memory.probe import free_device_bytes
from colo.phases.phase import ENGINE_KV_CACHE
from colo.runtime import Runtime
from colo.runtime.registry import check_free
from colo.trainer.master_weights import MakeOptimizer, MasterWeights
from colo.weights.sources.heads import causal_lm, refuse_heads
from colo.weights.sources.module import ModuleSource
from colo.weights.sources.peft import adapter_weights, check_lora_config, is_peft_model
from colo.weights.transports.choice import choose_transport

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel

FULL_LEARNING_RATE = 1e-6
LORA_LEARNING_RATE = 1e-5
_UNPLANNED_FRACTION = 0.03
"""Share of a GPU left to workspaces and fragmentation when no limit is given."""

_TRIAL = "colo.trial"
"""Name of an adapter that is loaded to see whether it can be."""


@torch.inference_mode(False)
def launch(
    model: Checkpoint,
    *,
    engine: Literal["torch", "vllm"] = "torch",
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
    whose weights are copied and which is otherwise left alone. `engine` is the embedded one, or vLLM, which runs in its
    own process unless `engine_options` has `own_process=False`; the rest of `engine_options` are those of `vllm.LLM`.
    With `lora` the base is frozen and shared, and an adapter is trained; with `quantization="bitsandbytes"` among the
    `engine_options`, or a checkpoint that bitsandbytes has packed, that base is in 4 bits, and vLLM in this process.
    `optimizer` builds the optimizer from the trainable parameters; by default see `default_optimizer`. `dtype`, one of
    torch's or its name, or "auto" for the checkpoint's own, defaults to bf16 on CUDA and to fp32 on the CPU, where bf16
    is slow.

    Raises: `TypeError` and `ValueError` for what it does not take; `BudgetError` before anything is allocated when
    weights and KV cache do not fit; `Unsupported` for a LoRA setting that an engine cannot apply, or an optimizer of
    other parameters; whatever transformers raises for a checkpoint it cannot read.
    """
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
    config, options, target = config or RuntimeConfig(), dict(engine_options or {}), chosen_device(device)
    weights_dtype = chosen_dtype(dtype, target, lambda: dtype_of(model, revision_of(options)))
    if isinstance(model, PretrainedConfig):
        model = copy.deepcopy(model)  # in which transformers notes the dtype of what it builds
    start = start_vllm if engine == "vllm" else start_torch
    request = LaunchRequest(
        model, target, weights_dtype, config, _capacity(config, target, held_bytes=0), lora, options
    )
    return _launch(request, start, optimizer or default_optimizer, tokenizer)


@torch.inference_mode(False)
def share(
    engine: Any,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    tokenizer: Any = None,
    config: RuntimeConfig | None = None,
) -> Runtime:
    """Let your own engine, model and optimizer take turns. `engine` is a `vllm.LLM`, or one of colo's engines.

    Where the engine's memory can hold the model's parameters as they are (same dtype, every byte by a plain copy), they
    move there, under the same `nn.Parameter` objects, and nothing is ever sent; otherwise each side keeps its own and
    the weights are copied at every rollout that follows a step. `rt.transport.reason` says which, and why. A `vllm.LLM`
    in a process of its own needs `worker_extension_cls="colo.engines.vllm.worker.ColoWorker"`; its memory can be the
    model's with `load_format="colo"`, and on CUDA with vLLM's own loader too unless it has `enable_sleep_mode`. Without
    `logprobs_mode="processed_logprobs"` it samples at temperature 1 without filters, or greedily: the log-probabilities
    of anything else would not be those of what was sampled from.

    What trains along with the model and is not the engine's stays yours: a value head that was added to the model, in a
    module around it (`rt.model` is the causal language model within), or beside it in the same optimizer. Its state is
    moved with the others'.

    A model that is sharded over ranks (`fully_shard`) is gathered on its way to each rank's engine, some of it at a
    time: every rank shares, enters the same phases and steps in the same order, and what fails in one fails in all.

    Outside `rt.rollout()` the engine is paused, and `generate` of a `vllm.LLM` of yours would wait for ever: call it
    within such a block, or `rt.generate`, which opens one. Without `tokenizer`, that of the `vllm.LLM` encodes texts.

    Raises: `TypeError` for what it does not take; `PhaseError` when one of the three has a runtime already;
    `Unsupported` when model and engine are on different devices, the model is wrapped or sharded by FSDP's first
    version, the optimizer is not one of the model's, or the engine cannot apply the adapter; `TransferError` when the
    model lacks weights that the engine needs, or has others. Nothing has changed then, but where weights go through the
    engine's own loader: what is missing is known only when the others have been loaded. `BudgetError`, and whatever
    fails as the first version is published: the engine may hold the model's weights then.
    """
    check_share(model, optimizer, tokenizer=tokenizer, config=config)
    model = causal_lm(model)
    check_free({"model": model, "optimizer": optimizer, "engine": engine})
    if isinstance(engine, Engine):
        was_awake = engine.state is EngineState.AWAKE
        try:
            return _share(engine, model, optimizer, tokenizer=tokenizer, config=config or RuntimeConfig())
        except BaseException:
            if was_awake and engine.state is EngineState.PAUSED:
                with suppress(Exception):  # of which the first is raised
                    engine.resume()
            raise
    if not hasattr(engine, "llm_engine"):
        raise TypeError(
            f"share() takes a vllm.LLM, an engine of colo's or colo.connect(url) first, not {type(engine).__name__}"
        )
    return _share_llm(engine, model, optimizer, tokenizer=tokenizer, config=config or RuntimeConfig())


def _share_llm(
    llm: Any, model: nn.Module, optimizer: torch.optim.Optimizer, *, tokenizer: Any, config: RuntimeConfig
) -> Runtime:
    from colo.engines.vllm.engine import VLLMEngine

    engine = VLLMEngine.around(llm)
    try:
        if tokenizer is None and not llm.llm_engine.vllm_config.model_config.skip_tokenizer_init:
            tokenizer = llm.get_tokenizer()
        return _share(engine, model, optimizer, tokenizer=tokenizer, config=config)
    except BaseException:
        with suppress(Exception):
            engine.close()  # which leaves it awake
        raise


def _launch(request: LaunchRequest, start: Start, make_optimizer: MakeOptimizer, tokenizer: Any) -> Runtime:
    config, device = request.config, request.device
    with ExitStack() as undo:
        mover = Mover(device, host_limit_bytes=config.host_limit_bytes, chunk_bytes=config.chunk_bytes)
        undo.callback(mover.close)
        engine, trained = start(request, mover, undo)
        capacity_bytes = request.capacity_bytes
        if config.device_limit_bytes is None:  # what the engine took beside its segments is known now
            held_bytes = sum(segment.device_bytes for segment in engine.segments)
            capacity_bytes = _capacity(config, device, held_bytes=held_bytes)
        if request.lora is not None:
            trained = _adapted(trained, request.lora)
        rt = _assemble(
            engine,
            trained,
            _made_optimizer(make_optimizer, trained),
            mover=mover,
            config=config,
            capacity_bytes=capacity_bytes,
            tokenizer=tokenizer if tokenizer is not None else _tokenizer(request.model, request.revision),
            owns_model=True,
        )
        undo.pop_all()
    return rt


def _share(
    engine: Engine, model: nn.Module, optimizer: torch.optim.Optimizer, *, tokenizer: Any, config: RuntimeConfig
) -> Runtime:
    _check_sharding(model)
    ModuleSource(model).reshard()
    _check_optimizer(optimizer, model)
    devices = {p.device for p in model.parameters()}
    if devices != {engine.device}:
        names = ", ".join(sorted(map(str, devices)))
        raise Unsupported(f"the engine is on {engine.device} and the model on {names}: they share one device")
    kv_cache = next((segment for segment in engine.segments if segment.name == ENGINE_KV_CACHE), None)
    if kv_cache is not None and kv_cache.away is None and engine.device.type == "cuda":
        warnings.warn(
            "the engine's KV cache stays on the device while the trainer works: start vLLM with enable_sleep_mode=True "
            "(a server with --enable-sleep-mode) to let it go",
            stacklevel=4,
        )
    if is_peft_model(model):  # before any weights have moved
        engine.load_adapter(_TRIAL, adapter_weights(cast("PeftModel", model)))
        engine.remove_adapter(_TRIAL)
    held_bytes = sum(s.device_bytes for s in engine.segments) + sum(map(local_bytes, model.parameters()))
    engine.mover.chunk_bytes = config.chunk_bytes
    if config.host_limit_bytes is not None:
        engine.mover.arena.limit_bytes = config.host_limit_bytes
    return _assemble(
        engine,
        model,
        optimizer,
        mover=engine.mover,
        config=config,
        capacity_bytes=_capacity(config, engine.device, held_bytes=held_bytes),
        tokenizer=tokenizer,
        owns_model=False,
    )


def default_optimizer(params: Any) -> torch.optim.Optimizer:
    """AdamW with fp32 masters for 16-bit parameters (learning rate 1e-6), or without for fp32 ones (1e-5)."""
    params = list(params)
    fused = all(p.device.type == "cuda" for p in params)
    if any(p.element_size() < 4 for p in params):
        return MasterWeights(lambda ps: torch.optim.AdamW(ps, lr=FULL_LEARNING_RATE, fused=fused))(params)
    return torch.optim.AdamW(params, lr=LORA_LEARNING_RATE, fused=fused)


def _assemble(
    engine: Engine,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: RuntimeConfig,
    **options: Any,
) -> Runtime:
    transport = choose_transport(engine, model, config)
    try:
        return Runtime(engine=engine, model=model, optimizer=optimizer, transport=transport, config=config, **options)
    except BaseException:
        transport.move_out(engine.device)
        with suppress(Exception):
            transport.close()
        raise


def _adapted(model: nn.Module, lora: LoraConfig) -> Any:
    """The model with a new adapter. Raises: `Unsupported` for one that an engine cannot apply."""
    from peft import get_peft_model

    adapted: Any = get_peft_model(cast("PreTrainedModel", model), lora)
    check_lora_config(adapted.peft_config[adapted.active_adapter])  # to which PEFT may have added a mixture's experts
    return adapted


def _made_optimizer(make: MakeOptimizer, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of what is trained. Raises: `TypeError` for another thing, `Unsupported` as `_check_optimizer`."""
    made = make([p for p in model.parameters() if p.requires_grad])
    check_optimizer_type(made, "optimizer is a function that returns an optimizer of the parameters it is given")
    _check_optimizer(made, model)
    return made


def _check_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Raise `Unsupported` for an optimizer without torch's hooks, or one that trains something else.

    It may train other parameters along, such as those of a value head, which no logits depend on.
    """
    if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        raise Unsupported(
            f"{type(optimizer).__name__} wraps an optimizer without torch's own hooks: share first and prepare after, "
            "or pass the wrapped one (optimizer.optimizer)"
        )
    trained = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    own = {id(p): p for p in model.parameters()}
    others = [p for key, p in trained.items() if key not in own]
    # One that the model had before, and that was replaced, would be trained in vain.
    untrained = {p.shape for key, p in own.items() if p.requires_grad and key not in trained}
    foreign = others if len(others) == len(trained) else [p for p in others if p.shape in untrained]
    if foreign:
        raise Unsupported(
            f"{len(foreign)} parameters of the optimizer are not the model's, one with shape "
            f"{tuple(foreign[0].shape)}: build the optimizer from this model's parameters"
        )
    device = next(model.parameters()).device
    elsewhere = [p for p in others if p.device != device]
    if elsewhere:
        raise Unsupported(
            f"the optimizer trains {len(elsewhere)} parameters on {elsewhere[0].device} along with a model on "
            f"{device}: the runtime moves state of one device"
        )


def _check_sharding(model: nn.Module) -> None:
    """Raise `Unsupported` for a model that FSDP's first version has flattened: its parameters are no weights."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # without which none is
    kind = getattr(fsdp, "FullyShardedDataParallel", None)
    if kind is not None and any(isinstance(module, kind) for module in model.modules()):
        raise Unsupported(
            "FullyShardedDataParallel keeps weights flattened, which cannot be gathered one by one: shard the model "
            "with fully_shard (FSDP2; fsdp_version: 2 in accelerate)"
        )


def _tokenizer(model: Checkpoint, revision: str) -> Any:
    """The checkpoint's tokenizer, or `None` where it has none."""
    if isinstance(model, (PretrainedConfig, PreTrainedModel)):
        return None
    folder = Path(model)
    if folder.is_dir() and not any(folder.glob("tokenizer*")):
        return None
    return AutoTokenizer.from_pretrained(os.fspath(model), revision=revision)


def _capacity(config: RuntimeConfig, device: torch.device, *, held_bytes: int) -> int:
    """Bytes that segments may take: the given limit, or what is free and what they hold already."""
    if config.device_limit_bytes is not None:
        return config.device_limit_bytes - config.device_reserve_bytes
    available_bytes = free_device_bytes(device) + held_bytes
    unplanned = _UNPLANNED_FRACTION if device.type == "cuda" else 0.0
    return int(available_bytes * (1 - unplanned)) - config.device_reserve_bytes
