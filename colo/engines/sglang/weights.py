"""Weights as SGLang's servers take, name and sum them: buckets, the engine's own parameters, their checksums.

A server takes Hugging Face names and fuses some into parameters of its own. It believes whatever it is sent: a name
that it does not know is passed over in silence, a wrong shape ends its process or is copied as far as it goes. So names
and shapes are checked here first, and what it holds afterwards is compared by the checksums of its `weights_checker`.

The server unpickles data alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from colo.engine import AdapterWeights
from colo.engines.buckets import Slab, bytes_of, described, pack
from colo.engines.server import Outline
from colo.engines.sglang.server import LORA_FLAGS
from colo.errors import TransferError, Unsupported
from colo.memory.specs import TensorSpec
from colo.weights.sources.module import OUTPUT_LAYER

FUSED: Mapping[str, Sequence[str]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Modules of the engine that are several of Hugging Face's, one after another along the first dimension."""

ADAPTED = frozenset(part for parts in FUSED.values() for part in parts) | {"o_proj", "down_proj"}
"""Modules that a server applies adapters to, when it is told to take all."""

_PADDED = ("embed_tokens.weight", OUTPUT_LAYER)
_ROWS = 64  # vocabularies are padded with zeros to a multiple of it
_BASE = ".base_layer."  # in names of modules that take adapters

_WORD, _MASK = 0xFFFFFFFF, (1 << 64) - 1


# ---- what the engine has -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EngineLayout(Outline):
    """Parameters of an engine, each with the names of the weights that it is made of."""

    parts: Mapping[str, tuple[str, ...]]  # names of the weights in each of the engine's parameters

    @classmethod
    def of(cls, specs: Iterable[TensorSpec], parameters: Iterable[str]) -> EngineLayout:
        """Find the weights in each parameter. Raises: `Unsupported` for a model that SGLang lays out otherwise."""
        by_name = {spec.name: spec for spec in specs}
        parts = {name: _parts_of(name.replace(_BASE, "."), by_name) for name in parameters}
        unknown = [name for name, of in parts.items() if not set(of) <= by_name.keys()]
        left = by_name.keys() - {part for of in parts.values() for part in of}
        if unknown or left:
            name = (unknown or sorted(left))[0]
            raise Unsupported(
                f"the server's model is laid out in a way that colo does not know ({name}, {len(unknown) + len(left)} "
                "in all): dense models whose parts of attention and MLP SGLang fuses, or leaves alone, can be trained"
            )
        return cls(by_name, parts)


def _parts_of(parameter: str, known: Mapping[str, TensorSpec]) -> tuple[str, ...]:
    """Weights in a parameter; one that has its name is the whole of it."""
    for fused, parts in FUSED.items():
        if parameter not in known and f".{fused}." in parameter:
            return tuple(parameter.replace(f".{fused}.", f".{part}.") for part in parts)
    return (parameter,)


# ---- checksums -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Expected:
    """Checksums that the engine's parameters have to have, added up while weights pass in any order."""

    layout: EngineLayout
    sums: dict[str, str] = field(default_factory=dict)
    _waiting: dict[str, torch.Tensor] = field(default_factory=dict)
    _owners: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._owners = {part: name for name, parts in self.layout.parts.items() for part in parts}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take a weight; a parameter is summed when the last of its parts has come."""
        owner = self._owners[name]
        self._waiting[name] = tensor
        parts = self.layout.parts[owner]
        if all(part in self._waiting for part in parts):
            whole = [self._waiting.pop(part) for part in parts]
            self.sums[owner] = checksum(whole, padded=parts[0].endswith(_PADDED))

    def check(self, held: Mapping[str, str]) -> None:
        """Raise `TransferError`, naming a parameter, unless the engine holds what has passed here."""
        missing = [part for name, parts in self.layout.parts.items() if name not in self.sums for part in parts]
        if missing:
            raise TransferError(f"nothing was sent for {missing[0]}, {len(missing)} in all: the engine kept its own")
        wrong = [name for name, value in self.sums.items() if held.get(name) != value]
        if wrong:
            raise TransferError(
                f"{len(wrong)} of {len(self.sums)} parameters of the server are not what was sent, {wrong[0]} for one: "
                "another client may have written to it, or it computes with another dtype or layout than it says"
            )


def checksum(parts: Sequence[torch.Tensor], *, padded: bool = False) -> str:
    """SGLang's checksum of a parameter made of `parts`, 16 hexadecimal digits; it depends on the kind of device."""
    rows = sum(len(part) for part in parts)
    padding = parts[0].new_zeros(-rows % _ROWS if padded else 0, *parts[0].shape[1:])
    if parts[0].device.type == "cuda":
        return f"{_gpu_hash(bytes_of(torch.cat([*parts, padding]))):016x}"
    found = hashlib.sha256()
    for part in (*parts, padding):
        found.update(bytes_of(part).numpy().data)
    return found.hexdigest()[:16]


def _gpu_hash(data: torch.Tensor) -> int:
    """`gpu_tensor_hash` of SGLang (sglang/kernels/ops/memory/gpu_tensor_hash.py) in torch's own operations.

    Each word of 32 bits is mixed with its position, twice; tiles of 8192 words are summed and mixed, and the tiles'
    values, of 64 bits, summed and mixed.
    """
    seed, tile, chunk = 0x243F6A88, 8192, 8192 * 512
    spare = -data.numel() % 4
    words = (torch.cat([data, data.new_zeros(spare)]) if spare else data).view(torch.int32)
    total = 0
    for start in range(0, words.numel(), chunk):
        part = words[start : start + chunk].long() & _WORD
        index = torch.arange(start, start + part.numel(), device=data.device)
        halves = []
        for seeded, factor, turns in (
            (seed, 0x27D4EB2D, 15),
            ((seed * 0x9E3779B1 ^ 0xDEADBEEF) & _WORD, 0x165667B1, 13),
        ):
            rotated = ((index << turns) | (index >> (32 - turns))) & _WORD
            mixed = _fmix32(part ^ ((index * factor + seeded) & _WORD) ^ rotated)
            mixed = torch.cat([mixed, mixed.new_zeros(-mixed.numel() % tile)]).view(-1, tile).sum(1) & _WORD
            halves.append(_fmix32(mixed ^ (words.numel() * 4 & _WORD)))
        # in Python's integers: 64 bits without a sign
        total += sum((high << 32) | low for high, low in zip(*(half.tolist() for half in halves), strict=True))
    total &= _MASK
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        total = ((total ^ total >> shift) * factor) & _MASK
    return total ^ total >> 31


def _fmix32(value: torch.Tensor) -> torch.Tensor:
    """MurmurHash3's last step, of words in int64: products wrap, and their low 32 bits are right."""
    value = value ^ (value >> 16)
    value = (value * 0x85EBCA6B) & _WORD
    value = value ^ (value >> 13)
    value = (value * 0xC2B2AE35) & _WORD
    return value ^ (value >> 16)


# ---- buckets -------------------------------------------------------------------------------------------------------


def payload(slab: Slab, bucket: Sequence[tuple[str, torch.Tensor]], fence: Callable[[], object] = lambda: None) -> str:
    """The payload of a bucket of any dtypes, in bytes of the slab. `fence`: see `Slab.fill`."""
    memory, places = slab.fill(bucket, fence)
    metadata = [described(name, tensor, start, tensor.nbytes) for name, tensor, start in places]
    return pack({"flattened_tensor": memory, "metadata": metadata})


# ---- adapters ------------------------------------------------------------------------------------------------------


def adapter_as_taken(
    adapter: AdapterWeights, layout: EngineLayout, options: Mapping[str, Any]
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors and settings of an adapter as a server with `options` takes them: one rank and one scaling for all.

    Raises: `Unsupported` for an adapter that it cannot apply.
    """
    if not options.get("enable_lora"):
        raise Unsupported(
            f"this SGLang server takes no adapters: start it with {LORA_FLAGS}, or merge the adapter and share "
            "the merged model"
        )
    rank = max(len(a) for a in adapter.a.values())
    if rank > (options.get("max_lora_rank") or 0):
        raise Unsupported(f"the adapter has rank {rank}: start the server with --max-lora-rank {rank}")
    taken = set(options.get("lora_target_modules") or ())
    scalings = set(adapter.scalings.values())
    # one that all modules have stays a number; others become a part of B
    common = (next(iter(scalings)) if len(scalings) == 1 else 0) or 1.0
    tensors = {}
    for module, a in adapter.a.items():
        b, last = adapter.b[module], module.rpartition(".")[2]
        spec = layout.specs.get(f"{module}.weight")
        if spec is None or spec.shape != (b.shape[0], a.shape[1]) or last not in ADAPTED:
            raise Unsupported(f"an SGLang server cannot adapt {module}: leave it out of target_modules")
        if "all" not in taken and last not in taken:
            raise Unsupported(f"the server does not adapt {last}: start it with --lora-target-modules all")
        spare = rank - len(a)
        own = adapter.scalings[module] / common
        tensors[f"base_model.model.{module}.lora_A.weight"] = torch.nn.functional.pad(a.detach(), (0, 0, 0, spare))
        b = b.detach() if own == 1 else b.detach() * own
        tensors[f"base_model.model.{module}.lora_B.weight"] = torch.nn.functional.pad(b, (0, spare))
    modules = sorted({module.rpartition(".")[2] for module in adapter.a})
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": common * rank, "target_modules": modules}
    return tensors, settings | {"bias": "none"}


def adapter_payload(tensors: Mapping[str, torch.Tensor]) -> tuple[str, dict[str, str]]:
    """The payload of an adapter's tensors, by value, and their SHA-256, which the server compares."""
    on_host = [(name, tensor.detach().cpu()) for name, tensor in tensors.items()]
    packed = payload(Slab(torch.device("cpu"), num_parts=1), on_host)
    return packed, {name: hashlib.sha256(bytes_of(tensor).numpy().data).hexdigest() for name, tensor in on_host}
