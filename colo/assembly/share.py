"""`share`: a runtime of an engine, a model and an optimizer that exist, or of an engine started for the other two.

`resolve` finds or starts the engine, `assemble` builds the runtime; `launch` ends in `assemble` too.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import nn
from torch.utils import _pytree as pytree

from colo.assembly.arguments import check_engine, check_share, check_trainer, names_checked
from colo.assembly.starting import Undo, model_device, start_for
from colo.config import RuntimeConfig
from colo.engine import Engine, EngineState, adapters_of
from colo.errors import BudgetError, Unsupported
from colo.memory.dtensor import local_bytes, local_shard
from colo.memory.probe import free_device_bytes
from colo.memory.storage import storage_key
from colo.phases.phase import ENGINE_KV_CACHE
from colo.phases.segment import Segment
from colo.runtime import Runtime
from colo.runtime.registry import check_free, collect_dropped
from colo.trainer.gradients import parameters_of
from colo.trainer.megatron import MegatronOptimizers, as_torch
from colo.trainer.state import unwrapped
from colo.weights.ranks import RankGroup
from colo.weights.sources.base import WeightSource
from colo.weights.sources.heads import causal_lm
from colo.weights.sources.megatron import MegatronSource, bare, is_megatron
from colo.weights.sources.module import ModuleSource
from colo.weights.sources.peft import adapter_weights, check_adapter, is_peft_model, warn_of_tied_head, whole_adapter
from colo.weights.sources.spread import PlacedWeights, SpreadSource
from colo.weights.transports.base import Transport
from colo.weights.transports.choice import transport_for

if TYPE_CHECKING:
    from peft import PeftModel

_UNPLANNED_FRACTION = 0.03
"""Share of a GPU left to workspaces and fragmentation when no limit is given."""

_TRIAL = "colo.trial"
"""Name of an adapter that is loaded to see whether it can be."""


@names_checked
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
    placed, module = _placed_or_none(model), as_module(model)
    check_share(module, optimizer, tokenizer=tokenizer, config=config)
    model, config = causal_lm(module), config or RuntimeConfig()
    check_adapter(model)
    check_free({"model": model, "optimizer": unwrapped(optimizer), "engine": engine})
    with Undo() as undo:
        resolved = resolve(engine, model, optimizer, placed, engine_options, dtype, config, undo)
        source = source_of(model, placed, resolved)
        with source.ranks.fail_together("checking the model and its optimizer"):
            check_trainer(model, optimizer, resolved.device)
        _try_adapter(resolved, model)  # an engine may refuse it, and no weights have moved yet
        _warn_of_kv_cache(resolved)
        if tokenizer is None and resolved is not engine and hasattr(engine, "llm_engine"):
            tokenizer = _tokenizer_of(engine)
        rt = assemble(resolved, model, optimizer, config, undo, source=source, tokenizer=tokenizer, owns_model=False)
        undo.pop_all()
    return rt


def as_module(model: Any) -> Any:
    """The stages of a list, or of placed weights, as one module; anything else as it is.

    Raises: `Unsupported` for a list of other modules than Megatron's.
    """
    if not isinstance(model, nn.Module) and isinstance(model, PlacedWeights):
        return nn.ModuleList(model.stages)
    if isinstance(model, (list, tuple)) and all(isinstance(stage, nn.Module) for stage in model):
        bare(model)
        return nn.ModuleList(model)
    return model


def resolve(
    engine: Engine | Any,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    placed: PlacedWeights | None,
    engine_options: Mapping[str, Any] | None,
    dtype: torch.dtype | str | None,
    config: RuntimeConfig,
    undo: Undo,
) -> Engine:
    """Return the engine that is meant: one that runs, one around a `vllm.LLM`, or one that is started for the model.

    `undo` ends it, or leaves it as it was. Raises: as `share`.
    """
    if engine in ("torch", "vllm"):
        check_engine(engine, engine_options)
        _refuse_stages(model, placed, engine)
        warn_of_tied_head(model)
        with RankGroup(model.parameters()).fail_together("checking the model and its optimizer"):
            check_trainer(model, optimizer)
        held_bytes = _held_bytes([], model, optimizer)
        with told_of_others():
            capacity_bytes = capacity(config, model_device(model), held_bytes=held_bytes)
            return start_for(model, engine, dict(engine_options or {}), dtype, config, capacity_bytes, undo)
    if engine_options is not None or dtype is not None:
        raise TypeError("engine_options and dtype are for an engine that share() starts by name: this one runs already")
    if isinstance(engine, Engine):
        if engine.state is EngineState.AWAKE:
            undo.add(lambda: engine.resume() if engine.state is EngineState.PAUSED else None)
        resolved = engine
    elif hasattr(engine, "llm_engine"):
        from colo.engines.vllm.client.engine import VLLMEngine

        warn_of_tied_head(model)
        resolved = VLLMEngine.around(engine)
        undo.add(resolved.close)  # which leaves the `vllm.LLM` awake
    else:
        raise TypeError(
            "share() takes a vllm.LLM, an engine of colo's or colo.connect(url) first, or 'torch' or 'vllm', not "
            + (repr(engine) if isinstance(engine, str) else type(engine).__name__)
        )
    resolved.mover.chunk_bytes = config.chunk_bytes
    if config.host_limit_bytes is not None:
        resolved.mover.arena.limit_bytes = config.host_limit_bytes
    return resolved


def _placed_or_none(model: Any) -> PlacedWeights | None:
    """Return `model` if it is `PlacedWeights`, else `None`."""
    return model if not isinstance(model, nn.Module) and isinstance(model, PlacedWeights) else None


def _refuse_stages(model: nn.Module, placed: PlacedWeights | None, kind: str) -> None:
    """Raise `Unsupported` for weights whose places no tensor of torch's describes: no engine starts for them."""
    if placed is not None or is_megatron(_stages(model)):
        raise Unsupported(
            f"{kind!r} is started for a transformers model, and stages have Megatron's config: start the engine on the "
            f"checkpoint, engine, _ = colo.start(folder, engine={kind!r}), or give a vllm.LLM"
        )


def source_of(model: nn.Module, placed: PlacedWeights | None, engine: Engine) -> WeightSource:
    """The source of the weights of what was given. A collective for Megatron's stages.

    Names are those of the engine's family, and rows that pad the vocabulary are cut to the engine's.
    Raises: as `MegatronSource`.
    """
    if placed is None and not is_megatron(_stages(model)):
        return ModuleSource(model)
    if placed is None:
        if engine.model_type is None:
            raise Unsupported(
                "the engine does not say of which family its model is: pass MegatronSource(stages, "
                "family='qwen3', vocab_size=...) (colo/weights/sources/megatron.py) in place of the stages"
            )
        placed = MegatronSource(_stages(model), family=engine.model_type, vocab_size=engine.vocab_size)
    return SpreadSource(placed, device=next(model.parameters()).device)


def _stages(model: nn.Module) -> list[nn.Module]:
    return list(model) if isinstance(model, nn.ModuleList) else [model]


def _try_adapter(engine: Engine, model: nn.Module) -> None:
    """Load the adapter and remove it again, before any weights have moved. Raises: as `Engine.load_adapter`."""
    if is_peft_model(model):
        takes = adapters_of(engine)
        takes.load_adapter(_TRIAL, whole_adapter(adapter_weights(cast("PeftModel", model))))
        takes.remove_adapter(_TRIAL)


def _warn_of_kv_cache(engine: Engine) -> None:
    kv_cache = next((segment for segment in engine.segments if segment.name == ENGINE_KV_CACHE), None)
    if kv_cache is not None and kv_cache.away is None and engine.device.type == "cuda":
        warnings.warn(
            "the engine's KV cache stays on the device while the trainer works: start vLLM with enable_sleep_mode=True "
            "(a server with --enable-sleep-mode) to let it go",
            stacklevel=5,
        )


def _tokenizer_of(llm: Any) -> Any:
    """Return the tokenizer of a `vllm.LLM`, or `None` where it was started without."""
    return None if llm.llm_engine.vllm_config.model_config.skip_tokenizer_init else llm.get_tokenizer()


def assemble(
    engine: Engine,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: RuntimeConfig,
    undo: Undo,
    *,
    source: WeightSource,
    tokenizer: Any,
    owns_model: bool,
) -> Runtime:
    """Build the runtime of parts that have been checked; every way in ends here. Raises: as `share`.

    `undo` gives the model memory of its own again.
    """
    transport = transport_for(source, engine, config)
    undo.add(transport.close)
    undo.callback(transport.move_out, engine.device)  # the last that is added runs first: parameters leave, then close
    held_bytes = _held_bytes(engine.segments, model, optimizer, transport)
    with told_of_others():
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


@contextmanager
def told_of_others() -> Iterator[None]:
    """Free runtimes that were dropped first, and name those that are open in a `BudgetError`: they hold memory."""
    others = collect_dropped()
    try:
        yield
    except BudgetError as error:
        if others:
            error.add_note(
                f"{others} other runtime{'s are' if others > 1 else ' is'} open in this process, with memory of the "
                "device: close() what a notebook cell has started before it is run again"
            )
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
        state += stepped.gradients()
    storages = {storage_key(local_shard(t)): local_bytes(t) for t in [*found, *state] if t.device == device}
    return sum(segment.device_bytes for segment in segments) + sum(storages.values())


def capacity(config: RuntimeConfig, device: torch.device, *, held_bytes: int) -> int:
    """Bytes that segments may take: the given limit, or what is free and what they hold already."""
    if config.device_limit_bytes is not None:
        return config.device_limit_bytes - config.device_reserve_bytes
    available_bytes = free_device_bytes(device) + held_bytes
    unplanned = _UNPLANNED_FRACTION if device.type == "cuda" else 0.0
    return int(available_bytes * (1 - unplanned)) - config.device_reserve_bytes
