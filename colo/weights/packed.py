"""Linear layers whose weights bitsandbytes has packed to 4 bits: a trainer's, over an engine's memory.

Packed weights stay as they are for the whole run, under an adapter that is trained. What says how to unpack them, a
scale for each block, is part of the layer and not of its parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from colo.errors import Unsupported
from colo.memory.storage import with_own_storage

BITSANDBYTES = "bitsandbytes"
"""Name that transformers and vLLM have for what packs weights to 4 bits."""

_KINDS = ("Params4bit", "Int8Params")  # parameters of bitsandbytes


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedWeight:
    """The weight of one linear layer as an engine holds it."""

    data: torch.Tensor
    """Two elements a byte (uint8, shape [num_elements / 2, 1]): a view of the engine's memory."""

    quant_state: Any  # bitsandbytes' `QuantState`, with the scales not packed themselves. Not to be modified.


def is_packed(parameter: torch.Tensor) -> bool:
    """True if bitsandbytes has packed it. Does not import bitsandbytes."""
    return type(parameter).__name__ in _KINDS


def method_of(config: Any) -> str | None:
    """Name the method that a checkpoint's weights are quantized by, from its config or the mapping in `config.json`.

    `None` for weights that are whole.
    """
    # multimodal models keep the text model's own; `compression_config` is of compressed-tensors
    parts = (config, _field(config, "text_config"))
    places = [_field(part, name) for name in ("quantization_config", "compression_config") for part in parts]
    found = next(filter(None, places), None)
    if found is None:
        return None
    method = _field(found, "quant_method")
    name = str(getattr(method, "value", method) or "by a method without a name")
    return f"{name} in 8 bits" if name == BITSANDBYTES and _field(found, "load_in_8bit") else name


def _field(record: Any, name: str) -> Any:
    return record.get(name) if isinstance(record, Mapping) else getattr(record, name, None)


def refuse_quantized(config: Any) -> None:
    """Raise `Unsupported` for a checkpoint of quantized weights: an engine's would not be the trainer's."""
    method = method_of(config)
    if method == BITSANDBYTES:
        raise Unsupported(
            "weights that bitsandbytes packs can be shared with vLLM alone, in 4 bits: engine='vllm', and a folder or "
            "a hub id"
        )
    if method is not None:
        raise Unsupported(
            f"an engine samples from weights as they are trained, and these are quantized ({method}): give a "
            "checkpoint from before that, or, where they are not, a config without quantization_config"
        )


def pack(model: nn.Module, weights: Mapping[str, PackedWeight], *, compute_dtype: torch.dtype) -> None:
    """Replace linear layers of `model` by bitsandbytes' own, over the memory of `weights` (by parameter name).

    PEFT then trains adapters as of a model in 4 bits. `Unsupported`, and nothing changed, for a weight that fits no
    layer.
    """
    if not weights:
        return
    from bitsandbytes.nn import Linear4bit, Params4bit

    # all are found before the first is replaced, since a weight may fit none
    layers = {name: _layer(model, name, weight) for name, weight in weights.items()}
    for name, weight in weights.items():
        linear, state = layers[name], copy.copy(weight.quant_state)  # of which `.to(device)` changes the fields
        packed = Linear4bit(
            linear.in_features,
            linear.out_features,
            bias=False,
            compute_dtype=compute_dtype,
            compress_statistics=False,
            quant_type=state.quant_type,
            # its own weight would take memory, and is replaced below
            device="meta",
        )
        packed.weight = Params4bit(
            with_own_storage(weight.data),
            requires_grad=False,
            quant_state=state,
            blocksize=state.blocksize,
            compress_statistics=False,
            quant_type=state.quant_type,
            bnb_quantized=True,
            module=packed,
        )
        packed.bias = linear.bias
        packed.quant_state = state
        packed.support_avx512bf16_for_cpu = False  # in evaluation it would lay the weights out anew, in place
        owner, _, leaf = name.removesuffix(".weight").rpartition(".")
        setattr(model.get_submodule(owner), leaf, packed.train(linear.training))
    # PEFT knows by this what transformers has quantized
    model.is_loaded_in_4bit = True  # type: ignore[assignment]


def _layer(model: nn.Module, name: str, weight: PackedWeight) -> nn.Linear:
    try:
        layer = model.get_submodule(name.removesuffix(".weight"))
    except AttributeError:
        layer = None
    shape = tuple(weight.quant_state.shape)
    if not isinstance(layer, nn.Linear) or (layer.out_features, layer.in_features) != shape:
        found = "has no such layer" if layer is None else f"has {layer}"
        raise Unsupported(f"the engine packs {name}, of shape {shape}, and the model {found}")
    return layer
