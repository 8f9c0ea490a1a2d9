"""Parameters as vLLM has them: padding, names, layouts of its kernels, parts that it leaves out."""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from colo.weights.sources.module import saved_buffers


def keep_weights_plain(model: nn.Module) -> None:
    """On a CPU, keep linear and embedding weights as loaded, where vLLM would pack copies of them for its kernels.

    Through vLLM's own attributes of a layer: `skip_weight_relayout` (0.30), which is called `_cpu_skip_gemm_dispatch`
    from 0.32 on, and `quant_method`.

    vLLM: 0.30 for CPUs; 0.32 calls the attribute `_cpu_skip_gemm_dispatch`; no ticket. Delete when an option does it.
    """
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return

    class PlainEmbeddingMethod(UnquantizedEmbeddingMethod):  # type: ignore[misc]  # vLLM is untyped here
        """An embedding whose weight is used as it is."""

        def process_weights_after_loading(self, layer: Any) -> None:
            """Compute with torch's own matrix product."""
            layer.cpu_linear = torch.nn.functional.linear

    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedLinearMethod):
            for name in ("skip_weight_relayout", "_cpu_skip_gemm_dispatch"):
                setattr(module, name, True)  # not as an attribute, which is typed as a tensor
        elif type(method) is UnquantizedEmbeddingMethod:
            module.quant_method = PlainEmbeddingMethod()


def renamer(model: nn.Module) -> Callable[[str], str]:
    """Return a function from a checkpoint's names to those that `model.load_weights` wants.

    With LoRA enabled, 0.26 wants the names of wrapped layers with `.base_layer` in them; 0.30 takes them as they are.

    vLLM: 0.26, until PR #39935 (in 0.30). Delete with 0.26.
    """
    from vllm.lora.layers import BaseLayerWithLoRA

    if hasattr(BaseLayerWithLoRA, "load_weights"):
        return lambda name: name
    packed: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", None) or {}
    wrapped: set[str] = set()
    for name, module in model.named_modules():
        if isinstance(module, BaseLayerWithLoRA) and hasattr(module, "base_layer"):
            parent, _, own = name.rpartition(".")
            wrapped |= {f"{parent}.{part}" for part in packed.get(own, [own])}

    def rename(name: str) -> str:
        module, _, parameter = name.rpartition(".")
        return f"{module}.base_layer.{parameter}" if module in wrapped else name

    return rename


def unpadded_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter once, without the rows of vocabulary padding that no checkpoint fills.

    Left out are parameters that are parts of others, such as the matrices of multi-head latent attention (0.26).

    vLLM: Every version, for vocabulary padding; the parts of latent attention are parameters in 0.26. Stays.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    rows = {
        id(module.weight): module.shard_indices.num_org_elements
        for module in model.modules()
        if isinstance(module, VocabParallelEmbedding) and hasattr(module, "weight")
    }
    whole = _Ranges(model)
    return {
        name: parameter.detach().narrow(0, 0, rows[id(parameter)]) if id(parameter) in rows else parameter.detach()
        for name, parameter in model.named_parameters()
        if parameter.numel() and not whole.have_as_part(parameter)
    }


def unused(model: nn.Module, names: Iterable[str]) -> frozenset[str]:
    """Return the `names` of weights in parts that vLLM has left out because the model takes texts alone.

    vLLM: Every version. Delete when vLLM says which parts of a checkpoint it leaves out.
    """
    parts = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if type(module).__name__ == "StageMissingLayer"
    }
    return frozenset(name for name in names if parts.intersection(name.split("."))) if parts else frozenset()


def loadable_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Buffers that a checkpoint may fill, not those that vLLM keeps for itself under names that begin with `_`.

    vLLM: Every version. Stays: the names are a convention of vLLM's.
    """
    for name, buffer in saved_buffers(model):
        if not name.rpartition(".")[2].startswith("_"):
            yield name, buffer


class _Ranges:
    """The memory of a model's contiguous parameters."""

    def __init__(self, model: nn.Module) -> None:
        found = (p.detach() for p in model.parameters() if p.numel() and p.is_contiguous())
        ranges = sorted((t.data_ptr(), -t.data_ptr() - t.numel() * t.element_size()) for t in found)  # longest first
        self._ranges: list[tuple[int, int]] = []
        for first, last in ((first, -last) for first, last in ranges):
            if not self._ranges or last > self._ranges[-1][1]:  # else a part of the one before
                self._ranges.append((first, last))

    def have(self, tensor: torch.Tensor) -> bool:
        """True if a tensor is one of them, or a part of one."""
        return self._holding(tensor) is not None

    def have_as_part(self, tensor: torch.Tensor) -> bool:
        """True if a tensor is a part of one, or a permutation of its elements."""
        own = (tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size())
        return self._holding(tensor) not in ((None, own) if tensor.is_contiguous() else (None,))

    def _holding(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        start = tensor.data_ptr()
        reach = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        index = bisect_right(self._ranges, (start, sys.maxsize)) - 1
        first, last = self._ranges[index] if index >= 0 else (0, 0)
        return (first, last) if start + reach * tensor.element_size() <= last else None


_PLAIN_METHODS = {"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"}

_PLAIN_MOE_BACKENDS = {"TRITON", "BATCHED_TRITON"}

_NO_WEIGHTS = {"kv_cache", "_k_scale_cache", "_v_scale_cache", "_nvfp4_fp8_out", "alibi_slopes"}
"""Tensors of attention layers that are not derived from weights."""


def reworked_weights(model: nn.Module) -> str | None:
    """Find weights of a loaded model that may not be what its loader wrote, or not all; `None` without any.

    On a GPU vLLM's post-processing leaves dense layers alone, but lays experts out anew for some kernels (FlashInfer's,
    the usual ones on Blackwell) and derives matrices from others (multi-head latent attention). What is not known to be
    left alone counts as changed.

    vLLM: Every version. Delete when vLLM says whether post-processing has changed what was loaded.
    """
    whole = _Ranges(model)
    for name, module in model.named_modules():
        method: Any = getattr(module, "quant_method", None)
        method = getattr(method, "old_quant_method", method)  # what a kernel that takes adapters is wrapped around
        kind = type(method).__name__
        backend = getattr(method, "unquantized_backend", None)
        if not (method is None or kind in _PLAIN_METHODS or getattr(backend, "name", None) in _PLAIN_MOE_BACKENDS):
            return f"{kind} lays weights out for its kernels ({name})"
        if not hasattr(module, "process_weights_after_loading"):
            continue
        made = [key for key, p in module.named_parameters(recurse=False) if not whole.have_as_part(p)]
        kept = [*vars(module).items(), *implementation_tensors(module)]
        kept = [(key, t) for key, t in kept if isinstance(t, torch.Tensor) and key not in _NO_WEIGHTS]
        if derived := made + [key for key, t in kept if t.numel() > 1 and not whole.have(t)]:
            return f"{type(module).__name__} keeps {derived[0]}, which is derived from weights ({name})"
    return None


def implementation_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of an attention layer's backend, which is no module itself.

    vLLM: Every version: backends are no modules. Stays.
    """
    for name, value in getattr(getattr(module, "impl", None), "__dict__", {}).items():
        if isinstance(value, torch.Tensor):
            yield name, value
