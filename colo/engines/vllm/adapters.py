"""LoRA adapters for vLLM from tensors in memory: no file, and nothing of vLLM replaced."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from colo.errors import Unsupported

_A, _B = ".lora_A.weight", ".lora_B.weight"


class WorkerAdapters:
    """The adapters of one vLLM worker."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker

    @property
    def capacity(self) -> int:
        """How many adapters can be used at once; 0 without LoRA."""
        manager = self._manager
        return int(manager.lora_config.max_loras) if manager is not None else 0

    def add(self, number: int, tensors: Mapping[str, torch.Tensor], scalings: Mapping[str, float]) -> None:
        """Make adapter `number` available.

        `tensors` go by PEFT's names, such as `base_model.model.layers.0.self_attn.q_proj.lora_A.weight`, `scalings` by
        the part before `.lora_A`. The tensors are copied, never modified.
        Raises: `Unsupported` when the engine runs without LoRA, the rank is above its limit, or a module is not one of
        the engine's.
        """
        manager = self._manager
        if manager is None:
            raise Unsupported("the engine was started without LoRA: pass enable_lora=True and max_lora_rank")
        # Clones, since vLLM writes into what it is given.
        scaled = {
            name: t.detach() * scalings[name.removesuffix(_B)] if name.endswith(_B) else t.detach().clone()
            for name, t in tensors.items()
        }
        loaded = self._load(manager, number, scaled)
        adapters = manager._adapter_manager
        adapters.remove_adapter(loaded.id)
        if len(adapters) + 1 > adapters.capacity:
            adapters.remove_oldest_adapter()
        adapters.add_adapter(loaded)
        adapters.activate_adapter(loaded.id)

    def remove(self, number: int) -> None:
        """Forget adapter `number`, if it is there."""
        if self._manager is not None:
            self._manager._adapter_manager.remove_adapter(number)

    @property
    def _manager(self) -> Any:
        return getattr(self._worker.model_runner, "lora_manager", None)

    def _load(self, manager: Any, number: int, tensors: dict[str, torch.Tensor]) -> Any:
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.peft_helper import PEFTHelper

        adapters = manager._adapter_manager
        rank = max(t.shape[0] for name, t in tensors.items() if name.endswith(_A))
        if rank > manager.lora_config.max_lora_rank:
            raise Unsupported(
                f"the adapter has rank {rank} and the engine takes {manager.lora_config.max_lora_rank}: start it with "
                f"max_lora_rank={rank}"
            )
        modules = sorted({name.rsplit(".", 3)[1] for name in tensors})
        helper = PEFTHelper.from_dict(
            {
                "r": rank,
                "lora_alpha": rank,  # scalings are in the matrices already
                "target_modules": modules,
                "vllm_max_position_embeddings": manager.max_position_embeddings,
            }
        )
        helper.validate_legal(manager.lora_config)
        mapper = getattr(adapters.model, "hf_to_vllm_mapper", None)
        if mapper is not None:
            mapper = (getattr(mapper, "get_rename_mapper", None) or mapper.get_unstacked_mapper)()
        model = LoRAModel.from_lora_tensors(
            number,
            tensors,
            helper,
            device=str(self._worker.device),
            dtype=manager.lora_config.lora_dtype,
            model_vocab_size=manager.vocab_size,
            weights_mapper=mapper,
            skip_prefixes=getattr(adapters.model, "lora_skip_prefixes", None),
        )
        missing = [name for name in model.loras if not _is_adapted(name, adapters)]
        if missing:
            raise Unsupported(f"the engine has no module to adapt for {len(missing)} of the adapter's, {missing[0]}")
        return model


def _is_adapted(name: str, adapters: Any) -> bool:
    """Whether a module of an adapter is one that the engine adapts, by itself or as a part of a fused one."""
    if name in adapters.modules:
        return True
    parent, _, own = name.rpartition(".")
    fused = [k for k, parts in adapters.packed_modules_mapping.items() if own in parts]
    return any(f"{parent}.{k}" in adapters.modules for k in fused)
