"""vLLM's own CUDA IPC transfer (as in 0.26), set up once, as its documentation does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from colo.units import GIB


class VLLMIpc:
    """Sends weights to a `vllm.LLM` that was started with `weight_transfer_config=WeightTransferConfig("ipc")`."""

    def __init__(self, llm: Any) -> None:
        """Set up the transfer; `VLLM_ALLOW_INSECURE_SERIALIZATION` is set, for pickled handles."""
        self._llm = llm
        llm.init_weight_transfer_engine({"init_info": {}})

    def send(self, views: Sequence[tuple[str, torch.Tensor]], *, packed: bool = False) -> None:
        """Send all weights by their names in a checkpoint, one tensor at a time or packed into buffers."""
        from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine

        self._llm.start_weight_update()
        how: dict[str, Any] = {"send_mode": lambda update: self._llm.update_weights({"update_info": asdict(update)})}
        if packed:  # a tensor that is larger than vLLM's buffer is refused
            how |= {"packed": True, "packed_buffer_size_bytes": max(GIB, *(tensor.nbytes for _, tensor in views))}
        IPCWeightTransferEngine.trainer_send_weights(iter(views), how)
        self._llm.finish_weight_update()
