"""Models as transformers builds them from a config, on the meta device, and their parameters in groups.

Works for every architecture: parameters are told apart by their modules' classes and by words in their names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from colo.errors import Unsupported


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorGroup:
    """Parameters of one kind: `count` tensors of the same shape."""

    module: str  # embedding, attention, mixer, mlp, experts, router, norms or lm_head; a bias belongs to its matrix
    shape: tuple[int, ...]  # as torch stores it: (out, in), (experts, out, in) for packed experts, (size,) for vectors
    count: int = 1
    split_axis: int | None = None  # the axis that tensor parallelism cuts; None is held whole by every rank
    granule: int = 1  # the least along that axis: a key/value head is replicated rather than cut
    rank_factor: int = 0  # rank of a LoRA adapter in units of the configured rank; 0 is not adapted
    quantizable: bool = False  # the weight of a torch.nn.Linear in a layer: what bitsandbytes packs to 4 bits

    def local_shape(self, tp: int) -> tuple[int, ...]:
        """The shape that one of `tp` ranks holds."""
        if self.split_axis is None:
            return self.shape
        size = max(self.granule, -(-self.shape[self.split_axis] // tp))
        return (*self.shape[: self.split_axis], size, *self.shape[self.split_axis + 1 :])

    def num_parameters(self, tp: int = 1) -> int:
        """Elements of all `count` tensors on one of `tp` ranks."""
        return self.count * prod(self.local_shape(tp))


_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "max_position_embeddings",
)
_NULLABLE = {"num_key_value_heads", "head_dim"}
_NOT_OF_THE_SHAPE = {"model_type", "quantization_config", "auto_map", "architectures", "dtype", "torch_dtype"}


def check_sizes(config: Mapping[str, object]) -> None:
    """Raise `ValueError` for a size that is no positive integer, naming its key."""
    for key in _SIZES:
        value = config.get(key, 1)
        if value is None and key in _NULLABLE:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{key} of the model config must be an integer of at least 1, but is {value!r}")


def build_on_meta(config: Mapping[str, object]) -> Any:
    """The model on the meta device. Of a model with several parts only the text model, where transformers can."""
    import torch
    import transformers

    kind = str(config["model_type"])
    if kind not in transformers.CONFIG_MAPPING:
        version = transformers.__version__
        raise Unsupported(f"cannot plan a model of type {kind!r}: transformers {version} does not know it")
    try:
        whole = transformers.AutoConfig.for_model(kind, **{k: config[k] for k in config if k not in _NOT_OF_THE_SHAPE})
        text = whole.get_text_config(decoder=True)
        if text is not whole and "tie_word_embeddings" in config:
            text.tie_word_embeddings = config["tie_word_embeddings"]
        pairs = ((transformers.AutoModelForCausalLM, text), (transformers.AutoModelForImageTextToText, whole))
        with torch.device("meta"):
            for auto, found in pairs:
                if type(found) in auto._model_mapping:
                    return auto.from_config(found)
    except Exception as error:  # whatever transformers makes of values that do not go together
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"transformers cannot build a {kind} of this model config: {reason}") from error
    raise Unsupported(f"cannot plan a model of type {kind!r}: transformers has no causal language model of it")


def packed_experts(module: Any) -> list[Any]:
    """The matrices of all experts of a layer, (experts, out, in) or (experts, in, out)."""
    from torch import nn

    if isinstance(module, nn.Conv1d):
        return []
    return [parameter for parameter in module.parameters(recurse=False) if parameter.dim() == 3]


def mlp_widths(layer: Any, hidden_size: int) -> tuple[int, int]:
    """Intermediate elements of a layer's dense MLP, and of one of its experts."""
    dense = routed = 0
    for name, module in layer.named_modules():
        inner, outer = _sizes_of(module)
        if outer == hidden_size and _role(name) == "mlp":
            dense = max(dense, inner)
        for matrix in packed_experts(module):
            sizes = list(matrix.shape[1:])
            if hidden_size in sizes:
                sizes.remove(hidden_size)
                routed = min(routed or sizes[0], sizes[0])  # the other matrix holds gate and up projections
    return dense, routed


def _sizes_of(module: Any) -> tuple[int, int]:
    """Inputs and outputs of a linear layer, GPT-2's own kind included; zeros of another module."""
    from torch import nn

    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    return (module.nx, module.nf) if hasattr(module, "nf") else (0, 0)


def num_norms(layer: Any, hidden_size: int) -> int:
    """Norms over the hidden size."""
    weights = [(name, p) for name, p in layer.named_parameters() if name.endswith("weight")]
    return sum(_role(name) == "norms" and p.numel() == hidden_size for name, p in weights)


def norms_queries(name: str) -> bool:
    """True for a parameter of a norm within an attention module."""
    *path, _ = name.split(".")
    inside = [index for index, part in enumerate(path) if "attn" in part and "norm" not in part]
    return bool(inside) and "norm" in path[-1]


def _role(name: str) -> str:
    """The kind of module that a parameter or submodule of a layer belongs to, by its name."""
    words = name.lower()
    if "norm" in words or {"ln_1", "ln_2", "ln_f"} & set(words.split(".")):
        return "norms"
    if any(word in words for word in ("linear_attn", "mixer", "mamba", "conv")):
        return "mixer"
    return "attention" if any(word in words for word in ("attn", "attention")) else "mlp"


def tensor_groups(model: Any) -> tuple[TensorGroup, ...]:
    """The parameters of the text model, counted by kind and shape."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    owners = {id(p): module for module in model.modules() for p in module.parameters(recurse=False)}
    vocabulary = {id(p): "lm_head" for p in (head.parameters() if head is not None else ())}
    vocabulary |= {id(p): "embedding" for p in embedding.parameters()}  # also where the head is tied to it
    counted = vocabulary.keys() | {id(p) for p in model.get_decoder().parameters()}
    plan = {key.removeprefix("model."): style for key, style in (getattr(model, "_tp_plan", None) or {}).items()}
    counts: Counter[TensorGroup] = Counter()
    for name, parameter in model.named_parameters():
        if id(parameter) in vocabulary:
            shape = tuple(parameter.shape)
            counts[TensorGroup(module=vocabulary[id(parameter)], shape=shape, split_axis=0)] += 1
        elif id(parameter) in counted:
            counts[_group(model, name, parameter, owners[id(parameter)], plan)] += 1
    return tuple(replace(group, count=count) for group, count in counts.items())


def _group(model: Any, name: str, parameter: Any, owner: Any, plan: Mapping[str, str]) -> TensorGroup:
    from torch import nn

    shape, role, is_matrix = tuple(parameter.shape), _role(name), parameter.dim() == 2 and any(_sizes_of(owner))
    packed = packed_experts(owner)
    is_packed = any(parameter is matrix for matrix in packed)
    if packed:
        role = "experts"
    elif isinstance(owner, nn.Embedding):
        role = "embedding"
    elif parameter.dim() == 2 and role == "mlp" and not is_matrix:
        role = "router"
    is_adapted = is_matrix or is_packed or role == "router"
    axis = _split_axis(name, shape, plan)
    return TensorGroup(
        module=role,
        shape=shape,
        split_axis=axis,
        granule=_granule(model, name) if axis == 0 else 1,
        rank_factor=is_adapted * (2 if is_packed and "gate_up" in name else 1),
        quantizable=is_matrix,
    )


def _split_axis(name: str, shape: tuple[int, ...], plan: Mapping[str, str]) -> int | None:
    """The axis that transformers' tensor-parallel plan cuts; `None` for parameters that every rank holds whole."""
    key = ".".join("*" if part.isdigit() else part for part in name.removeprefix("model.").split("."))
    style = plan.get(key) or plan.get(key.rpartition(".")[0]) or ""
    if "colwise" in style:
        return max(0, len(shape) - 2)
    # the bias of a row-parallel matrix is added after the reduction, so every rank holds all of it
    return len(shape) - 1 if "rowwise" in style and len(shape) > 1 else None


def _granule(model: Any, name: str) -> int:
    """Elements that stay together as a parameter is cut: a head, of keys and values."""
    *path, projection, _ = name.split(".")
    return getattr(model.get_submodule(".".join(path)), "head_dim", 1) if projection in ("k_proj", "v_proj") else 1
