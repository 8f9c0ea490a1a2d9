"""Link to the workers of a vLLM. Every kind of link carries the same requests to the same worker agent.

    `InProcessLink`    vLLM in this process       `collective_rpc` with a function, tensors as they are
    `OwnProcessLink`   vLLM in its own process    `collective_rpc` by the name of a method
    `ServerLink`       a vLLM server              `POST /collective_rpc`, JSON

A link lasts as long as its vLLM. Lost or closed, it stays so, and an engine that is started again has another.
"""

from __future__ import annotations

import math
import operator
import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch

from colo.engine import Completion
from colo.engines.base import EngineStatus
from colo.engines.elsewhere import Broadcast, Broadcaster, WeightsFolder
from colo.engines.sampling import check_seeds, distorting
from colo.engines.text import check_count, check_prompts
from colo.engines.vllm.wire import Describe, Envelope, Request, WorkerError, WorkerInfo
from colo.errors import EngineLost, Unsupported
from colo.memory.probe import device_id
from colo.memory.share import Description, probing
from colo.weights.mismatch import not_numbers

T = TypeVar("T")

PauseMode = Literal["abort", "wait", "keep"]

NamedAdapter = tuple[str, int]
"""Name of an adapter, and the number by which workers know it."""


class WorkerLink(ABC):
    """Carries operations to every worker, and requests to vLLM. One caller at a time.

    Once vLLM has ended, or does not answer, the status is lost: this call and every later one raise `EngineLost`.
    """

    same_process: bool = False
    is_own: bool = False
    """This vLLM was started here and ends with the link."""

    through: WeightsFolder | Broadcast | None = None
    """The way of weights to workers elsewhere; `None` for those on the trainer's machine and device."""

    broadcaster: Broadcaster | None = None
    """The trainer's end of a group with workers elsewhere, where weights are broadcast."""

    cache_bytes: int = 0
    """KV cache of a worker elsewhere."""

    why_not_shared: str | None = None
    """The reason why the workers' memory cannot be a trainer's; `None` where it can."""

    goes_by_number: bool = False
    """Versions of an adapter have one name in vLLM, whose prefix cache then takes them for the same."""

    llm: Any = None
    """The `vllm.LLM`, where there is one."""

    how_to_free: Mapping[str, str]
    """Advice on starting this vLLM so that its KV cache (`pool`) can leave, or its `weights`, also those in `slabs`."""

    name_of_vllm: str
    """`vllm.LLM` or `server`, whichever a user has."""

    for_logprobs: str
    """Advice on starting this vLLM so that log-probabilities are those of what is sampled."""

    for_positions: str
    """Advice on giving it more positions, after a comma."""

    taken_bytes: int = 0
    """Device memory that vLLM took when it started, where that was seen."""

    def __init__(self, device: torch.device, status: EngineStatus, deadline_s: float) -> None:
        """Begin without workers; `deadline_s` is the silence after which vLLM counts as lost."""
        self.device = device
        self.status = status
        self.deadline_s = deadline_s
        # another client that describes itself takes the workers over: see `WorkerAgent`
        self.client = secrets.token_hex(8)
        """Identifies this link among the clients of the same workers."""

        self.infos: Sequence[WorkerInfo] = ()
        """Accounts of the workers, of when the link was made."""

    @property
    def distorting(self) -> tuple[str, ...]:
        """Names of start options of this vLLM that change every request's distribution."""
        return ()

    # ---- what a carrier has ------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def placement(self) -> str:
        """A phrase for reports: which vLLM runs where."""

    @abstractmethod
    def ask(self, request: Request) -> list[Any]:
        """Run an operation in every worker and return the answer of each, or its `WorkerError`."""

    @abstractmethod
    def sampling_params(self, params: Any, options: Mapping[str, Any]) -> Any:
        """Make what `generate` takes, from colo's or vLLM's own parameters or from options by name."""

    @abstractmethod
    def generate(
        self, prompts: Sequence[Sequence[int]], params: Any, *, version: int, adapter: NamedAdapter | None
    ) -> list[Completion]:
        """Sample from weights of `version`; see `Engine.generate`."""

    @abstractmethod
    def reset_prefix_cache(self) -> None:
        """Forget what earlier requests have computed. Raises: `TransferError` when vLLM does not let go of it."""

    @abstractmethod
    def stop_requests(self, mode: PauseMode) -> None:
        """Stop generating. See `VLLMEngine.pause`."""

    @abstractmethod
    def go_on(self) -> None:
        """Generate again."""

    @abstractmethod
    def why_not_recovered(self, lost: str) -> str:
        """Advice about a vLLM of the user's own that is lost."""

    @abstractmethod
    def close(self) -> None:
        """Let go of vLLM, and end it where it is ours. Idempotent."""

    def check_alive(self) -> None:
        """Find out whether vLLM has ended, where that can be seen without asking it. Raises: `EngineLost`."""
        return

    def look(self) -> None:
        """Ask whether vLLM is there and knows this client still, where `check_alive` does not see it.

        Raises: `EngineLost`, `TransferError`.
        """
        return

    def check_mode(self, mode: PauseMode) -> None:
        """Raise `Unsupported` for a way of pausing that is not possible."""
        return

    def tell_version(self, version: int) -> None:
        """Tell vLLM the version of its weights, for its clients, where it takes one."""
        return

    def reserve_adapter(self, number: int, tensors: Sequence[tuple[str, torch.Tensor]]) -> int:
        """The number by which workers are to know a new adapter of these tensors: `number` where that is free."""
        return number

    def release_adapter(self, number: int) -> None:
        """Forget a number that `reserve_adapter` has given. Idempotent."""
        return

    # ---- what all have -----------------------------------------------------------------------------------------------

    @property
    def pids(self) -> Sequence[int]:
        """Process of every worker."""
        return tuple(info.pid for info in self.infos)

    @property
    def ipc_refusal(self) -> str | None:
        """The reason why some worker cannot map memory of this process on its GPU; `None` if all can, or need not."""
        return next((info.ipc_refusal for info in self.infos if info.ipc_refusal), None)

    def gather(self, value: T) -> list[T]:
        """`value` of every rank that runs a part of this vLLM; usually it alone."""
        return [value]

    def check_request(self, prompts: Sequence[Sequence[int]], params: Any) -> list[tuple[int, ...]]:
        """Return the token ids of every prompt. Raises: as `Engine.generate`; `Unsupported` as `check_logprobs`."""
        info = self.infos[0]
        check_logprobs(params, info.logprobs_mode, self.for_logprobs)
        check_count(len(prompts), params.n)
        check_seeds(params.seed, len(prompts))
        # NumPy's integers would not travel as JSON
        token_ids = [tuple(map(operator.index, prompt)) for prompt in prompts]
        check_prompts(token_ids, info.vocab_size, info.max_length, or_else=self.for_positions)
        return token_ids

    def envelope(self, request: Request) -> dict[str, Any]:
        """Make a request ready to travel, by the names of all fields."""
        return Envelope(operation=request.operation(), arguments=request.to_wire(), client=self.client).to_wire()

    def call(self, request: Request) -> list[Any]:
        """Run an operation in every worker and return their answers. Raises: the error of the first that fails."""
        answers = self.ask(request)
        for answer in answers:
            if isinstance(answer, WorkerError):
                raise answer.error()
        return answers

    def pause(self, mode: PauseMode = "abort") -> None:
        """Hold requests back; see `VLLMEngine.pause`. Idempotent, but for a mode that is not possible."""
        self.check_mode(mode)
        if self.status.paused:
            return
        self.status.paused = True  # also after an interrupt: it may be, and to resume what is not does nothing
        try:
            self.stop_requests(mode)
        except Exception:
            self.status.paused = False
            raise

    def resume(self) -> None:
        """Let requests go on. Idempotent."""
        if self.status.paused:
            self.go_on()
            self.status.paused = False

    def meet_workers(self, *, home: Description | None = None) -> Sequence[WorkerInfo]:
        """Introduce this client to the workers, who answer no other then; they check that `home` can be mapped."""
        with probing(torch.device("cpu") if self.same_process or self.through else self.device) as probe:
            # those of a server do not end with it
            client_pid = None if home is not None or self.through else os.getpid()
            asked = Describe(same_process=self.same_process, client_pid=client_pid, probe=probe, home=home)
            told = self.call(asked)
        return tuple(map(WorkerInfo.from_wire, told))

    def check_device(self) -> None:
        """Raise `Unsupported` unless the first worker is on the trainer's device."""
        found, wanted = self.infos[0].device, device_id(self.device)
        if found != wanted:
            raise Unsupported(
                f"vLLM runs on {found} and the trainer on {wanted}: set CUDA_VISIBLE_DEVICES so that both see the same "
                "GPU first"
            )


def answers_of(told: Sequence[Mapping[str, Any]], status: EngineStatus) -> list[Any]:
    """Values and `WorkerError`s that workers have answered. `EngineLost` when they answer another client now."""
    answers = [WorkerError.from_wire(one["error"]) if "error" in one else one["value"] for one in told]
    for answer in answers:
        # whoever has taken the workers over copies into them: this client's version is gone
        if isinstance(answer, WorkerError) and answer.kind == EngineLost.__name__:
            raise status.lose(answer.message)
    return answers


def check_logprobs(params: Any, mode: str, advice: str) -> None:
    """Raise `Unsupported` unless `logprobs_mode` returns log-probabilities of the distribution that is sampled from."""
    if mode == "processed_logprobs":
        return
    # raw log-probabilities are those of temperature 1 without filters
    if mode != "raw_logprobs" or params.temperature not in (0, 1) or distorting(params):
        raise Unsupported(
            f"vLLM was started with logprobs_mode={mode!r} and returns no log-probabilities of what is sampled at "
            f"temperature {params.temperature} with these filters: {advice}"
            + (", or sample at temperature 1 without filters" if mode == "raw_logprobs" else "")
        )


def check_numbers(logprobs: Sequence[float]) -> None:
    """Raise `FloatingPointError` unless every log-probability of what was sampled is a finite number."""
    # a sum is NaN or infinite if any part is, and costs one pass in C
    if not math.isfinite(sum(logprobs)):
        raise FloatingPointError(not_numbers(None))
