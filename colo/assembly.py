"""`launch` and `share`: the two ways to get a runtime."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedModel

from colo.config import RuntimeConfig, Weights
from colo.engines.base import Engine
from colo.engines.layout import bind, empty_model
from colo.engines.torch import TorchEngine
from colo.errors import BudgetError, Unsupported
from colo.memory.offload import Mover
from colo.memory.probe import free_device_bytes
from colo.optim import MakeOptimizer, MasterWeights
from colo.runtime import Runtime, check_free
from colo.units import GIB, MIB, format_bytes
from colo.weights.load_plan import LoadPlan
from colo.weights.packed import PackedWeight, is_packed, pack
from colo.weights.sources.module import ModuleSource
from colo.weights.sources.peft import check_lora_config
from colo.weights.transports.base import Transport
from colo.weights.transports.ipc import IpcTransport, Peer
from colo.weights.transports.local import LocalTransport
from colo.weights.transports.shared import SharedTransport, is_same_memory

if TYPE_CHECKING:
    from peft import LoraConfig

Checkpoint: TypeAlias = str | os.PathLike[str] | PretrainedConfig | PreTrainedModel

FULL_LEARNING_RATE = 1e-6
LORA_LEARNING_RATE = 1e-5
DEFAULT_SEQUENCES, DEFAULT_LENGTH = 64, 4096
"""The KV cache holds so many sequences of so many tokens unless told otherwise."""

_PACKED_BYTES = 0.5 + 4 / 64
"""Of an element in 4 bits, with its share of a scale for every 64."""

_UNPLANNED_FRACTION = 0.03
"""Share of a GPU left to workspaces and fragmentation when no limit is given."""


def launch(
    model: Checkpoint,
    *,
    engine: Literal["torch", "vllm"] = "torch",
    engine_options: Mapping[str, Any] | None = None,
    lora: LoraConfig | None = None,
    optimizer: MakeOptimizer | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    tokenizer: Any = None,
    config: RuntimeConfig | None = None,
) -> Runtime:
    """Start an engine and build a model to train on one copy of the weights.

    `model` is a folder or a hub id with a checkpoint, a transformers config for random weights, or a transformers model
    whose weights are copied and which is otherwise left alone. `engine` is the embedded one, or vLLM, which runs in its
    own process unless `engine_options` has `own_process=False`; the rest of `engine_options` are those of `vllm.LLM`.
    With `lora` the base is frozen and shared, and an
    adapter is trained. `optimizer` builds the optimizer from the trainable parameters; by default see
    `default_optimizer`. `dtype` defaults to bf16 on CUDA and to fp32 on the CPU, where bf16 is slow.

    Raises: `BudgetError` before anything is allocated when weights and KV cache do not fit; `Unsupported` for a LoRA
    setting that an engine cannot apply; whatever transformers raises for a checkpoint it cannot read.
    """
    config = config or RuntimeConfig()
    target = _device(device)
    dtype = dtype or (torch.bfloat16 if target.type == "cuda" else torch.float32)
    if lora is not None:
        check_lora_config(lora)
    if engine not in ("torch", "vllm"):
        raise ValueError(f"engine must be 'torch' or 'vllm', not {engine!r}")
    if engine == "torch" and engine_options:
        raise ValueError(f"engine_options are those of vLLM: pass engine='vllm' with {sorted(engine_options)}")
    start = _start_vllm if engine == "vllm" else _start_torch
    capacity_bytes = _capacity(config, target, held_bytes=0)
    with ExitStack() as undo:
        mover = Mover(target, host_limit_bytes=config.host_limit_bytes, chunk_bytes=config.chunk_bytes)
        undo.callback(mover.close)
        order = _Order(model, target, dtype, config, capacity_bytes, mover, lora, dict(engine_options or {}))
        started, trained = start(order, undo)
        if config.device_limit_bytes is None:  # what the engine took beside its segments is known now
            held_bytes = sum(segment.device_bytes for segment in started.segments)
            capacity_bytes = _capacity(config, target, held_bytes=held_bytes)
        if lora is not None:
            from peft import get_peft_model

            trained = get_peft_model(trained, lora)
        rt = _assemble(
            started,
            trained,
            (optimizer or default_optimizer)([p for p in trained.parameters() if p.requires_grad]),
            mover=mover,
            config=config,
            capacity_bytes=capacity_bytes,
            tokenizer=tokenizer if tokenizer is not None else _tokenizer(model),
            owns_model=True,
        )
        undo.pop_all()
    return rt


@dataclass(frozen=True, slots=True)
class _Order:
    """What `launch` was asked for."""

    model: Checkpoint
    device: torch.device
    dtype: torch.dtype
    config: RuntimeConfig
    capacity_bytes: int
    mover: Mover
    lora: LoraConfig | None
    engine_options: dict[str, Any]

    def kv_cache_bytes(self, model: nn.Module, *, packed: bool = False) -> int:
        """Size of the KV cache beside `model`. Raises: `BudgetError` when the two do not fit."""
        weights_bytes = _weights_bytes(model, packed=packed)
        left_bytes = self.capacity_bytes - weights_bytes
        size_bytes = self.config.kv_cache_bytes or _default_kv_bytes(model, self.dtype, left_bytes, self.device)
        _admit(weights_bytes, size_bytes, self.capacity_bytes)
        return size_bytes


def _start_torch(order: _Order, undo: ExitStack) -> tuple[Engine, Any]:
    """The embedded engine, and a model over its memory."""
    checkpoint = _load_checkpoint(order.model, order.dtype)
    engine = TorchEngine(
        checkpoint.config,
        device=order.device,
        dtype=order.dtype,
        kv_cache_bytes=order.kv_cache_bytes(checkpoint),
        mover=order.mover,
    )
    undo.callback(engine.close)
    engine.module.generation_config = checkpoint.generation_config
    engine.load_weights(checkpoint.named_parameters())
    if order.config.weights is not Weights.AUTO:
        return engine, checkpoint.to(order.device).requires_grad_(True).train()
    model = empty_model(checkpoint.config, dtype=order.dtype, attn_implementation=None)
    bind(model, engine.weights.hf_views(), engine.weights.layout.tied)
    model.generation_config = checkpoint.generation_config
    return engine, model.requires_grad_(True).train()


def _start_vllm(order: _Order, undo: ExitStack) -> tuple[Engine, Any]:
    """vLLM, which reads the checkpoint itself, and a model over its memory, or one of its own where that cannot be."""
    from colo.engines.vllm.engine import VLLMEngine

    options = order.engine_options
    packs = _is_packed_by_vllm(order)
    if order.lora is not None:
        options.setdefault("max_lora_rank", _engine_rank(order.lora))
        options.setdefault("lora_target_modules", _adapted_modules(_config(order.model), order.lora))
    model = empty_model(_config(order.model), dtype=order.dtype, attn_implementation=None)
    engine = VLLMEngine(
        order.model,
        kv_cache_bytes=order.kv_cache_bytes(model, packed=packs),
        device=order.device,
        dtype=order.dtype,
        mover=order.mover,
        **options,
    )
    undo.callback(engine.close)
    packed = engine.packed_weights()
    pack(model, packed, compute_dtype=order.dtype)
    tensors = dict(model.named_parameters())
    plan = engine.record_plan(tensors)
    why_not = _why_not_shared(plan, tensors, order.config)
    if packs:
        if why_not is not None:
            raise Unsupported(f"packed weights can only be shared: {why_not}")
        bind(model, plan.aliases | {name: tensors[name] for name in packed}, _tied(model))
        return engine, model.train()  # frozen: an adapter is what is trained
    if why_not is None:
        bind(model, plan.aliases, _tied(model))
        if isinstance(order.model, PreTrainedModel):
            _copy_weights(order.model, model)
        elif isinstance(order.model, PretrainedConfig):
            _draw_weights(model)
    else:
        model = _load_checkpoint(order.model, order.dtype).to(order.device)
    return engine, model.requires_grad_(True).train()


def _is_packed_by_vllm(order: _Order) -> bool:
    """Whether vLLM packs the weights to 4 bits as it reads them. Raises: `Unsupported` where they could not be shared.

    Its loader of such weights puts them where no other process can map them, so that the engine runs in this one.
    """
    from colo.engines.vllm.options import BITSANDBYTES, packs_weights

    options = order.engine_options
    if isinstance(order.model, (PretrainedConfig, PreTrainedModel)):
        if options.get("quantization") == BITSANDBYTES:
            raise Unsupported("vLLM packs weights as it reads a checkpoint: give a folder or a hub id")
        return False
    if not packs_weights(order.model, options):
        return False
    if order.lora is None:
        raise Unsupported("weights that bitsandbytes has packed cannot be trained: pass lora=LoraConfig(...)")
    if order.dtype not in (torch.float16, torch.bfloat16):
        raise Unsupported(f"vLLM packs 16-bit weights, and these would be {order.dtype}: pass dtype=torch.bfloat16")
    if options.setdefault("own_process", False):
        raise Unsupported(
            "vLLM keeps packed weights where no other process can map them: pass engine_options={'own_process': False}"
        )
    return True


def _draw_weights(model: PreTrainedModel) -> None:
    """Random weights as transformers draws them, in place."""
    for module in model.modules():  # which believe that they were initialized when they were empty
        module._is_hf_initialized = False
    model.init_weights()


def _config(model: Checkpoint) -> PretrainedConfig:
    if isinstance(model, PretrainedConfig):
        return model
    return model.config if isinstance(model, PreTrainedModel) else AutoConfig.from_pretrained(os.fspath(model))


def _engine_rank(lora: LoraConfig) -> int:
    """The smallest rank limit of vLLM's that every module of the adapter fits under."""
    rank = max([lora.r, *(lora.rank_pattern or {}).values()])
    return next((limit for limit in (8, 16, 32, 64, 128, 256, 320, 512) if limit >= rank), rank)


def _adapted_modules(config: PretrainedConfig, lora: LoraConfig) -> list[str]:
    """Last names of the modules that PEFT adapts. vLLM holds matrices for no others then, such as the vocabulary's."""
    from peft import inject_adapter_in_model

    model = empty_model(config, dtype=torch.bfloat16, attn_implementation=None)
    settings = copy.deepcopy(lora)
    settings.init_lora_weights = False
    inject_adapter_in_model(settings, model, low_cpu_mem_usage=True)
    return sorted({name.rpartition(".")[2] for name, module in model.named_modules() if "lora_A" in module._modules})


def _tied(model: nn.Module) -> dict[str, str]:
    """Parameters that are others under a second name."""
    first = {id(p): name for name, p in model.named_parameters()}
    names = model.named_parameters(remove_duplicate=False)
    return {name: first[id(p)] for name, p in names if first[id(p)] != name}


@torch.no_grad()
def _copy_weights(source: nn.Module, target: nn.Module) -> None:
    tensors = dict(source.named_parameters())
    for name, parameter in target.named_parameters():
        parameter.copy_(tensors[name])


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
    the weights are copied at every rollout that follows a step. `rt.transport.reason` says which, and why.

    Raises: `PhaseError` when one of the three has a runtime already; `Unsupported` when model and engine are on
    different devices, or the optimizer is not one of the model's; `TransferError` when the model lacks weights that the
    engine needs. Nothing has changed then.
    """
    if not isinstance(engine, Engine):
        from colo.engines.vllm.engine import VLLMEngine

        engine = VLLMEngine.around(engine)
    check_free(model, optimizer, engine)
    _check_optimizer(optimizer, model)
    config = config or RuntimeConfig()
    devices = {p.device for p in model.parameters()}
    if devices != {engine.device}:
        names = ", ".join(sorted(map(str, devices)))
        raise Unsupported(f"the engine is on {engine.device} and the model on {names}: they share one device")
    held_bytes = sum(s.device_bytes for s in engine.segments) + sum(p.nbytes for p in model.parameters())
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


def choose_transport(engine: Engine, model: nn.Module, config: RuntimeConfig) -> Transport:
    """Share memory where every parameter can be the engine's own, and copy, with the reason, where not."""
    source = ModuleSource(model)
    tensors = source.tensors()
    _check_packed(tensors, engine)
    plan = engine.record_plan(tensors)
    why_not = _why_not_shared(plan, tensors, config)
    if why_not is None:
        _move_in(tensors, plan.aliases)
        engine.share_weights()
        return SharedTransport(source, plan.aliases)
    is_elsewhere = isinstance(engine, Peer) and os.getpid() not in engine.pids
    if is_elsewhere and (plan.fallbacks or config.weights is not Weights.AUTO):
        staged = config.weights is Weights.STAGED
        try:
            return IpcTransport(
                source, cast("Peer", engine), why_not_shared=why_not, staged=staged, verify=config.verify
            )
        except Unsupported as error:
            why_not = f"{why_not}; recorded copies will not do ({error})"
    return LocalTransport(source, engine, plan, why_not_shared=why_not)


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
        if isinstance(transport, SharedTransport):
            transport.move_out(engine.device)
        raise


def _check_packed(tensors: Mapping[str, torch.Tensor], engine: Engine) -> None:
    """Raise `Unsupported` for packed weights that are not the engine's memory already: none can be moved there."""
    packed = [name for name, tensor in tensors.items() if is_packed(tensor)]
    engines: Mapping[str, PackedWeight] = getattr(engine, "packed_weights", dict)() if packed else {}
    apart = [n for n in packed if n not in engines or not is_same_memory(tensors[n], engines[n].data)]
    if apart:
        raise Unsupported(
            f"{len(apart)} weights are quantized by bitsandbytes, {apart[0]} for one, and cannot be moved into an "
            "engine or sent to it: load the model in 16 bits, which an adapter (lora=...) leaves as it is, or let "
            "colo.launch(folder, engine='vllm', engine_options={'quantization': 'bitsandbytes'}, lora=...) build both"
        )


def _check_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Raise `Unsupported` for an optimizer without torch's hooks, or one that trains something else."""
    if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        raise Unsupported(
            f"{type(optimizer).__name__} wraps an optimizer without torch's own hooks: share first and prepare after, "
            "or pass the wrapped one (optimizer.optimizer)"
        )
    own = {id(p) for p in model.parameters()}
    foreign = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in own]
    if foreign:
        raise Unsupported(
            f"{len(foreign)} parameters of the optimizer are not the model's, one with shape "
            f"{tuple(foreign[0].shape)}: build the optimizer from this model's parameters"
        )


def _why_not_shared(plan: LoadPlan, tensors: Mapping[str, torch.Tensor], config: RuntimeConfig) -> str | None:
    """Why some parameter is not to be the engine's memory, or `None` when all can be."""
    if config.weights is not Weights.AUTO:
        return f"a copy each was asked for (weights={config.weights.value!r})"
    for name, tensor in tensors.items():
        if name not in plan.aliases:
            copies = [copy for copy in plan.copies if copy.name == name]
            if name in plan.fallbacks:
                return f"{name} cannot be shared: {plan.fallbacks[name]}"
            if not copies:
                return f"{name} cannot be shared: the engine does not load it"
            if copies[0].target.dtype != tensor.dtype:
                return f"{name} cannot be shared: it is {tensor.dtype} here and {copies[0].target.dtype} in the engine"
            return f"{name} cannot be shared: the engine lays it out differently"
    return None


def _move_in(tensors: Mapping[str, torch.Tensor], aliases: Mapping[str, torch.Tensor]) -> None:
    """Make every parameter the engine's memory, with the values it has now. Parameters stay the same objects."""
    with torch.no_grad():
        for name, parameter in tensors.items():
            if not is_same_memory(parameter, aliases[name]):
                aliases[name].copy_(parameter)
                parameter.data = aliases[name]


def _load_checkpoint(model: Checkpoint, dtype: torch.dtype) -> Any:
    """A model with the weights of a checkpoint or random ones, on the host unless it was given."""
    if isinstance(model, PreTrainedModel):
        return model
    if isinstance(model, PretrainedConfig):
        return AutoModelForCausalLM.from_config(model, dtype=dtype)
    return AutoModelForCausalLM.from_pretrained(os.fspath(model), dtype=dtype)


def _tokenizer(model: Checkpoint) -> Any:
    """The checkpoint's tokenizer, or `None` where it has none."""
    if isinstance(model, (PretrainedConfig, PreTrainedModel)):
        return None
    folder = Path(model)
    if folder.is_dir() and not any(folder.glob("tokenizer*")):
        return None
    return AutoTokenizer.from_pretrained(os.fspath(model))


def _device(device: str | torch.device | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    found = torch.device(device)
    if found.type == "cuda" and not torch.cuda.is_available():
        raise Unsupported("device='cuda' was asked for, but torch sees no CUDA device: run `colo doctor`")
    return torch.device("cuda", torch.cuda.current_device()) if str(found) == "cuda" else found


def _capacity(config: RuntimeConfig, device: torch.device, *, held_bytes: int) -> int:
    """Bytes that segments may take: the given limit, or what is free and what they hold already."""
    if config.device_limit_bytes is not None:
        return config.device_limit_bytes - config.device_reserve_bytes
    available_bytes = free_device_bytes(device) + held_bytes
    unplanned = _UNPLANNED_FRACTION if device.type == "cuda" else 0.0
    return int(available_bytes * (1 - unplanned)) - config.device_reserve_bytes


def _weights_bytes(model: Any, *, packed: bool) -> int:
    """Bytes of the parameters, or what they will be with those of the linear layers packed to 4 bits."""
    head = model.get_output_embeddings()
    linears = [m for m in model.modules() if packed and isinstance(m, nn.Linear) and m is not head]
    saved_bytes = sum(m.weight.numel() * (m.weight.element_size() - _PACKED_BYTES) for m in linears)
    return int(sum(p.numel() * p.element_size() for p in model.parameters()) - saved_bytes)


def _default_kv_bytes(model: Any, dtype: torch.dtype, left_bytes: int, device: torch.device) -> int:
    """Room for `DEFAULT_SEQUENCES`, within most of what the weights leave; a CPU is given a GiB at most."""
    text = model.config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    bytes_per_token = int(2 * text.num_hidden_layers * heads * head_dim * dtype.itemsize)
    length = min(DEFAULT_LENGTH, int(text.max_position_embeddings))
    wanted_bytes = DEFAULT_SEQUENCES * length * bytes_per_token
    most_bytes = int(0.9 * left_bytes)
    if device.type != "cuda":
        most_bytes = min(most_bytes, GIB)
    return max(min(wanted_bytes, most_bytes), min(16 * MIB, bytes_per_token * length))


def _admit(weights_bytes: int, kv_cache_bytes: int, capacity_bytes: int) -> None:
    if weights_bytes + kv_cache_bytes > capacity_bytes:
        raise BudgetError(
            f"weights of {format_bytes(weights_bytes)} and a KV cache of {format_bytes(kv_cache_bytes)} do not fit in "
            f"{format_bytes(capacity_bytes)}: pass a smaller kv_cache_bytes, a smaller model, or raise "
            "device_limit_bytes (`colo plan MODEL` shows what fits)",
            needed_bytes=weights_bytes + kv_cache_bytes,
            free_bytes=capacity_bytes,
        )
