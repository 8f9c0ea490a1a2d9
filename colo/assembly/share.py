"""`share`: a runtime of an engine, a model and an optimizer that exist, or of an engine started for the other two.

`resolve` finds or starts the engine, `assemble` builds the runtime; `launch` ends in `assemble` too.
"""

from __future__ import annotations

import copy
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import torch
from torch import nn
from torch.utils import _pytree as pytree

from colo import unsloth
from colo.assembly.arguments import check_engine, check_share, check_trainer, chosen_dtype, names_checked
from colo.config import RuntimeConfig
from colo.engine import Engine, EngineState, adapters_of, missing_members
from colo.engines.fleet import Fleet
from colo.engines.main_rank import MainRankEngine
from colo.engines.text import positions_of
from colo.errors import BudgetError, Unsupported
from colo.memory.offload import Mover
from colo.memory.probe import free_device_bytes
from colo.memory.storage import is_dtensor, local_bytes, local_shard, storage_key
from colo.phases.phase import ENGINE_KV_CACHE, Segment
from colo.planning.estimate import RESIDUAL_BYTES, warm_up_bytes
from colo.planning.kv_cache import layer_caches
from colo.planning.model_shape import ModelShape
from colo.runtime import Runtime
from colo.runtime.lifetime import check_free, collect_dropped, end_runtime_of
from colo.trainer.optimizers import MegatronOptimizers, as_torch, parameters_of
from colo.trainer.state import unwrapped
from colo.units import GIB, MIB, format_bytes
from colo.weights.packed import is_packed
from colo.weights.ranks import RankGroup
from colo.weights.sources.base import WeightSource
from colo.weights.sources.folded import check_adapter, folded_bytes, module_source
from colo.weights.sources.heads import causal_lm, is_peft_model, plain_model
from colo.weights.sources.megatron import MegatronSource, bare, is_megatron
from colo.weights.sources.peft import (
    TIED_WARNING,
    active_adapter,
    check_lora_config,
    warn_of_tied_head,
    whole_adapter,
)
from colo.weights.sources.spread import PlacedWeights, SpreadSource
from colo.weights.transports.base import Transport
from colo.weights.transports.choice import move_in, record_plan, transport_for, why_not_shared

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PretrainedConfig, PreTrainedModel

    from colo.engines.torch import TorchEngine
    from colo.engines.vllm.client.engine import VLLMEngine

Checkpoint: TypeAlias = "str | os.PathLike[str] | PretrainedConfig | PreTrainedModel"

DEFAULT_SEQUENCES, DEFAULT_LENGTH = 64, 4096
"""The KV cache holds so many sequences of so many tokens unless told otherwise."""

_PACKED_BYTES = 0.5 + 4 / 64
"""Bytes of an element in 4 bits, with its share of a scale for every 64."""

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

    A list of engines that run is a `Fleet`: each gets a copy, prompts are spread, and the loss of one stops no other.

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
    check_adapter(model, fold=config.fold_adapter)
    unsloth.check_engine(model, engine, fold=config.fold_adapter)
    check_free({"model": model, "optimizer": unwrapped(optimizer), "engine": engine})
    with Undo() as undo:
        resolved = resolve(engine, model, optimizer, placed, engine_options, dtype, config, undo)
        source = source_of(model, placed, resolved, fold=config.fold_adapter)
        if isinstance(resolved, MainRankEngine) and source.ranks.is_alone:
            source.ranks = resolved.ranks  # whole weights on each, which are published together all the same
        # every rank learns of it: one that goes on alone would wait in the next collective
        with source.ranks.fail_together("checking the model and its optimizer"):
            check_trainer(model, optimizer, resolved.device)
        _try_adapter(resolved, source)  # an engine may refuse it, and no weights have moved yet
        _warn_of_kv_cache(resolved, engine)
        if tokenizer is None and resolved is not engine and hasattr(engine, "llm_engine"):
            llm = cast("Any", engine)
            started_without = llm.llm_engine.vllm_config.model_config.skip_tokenizer_init
            tokenizer = None if started_without else llm.get_tokenizer()
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
        # ranks meet here: each would otherwise start an engine for a model that another refuses
        with RankGroup(model.parameters()).fail_together("checking the model and its optimizer"):
            check_trainer(model, optimizer)
            module_source(model, fold=config.fold_adapter).adapter()
        held_bytes = _held_bytes([], model, optimizer)
        with told_of_others():
            capacity_bytes = capacity(config, model_device(model), held_bytes=held_bytes)
            return start_for(model, engine, dict(engine_options or {}), dtype, config, capacity_bytes, undo)
    if engine_options is not None or dtype is not None:
        raise TypeError("engine_options and dtype are for an engine that share() starts by name: this one runs already")
    if isinstance(engine, (list, tuple)):
        engine = Fleet(engine)
    if isinstance(engine, Engine):
        if engine.state is EngineState.AWAKE:
            # an engine that was awake is left awake where something fails
            undo.add(lambda: engine.resume() if engine.state is EngineState.PAUSED else None)
        resolved = engine
    elif hasattr(engine, "llm_engine"):
        from colo.engines.vllm.client.engine import VLLMEngine

        warn_of_tied_head(model)
        resolved = VLLMEngine.around(engine)
        undo.add(resolved.close)  # which leaves the `vllm.LLM` awake
    else:
        given = repr(engine) if isinstance(engine, str) else type(engine).__name__
        if hasattr(engine, "load_weights") or hasattr(engine, "commit"):  # meant to be one
            given += f", which lacks {', '.join(missing_members(engine))}"
        raise TypeError(
            "share() takes a vllm.LLM, an engine of colo's or colo.connect(url) first, or 'torch' or 'vllm', not "
            + given
        )
    # the mover came with the engine, its settings come with the runtime
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


def source_of(model: nn.Module, placed: PlacedWeights | None, engine: Engine, *, fold: bool = False) -> WeightSource:
    """The source of the weights of what was given, an adapter in them to `fold`. A collective for Megatron's stages.

    Names are those of the engine's family, and rows that pad the vocabulary are cut to the engine's.
    Raises: as `MegatronSource`.
    """
    if placed is None and not is_megatron(_stages(model)):
        return module_source(model, fold=fold)
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


def _try_adapter(engine: Engine, source: WeightSource) -> None:
    """Load the adapter and remove it again, before any weights have moved. Raises: as `Engine.load_adapter`."""
    if (adapter := source.adapter()) is not None:
        takes = adapters_of(engine)
        takes.load_adapter(_TRIAL, whole_adapter(adapter))
        # at once: engines hold few adapters
        takes.remove_adapter(_TRIAL)


def _warn_of_kv_cache(engine: Engine, given: object) -> None:
    kv_cache = next((segment for segment in engine.segments if segment.name == ENGINE_KV_CACHE), None)
    if kv_cache is not None and kv_cache.away is None and engine.device.type == "cuda":
        how = "start vLLM with enable_sleep_mode=True (a server with --enable-sleep-mode)"
        how = unsloth.HOW_TO_SLEEP if unsloth.is_unsloths(given) else how
        how = "start the SGLang server with --enable-memory-saver" if engine.name == "sglang" else how
        warnings.warn(
            f"the engine's KV cache stays on the device while the trainer works: {how} to let it go", stacklevel=5
        )


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
    undo.add(partial(end_runtime_of, engine))  # where Ctrl-C comes before it is returned
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
    # weights that are the engine's memory are in its segments already
    shared = {id(tensor) for _, tensor in transport.source} if transport is not None and transport.shares else set()
    stepped = as_torch(unwrapped(optimizer))
    # by id: tied weights and optimizers that overlap count once
    parameters = {id(p): p for p in [*model.parameters(), *parameters_of(stepped)]}
    state = [leaf for leaf in pytree.tree_leaves(dict(stepped.state)) if isinstance(leaf, torch.Tensor)]
    found = [p for key, p in parameters.items() if key not in shared]
    if transport is not None and not transport.shares:
        found += transport.source.memory()  # with weights that an adapter is folded into
    found += [p.grad for p in parameters.values() if p.grad is not None]
    if isinstance(stepped, MegatronOptimizers):
        state += stepped.gradients()
    # by storage: views of one buffer count once; as bytes of the shard that is here
    storages = {storage_key(local_shard(t)): local_bytes(t) for t in [*found, *state] if t.device == device}
    return sum(segment.device_bytes for segment in segments) + sum(storages.values())


def capacity(config: RuntimeConfig, device: torch.device, *, held_bytes: int) -> int:
    """Bytes that segments may take: the given limit, or what is free and what they hold already."""
    if config.device_limit_bytes is not None:
        return config.device_limit_bytes - config.device_reserve_bytes
    if device.type == "cuda":
        torch.cuda.empty_cache()  # of what ran before: the driver calls it used, and torch would use it again
    # bytes of segments are not free, and the runtime counts them as its own
    available_bytes = free_device_bytes(device) + held_bytes
    unplanned = _UNPLANNED_FRACTION if device.type == "cuda" else 0.0
    return int(available_bytes * (1 - unplanned)) - config.device_reserve_bytes


class Undo(ExitStack):
    """Ends what has been started, the last first, when something fails later."""

    def add(self, end: Callable[[], object]) -> None:
        """End something with `end`, whose own errors are dropped: what failed first is raised."""

        def quietly() -> None:
            with suppress(Exception):
                end()

        self.callback(quietly)


# ---- an engine that is started -------------------------------------------------------------------------------------


def start_for(
    model: Any,
    kind: str,
    engine_options: dict[str, Any],
    dtype: torch.dtype | str | None,
    config: RuntimeConfig,
    capacity_bytes: int,
    undo: Undo,
) -> Engine:
    """Start the engine "torch" or "vllm" for a causal language model of transformers, or one with PEFT's adapter.

    The weights wait in host memory meanwhile, so that the device never holds them twice. Where the engine's memory can
    be the model's, they lie there afterwards, under the same `nn.Parameter` objects.
    Raises: `Unsupported` for a model that is no transformers model, or packed to 4 bits; `BudgetError` when the weights
    and the KV cache do not fit; whatever the engine raises. The model is as it was then.
    """
    # An adapter that transformers has added (`add_adapter`) is within the model, without a wrapper.
    base: Any = plain_model(model) if is_peft_model(model) else model
    if not hasattr(base, "config") or not hasattr(base, "get_output_embeddings"):
        raise Unsupported(f"an engine can be started for a transformers model, and this is {type(base).__name__}")
    packed = [name for name, parameter in base.named_parameters() if is_packed(parameter)]
    if packed:
        raise Unsupported(
            f"{len(packed)} weights are quantized by bitsandbytes, {packed[0]} for one, and can only be built together "
            "with an engine: colo.start(folder, engine='vllm', engine_options={'quantization': 'bitsandbytes'}, "
            "lora=...)"
        )
    if kind == "vllm":
        from colo.engines.vllm.client.start import check_quantization

        check_quantization(base, engine_options)
    device = model_device(model)
    is_folded = config.fold_adapter and is_peft_model(model)
    # folded: the engine needs no LoRA kernels, and no matrices
    lora = model.peft_config[active_adapter(model)] if is_peft_model(model) and not is_folded else None
    chosen = _dtype(base, dtype, device)
    request = EngineRequest(base, device, chosen, config, capacity_bytes, lora, dict(engine_options))
    mover = request.make_mover(undo)
    # weights that stay the trainer's own lie beside the engine's
    beside_bytes = _bytes_of_copy(base, request.dtype) + (folded_bytes(model) if is_folded else 0)
    kv_cache_bytes = request.kv_cache_bytes(base, kind, beside_bytes=beside_bytes)
    with _in_host_memory(model):  # until the engine has its memory: the device never holds the weights twice
        engine: Engine
        if kind == "vllm":
            add_lora_options(request, base.config)
            engine = make_vllm_engine(request, mover, kv_cache_bytes)
        else:
            engine = make_torch_engine(base, request, mover, kv_cache_bytes)
        undo.add(engine.close)
        tensors, plan = record_plan(engine, module_source(model, fold=config.fold_adapter))
        if why_not_shared(plan, tensors, config) is None:
            move_in(tensors, plan.aliases)
    return engine


def model_device(model: nn.Module) -> torch.device:
    """The device of a model's first parameter; that of its mesh where FSDP2 keeps parts in host memory."""
    first = next(model.parameters())
    return RankGroup([first]).device if is_dtensor(first) else first.device


def _dtype(base: nn.Module, given: torch.dtype | str | None, device: torch.device) -> torch.dtype:
    """The engine's: the model's own, but bf16 for an fp32 model on CUDA, where vLLM has no fast fp32."""
    own = next((p.dtype for p in base.parameters() if p.is_floating_point()), torch.float32)
    if given is None:
        return torch.bfloat16 if device.type == "cuda" and own not in (torch.float16, torch.bfloat16) else own
    return chosen_dtype(given, device, lambda: own)


def _bytes_of_copy(base: nn.Module, dtype: torch.dtype) -> int:
    """Bytes that the trainer's own weights take, where the engine's dtype is another or a rank has a shard of them."""
    # neither buffers nor an adapter, which PEFT keeps in fp32
    own = [tensor for tensor in module_source(base, fold=False).memory() if isinstance(tensor, nn.Parameter)]
    if all(p.dtype == dtype and not is_dtensor(p) for p in own):
        return 0
    return sum(map(local_bytes, own))


@contextmanager
def _in_host_memory(model: nn.Module) -> Iterator[None]:
    """Keep weights in host memory for a while; on the way out those come back that have found no other place."""
    # shards stay: an engine starts beside them
    away = {p: p.device for p in model.parameters() if p.device.type == "cuda" and not is_dtensor(p)}
    try:
        for parameter in away:
            parameter.data = parameter.data.to("cpu")
        if away:
            torch.cuda.empty_cache()  # an engine in another process could not have it
        yield
    finally:
        for parameter, device in away.items():
            # those that have moved into the engine's memory are there already
            if parameter.device != device:
                parameter.data = parameter.data.to(device)


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """An engine to start, and for what: arguments of `launch` or `share`, checked and completed."""

    model: Checkpoint
    device: torch.device
    dtype: torch.dtype
    config: RuntimeConfig
    capacity_bytes: int
    lora: LoraConfig | None
    engine_options: dict[str, Any]

    def make_mover(self, undo: Undo) -> Mover:
        """Make the mover; `undo` closes it after the engine."""
        mover = Mover(self.device, host_limit_bytes=self.config.host_limit_bytes, chunk_bytes=self.config.chunk_bytes)
        undo.add(mover.close)
        return mover

    def kv_cache_bytes(self, model: Any, kind: str, *, packed: bool = False, beside_bytes: int = 0) -> int:
        """Size of the KV cache beside `model` and `beside_bytes` of a copy of its weights.

        Raises: `BudgetError` when they do not fit.
        """
        weights_bytes = beside_bytes + _weights_bytes(model, self.dtype, packed=packed)
        size_bytes, started_bytes = self.config.kv_cache_bytes, 0
        if not size_bytes:
            started_bytes = self._started_bytes(model, kind)
            left_bytes = self.capacity_bytes - weights_bytes - started_bytes
            size_bytes = _default_kv_bytes(model, self.dtype, left_bytes, self.device)
        _admit(weights_bytes, size_bytes, self.capacity_bytes, started_bytes=started_bytes)
        return size_bytes

    def _started_bytes(self, model: Any, kind: str) -> int:
        """Bytes beside weights and KV cache as vLLM starts, by the formulas of `colo plan`: what stays, its warm-up."""
        if kind != "vllm" or self.device.type != "cuda":
            return 0
        from colo.engines.vllm.client import start
        from colo.engines.vllm.compat import most_at_once

        start.import_apart()  # before `most_at_once` imports it
        tokens, sequences = most_at_once(self.engine_options)
        try:
            shape = ModelShape.of(model)
        except Unsupported:  # layers of a class of one's own, which vLLM may know
            return RESIDUAL_BYTES
        return RESIDUAL_BYTES + warm_up_bytes(shape, tokens, sequences, dtype_bytes=self.dtype.itemsize)


def _weights_bytes(model: Any, dtype: torch.dtype, *, packed: bool) -> int:
    """Bytes of an engine's parameters, or what they will be with those of the linear layers packed to 4 bits."""
    head = model.get_output_embeddings()
    linears = [m for m in model.modules() if packed and isinstance(m, nn.Linear) and m is not head]
    saved_bytes = sum(m.weight.numel() * (dtype.itemsize - _PACKED_BYTES) for m in linears)
    return int(sum(p.numel() * dtype.itemsize for p in model.parameters()) - saved_bytes)


def _default_kv_bytes(model: Any, dtype: torch.dtype, left_bytes: int, device: torch.device) -> int:
    """Room for `DEFAULT_SEQUENCES`, within most of what is left; a CPU is given a GiB at most."""
    length = min(DEFAULT_LENGTH, positions_of(model.config).count or DEFAULT_LENGTH)
    bytes_per_token = _kv_bytes_per_token(model, dtype)
    wanted_bytes = DEFAULT_SEQUENCES * length * bytes_per_token
    most_bytes = int(0.9 * left_bytes)
    if device.type != "cuda":
        most_bytes = min(most_bytes, GIB)
    # one sequence at least, or 16 MiB: `_admit` refuses it if that does not fit either
    return max(min(wanted_bytes, most_bytes), min(16 * MIB, bytes_per_token * length))


def _kv_bytes_per_token(model: Any, dtype: torch.dtype) -> int:
    """Keys and values of every layer; one that keeps a state instead is given as much as the others, or a key and a
    value of the hidden size.
    """
    sizes = [layer.token_bytes(dtype_bytes=dtype.itemsize) for layer in layer_caches(model)]
    text = model.config.get_text_config()
    stand_in = max(sizes, default=0) or 2 * text.hidden_size * dtype.itemsize
    return sum(size or stand_in for size in sizes) or text.num_hidden_layers * stand_in


def _admit(weights_bytes: int, kv_cache_bytes: int, capacity_bytes: int, *, started_bytes: int) -> None:
    needed_bytes = weights_bytes + kv_cache_bytes + started_bytes
    if needed_bytes > capacity_bytes:
        beside, less = "", "pass a smaller kv_cache_bytes"
        if started_bytes:  # and the KV cache is the least that there is
            beside = f" beside {format_bytes(started_bytes)} that vLLM starts in"
            less = "lower max_num_batched_tokens and max_num_seqs in the engine's options"
        raise BudgetError(
            f"weights of {format_bytes(weights_bytes)} and a KV cache of {format_bytes(kv_cache_bytes)} do not fit in "
            f"{format_bytes(capacity_bytes)}{beside}: {less}, take a smaller model, or raise "
            "device_limit_bytes (`colo plan MODEL` shows what fits)",
            needed_bytes=needed_bytes,
            free_bytes=capacity_bytes,
        )


def make_torch_engine(model: Any, request: EngineRequest, mover: Mover, kv_cache_bytes: int) -> TorchEngine:
    """Make the embedded engine for the architecture of `model`, without its weights."""
    from colo.engines.torch import TorchEngine

    if getattr(model, "generation_config", None) is None:
        raise Unsupported(f"{type(model).__name__} generates nothing: load it with AutoModelForCausalLM")
    engine = TorchEngine(
        model.config, device=request.device, dtype=request.dtype, kv_cache_bytes=kv_cache_bytes, mover=mover
    )
    engine.module.generation_config = model.generation_config
    return engine


def make_vllm_engine(request: EngineRequest, mover: Mover, kv_cache_bytes: int) -> VLLMEngine:
    """Start vLLM for `request.model`, with its weights if that is a checkpoint."""
    from colo.engines.vllm.client.engine import VLLMEngine

    return VLLMEngine(
        request.model,
        kv_cache_bytes=kv_cache_bytes,
        device=request.device,
        dtype=request.dtype,
        mover=mover,
        **request.engine_options,
    )


def add_lora_options(request: EngineRequest, config: PretrainedConfig) -> None:
    """Make vLLM hold matrices for the adapter, if any. Raises: `Unsupported` for a rank above what is given."""
    from colo.engines.vllm.compat import rank_limit

    options = request.engine_options
    if "kv_cache_memory_bytes" in options:
        raise Unsupported("the KV cache is planned by colo: pass config=RuntimeConfig(kv_cache_bytes=...)")
    if request.lora is not None:
        rank = max([request.lora.r, *(request.lora.rank_pattern or {}).values()])
        # `setdefault` first: a limit of the caller's own stands
        if rank > options.setdefault("max_lora_rank", rank_limit(rank)):
            raise Unsupported(f"the adapter has rank {rank} and the engine would take {options['max_lora_rank']}")
        options.setdefault("lora_target_modules", _adapted_modules(config, request.lora))


def _adapted_modules(config: PretrainedConfig, lora: LoraConfig) -> list[str]:
    """Last names of the modules that PEFT adapts. vLLM holds matrices for no others then, such as the vocabulary's."""
    named = adapted_outline(config, lora).named_modules()
    return sorted({name.rpartition(".")[2] for name, module in named if "lora_A" in module._modules})


def adapted_outline(config: PretrainedConfig, lora: LoraConfig, *, folded: bool = False) -> PreTrainedModel:
    """The model with an adapter, without memory; of one that is published `folded`, whole modules may train too.

    Raises: `Unsupported` for an adapter that engines cannot apply; `ValueError` for one that PEFT cannot make, or of
    modules some of which the model does not have.
    """
    from peft import inject_adapter_in_model

    from colo.engines.layout import empty_model

    model = empty_model(config, dtype=torch.bfloat16, attn_implementation=None)
    settings, modules = copy.deepcopy(lora), dict(model.named_modules())
    # nothing is drawn for an outline, and PiSSA's kind would ask for weights
    settings.init_lora_weights = False
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", TIED_WARNING)
        try:
            inject_adapter_in_model(settings, model, low_cpu_mem_usage=True)
        except (re.error, RuntimeError, TypeError) as error:
            raise ValueError(
                f"PEFT cannot put the adapter on the model ({error}): change r, target_modules or modules_to_save"
            ) from error
    _check_named(settings, lora, modules)
    check_lora_config(settings, folded=folded)  # to which PEFT may have added, parameters of experts for one
    embeddings = [name for name, module in model.named_modules() if getattr(module, "lora_embedding_A", None)]
    if embeddings and not folded:
        raise Unsupported(
            f"LoraConfig(target_modules=...) adapts {embeddings[0]}, an embedding, and engines apply adapters to "
            "linear modules only: leave it out of target_modules"
        )
    return model


def _check_named(settings: LoraConfig, lora: LoraConfig, modules: Mapping[str, nn.Module]) -> None:
    """Raise `ValueError` for a name in a list of `lora` that PEFT would leave out, since no module is called so."""
    for option, before in (("target_modules", "."), ("modules_to_save", "")):
        named, read = getattr(lora, option) or (), getattr(settings, option) or ()
        # a text is a pattern; of a mixture's experts PEFT makes other names
        for name in sorted(set(named) & set(read)) if not isinstance(named, str) else ():
            if not any(f"{before}{module}".endswith(f"{before}{name}") for module in modules):
                there = {path.rpartition(".")[2] for path, module in modules.items() if module._parameters}
                raise ValueError(
                    f"LoraConfig({option}=...) names {name!r}, and no module of the model is called so: leave it out, "
                    f"or name some of {', '.join(sorted(there))}; 'all-linear' stands alone"
                )
