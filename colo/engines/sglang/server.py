"""An SGLang server as it tells of itself: its options and model, its labels, and the memory that it can let go."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from packaging.version import Version
from transformers import AutoConfig, PretrainedConfig

from colo.engines.base import TAGS
from colo.errors import BudgetError, PhaseError, Unsupported
from colo.phases.phase import Done, Move, Residency, check_move
from colo.units import format_bytes

OLDEST = "0.5.21"
"""The first SGLang that this was tested with."""

LORA_FLAGS = "--enable-lora --max-lora-rank 16 --lora-target-modules all"
WHY_IT_STAYS = "memory that stays (start the server with --enable-memory-saver, on a GPU)"

_ASLEEP = " asleep:"
"""Part of a label that says what is away: the server does not tell, and ends when it is to resume what is not."""


# ---- what a server says of itself ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Facts:
    """An SGLang server's account of itself, and what follows from the config of its checkpoint."""

    version: str
    model_path: str
    config: PretrainedConfig
    dtype: torch.dtype
    device: str  # "cpu" or "cuda"
    num_positions: int
    max_prompt: int  # tokens: a few less than the positions
    num_cached_tokens: int
    label: str  # its `weight_version`
    started_with: Mapping[str, Any]  # its options

    @property
    def lacking_flags(self) -> Mapping[str, str]:
        """Options that it was started without, and what it cannot do therefore."""
        wanted = {
            "enable_memory_saver": ("--enable-memory-saver", "its memory stays on the device"),
            "enable_weights_cpu_backup": ("--enable-weights-cpu-backup", "weights that leave are sent again"),
            "enable_deterministic_inference": ("--enable-deterministic-inference", "it ignores seeds"),
            "enable_lora": (LORA_FLAGS, "it takes no adapters"),
        }
        return {flag: lack for option, (flag, lack) in wanted.items() if not self.started_with.get(option)}

    @classmethod
    def of(cls, url: str, info: Mapping[str, Any], server: Mapping[str, Any], positions: int) -> Facts:
        """Read `/model_info` and `/server_info`. Raises: `Unsupported` for a server that cannot take weights here."""
        where = f"the SGLang server at {url}"
        if Version(server["version"]) < Version(OLDEST):
            raise Unsupported(f"{where} is of version {server['version']}: colo needs {OLDEST} or later")
        for option, plain, why in (
            ("tp_size", (1,), "colo trains beside an engine on one GPU"),
            ("pp_size", (1,), "colo trains beside an engine on one GPU"),
            ("dp_size", (1,), "colo trains beside an engine on one GPU"),
            ("weight_cache_mode", ("off", None), "the weights belong to another process"),
            ("quantization", (None,), "quantized weights are not the trainer's"),
            ("speculative_algorithm", (None,), "a drafter's weights would stay as they are"),
        ):
            if server.get(option) not in plain:
                flag = f"--{option.replace('_', '-')}"
                raise Unsupported(f"{where} was started with {flag} {server[option]}: {why}; start it without")
        path = info["model_path"]
        try:
            config = AutoConfig.from_pretrained(path)
        except (OSError, ValueError) as error:
            raise Unsupported(
                f"the config of {path}, which {where} has loaded, cannot be read here ({error}): colo needs it to know "
                "shapes and the vocabulary before it sends anything"
            ) from error
        return cls(
            version=server["version"],
            model_path=path,
            config=config,
            dtype=engine_dtype(server["dtype"], config),
            device=server["device"],
            num_positions=positions,
            max_prompt=server["max_req_input_len"],
            num_cached_tokens=server["max_total_num_tokens"],
            label=info["weight_version"],
            started_with=server,
        )

    def check_room(self, prompt_tokens: int, max_tokens: int, cache_bytes: int) -> None:
        """Raise `BudgetError` for a sequence that the KV cache of `cache_bytes` does not hold, however empty it is."""
        needed, cached = prompt_tokens + max_tokens, self.num_cached_tokens
        if needed > cached:
            needed_bytes = cache_bytes * needed // cached
            raise BudgetError(
                f"a prompt of {prompt_tokens} tokens and max_tokens={max_tokens} need {format_bytes(needed_bytes)} of "
                f"the server's KV cache, which has {format_bytes(cache_bytes)} for {cached} tokens: lower max_tokens, "
                f"shorten the prompt, or start it with --max-total-tokens {needed}",
                needed_bytes=needed_bytes,
                free_bytes=cache_bytes,
            )


def shapes_of(config: PretrainedConfig) -> dict[str, Any]:
    """All that a config says, but for the folder that it came from and who wrote it."""
    said = config.to_dict()
    return {key: said[key] for key in said.keys() - {"_name_or_path", "transformers_version"}}


def engine_dtype(said: str, config: PretrainedConfig) -> torch.dtype:
    """SGLang's dtype: in "auto" a checkpoint's own, but 16 bits in place of 32."""
    if said != "auto":
        return {"half": torch.float16, "float": torch.float32}.get(said) or getattr(torch, said)
    own = getattr(config.get_text_config(), "dtype", None) or getattr(config, "dtype", None) or torch.float32
    if own != torch.float32:
        return own
    return torch.bfloat16 if config.model_type.startswith("gemma") else torch.float16


# ---- its memory ----------------------------------------------------------------------------------------------------


class ServerSegment:
    """Memory of the server that goes and comes by its tag."""

    def __init__(
        self,
        tag: str,
        size_bytes: int,
        *,
        away: Residency | None,
        move: Callable[[ServerSegment, Residency], None],
    ) -> None:
        """`move` makes the server release the segment, or resume it."""
        self.tag, self.name, self.size_bytes, self.away = tag, TAGS[tag], size_bytes, away
        self.residency = Residency.RESIDENT
        self._move = move

    @property
    def device_bytes(self) -> int:
        """Bytes on the device now."""
        return self.size_bytes if self.residency is Residency.RESIDENT else 0

    @property
    def host_bytes(self) -> int:
        """Bytes that the server has pinned in host memory."""
        return self.size_bytes if self.residency is Residency.OFFLOADED else 0

    def begin(self, target: Residency) -> Move:
        """Make the server release or resume it. Raises: `PhaseError` when it must not leave, `EngineLost`."""
        if target is self.residency:
            return Done()
        if self.away is None:
            raise PhaseError(f"segment {self.name} cannot become {target}: it is {WHY_IT_STAYS}")
        if target is Residency.OFFLOADED and self.away is not target:
            raise PhaseError(
                "level 1 keeps a copy in host memory, which this SGLang server does not: start it with "
                "--enable-weights-cpu-backup, or take level 2, after which weights are published again"
            )
        check_move(self.name, self.residency, target)
        self._move(self, target)
        self.residency = target
        return Done()


# ---- labels ----------------------------------------------------------------------------------------------------------


def plain_label(label: str) -> str:
    """The label without what it says of memory."""
    return label.partition(_ASLEEP)[0]


def away_by(label: str) -> list[str]:
    """Tags that a label says are away, weights first."""
    away = label.partition(_ASLEEP)[2].split(",")
    return [tag for tag in TAGS if tag in away]


def label_with(label: str, away: Iterable[str]) -> str:
    """The label that says that these tags are away."""
    named = sorted(away)
    return plain_label(label) + (f"{_ASLEEP}{','.join(named)}" if named else "")
