"""Weight-transfer backend `colo`: a trainer's weights through vLLM's own four calls.

    vllm serve MODEL --host 127.0.0.1 --load-format colo --weight-transfer-config '{"backend": "colo"}'

    init_weight_transfer_engine {"init_info":   {"step": "bind", "arguments": {...}}}    what will be sent
                                {"init_info":   {"step": "stage", "arguments": {...}}}   where groups arrive, if any do
    start_weight_update
    update_weights              {"update_info": {"step": "begin", "arguments": {...}}}
                                {"update_info": {"step": "copy", ...}}                   all, or a "group" of a buffer
                                {"update_info": {"step": "finish", "arguments": {...}}}
    finish_weight_update                                                                 fails unless finish attested

Steps and arguments are those of `Receiver`, in JSON; errors come back, and nothing else. A step that fails ends the
update. Pause generation before, reset the prefix cache after. `colo.connect` does without all this.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine as Base
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo

from colo.engines.vllm import compat
from colo.engines.vllm.wire import error_in_words
from colo.engines.vllm.worker.record import record
from colo.errors import ColoError, PhaseError, TransferError, Unsupported
from colo.memory.load_plan import LoadPlan
from colo.weights.transports.receiver import Receiver, run_step

_INIT_STEPS = ("bind", "stage", "release")
_UPDATE_STEPS = ("begin", "copy", "finish")
_DEFAULTS: dict[str, dict[str, Any]] = {
    "bind": {"model_type": None},
    "copy": {"verify": True},
    "finish": {"checksums": None},
}
"""Arguments that a client may leave out."""


@dataclass
class TransferStep(WeightTransferInitInfo, WeightTransferUpdateInfo):  # type: ignore[misc]  # vLLM ships no types for mypy
    """A step of `Receiver`."""

    step: str
    arguments: dict[str, Any] = field(default_factory=dict)


class ColoWeightTransferEngine(Base):  # type: ignore[misc]  # as above
    """A worker's end of the four calls. One `Receiver` does the work."""

    init_info_cls = TransferStep
    update_info_cls = TransferStep
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        parallel = self.parallel_config
        number = parallel.data_parallel_rank * parallel.world_size + parallel.rank
        self._receiver = Receiver(self.device, self._record, number=number)
        self._attested = False

    def init_transfer_engine(self, init_info: TransferStep) -> None:
        """Run a step outside an update. Raises: `Unsupported` from `bind` for a model that cannot be copied to."""
        bound = self._run(init_info, _INIT_STEPS)
        if init_info.step == "bind" and bound["fallbacks"]:
            name, why = next(iter(bound["fallbacks"].items()))
            raise Unsupported(f"{name} cannot be copied: {why}")

    def start_weight_update(self) -> None:
        """Check that there is memory to write to. Raises: `PhaseError` while the weights are asleep."""
        self._attested = False
        pool = compat.sleep_pool(self)
        if pool is not None and any(r.tag == "weights" and r.is_asleep for r in pool.pointer_to_data.values()):
            raise PhaseError("the engine's weights are asleep: wake them before an update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Run a step of an update. Does not wait for the device, unlike vLLM's own engines: `finish` does."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: TransferStep) -> None:
        """Run a step of an update. Raises: what is wrong with it; vLLM ends the update then."""
        self._attested = False
        self._run(update_info, _UPDATE_STEPS)
        self._attested = update_info.step == "finish"

    def finish_weight_update(self) -> None:
        """End an update. Raises: `TransferError` unless its last step has attested what is in the engine."""
        attested, self._attested = self._attested, False
        if not attested:
            raise TransferError(
                "the update is not complete: no finish step has attested what the engine holds. Send what is missing, "
                "or start again"
            )

    def shutdown(self) -> None:
        """Let go of the sender's memory."""
        self._receiver.release()

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: Any) -> NoReturn:
        """Refuse (vLLM 0.26 asks for this; 0.30 does not)."""
        raise Unsupported("the trainer's end of this backend is colo.connect(url), passed to colo.share")

    def _run(self, asked: TransferStep, steps: tuple[str, ...]) -> Any:
        if asked.step not in steps:
            raise TransferError(f"{asked.step!r} is no step of this call, which takes {', '.join(steps)}")
        try:
            return run_step(self._receiver, asked.step, _DEFAULTS.get(asked.step, {}) | asked.arguments)
        except ColoError:
            raise
        except Exception as error:
            raise TransferError(error_in_words(error)) from error

    def _record(self, source: dict[str, torch.Tensor], model_type: str | None) -> LoadPlan:
        kind = model_type or getattr(self.model_config.hf_config, "model_type", None)
        return record(self.model, self.model_config, self.device, source, kind)
