"""The dimensions of a model, read from its `config.json`. Imports no torch and no transformers.

Parameter counts are exact for the types in `SUPPORTED`: the tests compare them with what transformers builds. What a
config leaves out takes transformers' default where files on the hub rely on it. Only the text model is counted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path

from colo.errors import Unsupported

CONFIG_FILE = "config.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorGroup:
    """Parameters of one kind: `count` tensors of the same shape."""

    module: str  # embedding, attention, mlp, experts, router, norms or lm_head; a bias belongs to its matrix
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


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """The dimensions of a decoder-only language model that decide how many bytes it takes."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int  # of the dense MLP, in layers that have one
    tied_embeddings: bool  # the LM head is the embedding matrix
    qkv_bias: bool = False
    output_bias: bool = False  # of the attention's output projection
    mlp_bias: bool = False
    qk_norm: bool = False
    norms_per_layer: int = 2  # over the hidden size, beside those of queries and keys
    num_moe_layers: int = 0
    num_experts: int = 0
    experts_per_token: int = 0
    moe_intermediate_size: int = 0
    sliding_layers: int = 0  # layers whose attention, and so whose KV cache, ends `sliding_window` tokens back
    sliding_window: int | None = None
    max_context: int | None = None  # longest sequence the model was made for, where the config says so
    uncounted: tuple[str, ...] = ()  # parts of the config outside the text model, such as vision_config

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> ModelShape:
        """Read a Hugging Face `config.json`, or the `text_config` nested in it.

        Raises: `Unsupported` for another architecture, naming it and those that are supported; `ValueError` for a
        key that is missing or no positive integer, naming the key.
        """
        text = config.get("text_config")
        if not isinstance(text, Mapping):
            return _read_shape(config)
        others = tuple(key for key in ("vision_config", "audio_config") if key in config)
        inherited = {key: config[key] for key in ("model_type", "tie_word_embeddings") if key in config}
        return _read_shape({**inherited, **text}, uncounted=others)

    @property
    def num_parameters(self) -> int:
        """Parameters of the text model; tied embeddings count once."""
        return sum(group.num_parameters() for group in self.tensors())

    @property
    def num_dense_layers(self) -> int:
        """Layers with a dense MLP."""
        return self.num_layers - self.num_moe_layers

    def parameters(self, tp: int = 1) -> dict[str, int]:
        """Parameters by module on one of `tp` ranks."""
        groups = self.tensors()
        modules = dict.fromkeys(group.module for group in groups)
        return {m: sum(group.num_parameters(tp) for group in groups if group.module == m) for m in modules}

    def tensors(self) -> tuple[TensorGroup, ...]:
        """Every parameter of the model, in groups of one kind and shape."""
        groups = (*self._whole(), *self._attention(), *self._mlp(), *self._moe())
        return tuple(group for group in groups if group.count)

    def local_kv_heads(self, tp: int) -> int:
        """Key/value heads that one of `tp` ranks holds; never below one."""
        return max(1, self.num_kv_heads // tp)

    def mlp_widths(self, tp: int = 1) -> tuple[int, int]:
        """Intermediate elements of a token on one of `tp` ranks: in a dense layer, over the experts it is routed to."""
        dense = self.intermediate_size if self.num_dense_layers else 0
        routed = self.experts_per_token * self.moe_intermediate_size if self.num_moe_layers else 0
        return dense // tp, routed // tp

    def kv_bytes(self, context: int, *, tp: int = 1, dtype_bytes: int = 2) -> int:
        """KV cache of one sequence of `context` tokens on one of `tp` ranks.

        Each layer holds a key and a value vector for each head and token; a sliding-window layer only those within
        its window (an engine may hold a prefill chunk more while it reads a prompt, and rounds up to its block size).
        """
        window = context if self.sliding_window is None else min(context, self.sliding_window)
        positions = (self.num_layers - self.sliding_layers) * context + self.sliding_layers * window
        return 2 * self.local_kv_heads(tp) * self.head_dim * dtype_bytes * positions

    def weight_bytes(self, *, tp: int = 1, dtype_bytes: int = 2, nf4: bool = False) -> int:
        """The weights on one of `tp` ranks.

        NF4 packs two weights of a linear layer into a byte and keeps an fp32 scale for each block of 64 (Dettmers et
        al. 2023, QLoRA, section 3; without double quantization). transformers leaves packed experts as they are.
        """
        sizes = [(group, prod(group.local_shape(tp))) for group in self.tensors()]
        packed = sum(g.count * (-(-size // 2) + 4 * -(-size // 64)) for g, size in sizes if nf4 and g.quantizable)
        return packed + sum(g.count * size * dtype_bytes for g, size in sizes if not (nf4 and g.quantizable))

    def adapter_shapes(self, rank: int, *, tp: int = 1) -> list[tuple[tuple[int, ...], int]]:
        """Shape and count of LoRA's A (rank, in) and B (out, rank) on one of `tp` ranks, where PEFT's `all-linear` puts
        them. Packed experts stack theirs along the rank; packed gate and up projections share one of twice the rank.
        """
        shapes: list[tuple[tuple[int, ...], int]] = []
        for group in self.tensors():
            if group.rank_factor:
                *stack, size_out, size_in = group.local_shape(tp)
                ranks = rank * group.rank_factor * prod(stack)
                shapes += [((ranks, size_in), group.count), ((size_out, ranks), group.count)]
        return shapes

    def check_tp(self, tp: int) -> None:
        """Raise `ValueError` unless `tp` ranks can share the heads and the widths evenly."""
        sizes = {"num_attention_heads": self.num_heads}
        sizes |= {"intermediate_size": self.intermediate_size} if self.num_dense_layers else {}
        sizes |= {"moe_intermediate_size": self.moe_intermediate_size} if self.num_moe_layers else {}
        if tp % self.num_kv_heads:  # a multiple of the key/value heads replicates them
            sizes["num_key_value_heads"] = self.num_kv_heads
        for name, size in sizes.items():
            if tp < 1 or size % tp:
                raise ValueError(f"tp {tp} does not divide {name} = {size} of this model: use a divisor of {size}")

    def _whole(self) -> list[TensorGroup]:
        modules = ("embedding",) if self.tied_embeddings else ("embedding", "lm_head")
        vocabulary = [TensorGroup(module=m, shape=(self.vocab_size, self.hidden_size), split_axis=0) for m in modules]
        num_norms = self.norms_per_layer * self.num_layers + 1  # one more after the last layer
        norms = [TensorGroup(module="norms", shape=(self.hidden_size,), count=num_norms)]
        if self.qk_norm:
            norms.append(TensorGroup(module="norms", shape=(self.head_dim,), count=2 * self.num_layers))
        return vocabulary + norms

    def _attention(self) -> list[TensorGroup]:
        hidden, layers, granule = self.hidden_size, self.num_layers, self.head_dim
        q, kv = self.num_heads * granule, self.num_kv_heads * granule
        return [
            *_linear("attention", (q, hidden), layers, split_axis=0, bias=self.qkv_bias),
            *_linear("attention", (kv, hidden), 2 * layers, split_axis=0, bias=self.qkv_bias, granule=granule),
            *_linear("attention", (hidden, q), layers, split_axis=1, bias=self.output_bias),
        ]

    def _mlp(self) -> list[TensorGroup]:
        layers, width, hidden = self.num_dense_layers, self.intermediate_size, self.hidden_size
        return [
            *_linear("mlp", (width, hidden), 2 * layers, split_axis=0, bias=self.mlp_bias),
            *_linear("mlp", (hidden, width), layers, split_axis=1, bias=self.mlp_bias),
        ]

    def _moe(self) -> list[TensorGroup]:
        layers, experts, hidden = self.num_moe_layers, self.num_experts, self.hidden_size
        up, down = (experts, 2 * self.moe_intermediate_size, hidden), (experts, hidden, self.moe_intermediate_size)
        return [
            TensorGroup(module="experts", shape=up, count=layers, split_axis=1, rank_factor=2),
            TensorGroup(module="experts", shape=down, count=layers, split_axis=2, rank_factor=1),
            TensorGroup(module="router", shape=(experts, hidden), count=layers, rank_factor=1),
        ]


def _linear(
    module: str, shape: tuple[int, int], count: int, *, split_axis: int, bias: bool, granule: int = 1
) -> list[TensorGroup]:
    """The weight, and the bias if there is one, of `count` linear layers."""
    split = TensorGroup(module=module, shape=shape, count=count, split_axis=split_axis, granule=granule)
    weight = replace(split, rank_factor=1, quantizable=True)
    # the bias of a row-parallel matrix is added after the reduction, so every rank holds all of it
    bias_axis = 0 if split_axis == 0 else None
    return [weight, replace(split, shape=shape[:1], split_axis=bias_axis)] if bias else [weight]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Family:
    """What the architecture fixes and its config does not say."""

    sliding: str = "none"
    """Which layers have a window: `none`, `all`, `last` (from `max_window_layers`), `pattern` (all but each n-th)."""

    window_switch: bool = False  # the window counts only where the config sets `use_sliding_window`
    qkv_bias: bool | None = None  # `None`: the config's `attention_bias` decides, also for the output projection
    mlp_bias: bool = False  # whether the config's key of that name counts
    qk_norm: bool = False
    norms_per_layer: int = 2
    experts: bool = False
    defaults: Mapping[str, object] = field(default_factory=dict)
    """What files on the hub leave out because transformers' config class supplies it."""


_GEMMA3_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
_GEMMA3_SIZES = {"vocab_size": 262_208, "max_position_embeddings": 131_072, "tie_word_embeddings": True}
_GEMMA3 = _Family(sliding="pattern", qk_norm=True, norms_per_layer=4, defaults={**_GEMMA3_HEADS, **_GEMMA3_SIZES})
_FAMILIES: Mapping[str, _Family] = {
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "llama": _Family(mlp_bias=True, defaults={"num_key_value_heads": None}),
    "mistral": _Family(sliding="all", qkv_bias=False),
    "qwen2": _Family(sliding="last", window_switch=True, qkv_bias=True),
    "qwen3": _Family(sliding="last", window_switch=True, qk_norm=True, defaults={"head_dim": 128}),
    "qwen3_moe": _Family(sliding="all", window_switch=True, qk_norm=True, experts=True),
}
SUPPORTED = tuple(_FAMILIES)


def _read_shape(config: Mapping[str, object], uncounted: tuple[str, ...] = ()) -> ModelShape:
    if "model_type" not in config:
        raise ValueError("the model config has no key 'model_type': pass the config.json of a Hugging Face model")
    family = _FAMILIES.get(str(config["model_type"]))
    if family is None:
        supported = ", ".join(SUPPORTED)
        raise Unsupported(f"cannot plan a model of type {config['model_type']!r}: supported types are {supported}")
    config = {**family.defaults, **config}
    heads, hidden = _integer(config, "num_attention_heads"), _integer(config, "hidden_size")
    layers = _integer(config, "num_hidden_layers")
    window = _window(config, family)
    bias = bool(config.get("attention_bias", False))
    return ModelShape(
        model_type=str(config["model_type"]),
        vocab_size=_integer(config, "vocab_size"),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=_integer(config, "num_key_value_heads", null=heads),
        head_dim=_integer({"head_dim": None, **config}, "head_dim", null=hidden // heads),
        intermediate_size=_integer(config, "intermediate_size"),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=bias if family.qkv_bias is None else family.qkv_bias,
        output_bias=bias if family.qkv_bias is None else False,
        mlp_bias=family.mlp_bias and bool(config.get("mlp_bias", False)),
        qk_norm=family.qk_norm,
        norms_per_layer=family.norms_per_layer,
        sliding_layers=0 if window is None else _num_sliding(config, family, layers),
        sliding_window=window,
        max_context=_integer(config, "max_position_embeddings") if "max_position_embeddings" in config else None,
        uncounted=uncounted,
        **(_experts(config, layers) if family.experts else {}),
    )


def _integer(config: Mapping[str, object], key: str, *, least: int = 1, null: int | None = None) -> int:
    """The integer at `key`; `null` stands for an explicit null where it is given."""
    if key not in config:
        raise ValueError(f"the model config has no key {key!r}: pass the complete config.json of the model")
    value = config[key]
    if value is None and null is not None:
        return null
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{key} of the model config must be an integer of at least {least}, but is {value!r}")
    return value


def _window(config: Mapping[str, object], family: _Family) -> int | None:
    off = family.sliding == "none" or (family.window_switch and not config.get("use_sliding_window", False))
    config = {"sliding_window": 4096, **config}  # the default of every family that has windows
    return None if off or config["sliding_window"] is None else _integer(config, "sliding_window")


def _num_sliding(config: Mapping[str, object], family: _Family, layers: int) -> int:
    if family.sliding == "all":
        return layers
    kinds = config.get("layer_types")
    if isinstance(kinds, Sequence):
        return sum(kind == "sliding_attention" for kind in kinds)
    if family.sliding == "last":
        return max(0, layers - _integer({"max_window_layers": 28, **config}, "max_window_layers", least=0))
    every = _integer({"sliding_window_pattern": 6, **config}, "sliding_window_pattern")
    return layers - layers // every


def _experts(config: Mapping[str, object], layers: int) -> dict[str, int]:
    step = _integer({"decoder_sparse_step": 1, **config}, "decoder_sparse_step")
    listed = config.get("mlp_only_layers")
    dense = listed if isinstance(listed, Sequence) else ()
    return {
        "num_moe_layers": sum((i + 1) % step == 0 and i not in dense for i in range(layers)),
        "num_experts": _integer(config, "num_experts" if "num_experts" in config else "num_local_experts"),
        "experts_per_token": _integer(config, "num_experts_per_tok"),
        "moe_intermediate_size": _integer(config, "moe_intermediate_size"),
    }


def _hub_file(model: str, file_name: str) -> str:
    from huggingface_hub import hf_hub_download

    return hf_hub_download(model, file_name)


def load_model_config(model: str, *, download: Callable[[str, str], str] = _hub_file) -> dict[str, object]:
    """The `config.json` of a model: a folder that holds one, or the name of a model on the Hugging Face hub.

    `download(model, file_name)` returns the path of a file of a hub model; by default through `huggingface_hub`,
    which looks into its cache first.
    Raises: `ValueError` when there is no such folder, model or file, or it holds no JSON object.
    """
    folder = Path(model).expanduser()
    if folder.is_file():
        raise ValueError(f"{model} is a file: pass the folder that holds the model's {CONFIG_FILE}")
    path = folder / CONFIG_FILE if folder.is_dir() else _fetch(model, download)
    if not path.is_file():
        raise ValueError(f"the folder {folder} has no {CONFIG_FILE}: pass the folder of a Hugging Face model")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}): fetch the model's {CONFIG_FILE} again") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds a {type(config).__name__}, not a JSON object: it is no model config")
    return config


def _fetch(model: str, download: Callable[[str, str], str]) -> Path:
    try:
        return Path(download(model, CONFIG_FILE))
    except (OSError, ValueError) as error:  # every error of huggingface_hub for a name, a file, or a network
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"found no folder {model!r} and could not read its {CONFIG_FILE} from the Hugging Face hub ({reason}): "
            f"pass a folder with a {CONFIG_FILE}, or check the name and the network"
        ) from error
