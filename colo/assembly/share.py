"""`share`: a runtime of an engine, a model and an optimizer that exist, or of an engine started for the other two."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import nn
from torch.utils import _pytree as pytree

from colo.assembly.arguments import check_engine, check_share
from colo.assembly.existing import model_device, start_for
from colo.assembly.stages import as_module, placed_or_none, refuse_stages, source_of
from colo.config import RuntimeConfig
from colo.engine import Engine, EngineState, adapters_of
from colo.errors import Unsupported
from colo.memory.dtensor import is_dtensor, local_bytes, local_shard
from colo.memory.probe import free_device_bytes
from colo.memory.storage import storage_key
from colo.phases.phase import ENGINE_KV_CACHE
from colo.phases.segment import Segment
from colo.runtime import Runtime
from colo.runtime.registry import check_free
from colo.trainer.gradients import parameters_of
from colo.trainer.megatron import MegatronOptimizers, as_torch
from colo.trainer.optimizer_state import unwrapped
from colo.weights.ranks import RankGroup
from colo.weights.sources.base import WeightSource
from colo.weights.sources.heads import causal_lm
from colo.weights.sources.module import ModuleSource
from colo.weights.sources.peft import adapter_weights, check_adapter, is_peft_model, warn_of_tied_head, whole_adapter
from colo.weights.sources.spread import PlacedWeights
from colo.weights.transports.base import Transport
from colo.weights.transports.choice import transport_for

if TYPE_CHECKING:
    from peft import PeftModel

_UNPLANNED_FRACTION = 0.03
"""Share of a GPU left to workspaces and fragmentation when no limit is given."""

_HOST = torch.device("cpu")

_TRIAL = "colo.trial"
"""Name of an adapter that is loaded to see whether it can be."""


@torch.inference_mode(False)
def share(
    engine: Engine | Any | Literal["torch", "vllm"],
    model: nn.Module | Sequence[nn.Module] | PlacedWeights,
    optimizer: torch.optim.Optimizer,
    *,
    engine_options: Mapping[str, Any] | None = None,
    dtype: torch.dtype | str | None = None,
    tokenizer: Any = None,
    config: RuntimeConfig | None = None,
) -> Runtime:
    """Let your own engine, model and optimizer take turns. `engine` is a `vllm.LLM`, or one of colo's engines.

    By its name, "torch" or "vllm", an engine is started for the model, whose weights are in host memory meanwhile, so
    that the device never holds them twice; `engine_options` are those of `launch`. Its weights have the model's dtype
    unless `dtype` says another, but for an fp32 model on CUDA: the engine is in bf16 then, and weights are cast on
    their way.

    Where the engine's memory can hold the model's parameters as they are (same dtype, every byte by a plain copy), they
    move there, under the same `nn.Parameter` objects, and nothing is ever sent; otherwise each side keeps its own and
    the weights are copied at every rollout that follows a step. `rt.transport.reason` says which, and why. A `vllm.LLM`
    in a process of its own needs `worker_extension_cls="colo.engines.vllm.worker.ColoWorker"`; its memory can be the
    model's with `load_format="colo"`, and on CUDA with vLLM's own loader too unless it has `enable_sleep_mode`. Without
    `logprobs_mode="processed_logprobs"` it samples at temperature 1 without filters, or greedily: the log-probabilities
    of anything else would not be those of what was sampled from.

    What trains along with the model and is not the engine's stays yours, such as a value head in a module around it
    (`rt.model` is the causal language model within), or beside it in the same optimizer; its state is moved too. A
    model sharded by `fully_shard` reaches each rank's engine in slices: every rank makes the same calls. So does a
    model of Megatron's, its list of stages (`rt.model` is an `nn.ModuleList` of them), with Megatron's optimizer or one
    of torch's, and an engine that runs, whose family names the weights unless a `MegatronSource` has another table.
    Log-probabilities of its pipeline are not compared: `rt.log(mismatch=...)` adds yours to reports.

    Outside `rt.rollout()` the engine is paused, and `generate` of a `vllm.LLM` of yours would wait for ever: call it
    within such a block, or `rt.generate`, which opens one. Without `tokenizer`, that of the `vllm.LLM` encodes texts.

    Raises: `TypeError` for what it does not take; `PhaseError` when one of the three has a runtime already;
    `Unsupported` when model and engine are on different devices, the model is wrapped or sharded by FSDP's first
    version, a name of Megatron's is in no table, the optimizer is not one of the model's, or the engine cannot apply
    the adapter; `TransferError` when the model lacks weights that the engine needs, or has others. Nothing has changed
    then, but where weights go through the engine's own loader: what is missing is known only when the others have been
    loaded. `BudgetError`, and whatever fails as the first version is published: the engine may hold the weights then.
    """
    placed, module = placed_or_none(model), as_module(model)
    check_share(module, optimizer, tokenizer=tokenizer, config=config)
    model, config = causal_lm(module), config or RuntimeConfig()
    check_adapter(model)
    check_free({"model": model, "optimizer": unwrapped(optimizer), "engine": engine})
    if engine in ("torch", "vllm"):
        check_engine(engine, engine_options)
        refuse_stages(model, placed, engine)
        return _share_started(engine, model, optimizer, engine_options, dtype, tokenizer=tokenizer, config=config)
    if engine_options is not None or dtype is not None:
        raise TypeError("engine_options and dtype are for an engine that share() starts by name: this one runs already")
    if isinstance(engine, Engine):
        return _share_running(engine, model, optimizer, placed, tokenizer=tokenizer, config=config)
    if hasattr(engine, "llm_engine"):
        return _share_llm(engine, model, optimizer, placed, tokenizer=tokenizer, config=config)
    raise TypeError(
        "share() takes a vllm.LLM, an engine of colo's or colo.connect(url) first, or 'torch' or 'vllm', not "
        + (repr(engine) if isinstance(engine, str) else type(engine).__name__)
    )


def _share_started(
    kind: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    engine_options: Mapping[str, Any] | None,
    dtype: torch.dtype | str | None,
    *,
    tokenizer: Any,
    config: RuntimeConfig,
) -> Runtime:
    warn_of_tied_head(model)
    with RankGroup(model.parameters()).fail_together("checking the model and its optimizer"):
        check_optimizer(optimizer, model)
        check_sharding(model)
    capacity_bytes = capacity(config, model_device(model), held_bytes=_held_bytes([], model, optimizer))
    engine = start_for(model, kind, dict(engine_options or {}), dtype, config, capacity_bytes)
    try:
        return _share(engine, model, optimizer, None, tokenizer=tokenizer, config=config)
    except BaseException:
        with suppress(Exception):  # of which the first is raised
            engine.close()
            engine.mover.close()
        raise


def _share_running(
    engine: Engine,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    placed: PlacedWeights | None,
    *,
    tokenizer: Any,
    config: RuntimeConfig,
) -> Runtime:
    was_awake = engine.state is EngineState.AWAKE
    try:
        return _share(engine, model, optimizer, placed, tokenizer=tokenizer, config=config)
    except BaseException:
        if was_awake and engine.state is EngineState.PAUSED:
            with suppress(Exception):  # of which the first is raised
                engine.resume()
        raise


def _share_llm(
    llm: Any,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    placed: PlacedWeights | None,
    *,
    tokenizer: Any,
    config: RuntimeConfig,
) -> Runtime:
    from colo.engines.vllm.client.engine import VLLMEngine

    warn_of_tied_head(model)
    engine = VLLMEngine.around(llm)
    try:
        if tokenizer is None and not llm.llm_engine.vllm_config.model_config.skip_tokenizer_init:
            tokenizer = llm.get_tokenizer()
        return _share(engine, model, optimizer, placed, tokenizer=tokenizer, config=config)
    except BaseException:
        with suppress(Exception):
            engine.close()  # which leaves it awake
        raise


def _share(
    engine: Engine,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    placed: PlacedWeights | None,
    *,
    tokenizer: Any,
    config: RuntimeConfig,
) -> Runtime:
    source = source_of(model, placed, engine)
    with source.ranks.fail_together("checking the model and its optimizer"):
        check_sharding(model)
        check_optimizer(optimizer, model)
        _check_devices(model, engine.device)
    kv_cache = next((segment for segment in engine.segments if segment.name == ENGINE_KV_CACHE), None)
    if kv_cache is not None and kv_cache.away is None and engine.device.type == "cuda":
        warnings.warn(
            "the engine's KV cache stays on the device while the trainer works: start vLLM with enable_sleep_mode=True "
            "(a server with --enable-sleep-mode) to let it go",
            stacklevel=4,
        )
    if is_peft_model(model):  # before any weights have moved
        with source.ranks.fail_together("reading the adapter"):
            adapter = adapter_weights(cast("PeftModel", model))
        takes = adapters_of(engine)
        takes.load_adapter(_TRIAL, whole_adapter(adapter))
        takes.remove_adapter(_TRIAL)
    engine.mover.chunk_bytes = config.chunk_bytes
    if config.host_limit_bytes is not None:
        engine.mover.arena.limit_bytes = config.host_limit_bytes
    return assemble(engine, model, optimizer, config, tokenizer=tokenizer, owns_model=False, source=source)


def assemble(
    engine: Engine,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: RuntimeConfig,
    *,
    tokenizer: Any,
    owns_model: bool,
    source: WeightSource | None = None,
) -> Runtime:
    """Make a runtime of parts that have been checked. Raises: as `share`; the model has memory of its own then."""
    transport = transport_for(source or ModuleSource(model), engine, config)
    try:
        held_bytes = _held_bytes(engine.segments, model, optimizer, transport)
        return Runtime(
            engine=engine,
            model=model,
            optimizer=optimizer,
            transport=transport,
            mover=engine.mover,
            config=config,
            capacity_bytes=capacity(config, engine.device, held_bytes=held_bytes),
            tokenizer=tokenizer,
            owns_model=owns_model,
        )
    except BaseException:
        transport.move_out(engine.device)
        with suppress(Exception):
            transport.close()
        raise


def _held_bytes(
    segments: Sequence[Segment], model: nn.Module, optimizer: torch.optim.Optimizer, transport: Transport | None = None
) -> int:
    """Device bytes of what the runtime will count: segments of the engine, weights beside it, gradients and state."""
    device = model_device(model)
    shared = {id(tensor) for _, tensor in transport.source} if transport is not None and transport.shares else set()
    stepped = as_torch(unwrapped(optimizer))
    parameters = {id(p): p for p in [*model.parameters(), *parameters_of(stepped)]}
    state = [leaf for leaf in pytree.tree_leaves(dict(stepped.state)) if isinstance(leaf, torch.Tensor)]
    found = [p for key, p in parameters.items() if key not in shared]
    found += [p.grad for p in parameters.values() if p.grad is not None]
    if isinstance(stepped, MegatronOptimizers):
        state += [leaf for leaf in pytree.tree_leaves(stepped.gradients.state) if isinstance(leaf, torch.Tensor)]
    storages = {storage_key(local_shard(t)): local_bytes(t) for t in [*found, *state] if t.device == device}
    return sum(segment.device_bytes for segment in segments) + sum(storages.values())


def check_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Raise `Unsupported` for an optimizer without torch's hooks, or one that trains something else.

    It may train other parameters along, such as those of a value head, which no logits depend on.
    """
    stepped = as_torch(unwrapped(optimizer))
    if not hasattr(stepped, "_optimizer_step_pre_hooks") and not isinstance(stepped, MegatronOptimizers):
        raise Unsupported(
            f"{type(stepped).__name__} wraps an optimizer without torch's own hooks: pass the wrapped one "
            "(optimizer.optimizer)"
        )
    trained = {id(p): p for p in parameters_of(stepped)}
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


def _check_devices(model: nn.Module, device: torch.device) -> None:
    """Raise `Unsupported` unless the model is where the engine is, or FSDP2 keeps its parts in host memory."""
    devices = {p.device for p in model.parameters()}
    if devices == {device} or (devices == {_HOST} and all(map(is_dtensor, model.parameters()))):
        return
    names = ", ".join(sorted(map(str, devices)))
    raise Unsupported(f"the engine is on {device} and the model on {names}: they share one device")


def check_sharding(model: nn.Module) -> None:
    """Raise `Unsupported` for a model that FSDP's first version has flattened: its parameters are no weights."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # without which none is
    kind = getattr(fsdp, "FullyShardedDataParallel", None)
    if kind is not None and any(isinstance(module, kind) for module in model.modules()):
        raise Unsupported(
            "FullyShardedDataParallel keeps weights flattened, which cannot be gathered one by one: shard the model "
            "with fully_shard (FSDP2; fsdp_version: 2 in accelerate)"
        )


def capacity(config: RuntimeConfig, device: torch.device, *, held_bytes: int) -> int:
    """Bytes that segments may take: the given limit, or what is free and what they hold already."""
    if config.device_limit_bytes is not None:
        return config.device_limit_bytes - config.device_reserve_bytes
    available_bytes = free_device_bytes(device) + held_bytes
    unplanned = _UNPLANNED_FRACTION if device.type == "cuda" else 0.0
    return int(available_bytes * (1 - unplanned)) - config.device_reserve_bytes
