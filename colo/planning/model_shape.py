"""The dimensions of a model, read from what transformers builds of its `config.json` on the meta device.

Parameters are exact for every causal language model that transformers knows: what a config leaves out takes
transformers' default, as when the model is loaded. They are told apart by their modules' classes and by words in their
names. Only the text model is counted. Neither torch nor transformers is imported before a config is read.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from colo.errors import Unsupported
from colo.planning import kv_cache
from colo.planning.cards import MODELS, known_config
from colo.planning.kv_cache import LayerCache, decoder_layers, layer_caches
from colo.units import check_digits

CONFIG_FILE = "config.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """The dimensions of a decoder-only language model that decide how many bytes it takes."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int  # of attention; 0 for a model without
    num_kv_heads: int
    head_dim: int
    intermediate_size: int  # of the dense MLP, in layers that have one
    qk_norm: bool = False
    norms_per_layer: int = 2  # over the hidden size, beside those of queries and keys
    num_moe_layers: int = 0
    num_experts: int = 0
    experts_per_token: int = 0
    moe_intermediate_size: int = 0
    shared_intermediate_size: int = 0  # of the experts that every token takes
    mixer_width: int = 0  # widest projection of a recurrent layer
    max_context: int | None = None  # longest sequence the model was made for, where the config says so
    uncounted: tuple[str, ...] = ()  # parts of the config outside the text model, such as vision_config
    groups: tuple[TensorGroup, ...] = ()  # every parameter, by kind and shape
    caches: tuple[LayerCache, ...] = ()

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> ModelShape:
        """Read a Hugging Face `config.json`; of a model with several parts, the text model.

        Raises: `Unsupported` for a type that transformers does not know as a causal language model; `ValueError` for
        a config without `model_type`, with a size that is no positive integer, or from which no model can be built.
        """
        if "model_type" not in config:
            raise ValueError("the model config has no key 'model_type': pass the config.json of a Hugging Face model")
        check_sizes(config)
        text = config.get("text_config")
        check_sizes(text if isinstance(text, Mapping) else {})
        model = build_on_meta(config)
        others = tuple(key for key in ("vision_config", "audio_config") if isinstance(text, Mapping) and key in config)
        return cls.of(model, uncounted=others)

    @classmethod
    def of(cls, model: Any, *, uncounted: tuple[str, ...] = ()) -> ModelShape:
        """Measure a model of transformers, on any device, an adapter with it; `uncounted` names what it leaves out.

        Raises: `Unsupported` where its layers are not known.
        """
        text = model.config.get_text_config(decoder=True)
        unknown = Unsupported(
            f"cannot plan a model of type {text.model_type!r}: colo does not know what its layers cache"
        )
        groups = tensor_groups(model)
        try:
            caches, layers = layer_caches(model), decoder_layers(model)
        except Exception as error:  # whatever comes of modules that are built otherwise than any that are known
            raise unknown from error
        if not caches:
            raise unknown
        attention = [cache for cache in caches if cache.num_heads]
        widths = [mlp_widths(layer, text.hidden_size) for layer in layers]
        experts = [module for module in model.modules() if packed_experts(module)]
        limits = [limit for key in _POSITIONS if isinstance(limit := getattr(text, key, None), int) and limit > 0]
        return cls(
            model_type=text.model_type,
            vocab_size=text.vocab_size,
            hidden_size=text.hidden_size,
            num_layers=len(layers),
            num_heads=text.num_attention_heads if attention else 0,
            num_kv_heads=max((cache.num_heads for cache in attention), default=0),
            head_dim=max((cache.key_size for cache in attention), default=0),
            intermediate_size=max((dense for dense, routed in widths if not routed), default=0),
            qk_norm=any(norms_queries(name) for name, _ in model.named_parameters()),
            norms_per_layer=max((num_norms(layer, text.hidden_size) for layer in layers), default=0),
            num_moe_layers=sum(routed > 0 for _, routed in widths),
            num_experts=max((packed_experts(each)[0].shape[0] for each in experts), default=0),
            experts_per_token=_experts_per_token(text) if experts else 0,
            moe_intermediate_size=max((routed for _, routed in widths), default=0),
            shared_intermediate_size=max((dense for dense, routed in widths if routed), default=0),
            mixer_width=max((group.shape[0] for group in groups if group.module == "mixer"), default=0),
            max_context=min(limits, default=None),
            uncounted=uncounted,
            groups=groups,
            caches=caches,
        )

    @property
    def num_parameters(self) -> int:
        """Parameters of the text model; tied embeddings count once."""
        return sum(group.num_parameters() for group in self.groups)

    @property
    def num_dense_layers(self) -> int:
        """Layers with a dense MLP."""
        return self.num_layers - self.num_moe_layers

    def local_kv_heads(self, tp: int) -> int:
        """Key/value heads that one of `tp` ranks holds; never below one."""
        return max(1, self.num_kv_heads // tp)

    def mlp_widths(self, tp: int = 1) -> tuple[int, int]:
        """Intermediate elements of a token on one of `tp` ranks: in a dense layer, over the experts it is routed to."""
        dense = self.intermediate_size if self.num_dense_layers else 0
        routed = self.experts_per_token * self.moe_intermediate_size if self.num_moe_layers else 0
        return dense // tp, routed // tp

    def kv_bytes(self, context: int, *, tp: int = 1, dtype_bytes: int = 2) -> int:
        """KV cache of one sequence of `context` tokens on one of `tp` ranks (see `colo.planning.kv_cache`)."""
        return kv_cache.kv_bytes(self.caches, context, tp=tp, dtype_bytes=dtype_bytes)

    def weight_bytes(self, *, tp: int = 1, dtype_bytes: int = 2, nf4: bool = False) -> int:
        """The weights on one of `tp` ranks.

        NF4 packs two weights of a linear layer into a byte and keeps an fp32 scale for each block of 64 (Dettmers et
        al. 2023, QLoRA, section 3; without double quantization). transformers leaves packed experts as they are.
        """
        sizes = [(group, prod(group.local_shape(tp))) for group in self.groups]
        packed = sum(g.count * (-(-size // 2) + 4 * -(-size // 64)) for g, size in sizes if nf4 and g.quantizable)
        return packed + sum(g.count * size * dtype_bytes for g, size in sizes if not (nf4 and g.quantizable))

    def adapter_shapes(self, rank: int, *, tp: int = 1) -> list[tuple[tuple[int, ...], int]]:
        """Shape and count of LoRA's A (rank, in) and B (out, rank) on one of `tp` ranks, where PEFT's `all-linear` puts
        them. Packed experts stack theirs along the rank; packed gate and up projections share one of twice the rank.
        """
        shapes: list[tuple[tuple[int, ...], int]] = []
        for group in self.groups:
            if group.rank_factor:
                *stack, size_out, size_in = group.local_shape(tp)
                ranks = rank * group.rank_factor * prod(stack)
                shapes += [((ranks, size_in), group.count), ((size_out, ranks), group.count)]
        return shapes

    def num_adapted(self, *, tp: int = 1) -> int:
        """Elements of the weights on one of `tp` ranks that PEFT's `all-linear` adapts."""
        return sum(prod(group.local_shape(tp)) * group.count for group in self.groups if group.rank_factor)

    def check_tp(self, tp: int) -> None:
        """Raise `ValueError` unless `tp` ranks can share the heads and the widths evenly."""
        sizes = {
            "num_attention_heads": self.num_heads,
            "intermediate_size": self.intermediate_size if self.num_dense_layers else 0,
            "moe_intermediate_size": self.moe_intermediate_size,
        }
        if tp < 1 or self.num_kv_heads == 0 or tp % self.num_kv_heads:  # a multiple of the heads replicates them
            sizes["num_key_value_heads"] = self.num_kv_heads
        for name, size in sizes.items():
            if tp < 1 or size % tp:
                raise ValueError(f"tp {tp} does not divide {name} = {size} of this model: use a divisor of {size}")


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


def _hub_file(model: str, file_name: str, revision: str | None = None) -> str:
    from huggingface_hub import hf_hub_download

    return hf_hub_download(model, file_name, revision=revision)


def load_model_config(
    model: str | os.PathLike[str], *, download: Callable[[str, str], str] = _hub_file
) -> dict[str, object]:
    """Return the `config.json` of a model: a folder that holds one, or a name on the Hugging Face hub.

    Those of `colo.planning.cards.MODELS` come along and are not asked for.
    `download(model, file_name)` returns the path of a file of a hub model; by default through `huggingface_hub`,
    which looks into its cache first.
    Raises: `ValueError` when there is no such folder, model or file, or it holds no JSON object.
    """
    if not isinstance(model, str | os.PathLike):
        raise TypeError(f"a plan is of a folder or a hub id, such as 'Qwen/Qwen3-8B', not of a {type(model).__name__}")
    model = os.fspath(model)
    known = known_config(model)
    if known is not None and not Path(model).expanduser().exists():
        return known
    return read_config(config_file(model, download=download, or_else=f"; known without it: {', '.join(MODELS)}"))


def read_config(path: Path) -> dict[str, object]:
    """Return the object of a `config.json`. Raises: `ValueError` where that is no JSON object."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}): fetch the model's {CONFIG_FILE} again") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds a {type(config).__name__}, not a JSON object: it is no model config")
    return config


def config_file(
    model: str, *, revision: str | None = None, download: Callable[..., str] = _hub_file, or_else: str = ""
) -> Path:
    """The path of a model's `config.json`, `download` as for `load_model_config`.

    Raises: `ValueError` when there is no such folder, model or file; `or_else` ends what it says of the hub.
    """
    folder = Path(model).expanduser()
    if folder.is_file():
        raise ValueError(f"{model} is a file: pass the folder that holds the model's {CONFIG_FILE}")
    if folder.is_dir():
        path = folder / CONFIG_FILE
        if not path.is_file():
            raise ValueError(f"the folder {folder} has no {CONFIG_FILE}: pass the folder of a Hugging Face model")
        return path
    try:
        return Path(download(model, CONFIG_FILE, **({} if revision is None else {"revision": revision})))
    except (OSError, ValueError) as error:  # every error of huggingface_hub for a name, a file, or a network
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(":")
        raise ValueError(
            f"found no folder {model!r} and could not read its {CONFIG_FILE} from the Hugging Face hub ({reason}): "
            f"pass a folder with a {CONFIG_FILE}, or check the name and the network{or_else}"
        ) from error


# ---- what is measured of a model -----------------------------------------------------------------------------------

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
_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "decoder_layers")
_MOST_LAYERS = 1000
"""Each is made, on the meta device, which takes some milliseconds."""
_POSITIONS = ("max_position_embeddings", "max_seq_len", "max_target_positions")  # of MPT, of Whisper's decoder
_NULLABLE = {"num_key_value_heads", "head_dim"}
_NOT_OF_THE_SHAPE = {"model_type", "quantization_config", "auto_map", "architectures", "dtype", "torch_dtype"}


def check_sizes(config: Mapping[str, object]) -> None:
    """Raise `ValueError` for a size that is no positive integer, and for more layers than any model has, by its key."""
    for key in _SIZES:
        value = config.get(key, 1)
        if value is None and key in _NULLABLE:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{key} of the model config must be an integer of at least 1, but is {value!r}")
    for key in _LAYERS:
        if isinstance(value := config.get(key), int) and value > _MOST_LAYERS:
            check_digits(key, value)
            raise ValueError(f"{key} of the model config is {value}, and at most {_MOST_LAYERS} layers can be planned")


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
        words, _, _ = str(error).partition("\nException raised from ")  # and torch's frames
        reason = " ".join(words.split()) or type(error).__name__
        raise ValueError(f"transformers cannot build a {kind} of this model config: {reason}") from error
    raise Unsupported(f"cannot plan a model of type {kind!r}: transformers has no causal language model of it")


def _experts_per_token(config: Any) -> int:
    names = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts", "top_k")
    return int(next((getattr(config, name) for name in names if getattr(config, name, None)), 1))


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
