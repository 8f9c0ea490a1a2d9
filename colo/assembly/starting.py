"""Start an engine, with a model to train over its memory, or for a model that exists."""

from __future__ import annotations

import copy
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import find_adapter_config_file

from colo.assembly.arguments import adapter_alone, chosen_dtype
from colo.config import RuntimeConfig, Weights
from colo.engine import Engine, PacksWeights
from colo.engines.layout import bind, empty_model, require_causal_lm
from colo.engines.text import positions_of
from colo.engines.torch import TorchEngine
from colo.errors import BudgetError, Unsupported
from colo.memory.dtensor import is_dtensor, local_bytes
from colo.memory.offload import Mover
from colo.memory.storage import with_own_storage
from colo.planning.kv_cache import layer_caches
from colo.units import GIB, MIB, format_bytes
from colo.weights.packed import is_packed, pack
from colo.weights.ranks import RankGroup
from colo.weights.sources.module import ModuleSource
from colo.weights.sources.peft import (
    TIED_WARNING,
    active_adapter,
    check_lora_config,
    has_adapted_head,
    is_peft_model,
    warn_of_tied_head,
)
from colo.weights.transports.choice import move_in, record_plan, why_not_shared

if TYPE_CHECKING:
    from peft import LoraConfig

    from colo.engines.vllm.client.engine import VLLMEngine

logger = logging.getLogger(__name__)

Checkpoint: TypeAlias = str | os.PathLike[str] | PretrainedConfig | PreTrainedModel

DEFAULT_SEQUENCES, DEFAULT_LENGTH = 64, 4096
"""The KV cache holds so many sequences of so many tokens unless told otherwise."""

_PACKED_BYTES = 0.5 + 4 / 64
"""Bytes of an element in 4 bits, with its share of a scale for every 64."""

Start: TypeAlias = Callable[["LaunchRequest", "Undo"], tuple[Engine, Any]]
"""Starts an engine, which the stack closes if something fails later, and makes a model to train over its memory."""


class Undo(ExitStack):
    """Ends what has been started, the last first, when something fails later."""

    def add(self, end: Callable[[], object]) -> None:
        """End something with `end`, whose own errors are dropped: what failed first is raised."""

        def quietly() -> None:
            with suppress(Exception):
                end()

        self.callback(quietly)


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """Arguments of `launch`, checked and completed."""

    model: Checkpoint
    device: torch.device
    dtype: torch.dtype
    config: RuntimeConfig
    capacity_bytes: int
    lora: LoraConfig | None
    engine_options: dict[str, Any]

    @property
    def revision(self) -> str:
        """The revision of a checkpoint on the hub."""
        return revision_of(self.engine_options)

    def make_mover(self, undo: Undo) -> Mover:
        """Make the mover; `undo` closes it after the engine."""
        mover = Mover(self.device, host_limit_bytes=self.config.host_limit_bytes, chunk_bytes=self.config.chunk_bytes)
        undo.add(mover.close)
        return mover

    def kv_cache_bytes(self, model: nn.Module, *, packed: bool = False, beside_bytes: int = 0) -> int:
        """Size of the KV cache beside `model` and `beside_bytes` of a copy of its weights.

        Raises: `BudgetError` when they do not fit.
        """
        weights_bytes = beside_bytes + _weights_bytes(model, self.dtype, packed=packed)
        left_bytes = self.capacity_bytes - weights_bytes
        size_bytes = self.config.kv_cache_bytes or _default_kv_bytes(model, self.dtype, left_bytes, self.device)
        _admit(weights_bytes, size_bytes, self.capacity_bytes)
        return size_bytes


def revision_of(engine_options: Mapping[str, Any]) -> str:
    """The revision of a hub's checkpoint."""
    return str(engine_options.get("revision") or "main")


def dtype_of(model: Checkpoint, revision: str) -> torch.dtype | None:
    """The dtype that a model's weights have, or that a checkpoint's config names; `None` where it names none."""
    if isinstance(model, PreTrainedModel):
        return next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    config = config_of(model, revision)
    named: object = config.dtype or config.get_text_config().dtype
    found = getattr(torch, named, None) if isinstance(named, str) else named
    return found if isinstance(found, torch.dtype) else None


def start_torch(request: LaunchRequest, undo: Undo) -> tuple[Engine, Any]:
    """Start the embedded engine and make a model over its memory."""
    checkpoint = _load_checkpoint(request.model, request.dtype, request.revision)
    engine = make_torch_engine(checkpoint, request, request.make_mover(undo), request.kv_cache_bytes(checkpoint))
    undo.add(engine.close)
    engine.load_weights(ModuleSource(checkpoint))
    if request.config.weights is not Weights.AUTO:
        return engine, _own(checkpoint, request.model).to(request.device).requires_grad_(True).train()
    model = empty_model(checkpoint.config, dtype=request.dtype, attn_implementation=None)
    bind(model, _ordinary(engine.weights.hf_views()), engine.weights.layout.tied)
    model.generation_config = checkpoint.generation_config
    return engine, model.requires_grad_(True).train()


def make_torch_engine(model: Any, request: LaunchRequest, mover: Mover, kv_cache_bytes: int) -> TorchEngine:
    """Make the embedded engine for the architecture of `model`, without its weights."""
    engine = TorchEngine(
        model.config, device=request.device, dtype=request.dtype, kv_cache_bytes=kv_cache_bytes, mover=mover
    )
    engine.module.generation_config = model.generation_config
    return engine


def make_vllm_engine(request: LaunchRequest, mover: Mover, kv_cache_bytes: int) -> VLLMEngine:
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


def add_lora_options(request: LaunchRequest, config: PretrainedConfig) -> None:
    """Make vLLM hold matrices for the adapter, if any. Raises: `Unsupported` for a rank above what is given."""
    from colo.engines.vllm.compat import rank_limit

    options = request.engine_options
    if "kv_cache_memory_bytes" in options:
        raise Unsupported("the KV cache is planned by colo: pass config=RuntimeConfig(kv_cache_bytes=...)")
    if request.lora is not None:
        rank = _rank(request.lora)
        if rank > options.setdefault("max_lora_rank", rank_limit(rank)):
            raise Unsupported(f"the adapter has rank {rank} and the engine would take {options['max_lora_rank']}")
        options.setdefault("lora_target_modules", _adapted_modules(config, request.lora))


def start_vllm(request: LaunchRequest, undo: Undo) -> tuple[Engine, Any]:
    """Start vLLM, which reads the checkpoint itself, and make a model over its memory, or a copy where that fails."""
    packs, config = _is_packed_by_vllm(request), config_of(request.model, request.revision)
    add_lora_options(request, config)
    if not packs:
        _check_complete(request.model, request.dtype, request.revision)
    model = empty_model(config, dtype=request.dtype, attn_implementation=None)
    kv_cache_bytes = request.kv_cache_bytes(model, packed=packs)
    engine = make_vllm_engine(request, request.make_mover(undo), kv_cache_bytes)
    undo.add(engine.close)
    packed = engine.packed_weights() if isinstance(engine, PacksWeights) else {}
    pack(model, packed, compute_dtype=request.dtype)
    tensors, plan = record_plan(engine, ModuleSource(model))
    # the model has no memory yet: whether it can have the engine's decides where it gets some
    why_not = why_not_shared(plan, tensors, request.config)
    if packs:
        if why_not is not None:
            raise Unsupported(f"packed weights can only be shared: {why_not}")
        bind(model, _ordinary(plan.aliases) | {name: tensors[name] for name in packed}, _tied(model))
        return engine, model.train()  # frozen: an adapter is what is trained
    if why_not is None:
        bind(model, _ordinary(plan.aliases), _tied(model))
        if isinstance(request.model, PreTrainedModel):
            _copy_weights(request.model, model)
        elif isinstance(request.model, PretrainedConfig):
            _draw_weights(model)
    else:
        checkpoint = _load_checkpoint(request.model, request.dtype, request.revision)
        model = _own(checkpoint, request.model).to(request.device)
    return engine, model.requires_grad_(True).train()


def _ordinary(views: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the same memory as tensors with storages of their own: code that saves or copies a model expects those."""
    return {name: with_own_storage(view) for name, view in views.items()}


def _is_packed_by_vllm(request: LaunchRequest) -> bool:
    """Tell if vLLM packs the weights to 4 bits as it reads them. Raises: `Unsupported` where they could not be shared.

    Its loader of such weights puts them where no other process can map them, so that the engine runs in this one.
    """
    from colo.engines.vllm import compat
    from colo.engines.vllm.client.start import import_apart, is_packed_config, packs_weights
    from colo.engines.vllm.wire import BITSANDBYTES

    options = request.engine_options
    if isinstance(request.model, (PretrainedConfig, PreTrainedModel)):
        config = request.model if isinstance(request.model, PretrainedConfig) else request.model.config
        if options.get("quantization") == BITSANDBYTES or is_packed_config(
            getattr(config, "quantization_config", None)
        ):
            raise Unsupported("vLLM packs weights as it reads a checkpoint: give a folder or a hub id")
        return False
    if not packs_weights(request.model, options):
        return False
    if request.lora is None:
        raise Unsupported("weights that bitsandbytes has packed cannot be trained: pass lora=LoraConfig(...)")
    if request.dtype not in (torch.float16, torch.bfloat16):
        raise Unsupported(f"vLLM packs 16-bit weights, and these would be {request.dtype}: pass dtype=torch.bfloat16")
    if options.setdefault("own_process", False):
        raise Unsupported(
            "vLLM keeps packed weights where no other process can map them: pass engine_options={'own_process': False}"
        )
    import_apart()
    compat.require_packing()
    return True


def _draw_weights(model: PreTrainedModel) -> None:
    """Random weights as transformers draws them, in place."""
    for module in model.modules():  # which believe that they were initialized when they were empty
        module._is_hf_initialized = False
    model.init_weights()


def config_of(model: Checkpoint, revision: str) -> PretrainedConfig:
    """The config of a checkpoint, read if need be, or of a model.

    Raises: `Unsupported` for a checkpoint with code of its own, which is not run and not asked about.
    """
    if isinstance(model, PretrainedConfig):
        return model
    if isinstance(model, PreTrainedModel):
        return model.config
    with _without_its_code(model):
        return AutoConfig.from_pretrained(os.fspath(model), revision=revision, trust_remote_code=False)


@contextmanager
def _without_its_code(model: str | os.PathLike[str]) -> Iterator[None]:
    """Raise `Unsupported` for a checkpoint with code of its own: transformers would ask at the terminal to run it."""
    try:
        yield
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise Unsupported(
            f"{os.fspath(model)} comes with code of its own, and colo starts models of transformers' classes alone, "
            "whatever trust_remote_code says: register its classes (AutoConfig.register, AutoModelForCausalLM.register)"
        ) from error


def _rank(lora: LoraConfig) -> int:
    ranks: list[int] = [lora.r, *(lora.rank_pattern or {}).values()]
    return max(ranks)


def adapted_outline(config: PretrainedConfig, lora: LoraConfig) -> PreTrainedModel:
    """The model with an adapter, without memory.

    Raises: `Unsupported` for an adapter that engines cannot apply; `ValueError` for one of modules that the model does
    not have.
    """
    from peft import inject_adapter_in_model

    model = empty_model(config, dtype=torch.bfloat16, attn_implementation=None)
    settings = copy.deepcopy(lora)
    settings.init_lora_weights = False
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", TIED_WARNING)
        inject_adapter_in_model(settings, model, low_cpu_mem_usage=True)
    check_lora_config(settings)  # to which PEFT may have added, parameters of experts for one
    embeddings = [name for name, module in model.named_modules() if getattr(module, "lora_embedding_A", None)]
    if embeddings:
        raise Unsupported(
            f"LoraConfig(target_modules=...) adapts {embeddings[0]}, an embedding, and engines apply adapters to "
            "linear modules only: leave it out of target_modules"
        )
    return model


def refuse_adapted_head(model: Checkpoint, lora: LoraConfig, revision: str = "main") -> None:
    """Raise `Unsupported` for an adapter on the output layer, as `adapted_outline` for others that cannot be.

    For trainers that compute log-probabilities from hidden states and the output layer's weight.
    """
    if has_adapted_head(adapted_outline(config_of(model, revision), lora)):
        raise Unsupported(
            "log-probabilities are computed from the output layer's weight, so that an adapter on it would not be "
            "trained: leave the output layer out of target_modules"
        )


def check_adapter(request: LaunchRequest) -> None:
    """Raise as `adapted_outline` for the adapter that is asked for; warn of one on a tied output layer."""
    if request.lora is not None:
        warn_of_tied_head(adapted_outline(config_of(request.model, request.revision), request.lora))


def _adapted_modules(config: PretrainedConfig, lora: LoraConfig) -> list[str]:
    """Last names of the modules that PEFT adapts. vLLM holds matrices for no others then, such as the vocabulary's."""
    named = adapted_outline(config, lora).named_modules()
    return sorted({name.rpartition(".")[2] for name, module in named if "lora_A" in module._modules})


def _tied(model: nn.Module) -> dict[str, str]:
    """Second names of tied parameters."""
    first = {id(p): name for name, p in model.named_parameters()}
    names = model.named_parameters(remove_duplicate=False)
    return {name: first[id(p)] for name, p in names if first[id(p)] != name}


@torch.no_grad()
def _copy_weights(source: nn.Module, target: nn.Module) -> None:
    tensors = ModuleSource(source).tensors()
    for name, tensor in ModuleSource(target):
        tensor.copy_(tensors[name])


def _load_checkpoint(model: Checkpoint, dtype: torch.dtype, revision: str) -> Any:
    """A model with the weights of a checkpoint or random ones, on the host unless it was given.

    Raises: `Unsupported` for an adapter, which would be dropped; `ValueError` for a checkpoint without some weights.
    """
    if isinstance(model, PreTrainedModel):
        return model
    if isinstance(model, PretrainedConfig):
        require_causal_lm(model)
        return AutoModelForCausalLM.from_config(model, dtype=dtype)
    loaded, lacking = _read(os.fspath(model), dtype=dtype, revision=revision)
    _refuse_incomplete(model, lacking)
    return loaded


def _check_complete(model: Checkpoint, dtype: torch.dtype, revision: str) -> None:
    """Raise `ValueError` for a checkpoint without some of its weights, which vLLM would leave as its memory was."""
    if isinstance(model, (PretrainedConfig, PreTrainedModel)):
        return
    try:
        _, lacking = _read(os.fspath(model), dtype=dtype, revision=revision, device_map="meta")  # names and shapes
    except Exception as error:  # noqa: BLE001 - vLLM reads files that transformers does not
        logger.debug("not checked for missing weights: %s", error)
    else:
        _refuse_incomplete(model, lacking)


def _read(path: str, **options: Any) -> tuple[Any, list[str]]:
    """Read a model, and the names of weights that its checkpoint lacks. Raises: `Unsupported` for an adapter alone."""
    if find_adapter_config_file(path, revision=options["revision"]) is not None:
        raise adapter_alone(path)  # transformers would put it on its base
    require_causal_lm(config_of(path, options["revision"]))
    with _without_its_code(path):
        model, info = AutoModelForCausalLM.from_pretrained(
            path, output_loading_info=True, trust_remote_code=False, **options
        )
    return model, sorted(info["missing_keys"])


def _refuse_incomplete(model: Checkpoint, lacking: list[str]) -> None:
    if lacking:
        raise ValueError(
            f"the checkpoint {model} lacks {len(lacking)} of the model's weights, {lacking[0]} for one: copy or save "
            "it again, whole. Where random values are meant, load the model yourself and pass that"
        )


def _own(model: Any, given: Checkpoint) -> Any:
    """Deep-copy a model that the caller passed in: `launch` never trains the caller's object."""
    return copy.deepcopy(model) if model is given else model


def _weights_bytes(model: Any, dtype: torch.dtype, *, packed: bool) -> int:
    """Bytes of an engine's parameters, or what they will be with those of the linear layers packed to 4 bits."""
    head = model.get_output_embeddings()
    linears = [m for m in model.modules() if packed and isinstance(m, nn.Linear) and m is not head]
    saved_bytes = sum(m.weight.numel() * (dtype.itemsize - _PACKED_BYTES) for m in linears)
    return int(sum(p.numel() * dtype.itemsize for p in model.parameters()) - saved_bytes)


def _default_kv_bytes(model: Any, dtype: torch.dtype, left_bytes: int, device: torch.device) -> int:
    """Room for `DEFAULT_SEQUENCES`, within most of what the weights leave; a CPU is given a GiB at most."""
    length = min(DEFAULT_LENGTH, positions_of(model.config).count or DEFAULT_LENGTH)
    bytes_per_token = _kv_bytes_per_token(model, dtype)
    wanted_bytes = DEFAULT_SEQUENCES * length * bytes_per_token
    most_bytes = int(0.9 * left_bytes)
    if device.type != "cuda":
        most_bytes = min(most_bytes, GIB)
    return max(min(wanted_bytes, most_bytes), min(16 * MIB, bytes_per_token * length))


def _kv_bytes_per_token(model: Any, dtype: torch.dtype) -> int:
    """Keys and values of every layer; one that keeps a state instead is given as much as the others, or a key and a
    value of the hidden size.
    """
    sizes = [layer.token_bytes(dtype_bytes=dtype.itemsize) for layer in layer_caches(model)]
    text = model.config.get_text_config()
    stand_in = max(sizes, default=0) or 2 * text.hidden_size * dtype.itemsize
    return sum(size or stand_in for size in sizes) or text.num_hidden_layers * stand_in


def _admit(weights_bytes: int, kv_cache_bytes: int, capacity_bytes: int) -> None:
    if weights_bytes + kv_cache_bytes > capacity_bytes:
        raise BudgetError(
            f"weights of {format_bytes(weights_bytes)} and a KV cache of {format_bytes(kv_cache_bytes)} do not fit in "
            f"{format_bytes(capacity_bytes)}: pass a smaller kv_cache_bytes, a smaller model, or raise "
            "device_limit_bytes (`colo plan MODEL` shows what fits)",
            needed_bytes=weights_bytes + kv_cache_bytes,
            free_bytes=capacity_bytes,
        )


# ---- for a model that exists -----------------------------------------------------------------------------------------


def model_device(model: nn.Module) -> torch.device:
    """The device of a model's first parameter; that of its mesh where FSDP2 keeps parts in host memory."""
    first = next(model.parameters())
    return RankGroup([first]).device if is_dtensor(first) else first.device


def start_for(
    model: nn.Module,
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
    base: Any = getattr(model, "get_base_model", lambda: model)() if is_peft_model(model) else model
    if not hasattr(base, "config") or not hasattr(base, "get_output_embeddings"):
        raise Unsupported(f"an engine can be started for a transformers model, and this is {type(base).__name__}")
    packed = [name for name, parameter in base.named_parameters() if is_packed(parameter)]
    if packed:
        raise Unsupported(
            f"{len(packed)} weights are quantized by bitsandbytes, {packed[0]} for one, and can only be built together "
            "with an engine: colo.start(folder, engine='vllm', engine_options={'quantization': 'bitsandbytes'}, "
            "lora=...)"
        )
    device = model_device(model)
    request = LaunchRequest(
        base, device, _dtype(base, dtype, device), config, capacity_bytes, _lora(model), dict(engine_options)
    )
    mover = request.make_mover(undo)
    kv_cache_bytes = request.kv_cache_bytes(base, beside_bytes=_bytes_of_copy(base, request.dtype))
    with _in_host_memory(model):  # until the engine has its memory: the device never holds the weights twice
        engine: Engine
        if kind == "vllm":
            add_lora_options(request, base.config)
            engine = make_vllm_engine(request, mover, kv_cache_bytes)
        else:
            engine = make_torch_engine(base, request, mover, kv_cache_bytes)
        undo.add(engine.close)
        tensors, plan = record_plan(engine, ModuleSource(model))
        if why_not_shared(plan, tensors, config) is None:
            move_in(tensors, plan.aliases)
    return engine


def _dtype(base: nn.Module, given: torch.dtype | str | None, device: torch.device) -> torch.dtype:
    """The engine's: the model's own, but bf16 for an fp32 model on CUDA, where vLLM has no fast fp32."""
    own = next((p.dtype for p in base.parameters() if p.is_floating_point()), torch.float32)
    if given is None:
        return torch.bfloat16 if device.type == "cuda" and own not in (torch.float16, torch.bfloat16) else own
    return chosen_dtype(given, device, lambda: own)


def _lora(model: Any) -> Any:
    """The config of the adapter that is trained, or `None`."""
    return model.peft_config[active_adapter(model)] if is_peft_model(model) else None


def _bytes_of_copy(base: nn.Module, dtype: torch.dtype) -> int:
    """Bytes that the trainer's own weights take, where the engine's dtype is another or a rank has a shard of them."""
    own = list(base.parameters())
    if all(p.dtype == dtype and not is_dtensor(p) for p in own):
        return 0
    return sum(map(local_bytes, own))


@contextmanager
def _in_host_memory(model: nn.Module) -> Iterator[None]:
    """Keep weights in host memory for a while; on the way out those come back that have found no other place."""
    away = {p: p.device for p in model.parameters() if p.device.type == "cuda" and not is_dtensor(p)}
    try:
        for parameter in away:
            parameter.data = parameter.data.to("cpu")
        yield
    finally:
        for parameter, device in away.items():
            if parameter.device != device:
                parameter.data = parameter.data.to(device)
