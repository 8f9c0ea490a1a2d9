"""The weight-transfer backend `colo`: a trainer's weights through vLLM's own four calls, over HTTP or any other way.

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --load-format colo --weight-transfer-config '{"backend": "colo"}'

    init_weight_transfer_engine {"init_info":   {"step": "bind", "arguments": {...}}}    what will be sent
                                {"init_info":   {"step": "stage", "arguments": {...}}}   where buckets arrive, if any do
    start_weight_update
    update_weights              {"update_info": {"step": "begin", "arguments": {...}}}
                                {"update_info": {"step": "copy", ...}}, "take_all", or "take" for every bucket
                                {"update_info": {"step": "finish", "arguments": {...}}}
    finish_weight_update                                                                 fails unless finish attested

Steps and arguments are those of `Receiver`, in JSON. Whatever is wrong is raised in the worker, in words that reach the
client. Nothing is unpickled: vLLM's insecure serialization stays off. Pause generation before, reset the prefix cache
after; between `begin` and `finish` the weights are neither the old nor the new ones.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from colo.engines.vllm import compat
from colo.engines.vllm.answers import AnswerPart
from colo.engines.vllm.calls import pid_namespace
from colo.engines.vllm.worker.agent import error_in_words
from colo.engines.vllm.worker.loader import placement_of
from colo.engines.vllm.worker.record import record
from colo.engines.vllm.worker.reload import Reload, check_begun
from colo.errors import ColoError, PhaseError, TransferError, Unsupported
from colo.memory.load_plan import LoadPlan
from colo.memory.mapped_buffer import MappedBuffer as Window
from colo.memory.mapped_buffer import why_not_mapped
from colo.memory.probe import device_id
from colo.memory.shared_memory import Description
from colo.weights.manifest import Manifest, TensorSpec
from colo.weights.transports.ipc.receiver import Receiver
from colo.weights.transports.ipc.staging import end_bytes, staged

Step = Callable[..., Any]

_TRACEBACK_CHARACTERS = 20_000
"""The last so many reach the client."""


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM ships no types that mypy reads
    """What to do outside an update."""

    step: str
    """`connect`, `bind`, `stage`, `differences` or `release`."""

    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]  # as above
    """What to do within an update."""

    step: str
    """`begin`, `copy`, `take`, `take_all`, `finish`; `begin_reload`, `reload`, `finish_reload`; or `abandon`."""

    arguments: dict[str, Any] = field(default_factory=dict)


class ColoWeightTransferEngine(WeightTransferEngine):  # type: ignore[misc]  # as above
    """A worker's end of the four calls. One `Receiver` does the work."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        parallel = self.parallel_config
        self._number = parallel.data_parallel_rank * parallel.world_size + parallel.rank
        self._receiver = Receiver(self.device, self._record, number=self._number)
        self._reload: Reload | None = None
        self._staging: tuple[Description, Window] | None = None
        self._attested: dict[str, Any] | None = None
        self._answers: AnswerPart | None = None

    # ---- vLLM's calls ------------------------------------------------------------------------------------------------

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Run a step outside an update. Raises: `Unsupported` from `bind` for a model that cannot be copied to."""
        steps = (self.connect, self.bind, self.stage, self.differences, self.release)
        self._run(init_info.step, init_info.arguments, steps)

    def start_weight_update(self) -> None:
        """Check that there is memory to write to. Raises: `PhaseError` while the weights are asleep."""
        self._attested = None
        pool = compat.sleep_pool(self)
        if pool is not None and any(r.tag == "weights" and r.is_asleep for r in pool.pointer_to_data.values()):
            raise PhaseError("the engine's weights are asleep: wake them before an update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Run a step of an update. Does not wait for the device, unlike vLLM's own engines: `finish` does."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Run a step of an update. Raises: what is wrong with it; vLLM ends the update then."""
        copying = (self.begin, self.copy, self.take, self.take_all, self.finish)
        reloading = (self.begin_reload, self.reload, self.finish_reload)
        self._run(update_info.step, update_info.arguments, (*copying, *reloading, self.abandon))

    def finish_weight_update(self) -> None:
        """End an update. Raises: `TransferError` unless `finish` has attested what is in the engine."""
        attested, self._attested = self._attested, None
        if attested is None:
            raise TransferError(
                "the update is not complete: no finish step has attested what the engine holds. Send what is missing, "
                "or start again"
            )

    def shutdown(self) -> None:
        """Let go of the sender's memory."""
        self._receiver.release()
        self._answers = None

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: Any) -> NoReturn:
        """Refuse (vLLM 0.26 asks for this; 0.30 does not)."""
        raise Unsupported("the trainer's end of this backend is colo.connect(url), passed to colo.share")

    # ---- steps outside an update -------------------------------------------------------------------------------------

    def connect(
        self, slab: Description, num_workers: int, token: str, probe: Description | None = None
    ) -> dict[str, Any]:
        """Answer in `slab` from now on (see `Answers`); the first answer says who this worker is and what it holds.

        With `probe` (see `colo.memory.mapped_buffer.probing`) also why it cannot map the client's memory, if it cannot.
        """
        self._abandon_reload()  # of a client that has ended
        self._answers = AnswerPart(slab, num_workers, token, worker=self._number)
        return self._describe() | {"ipc_refusal": why_not_mapped(probe, self.device)}

    def bind(
        self,
        parameters: list[list[Any]],
        model_type: str | None = None,
        places: list[list[Any]] | None = None,
        memory: list[Description] | None = None,
    ) -> dict[str, Any]:
        """See `Receiver.bind`. `model_type` is the engine's own where it is not given.

        Raises: `Unsupported` with the reason when recorded copies cannot bring weights to this model.
        """
        kind = model_type or getattr(self.model_config.hf_config, "model_type", None)
        bound = self._receiver.bind(parameters, kind, places or [], memory or [])
        if bound["fallbacks"]:
            name, why = next(iter(bound["fallbacks"].items()))
            raise Unsupported(f"{name} cannot be copied: {why}")
        return bound

    def stage(
        self,
        slabs: list[Description],
        events: list[list[str]],
        buckets: list[list[list[Any]]],
        turns: Description | None = None,
        readers: int = 1,
        copied: bool = False,
    ) -> None:
        """See `Receiver.stage`."""
        self._receiver.stage(slabs, events, buckets, turns, readers, copied)

    def differences(self) -> list[str]:
        """Names of mapped tensors that the engine does not hold as they are now."""
        return self._receiver.differences()

    def release(self) -> None:
        """See `Receiver.release`."""
        self._receiver.release()

    # ---- steps of an update ------------------------------------------------------------------------------------------

    def begin(self, version: int, digest: str) -> None:
        """See `Receiver.begin`."""
        self._attested = None
        self._receiver.begin(version, digest)

    def copy(self, verify: bool = True) -> None:
        """See `Receiver.copy`."""
        self._receiver.copy(verify=verify)

    def take(self, index: int, verify: bool = True) -> None:
        """See `Receiver.take`."""
        self._receiver.take(index, verify=verify)

    def take_all(self, verify: bool = True) -> None:
        """See `Receiver.take_all`."""
        self._receiver.take_all(verify=verify)

    def finish(self, checksums: list[int] | None = None) -> dict[str, Any]:
        """See `Receiver.finish`."""
        self._attested = self._receiver.finish(checksums)
        return self._attested

    def begin_reload(self, parameters: list[list[Any]], version: int = 0) -> None:
        """Begin a layerwise reload: until `finish_reload` the model cannot compute. See `Reload`."""
        self._attested = None
        self._abandon_reload()
        specs = tuple(TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in parameters)
        manifest = Manifest(specs=specs, version=version)
        self._reload = Reload(self.model, self.model_config, self.device, manifest)

    def reload(self, tensors: list[list[Any]], staging: Description, model_type: str | None = None) -> None:
        """See `Reload.load`."""
        kind = model_type or getattr(self.model_config.hf_config, "model_type", None)
        try:
            if self._staging is None or self._staging[0] != staging:
                self._staging = None
                self._staging = (staging, Window(staging, self.device))
            window = self._staging[1]
            window.refresh(end_bytes(tensors))
            check_begun(self._reload).load(staged(window.bytes, tensors), kind)
        except Exception:
            self._abandon_reload()
            raise

    def finish_reload(self) -> dict[str, Any]:
        """See `Reload.finish`."""
        reload, self._reload = check_begun(self._reload), None
        self._staging = None
        self._attested = reload.finish()
        return self._attested

    def abandon(self) -> NoReturn:
        """End an update that its sender has given up; vLLM ends it because this raises."""
        self._abandon_reload()
        raise TransferError("the update was abandoned by its sender")

    # ---- within ------------------------------------------------------------------------------------------------------

    def _abandon_reload(self) -> None:
        """End a layerwise reload that has failed or been given up, if one has begun; see `Reload.abandon`."""
        reload, self._reload = self._reload, None
        self._staging = None
        if reload is not None:
            reload.abandon()

    def _run(self, step: str, arguments: Mapping[str, Any], steps: tuple[Step, ...]) -> None:
        """Run one of `steps` by its name, and leave what it returns or raises where the client reads."""
        try:
            value = _named(step, steps)(**arguments)
        except Exception as error:
            raised = error if isinstance(error, ColoError) else TransferError(error_in_words(error))
            described = {"kind": type(raised).__name__, "message": str(raised) or error_in_words(raised)}
            if isinstance(raised, TransferError):
                described["traceback"] = "".join(traceback.format_exception(error))[-_TRACEBACK_CHARACTERS:]
            self._answer({"error": described})
            if raised is error:
                raise
            raise raised from error
        self._answer({"value": value})

    def _answer(self, answer: dict[str, Any]) -> None:
        if self._answers is not None:
            self._answers.write(answer)

    def _record(self, source: dict[str, torch.Tensor], model_type: str | None) -> LoadPlan:
        return record(self.model, self.model_config, self.device, source, model_type)

    def _describe(self) -> dict[str, Any]:
        config, pool, placement = self.model_config, compat.sleep_pool(self), placement_of(self.model)
        pooled = [r for r in pool.pointer_to_data.values() if r.tag == "weights"] if pool is not None else []
        parameters = {p.data_ptr(): p.numel() * p.element_size() for p in self.model.parameters()}
        return {
            "pid": os.getpid(),
            "pid_namespace": pid_namespace(),
            "device": device_id(self.device),
            "model_type": getattr(config.hf_config, "model_type", None),
            "vocab_size": config.get_vocab_size(),
            "max_length": config.max_model_len,
            "logprobs_mode": config.logprobs_mode,
            "has_tokenizer": not config.skip_tokenizer_init,
            "weights_bytes": max(sum(parameters.values()), sum(record.handle[1] for record in pooled)),
            "weights_in": "slabs" if placement is not None else ("pool" if pooled else "memory"),
            "kv_cache_bytes": compat.kv_cache_bytes(self.vllm_config),
            "kv_cache_can_leave": pool is not None,
            "is_asleep": pool is not None and any(record.is_asleep for record in pool.pointer_to_data.values()),
            "residual_bytes": compat.residual_bytes(self, same_process=False),
        }


def _named(step: str, steps: tuple[Step, ...]) -> Step:
    by_name = {known.__name__: known for known in steps}
    if step not in by_name:
        raise ValueError(f"{step!r} is no step of this call, which takes {', '.join(by_name)}")
    return by_name[step]
