"""vLLM's layerwise reload, and the notes that it keeps of layers (`LAYERWISE_INFO`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


def before_reload(model: nn.Module) -> None:
    """On a CPU, let a layerwise reload pack experts again, which vLLM does only while it has no kernel for them.

    vLLM: 0.30 for CPUs; no ticket. Delete when a reload there packs experts again by itself.
    """
    from vllm.platforms import current_platform

    for module in model.modules() if current_platform.is_cpu() else ():
        method = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            setattr(method, "moe_kernel", None)  # noqa: B010 - untyped


def after_reload(model: nn.Module) -> None:
    """On a CPU, pack again what a layerwise reload skips: an output layer that is the embedding has nothing loaded.

    vLLM: 0.30 for CPUs; no ticket. Delete when a reload there processes tied output layers.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if hasattr(module, "cpu_linear") and type(method) is UnquantizedEmbeddingMethod:
            method.process_weights_after_loading(module)


def forget_reloads(model: nn.Module) -> None:
    """Drop the notes of layerwise reloads on a model: vLLM is about to end.

    vLLM (0.26, 0.30) keeps it by layer, weakly, but the notes hold loaders that hold the layers: neither ever goes.

    vLLM: 0.26 to 0.30; no ticket. Delete when `LAYERWISE_INFO` lets go of its layers.
    """
    from vllm.model_executor.model_loader.reload import layerwise

    notes: Any = getattr(layerwise, "LAYERWISE_INFO", {})
    for module in model.modules():
        notes.pop(module, None)


def unloaded_layers(model: nn.Module) -> list[str]:
    """Names of layers that a layerwise reload, about to be finished, has not loaded in full.

    Some layers got nothing: vLLM warns of them and puts back what they held before. Not named are layers that use
    another layer's weights, such as a tied output layer, and norms that a model does not use (Gemma 3n in 0.26).
    Other layers lack a part, such as one of a fused matrix. vLLM takes it for padding and would process whatever the
    new memory holds, so it is told that nothing was loaded.

    vLLM: 0.26 to 0.30; RFC #54477 is near. Delete when a reload refuses to finish while layers lack weights.
    """
    from vllm.model_executor.model_loader.reload import layerwise

    notes: Any = getattr(layerwise, "LAYERWISE_INFO", {})
    waiting: dict[str, list[torch.Tensor]] = {}
    held: set[int] = set()
    partial: list[str] = []
    unused = {id(part) for module in model.modules() for part in _parts_without_kv(module)}
    for name, module in model.named_modules():
        info = notes.get(module)
        if info is None or info.kernel_tensors is None:  # brought and processed, or never to be
            held |= {p.data_ptr() for p in module.parameters(recurse=False) if p.numel()}
        elif info.load_numel > 0:  # but for padding
            held |= {t.data_ptr() for t in info.kernel_tensors[0].values() if t.numel()}
            if id(module) not in unused and (lacking := list(_lacking_parts(module, info))):
                partial += [f"{name}.{part}" for part in lacking]
                _forget_loaded(info)
        elif any(t.dim() > 1 or (t.dim() and kind != "weight") for kind, t in info.restore_metadata[0].items()):
            waiting[name] = list(info.kernel_tensors[0].values())
    return partial + [name for name, tensors in waiting.items() if not all(t.data_ptr() in held for t in tensors)]


def forget_loaded(model: nn.Module) -> None:
    """Reset a failed layerwise reload, so that ending it puts back layers that it has not processed.

    vLLM: 0.26 to 0.30; no ticket. Delete when a reload can be given up.
    """
    from vllm.model_executor.model_loader.reload import layerwise

    notes: Any = getattr(layerwise, "LAYERWISE_INFO", {})
    for module in model.modules():
        if (info := notes.get(module)) is not None and info.kernel_tensors is not None:
            _forget_loaded(info)


def _forget_loaded(info: Any) -> None:
    info.loaded_weights.clear()
    info.load_numel = 0


def _parts_without_kv(attention: nn.Module) -> Iterator[nn.Module]:
    """The projection of an attention that uses the keys and values of another layer: its own need not be there."""
    if getattr(getattr(attention, "attn", None), "kv_sharing_target_layer_name", None) is not None:
        yield from getattr(attention, "qkv_proj", nn.Module()).modules()


def _lacking_parts(module: nn.Module, info: Any) -> Iterator[str]:
    """Yield parameters of a layer that a reload has not filled: empty ones, and fused ones that lack a part."""
    given: dict[str, set[tuple[Any, Any]]] = {}
    for name, call in info.loaded_weights:
        arguments = call.arguments
        part = arguments.get("loaded_shard_id", arguments.get("shard_id"))
        for one in part if isinstance(part, tuple) else (part,):
            given.setdefault(name, set()).add((arguments.get("expert_id"), one))
    for name, tensor in info.restore_metadata[0].items():
        if name not in given:
            if tensor.dim() > 1 or name == "bias":
                yield name
            continue
        experts, parts = ({key[i] for key in given[name]} for i in (0, 1))
        if None in parts:
            continue  # given whole
        if experts == {None}:
            num_wanted = len(getattr(module, "output_sizes", parts))
        else:
            num_experts = max(len(experts), int(getattr(module, "global_num_experts", 0)))
            num_wanted = num_experts * (2 if name.startswith("w13") else 1)
        if len(given[name]) < num_wanted:
            yield f"{name} ({len(given[name])} of {num_wanted} parts)"
