"""A running vLLM, and calls into it and its workers: one life of an engine. Lost or closed, a connection stays so."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch

from colo import errors
from colo.engines.vllm import compat
from colo.engines.vllm.calls import Caller, NoAnswer, ProcessEnded, start_apart_from_interrupts
from colo.engines.vllm.names import WORKER_EXTENSION
from colo.errors import BudgetError, EngineLost, Unsupported
from colo.memory.mapped_buffer import probing
from colo.memory.probe import device_id, used_device_bytes

T = TypeVar("T")

DEADLINE_S = 300.0
"""How long an engine in a process of its own may neither answer nor sample a token before it counts as lost."""

_ABORT_S = 10.0
"""How long an interrupt waits for a generation to end. What then still runs holds up the next call."""


class Connection:
    """A `vllm.LLM`, and what its workers have said of themselves.

    The engine is lost when its process ends, or neither answers nor samples anything for `deadline_s`: `lost` then says
    why, `on_loss` has been told, and this call and every later one raise `EngineLost`. One in this process is never
    lost.
    Ownership: owns a `vllm.LLM` that `start` has started, until `close`; one that it was given stays its owner's.
    Not thread-safe: one caller at a time.
    """

    def __init__(
        self,
        llm: Any,
        device: torch.device,
        *,
        own_process: bool,
        deadline_s: float,
        on_loss: Callable[[str], None],
        owns_llm: bool = False,
    ) -> None:
        """Connect to `llm`, which runs in a process of its own or in this one.

        Raises: `Unsupported` when it runs on another device than `device`, or in a process of its own without colo's
        worker extension.
        """
        self.llm = llm
        self.model_config = llm.llm_engine.vllm_config.model_config
        self.device = device
        self.own_process = own_process
        self.deadline_s = deadline_s
        self.lost: str | None = None
        self.taken_bytes = 0
        """What vLLM took of the device when it started, where that was seen."""
        self._on_loss = on_loss
        self.owns_llm = owns_llm
        self._calls = Caller(self._progress) if own_process else None
        try:
            self.infos = self._meet_workers()
        except BaseException:
            self.close()
            raise

    @classmethod
    def start(
        cls,
        options: Mapping[str, Any],
        device: torch.device,
        *,
        own_process: bool,
        deadline_s: float,
        on_loss: Callable[[str], None],
    ) -> Connection:
        """Start vLLM with `options`, those of `vllm.LLM`, and connect to it. Raises: also what vLLM raises."""
        from vllm import LLM

        before_bytes = used_device_bytes(device) or 0
        with compat.in_this_process(not own_process):
            start = partial(LLM, **options)
            llm = start_apart_from_interrupts(start, _shut_down) if own_process else _start_here(start, options, device)
        taken_bytes = (used_device_bytes(device) or 0) - before_bytes
        connection = cls(llm, device, own_process=own_process, deadline_s=deadline_s, on_loss=on_loss, owns_llm=True)
        connection.taken_bytes = taken_bytes
        return connection

    @property
    def pids(self) -> Sequence[int]:
        """Process of every worker."""
        return tuple(info["pid"] for info in self.infos)

    @property
    def ipc_refusal(self) -> str | None:
        """Why some worker cannot map memory of this process on its GPU; `None` where all can, or need not."""
        return next((info["ipc_refusal"] for info in self.infos if info["ipc_refusal"]), None)

    @property
    def model_type(self) -> str | None:
        """Of the model's configuration."""
        found: str | None = getattr(self.model_config.hf_config, "model_type", None)
        return found

    def gather(self, value: T) -> list[T]:
        """`value` of every rank, where each runs its own part of the engine (`external_launcher`); else it alone."""
        values = [value]
        if self.own_process or self.llm.llm_engine.vllm_config.parallel_config.world_size == 1:
            return values
        from vllm.distributed.parallel_state import get_pp_group, get_tp_group

        for group in (get_tp_group(), get_pp_group()):  # of this replica, of which there may be others
            if group.world_size > 1:
                found: list[Any] = [None] * group.world_size
                torch.distributed.all_gather_object(found, values, group=group.cpu_group)
                values = [one for part in found for one in part]
        return values

    def call(self, operation: str, **arguments: Any) -> list[Any]:
        """Run an operation in every worker and return their answers. Raises: what the first failing one raised."""
        answers = self.ask(operation, arguments)
        for answer in answers:
            if "error" in answer:
                raise error_from(answer["error"])
        return [answer["value"] for answer in answers]

    def ask(self, operation: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
        """Run an operation in every worker and return {"value": ...} or {"error": ...} of each."""
        if not self.own_process:
            from colo.engines.vllm.worker.agent import call

            # A function of this module needs no worker extension, which a caller's own engine may lack.
            return list(self.llm.collective_rpc(call, args=(operation, arguments)))
        return self.in_engine(operation, lambda: list(self.llm.collective_rpc("colo", args=(operation, arguments))))

    def in_engine(self, operation: str, function: Callable[[], T], *, deadline: bool = True) -> T:
        """Call into vLLM; the end of its process, or its silence, becomes `EngineLost`.

        It is silent when nothing has been sampled for as long as the deadline, nor this call been answered.
        """
        self.require()
        if self._calls is None:
            return function()
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            return self._calls.call(function, deadline_s=self.deadline_s if deadline else None)
        except (ProcessEnded, EngineDeadError) as error:
            self._lose(f"its process ended during {operation}", error)
        except NoAnswer as error:
            self._lose(f"it did not answer {operation} within {self.deadline_s:.0f} s", error)
        except Exception as error:
            if self._calls.has_ended():  # a dying engine may still answer, with whatever it died of
                self._lose(f"its process ended during {operation}", error)
            raise

    def abort_requests(self) -> None:
        """End every request in vLLM, whoever waits for it; in a process that is silent once it speaks again."""
        if self.lost is not None:
            return
        core = self.llm.llm_engine
        states = core.output_processor.request_states
        if self._calls is None:
            _abort(core, states)
            return
        taken: dict[str, Any] = {}

        def take() -> None:
            """Leave the thread that generates nothing to wait for."""
            for request in list(states):
                if (state := states.pop(request, None)) is not None:
                    taken[request] = state

        def abort() -> None:
            states.update(taken)  # for vLLM to take out of all that it has noted
            _abort(core, taken)

        self._calls.end_calls(take, abort, within_s=_ABORT_S)
        if self._calls.has_ended():
            self._note_loss("its process ended during generate")

    def tell_version(self, version: int) -> None:
        """Have vLLM name the version of its weights to whoever asks it, where it can (from 0.30)."""
        tell = getattr(self.llm, "update_weight_version", None)
        if tell is not None:
            self.in_engine("update_weight_version", lambda: tell(str(version)))

    def require(self) -> None:
        """Raise `EngineLost` when it is."""
        if self.lost is not None:
            raise EngineLost(f"the engine is lost: {self.lost}. {self._way_back[0].upper()}{self._way_back[1:]}")

    def give_up(self, cause: str) -> None:
        """End an engine of ours that must not be used, as if it were lost."""
        self._note_loss(cause)
        self.close()

    def close(self) -> None:
        """Let go of the `vllm.LLM`, and shut it down where it is ours. Idempotent."""
        llm, self.llm = self.llm, None
        if self._calls is not None:
            self._calls.close()
            self._calls = None
        if llm is not None and self.owns_llm:
            _shut_down(llm)
            del llm
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def _meet_workers(self) -> list[dict[str, Any]]:
        if self.own_process and not self.llm.llm_engine.vllm_config.parallel_config.worker_extension_cls:
            raise Unsupported(
                "this vllm.LLM runs in a process of its own, where colo has no foothold: start it with "
                f"worker_extension_cls='{WORKER_EXTENSION}' and load_format='colo', or set "
                "VLLM_ENABLE_V1_MULTIPROCESSING=0 before"
            )
        with probing(self.device if self.own_process else torch.device("cpu")) as probe:
            infos = self.call("describe", same_process=not self.own_process, client_pid=os.getpid(), probe=probe)
        if self._calls is not None:
            self._calls.watch([info["pid"] for info in infos])
        found, wanted = infos[0]["device"], device_id(self.device)
        if found != wanted:
            raise Unsupported(
                f"vLLM runs on {found} and the trainer on {wanted}: set CUDA_VISIBLE_DEVICES so that both see the same "
                "GPU first"
            )
        return infos

    def _progress(self) -> object:
        """What changes while vLLM generates: requests that are left, and how many tokens each has."""
        try:
            requests = list(self.llm.llm_engine.output_processor.request_states.values())
            return [(id(r), r.detokenizer.num_output_tokens()) for r in requests if r.detokenizer is not None]
        except RuntimeError:  # another thread is changing what is read here
            return object()  # unlike any before
        except AttributeError:  # the engine is closed, or keeps it elsewhere
            return None

    @property
    def _way_back(self) -> str:
        if self.owns_llm:
            return "call recover() to start it again"
        return "the vllm.LLM is your own: close the runtime, start another and share it"

    def _note_loss(self, cause: str) -> None:
        self.lost = cause
        self._on_loss(cause)

    def _lose(self, cause: str, error: BaseException) -> NoReturn:
        self._note_loss(cause)
        raise EngineLost(f"the engine is lost: {cause}. The trainer's weights are intact; {self._way_back}") from error


def _abort(core: Any, states: Mapping[str, Any]) -> None:
    """Abort requests, and those that stand for several of them, which vLLM would not let go of."""
    parents = {state.parent_req.request_id for state in states.values() if getattr(state, "parent_req", None)}
    core.abort_request([*states, *parents], internal=True)


def _start_here(start: Callable[[], T], options: Mapping[str, Any], device: torch.device) -> T:
    """Start vLLM in this process, whose random numbers stay its own.

    Unless `seed` is among the options, or there are other ranks, which have to draw what this one does.
    """
    if options.get("seed") is not None or options.get("distributed_executor_backend") == "external_launcher":
        return start()
    with compat.own_random_state(device):
        return start()


def _shut_down(llm: Any) -> None:
    llm.llm_engine.engine_core.shutdown()


def error_from(error: Mapping[str, Any]) -> Exception:
    """The error that a worker described."""
    kind: Callable[..., Exception] = getattr(errors, error["kind"], ValueError)
    if kind is BudgetError:
        return BudgetError(error["message"], needed_bytes=error["needed_bytes"], free_bytes=error["free_bytes"])
    raised = kind(error["message"])
    if "traceback" in error:
        raised.add_note("in the worker:\n" + error["traceback"])
    return raised
