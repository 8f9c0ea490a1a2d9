"""vLLM as an engine: in this process, in one of its own, or a server, through its documented extension points.

The weights lie in slabs that the trainer owns (colo/engines/vllm/store.py): a trainer's parameters can be that
memory, in one process and across two, and the engine may be killed and started again on it. What can be given back in
between is the KV cache and, where the weights are vLLM's own, the weights.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from colo.engines.base import EngineStatus
from colo.engines.vllm import compat, plugin
from colo.engines.vllm.client.link import WorkerLink
from colo.engines.vllm.client.linked_engine import LinkedEngine
from colo.engines.vllm.client.llm_link import DEADLINE_S, link_to, start_llm
from colo.engines.vllm.client.options import check_main_guard, device_of, llm_options, quantization_of, save_config
from colo.engines.vllm.store import WeightStore
from colo.engines.vllm.wire import Forget
from colo.errors import EngineLost, PhaseError, TransferError
from colo.memory.offload import Mover
from colo.phases.phase import Residency


class VLLMEngine(LinkedEngine):
    """An `Engine` (see `colo.engine`) that runs vLLM. Not thread-safe: one caller at a time.

    Ownership: owns the `vllm.LLM` that it has started and its weights' memory until `close`; with `around` and
    `colo.connect` it owns neither. It starts awake and poisoned, until `commit` names what it holds.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | PretrainedConfig | PreTrainedModel,
        *,
        kv_cache_bytes: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        own_process: bool = True,
        share_memory: bool = True,
        max_lora_rank: int = 0,
        mover: Mover | None = None,
        deadline_s: float = DEADLINE_S,
        **options: Any,
    ) -> None:
        """Start vLLM.

        `model` is a folder or a hub id; of a transformers config or model it takes the shape, with random weights.
        With `share_memory` the weights lie where a trainer can map them and stay on the device; without, and where
        vLLM quantizes them, they are its own and may leave (levels 1 and 2). `options` are those of `vllm.LLM`, such
        as `max_model_len`, `enforce_eager` or `load_format`; what colo sets itself may be overridden.

        Raises: `Unsupported` without vLLM, or when it runs on another device; whatever vLLM raises.
        """
        if own_process:
            check_main_guard()
        compat.warn_if_untested()
        compat.import_apart()
        plugin.register()
        super().__init__(device_of(device), mover, when_lost="call recover() to start it again")
        try:
            if isinstance(model, (PretrainedConfig, PreTrainedModel)):
                folder = self._owned.enter_context(TemporaryDirectory(prefix="colo-"))
                save_config(model, folder)
                options.setdefault("load_format", "dummy")
                model = folder
            # Quantized weights cannot be a trainer's, and what they were made from would stay beside them.
            if share_memory and quantization_of(model, options) is None:
                self._store = WeightStore(self.device)
                self._owned.callback(self._store.close)
            options = llm_options(
                os.fspath(model),
                self._store.address if self._store is not None else None,
                kv_cache_bytes=kv_cache_bytes,
                device=self.device,
                dtype=dtype or (torch.bfloat16 if self.device.type == "cuda" else torch.float32),
                max_lora_rank=max_lora_rank,
                options=options,
            )
            start = partial(start_llm, options, self.device, self._status, deadline_s=deadline_s)
            self._start: Callable[[], WorkerLink] | None = partial(_start_told, start, own_process=own_process)
            self._connect(self._start())
        except BaseException:
            self._owned.close()
            raise

    @classmethod
    def around(cls, llm: Any, *, mover: Mover | None = None, deadline_s: float = DEADLINE_S) -> VLLMEngine:
        """An engine over your own `vllm.LLM`, left awake by `close`. `Unsupported` without colo's worker extension."""
        compat.warn_if_untested()
        device = device_of(llm.llm_engine.vllm_config.device_config.device)
        own_process = not compat.is_in_this_process(llm)
        return cls.over(
            lambda status: link_to(llm, device, status, own_process=own_process, deadline_s=deadline_s),
            device,
            mover=mover,
            when_lost="the vllm.LLM is your own: close the runtime, start another and share it",
        )

    @classmethod
    def over(
        cls,
        link: Callable[[EngineStatus], WorkerLink],
        device: torch.device,
        *,
        mover: Mover | None = None,
        when_lost: str,
    ) -> VLLMEngine:
        """An engine over a vLLM that is someone else's, by a link to it. Raises: what making the link raises."""
        engine = cls.__new__(cls)
        LinkedEngine.__init__(engine, device, mover, when_lost=when_lost)
        engine._start = None
        try:
            engine._connect(link(engine._status))
        except BaseException:
            engine._owned.close()
            raise
        return engine

    def recover(self) -> None:
        """Start a lost engine again, on the same weights. It is awake and poisoned then.

        Raises: `PhaseError` unless it is lost and ours; `TransferError` when vLLM has overwritten the trainer's weights
        as it started; whatever vLLM raises.
        """
        lost = self._status.lost
        if lost is None:
            raise PhaseError("the engine is not lost: nothing to recover")
        if self._start is None:
            raise PhaseError(self._link.why_not_recovered(lost))
        self._link.close()
        self._adapters.close()
        held = self._store.digest() if self._store is not None else None
        self._status.revive()
        try:
            self._connect(self._start())
        except BaseException:
            self._status.lost = self._status.lost or lost
            raise
        changed = held.differs(self._store.digest()) if held is not None and self._store is not None else []
        if changed:
            cause = (
                f"vLLM has written over weights of the trainer as it started ({changed[0]}, {len(changed)} in all): "
                "restore them from a checkpoint, and start this model with share_memory=False"
            )
            self._status.lose(cause)
            self._link.close()
            raise TransferError(cause)
        self.poison("it has been started again: publish to it")

    def close(self) -> None:
        """Release everything, and leave a vLLM of the caller's awake and running. Idempotent.

        Raises: `BudgetError` when the device has no room to wake a vLLM that is asleep: free some and close again.
        """
        if self._status.closed:
            return
        if self._status.lost is None:
            with suppress(EngineLost):  # nothing is left to bring back then
                self._leave_as_found()
        self._status.close()
        self._link.close()
        self._adapters.close()
        self._weights.close()
        self._owned.close()

    # ---- start and end -----------------------------------------------------------------------------------------------

    def _leave_as_found(self) -> None:
        """Wake what stays or is freed in this process: vLLM maps and frees whole allocations only."""
        if self._start is not None and not self._link.same_process:
            return  # everything ends with the process
        if self._start is None:
            was_dropped = self._memory.weights.residency is Residency.DISCARDED
            self.wake()
            self.resume()
            if was_dropped:
                warnings.warn(
                    f"your {self._link.name_of_vllm} is awake without weights, since a level-2 sleep dropped them: "
                    "load them before it generates",
                    stacklevel=4,
                )
        self._memory.release()
        if self._start is not None:
            self._link.call(Forget())


def _start_told(start: Callable[..., WorkerLink], *, own_process: bool) -> WorkerLink:
    with compat.told_start(own_process=own_process):
        return start(own_process=own_process)
