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
from colo.engines.sglang.ranks import Ranks
from colo.engines.sglang.server import LORA_FLAGS
from colo.errors import TransferError, Unsupported
from colo.memory.specs import TensorSpec
from colo.weights.sources.names import checkpoint_views

FUSED: Mapping[str, Sequence[str]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Modules of the engine that are several of Hugging Face's, one after another along the first dimension."""

ADAPTED = frozenset(part for parts in FUSED.values() for part in parts) | {"o_proj", "down_proj"}
"""Modules that a server applies adapters to, when it is told to take all."""

_DOWN = (".down_proj.weight", ".w2.weight")
_BASE = ".base_layer."  # in names of modules that take adapters

_WORD, _MASK = 0xFFFFFFFF, (1 << 64) - 1
_CHUNK = 8192 * 1024  # words of a GPU that are mixed at once: a few temporary copies of 32 MiB


# ---- what the engine has -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EngineLayout(Outline):
    """Parameters of an engine, each with the names of the weights, in a checkpoint, that it is made of."""

    parts: Mapping[str, tuple[str, ...]]  # names of the weights in each of the engine's parameters
    ranks: Ranks
    model_type: str | None

    @classmethod
    def of(
        cls, specs: Iterable[TensorSpec], parameters: Iterable[str], ranks: Ranks, model_type: str | None = None
    ) -> EngineLayout:
        """Find the weights in each parameter. Raises: `Unsupported` for a model that SGLang lays out otherwise."""
        by_name = {spec.name: spec for spec in specs}
        weights = _on_meta(by_name.values(), model_type)
        parts = {name: _parts_of(name.replace(_BASE, "."), weights) for name in parameters}
        unknown = [name for name, of in parts.items() if not of or not set(of) <= weights.keys()]
        left = weights.keys() - {part for of in parts.values() for part in of}
        if unknown or left:
            name = (unknown or sorted(left))[0]
            raise Unsupported(
                f"the server's model is laid out in a way that colo does not know ({name}, {len(unknown) + len(left)} "
                "in all): models whose parts of attention, MLP and experts SGLang fuses, or leaves alone, can be "
                "trained"
            )
        return cls(by_name, parts, ranks, model_type)

    @property
    def rank_bytes(self) -> int:
        """Bytes of the weights that the first rank has."""
        weights = _on_meta(self.specs.values(), self.model_type)
        shares = (self.ranks.share(*weight, 0) for weight in weights.items())
        return sum(share.nbytes for share in shares if share is not None)


def _on_meta(specs: Iterable[TensorSpec], model_type: str | None) -> dict[str, torch.Tensor]:
    empty = {s.name: torch.empty(s.shape, dtype=getattr(torch, s.dtype), device="meta") for s in specs}
    return dict(checkpoint_views(empty, model_type))


def _parts_of(parameter: str, known: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
    """Weights in a parameter, in order; one that has its name is the whole of it."""
    if parameter in known:
        return (parameter,)
    for fused, parts in FUSED.items():
        if f".{fused}." in parameter:
            return tuple(parameter.replace(f".{fused}.", f".{part}.") for part in parts)
    experts, _, stacked = parameter.rpartition(".")
    if stacked in ("w13_weight", "w2_weight"):
        return tuple(n for n in known if n.startswith(f"{experts}.") and n.endswith(_DOWN) is (stacked == "w2_weight"))
    return (parameter,)


# ---- checksums -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Expected:
    """Checksums that the parameters of each rank have to have, added up while weights pass in any order."""

    layout: EngineLayout
    sums: list[dict[str, str | torch.Tensor]] = field(default_factory=list)  # for each rank
    _waiting: dict[str, torch.Tensor] = field(default_factory=dict)
    _owners: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sums = [{} for _ in range(self.layout.ranks.tp_size)]
        self._owners = {part: name for name, parts in self.layout.parts.items() for part in parts}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take a weight; a parameter is summed when the last of its parts has come."""
        views = checkpoint_views({name: tensor}, self.layout.model_type)
        self._waiting.update(views)
        for owner in dict.fromkeys(self._owners[part] for part, _ in views):
            parts = self.layout.parts[owner]
            if all(part in self._waiting for part in parts):
                self._sum(owner, {part: self._waiting.pop(part) for part in parts})

    def _sum(self, owner: str, parts: Mapping[str, torch.Tensor]) -> None:
        for rank, sums in enumerate(self.sums):
            shares = (self.layout.ranks.share(*part, rank) for part in parts.items())
            sums[owner] = checksum([share for share in shares if share is not None])

    def check(self, held: Sequence[Mapping[str, str]]) -> None:
        """Raise `TransferError`, naming a parameter, unless the engine's ranks hold what has passed here."""
        missing = [part for name, parts in self.layout.parts.items() if name not in self.sums[0] for part in parts]
        if missing:
            raise TransferError(f"nothing was sent for {missing[0]}, {len(missing)} in all: the engine kept its own")
        wrong = [
            name + (f" of rank {rank}" if rank else "")
            for rank, sums in enumerate(self.sums)
            for name, value in settled(sums).items()
            if rank >= len(held) or held[rank].get(name) != value
        ]
        if wrong:
            count = sum(map(len, self.sums))
            raise TransferError(
                f"{len(wrong)} of {count} parameters of the server are not what was sent, {wrong[0]} for one: "
                "another client may have written to it, or it computes with another dtype or layout than it says"
            )


def checksum(parts: Sequence[torch.Tensor]) -> str | torch.Tensor:
    """SGLang's checksum of a parameter made of `parts`; it depends on the kind of device: see `settled`."""
    if parts[0].device.type == "cuda":
        return _sum_of_tiles(bytes_of(torch.cat(list(parts))))
    found = hashlib.sha256()
    for part in parts:
        found.update(bytes_of(part).numpy().data)
    return found.hexdigest()[:16]


def settled(sums: Mapping[str, str | torch.Tensor]) -> dict[str, str]:
    """Checksums as 16 hexadecimal digits, once the GPU has found all of them."""
    queued = {name: value for name, value in sums.items() if isinstance(value, torch.Tensor)}
    values = torch.stack(list(queued.values())).tolist() if queued else []
    found = {name: f"{_mixed(value & _MASK):016x}" for name, value in zip(queued, values, strict=True)}
    return {name: found[name] if isinstance(value, torch.Tensor) else value for name, value in sums.items()}


def _sum_of_tiles(data: torch.Tensor) -> torch.Tensor:
    """`gpu_tensor_hash` of SGLang (sglang/kernels/ops/memory/gpu_tensor_hash.py) but for its last step, `_mixed`.

    Each word of 32 bits is mixed with its position, twice; tiles of 8192 words are summed and mixed, and the tiles'
    values, of 64 bits, summed. In torch's own operations on signed words: sums and products wrap as unsigned ones do,
    and nothing is waited for.
    """
    seed, tile = 0x243F6A88, 8192
    spare = -data.numel() % 4
    words = (torch.cat([data, data.new_zeros(spare)]) if spare else data).view(torch.int32)
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for start in range(0, words.numel(), _CHUNK):
        part = words[start : start + _CHUNK]
        index = torch.arange(part.numel(), dtype=torch.int32, device=data.device) + _signed(start)
        halves = []
        for seeded, factor, turns in (
            (seed, 0x27D4EB2D, 15),
            (seed * 0x9E3779B1 ^ 0xDEADBEEF, 0x165667B1, 13),
        ):
            mixed = _right(index, 32 - turns).bitwise_or_(index << turns)
            mixed.bitwise_xor_((index * _signed(factor)).add_(_signed(seeded))).bitwise_xor_(part)
            mixed = _fmix32(mixed)
            mixed = torch.nn.functional.pad(mixed, (0, -mixed.numel() % tile)).view(-1, tile).sum(1).int()
            halves.append(_fmix32(mixed.bitwise_xor_(_signed(words.numel() * 4))).long())
        total += ((halves[0] << 32) | (halves[1] & _WORD)).sum()
    return total


def _mixed(total: int) -> int:
    """Splitmix64's last step."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        total = ((total ^ total >> shift) * factor) & _MASK
    return total ^ total >> 31


def _fmix32(value: torch.Tensor) -> torch.Tensor:
    """MurmurHash3's last step, of int32 words, which it writes."""
    value.bitwise_xor_(_right(value, 16)).mul_(_signed(0x85EBCA6B))
    value.bitwise_xor_(_right(value, 13)).mul_(_signed(0xC2B2AE35))
    return value.bitwise_xor_(_right(value, 16))


def _right(words: torch.Tensor, places: int) -> torch.Tensor:
    """Shift int32 words to the right as unsigned ones."""
    return (words >> places).bitwise_and_((1 << (32 - places)) - 1)


def _signed(word: int) -> int:
    """The int32 that has the lower 32 bits of a number."""
    return ((word & _WORD) ^ (1 << 31)) - (1 << 31)


# ---- buckets -------------------------------------------------------------------------------------------------------


def payloads(
    slab: Slab,
    bucket: Sequence[tuple[str, torch.Tensor]],
    num_ranks: int,
    fence: Callable[[], object] = lambda: None,
) -> list[str]:
    """The payload of a bucket of any dtypes for each rank, in bytes of one slab. `fence`: see `Slab.fill`."""
    memory, places = slab.fill(bucket, fence)
    metadata = [described(name, tensor, start, tensor.nbytes) for name, tensor, start in places]
    # a handle for each rank: whoever opens one gives it back
    return [pack({"flattened_tensor": memory, "metadata": metadata}) for _ in range(num_ranks)]


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

    def take(module: str, a: torch.Tensor, b: torch.Tensor) -> None:
        tensors[f"base_model.model.{module}.lora_A.weight"] = a
        tensors[f"base_model.model.{module}.lora_B.weight"] = b

    for module, a in adapter.a.items():
        b, last = adapter.b[module], module.rpartition(".")[2]
        spec = layout.specs.get(f"{module}.weight")
        if spec is None or spec.shape != (b.shape[0], a.shape[1]) or last not in ADAPTED:
            raise Unsupported(f"an SGLang server cannot adapt {module}: leave it out of target_modules")
        if "all" not in taken and last not in taken:
            raise Unsupported(f"the server does not adapt {last}: start it with --lora-target-modules all")
        spare = rank - len(a)
        own = adapter.scalings[module] / common
        b = b.detach() if own == 1 else b.detach() * own
        take(module, torch.nn.functional.pad(a.detach(), (0, 0, 0, spare)), torch.nn.functional.pad(b, (0, spare)))
    # the server adapts what it fuses as a whole, and ends where it misses a part
    adapted = dict.fromkeys(part for module in adapter.a for part in _fused_with(module))
    for module in adapted.keys() - adapter.a.keys():
        a = next(iter(adapter.a.values()))
        rows, columns = layout.specs[f"{module}.weight"].shape
        take(module, a.new_zeros(rank, columns), a.new_zeros(rows, rank))
    modules = sorted({module.rpartition(".")[2] for module in adapted})
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": common * rank, "target_modules": modules}
    return tensors, settings | {"bias": "none"}


def _fused_with(module: str) -> Sequence[str]:
    """Modules that the server fuses with one, itself among them."""
    owner, _, last = module.rpartition(".")
    return next(([f"{owner}.{part}" for part in parts] for parts in FUSED.values() if last in parts), [module])


def adapter_payloads(tensors: Mapping[str, torch.Tensor], num_ranks: int) -> tuple[list[str], dict[str, str]]:
    """Payloads of an adapter's tensors, by value, for each rank, and their SHA-256, which the server compares."""
    on_host = [(name, tensor.detach().cpu()) for name, tensor in tensors.items()]
    packed = payloads(Slab(torch.device("cpu")), on_host, num_ranks)
    return packed, {name: hashlib.sha256(bytes_of(tensor).numpy().data).hexdigest() for name, tensor in on_host}
