"""An engine for a model that exists, whose weights wait in host memory: the device never holds them twice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from colo.assembly.arguments import chosen_dtype
from colo.assembly.starting import LaunchRequest, add_lora_options, make_torch_engine, make_vllm_engine
from colo.config import RuntimeConfig
from colo.engine import Engine
from colo.errors import Unsupported
from colo.memory.dtensor import is_dtensor, local_bytes
from colo.memory.offload import Mover
from colo.weights.packed import is_packed
from colo.weights.ranks import RankGroup
from colo.weights.sources.module import ModuleSource
from colo.weights.sources.peft import active_adapter, is_peft_model
from colo.weights.transports.choice import move_in, record_plan, why_not_shared


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
) -> Engine:
    """Start the engine "torch" or "vllm" for a causal language model of transformers, or one with PEFT's adapter.

    Where its memory can be the model's, the weights lie there afterwards, under the same `nn.Parameter` objects.
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
    mover = Mover(device, host_limit_bytes=config.host_limit_bytes, chunk_bytes=config.chunk_bytes)
    with ExitStack() as undo:
        undo.callback(mover.close)
        kv_cache_bytes = request.kv_cache_bytes(base, beside_bytes=_bytes_of_copy(base, request.dtype))
        with _in_host_memory(model), ExitStack() as started:
            engine: Engine
            if kind == "vllm":
                add_lora_options(request, base.config)
                engine = make_vllm_engine(request, mover, kv_cache_bytes)
            else:
                engine = make_torch_engine(base, request, mover, kv_cache_bytes)
            started.callback(engine.close)
            tensors, plan = record_plan(engine, ModuleSource(model))
            if why_not_shared(plan, tensors, config) is None:
                move_in(tensors, plan.aliases)
            started.pop_all()
        undo.pop_all()
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
    for parameter in away:
        parameter.data = parameter.data.to("cpu")
    try:
        yield
    finally:
        for parameter, device in away.items():
            if parameter.device != device:
                parameter.data = parameter.data.to(device)
