"""An SGLang server as it tells of itself: its options and model, the memory that it can let go, and its labels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from packaging.version import Version
from transformers import PretrainedConfig

from colo.engines.base import TAGS
from colo.engines.server import ServerFacts, config_of, own_dtype
from colo.engines.sglang.ranks import Ranks
from colo.errors import Unsupported
from colo.phases.phase import Residency

OLDEST = "0.5.21"
"""The first SGLang that this was tested with."""

LORA_FLAGS = "--enable-lora --max-lora-rank 16 --lora-target-modules all"
WHY_IT_STAYS = "memory that stays (start the server with --enable-memory-saver, on a GPU)"

NO_COPY = (
    "level 1 keeps a copy in host memory, which this SGLang server does not: start it with "
    "--enable-weights-cpu-backup, or take level 2, after which weights are published again"
)
_ASLEEP = " asleep:"
"""Part of a label that says what is away: the server does not tell, and ends when it is to resume what is not."""


# ---- what a server says of itself ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts(ServerFacts):
    """An SGLang server's account of itself, and what follows from the config of its checkpoint."""

    more_cache = "--max-total-tokens "
    version: str
    label: str  # its `weight_version`
    started_with: Mapping[str, Any]  # its options

    @property
    def ranks(self) -> Ranks:
        """Its ranks, which share the weights."""
        text = self.config.get_text_config()
        heads = getattr(text, "num_key_value_heads", None) or getattr(text, "num_attention_heads", None)
        return Ranks(
            tp_size=self.started_with.get("tp_size") or 1,
            ep_size=self.started_with.get("ep_size") or 1,
            num_kv_heads=heads or 1,
            num_experts=getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None) or 0,
        )

    @property
    def leaves(self) -> Mapping[str, Residency | None]:
        """Residency in which memory of each tag waits; `None` where it stays."""
        dropped = Residency.DISCARDED if self.started_with.get("enable_memory_saver") else None
        kept = Residency.OFFLOADED if dropped and self.started_with.get("enable_weights_cpu_backup") else dropped
        return {"weights": kept, "kv_cache": dropped}

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
            ("pp_size", (1,), "colo knows of ranks that share layers, not of stages"),
            ("dp_size", (1,), "each replica would have to be attested: start a server for each, and share a list"),
            ("ep_num_redundant_experts", (0, None), "colo knows of experts that one rank has"),
            ("weight_cache_mode", ("off", None), "the weights belong to another process"),
            ("quantization", (None,), "quantized weights are not the trainer's"),
            ("speculative_algorithm", (None,), "a drafter's weights would stay as they are"),
        ):
            if server.get(option) not in plain:
                flag = f"--{option.replace('_', '-')}"
                raise Unsupported(f"{where} was started with {flag} {server[option]}: {why}; start it without")
        path = info["model_path"]
        config = config_of(path, where)
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


def refusals(away: Residency | None) -> Mapping[Residency, str]:
    """Reasons against residencies of memory that waits as `away`, or stays."""
    if away is None:
        return dict.fromkeys((Residency.OFFLOADED, Residency.DISCARDED), f"it is {WHY_IT_STAYS}")
    return {Residency.OFFLOADED: NO_COPY} if away is Residency.DISCARDED else {}


def engine_dtype(said: str, config: PretrainedConfig) -> torch.dtype:
    """SGLang's dtype: in "auto" a checkpoint's own, but 16 bits in place of 32."""
    if said != "auto":
        return {"half": torch.float16, "float": torch.float32}.get(said) or getattr(torch, said)
    own = own_dtype(config) or torch.float32
    if own != torch.float32:
        return own
    return torch.bfloat16 if config.model_type.startswith("gemma") else torch.float16


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
