"""The workers behind a vLLM server, as a client of the weight-transfer backend `colo` sees them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

import torch

from colo import errors
from colo.engines.vllm.answers import Answers
from colo.errors import BudgetError, ColoError, TransferError
from colo.memory.mapped_buffer import probing
from colo.weights.sources.module import check_taken, noted
from colo.weights.transports.ipc.export import dtype_name
from colo.weights.transports.ipc.staging import Named, Staging

Ask = Callable[[str, str, dict[str, Any] | None], Any]
"""What a server answers to (method, path, body). Raises: `TransferError` for an error."""

FIRST_STEPS = frozenset({"begin", "begin_reload"})
"""Steps with which an update begins."""

_LAST_STEPS = frozenset({"finish", "finish_reload"})
_UPDATE_STEPS = FIRST_STEPS | _LAST_STEPS | {"copy", "take", "take_all", "reload"}

_CALLS = {"init": ("/init_weight_transfer_engine", "init_info"), "update": ("/update_weights", "update_info")}


class Workers:
    """All workers of a server, which do the same things at once.

    Ownership: owns the memory they answer in, until `close`.
    """

    def __init__(self, ask: Ask, num_workers: int) -> None:
        self._ask = ask
        self._answers = Answers(num_workers)

    def connect(self, device: torch.device) -> list[dict[str, Any]]:
        """What every worker says of itself, and whether it can map this process's memory of `device`.

        Raises: `TransferError` when they cannot answer in this memory.
        """
        with probing(device) as probe:
            return self._step("init", "connect", self._answers.describe() | ({"probe": probe} if probe else {}))

    def receive(self, step: str, arguments: Mapping[str, Any]) -> list[Any]:
        """Run a step of `ColoWeightTransferEngine` in every worker; what they answer, in their order.

        Around the steps of an update vLLM is told of its begin and end. Raises: what a worker raised, by its kind.
        """
        if step not in _UPDATE_STEPS:
            return self._step("init", step, arguments)
        if step in FIRST_STEPS:
            self._start_update()
        answers = self._step("update", step, arguments)
        if step in _LAST_STEPS:
            self._ask("POST", "/finish_weight_update", None)
        return answers

    def reload(self, tensors: Sequence[Named], model_type: str | None, device: torch.device) -> None:
        """Send every tensor of the model, whole, through vLLM's layerwise reload."""
        specs: dict[str, torch.Tensor] = {}
        parameters = [[name, dtype_name(tensor), list(tensor.shape)] for name, tensor in noted(tensors, specs)]
        self.receive("begin_reload", {"parameters": parameters})
        staging = Staging(device)
        try:
            for described, slab in staging.put_groups(tensors, to_pid=0):
                self.receive("reload", {"tensors": described, "model_type": model_type, "staging": slab})
        finally:
            staging.close()
        check_taken(specs, [attested["left_out"] for attested in self.receive("finish_reload", {})])

    def close(self) -> None:
        """Let go of the memory. Idempotent."""
        self._answers.close()

    def _start_update(self) -> None:
        try:
            self._ask("POST", "/start_weight_update", None)
        except TransferError:
            with suppress(TransferError):  # which is how an update that nobody has ended ends
                self._step("update", "abandon", {})
            self._ask("POST", "/start_weight_update", None)

    def _step(self, call: Literal["init", "update"], step: str, arguments: Mapping[str, Any]) -> list[Any]:
        path, key = _CALLS[call]
        self._answers.clear()
        try:
            self._ask("POST", path, {key: {"step": step, "arguments": dict(arguments)}})
        except TransferError as error:
            for answer in self._answers.read():
                if "error" in answer:
                    raise _error_from(answer["error"]) from error
            raise
        answers = self._answers.read()
        if len(answers) < self._answers.num_workers:
            raise TransferError(
                f"{len(answers)} of {self._answers.num_workers} workers have answered here: another client has "
                "connected since (close this runtime, connect and share again), or the server is on another machine"
            )
        return [answer["value"] for answer in answers]


def _error_from(error: Mapping[str, Any]) -> ColoError:
    """The error that a worker described."""
    kind = getattr(errors, error["kind"], TransferError)
    raised: ColoError = (TransferError if kind is BudgetError else kind)(error["message"])
    if "traceback" in error:
        raised.add_note("in the worker:\n" + error["traceback"])
    return raised
