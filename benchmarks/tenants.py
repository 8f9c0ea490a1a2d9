"""Trainers and their engines, in either way to share a device, as something that takes steps in turns."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.common import clear, own_processes, synchronize
from benchmarks.workload import Setup, Size, gradients, peak_device_bytes, shut_down, train_step, worker_model
from colo.assembly.launch import default_optimizer
from colo.config import Offload
from colo.engines.vllm import compat
from colo.engines.vllm.client.start import LOGPROBS_MODE
from colo.phases.phase import Phase
from colo.phases.trace import Trace
from colo.report.table import covered_s, stretches_of
from colo.units import GIB
from colo.weights.sources.names import checkpoint_views

PARTS = ("rollout", "publish", "train", "switch")
"""Parts of a step; `switch` is the rest."""

SHORT_TOKENS = 8
"""Tokens that a short step samples for each prompt."""


class Moment:
    """A point in what a device has been given to do on its current stream; on a CPU a time."""

    def __init__(self, device: torch.device) -> None:
        self._time_s = time.perf_counter()
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(torch.cuda.current_stream(device))

    def seconds_until(self, later: Moment) -> float:
        """Seconds from this to `later`. Ordering: the device has been waited for."""
        if self._event is None or later._event is None:
            return later._time_s - self._time_s
        return float(self._event.elapsed_time(later._event)) / 1e3


@dataclass
class Stopwatch:
    """Seconds of a step and of its parts. Runs from when it is made until `stop`."""

    device: torch.device
    parts_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    exposed_s: float | None = None
    """Seconds of copies between device and host beside neither sampling nor gradients; `None` if unknown."""

    sent_bytes: int = 0
    """Bytes of weights that have left the trainer's memory."""

    total_s: float = 0.0
    start_s: float = field(default_factory=time.perf_counter)
    _within_s: float = 0.0
    """Seconds of parts within the one that runs."""

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add what a block takes, until the device has done what it queues, to a part; less parts within it."""
        start_s, before_s, self._within_s = time.perf_counter(), self._within_s, 0.0
        yield
        synchronize(self.device)
        spent_s = time.perf_counter() - start_s
        self.parts_s[name] += spent_s - self._within_s
        self._within_s = before_s + spent_s

    def stop(self, rest: str = "switch") -> None:
        """Wait for what the trainer has queued, and count what no part has counted as `rest`.

        Copies of state to the host may go on: the next rollout does not wait for them.
        """
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        self.total_s = time.perf_counter() - self.start_s
        self.parts_s[rest] = self.total_s - sum(self.parts_s[name] for name in PARTS if name != rest)


class Tenants(ABC):
    """Engine and trainer under measurement, in a process of their own."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup

    @abstractmethod
    def step(self, way: str, *, short: bool = False) -> Stopwatch:
        """One step of rollout and training, in one of several ways to go about it.

        A `short` one goes through the same phases with batches of the same shapes, but fewer of them.
        """

    @abstractmethod
    def rest(self) -> None:
        """Hold as little device memory as can be, while others are measured."""

    @abstractmethod
    def close(self) -> None:
        """End the engine."""

    def prepare(self, way: str) -> None:
        """Come from rest or from another way, by a short step: memory that torch has kept of that is given back."""
        clear(self.setup.device)
        self.step(way, short=True)

    def watched_step(self, way: str) -> tuple[Stopwatch, int]:
        """One step, and the most device memory in use meanwhile, all processes together; 0 on a CPU."""
        with peak_device_bytes(self.setup.device) as peak:
            watch = self.step(way)
        return watch, peak[0]


def of_short_step(sequences: Sequence[Sequence[int]], size: Size) -> list[list[int]]:
    """Two micro-batches, since the second adds to gradients, of sequences as long as those of a whole step."""
    length = size.prompt_tokens + size.new_tokens
    return [(list(ids) * (length // len(ids) + 1))[:length] for ids in sequences[: 2 * size.train_sequences]]


# ---- one copy of the weights, by colo --------------------------------------------------------------------------------

OURS = ("auto", "always")
"""When trainer state leaves for a rollout: `RuntimeConfig.offload`."""

STREAMED = "streamed"
"""The way in which the optimizer's state passes through the device in each step, `RuntimeConfig.optimizer`."""


class OneCopy(Tenants):
    """vLLM in this process or in one of its own, and a trainer."""

    def __init__(self, setup: Setup, own_process: bool, optimizer: str | None = None) -> None:
        """Start both, with `RuntimeConfig.optimizer` where it is given."""
        super().__init__(setup)
        settings = {"optimizer": optimizer} if optimizer is not None else {}
        self._rt = setup.launched(own_process=own_process, **settings)

    def step(self, way: str, *, short: bool = False) -> Stopwatch:
        """One step, with `offload` as `way` says; what a streamed optimizer leaves on the device stays there."""
        rt, size = self._rt, self.setup.size
        rt.scheduler.offload = Offload.AUTO if way == STREAMED else Offload(way)
        first_span, sent_bytes, trace = len(rt.trace.spans), rt.bytes_synced, rt.trace
        watch, start_s = Stopwatch(rt.device), trace.now_s()
        with rt.rollout():
            sampling_s = trace.now_s()
            new_tokens = min(SHORT_TOKENS, size.new_tokens) if short else size.new_tokens
            completions = rt.generate(size.token_ids, max_tokens=new_tokens, ignore_eos=True)
            sampled_s = trace.now_s()
        sequences = [[*c.prompt_token_ids, *c.token_ids] for c in completions]
        sequences = of_short_step(sequences, size) if short else sequences
        with rt.train():
            training_s = trace.now_s()
            gradients(rt.model, sequences, size, rt.device)
            trained = Moment(rt.device)
            rt.optimizer.step()
            rt.optimizer.zero_grad()
        end = Moment(rt.device)
        for span in trace.spans[first_span:]:
            if span.category == "phase" and span.phase in (Phase.ROLLOUT, Phase.TRAIN):
                watch.parts_s[str(span.phase)] += span.duration_s
            elif span.name.startswith("publish"):
                watch.parts_s["publish"] += span.duration_s
        watch.stop()
        end_s = trace.now_s()
        rt.scheduler.sample()  # notes copies that have ended
        hidden = [(sampling_s, sampled_s), (training_s, end_s - trained.seconds_until(end))]
        watch.exposed_s = exposed_s(trace, (start_s, end_s), hidden)
        watch.sent_bytes = rt.bytes_synced - sent_bytes
        return watch

    def rest(self) -> None:
        """Enter a training phase with everything away that it does not need, and leave it."""
        self._rt.scheduler.offload = Offload.ALWAYS
        with self._rt.train():
            clear(self.setup.device)

    def close(self) -> None:
        """End the engine."""
        self._rt.close()


def exposed_s(trace: Trace, within: tuple[float, float], hidden: list[tuple[float, float]]) -> float:
    """Seconds of the trace's copies `within` a stretch of time that are not beside `hidden` ones, which are apart."""
    copies = stretches_of(span for span in trace.spans if span.category == "copy")
    beside = sum(covered_s(copies, max(start, within[0]), min(end, within[1])) for start, end in hidden)
    return max(0.0, covered_s(copies, *within) - beside)


# ---- two copies, as people do today ----------------------------------------------------------------------------------

LEVELS = {"both resident": 0, "vLLM's level 1": 1, "vLLM's level 2": 2}
"""vLLM's sleep level while the trainer works."""


class TwoCopies(Tenants):
    """vLLM in this process or in one of its own, and a trainer, with as many bytes of weights each."""

    def __init__(self, setup: Setup, own_process: bool) -> None:
        """Start both. vLLM returns the log-probabilities that colo asks it for."""
        super().__init__(setup)
        self._owned = ExitStack()
        options: dict[str, Any] = {"logprobs_mode": LOGPROBS_MODE}
        if own_process:
            from vllm.config import WeightTransferConfig

            options["weight_transfer_config"] = WeightTransferConfig(backend="ipc")
            self._owned.enter_context(compat.variable("VLLM_ALLOW_INSECURE_SERIALIZATION", "1"))
        self._llm = setup.stock(own_process=own_process, **options)
        self._owned.callback(shut_down, self._llm)
        self._ipc = VLLMIpc(self._llm) if own_process else None
        with setup.device:
            self._model = AutoModelForCausalLM.from_config(setup.config, dtype=setup.config.dtype)
        self._optimizer = default_optimizer(self._model.parameters())
        self._sleeps = False

    def step(self, way: str, *, short: bool = False) -> Stopwatch:
        """One step of a way in `LEVELS`; every part of it waits for the device."""
        level, device, size = LEVELS[way], self.setup.device, self.setup.size
        self._wake()
        watch = Stopwatch(device)
        with watch.part("rollout"):
            outputs = self._generate(min(SHORT_TOKENS, size.new_tokens) if short else size.new_tokens)
        with watch.part("switch"):
            if level:
                self._llm.sleep(level=level)
        sequences = [[*o.prompt_token_ids, *o.outputs[0].token_ids] for o in outputs]
        sequences = of_short_step(sequences, size) if short else sequences
        with watch.part("train"):
            train_step(self._model, self._optimizer, sequences, size, device)
        with watch.part("switch"):
            if level:
                torch.cuda.empty_cache()  # else vLLM does not find the memory that it gave back
                self._llm.wake_up(tags=["weights"])
        with watch.part("publish"):
            self._push()
        with watch.part("switch"):
            if level:
                self._llm.wake_up(tags=["kv_cache"])
        watch.stop()
        watch.sent_bytes = sum(p.nbytes for p in self._model.parameters())
        return watch

    def rest(self) -> None:
        """Put vLLM to sleep, until the next step."""
        clear(self.setup.device)
        if self.setup.device.type == "cuda":
            self._llm.sleep(level=1)
            self._sleeps = True

    def close(self) -> None:
        """End vLLM."""
        self._owned.close()

    def _wake(self) -> None:
        if self._sleeps:
            self._llm.wake_up()
            synchronize(self.setup.device)
            self._sleeps = False

    def _generate(self, new_tokens: int) -> Any:
        from vllm import SamplingParams

        size = self.setup.size
        params = SamplingParams(max_tokens=new_tokens, temperature=1.0, ignore_eos=True, detokenize=False, logprobs=0)
        prompts: Any = [{"prompt_token_ids": ids} for ids in size.token_ids]
        self._llm.reset_prefix_cache()
        return self._llm.generate(prompts, params, use_tqdm=False)

    @torch.no_grad()
    def _push(self) -> None:
        """Push the weights: one tensor at a time through vLLM's loader, as TRL does; to a process of its own by IPC."""
        weights = {name: parameter.detach() for name, parameter in self._model.named_parameters()}
        if self._ipc is not None:
            self._ipc.send(checkpoint_views(weights, self.setup.config.model_type))
            return
        (model,) = self._llm.collective_rpc(worker_model)
        for view in weights.items():
            model.load_weights([view])


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


# ---- processes -------------------------------------------------------------------------------------------------------

_made: list[Any] = []
"""In a side's process: the object that is measured."""


class Side:
    """An object in a process of its own, whose methods are called from here. Arguments and results are pickled."""

    def __init__(self, make: Callable[..., Any], *arguments: Any) -> None:
        """Start the process and make the object there. Raises: what making it raises."""
        with ExitStack() as running:
            self._process = running.enter_context(own_processes())
            self._process.submit(_make, make, arguments).result()
            self._running = running.pop_all()

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the object. Raises: the method's own error; `BrokenProcessPool` when its process ends."""
        return self._process.submit(_call, method, arguments).result()

    def __enter__(self) -> Side:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Call the object's `close`, and end its process; by Ctrl-C or a limit of time, its process at once."""
        try:
            if error is None or isinstance(error, Exception):
                with suppress(*([BrokenProcessPool] if error is not None else [])):
                    self.call("close")
        finally:
            self._running.__exit__(kind, error, traceback)


def _make(make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    _made.append(make(*arguments))


def _call(method: str, arguments: tuple[Any, ...]) -> Any:
    return getattr(_made[0], method)(*arguments)
