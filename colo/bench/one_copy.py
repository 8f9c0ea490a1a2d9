"""colo: vLLM and a trainer on one copy of the weights, as something that takes steps."""

from __future__ import annotations

from dataclasses import fields

from colo.bench.common import clear
from colo.bench.tenants import Moment, Stopwatch, Tenants
from colo.bench.workload import Setup, gradients
from colo.config import Offload, RuntimeConfig
from colo.phases.phase import Phase
from colo.phases.trace import Trace
from colo.report.table import covered_s, stretches_of

WAYS = ("auto", "always")
"""When trainer state leaves for a rollout: `RuntimeConfig.offload`."""

STREAMED = "streamed"
"""The way in which the optimizer's state passes through the device in each step, `RuntimeConfig.optimizer`."""


def can_stream() -> bool:
    """Whether colo can stream an optimizer's state."""
    return any(setting.name == "optimizer" for setting in fields(RuntimeConfig))


class OneCopy(Tenants):
    """vLLM in this process or in one of its own, and a trainer."""

    def __init__(self, setup: Setup, own_process: bool, optimizer: str | None = None) -> None:
        """Start both, with `RuntimeConfig.optimizer` where it is given."""
        super().__init__(setup)
        settings = {"optimizer": optimizer} if optimizer is not None else {}
        self._rt = setup.launched(own_process=own_process, **settings)

    def step(self, way: str) -> Stopwatch:
        """One step, with `offload` as `way` says; what a streamed optimizer leaves on the device stays there."""
        rt, size = self._rt, self.setup.size
        rt.scheduler.offload = Offload.AUTO if way == STREAMED else Offload(way)
        first_span, sent_bytes, trace = len(rt.trace.spans), rt.bytes_synced, rt.trace
        watch, start_s = Stopwatch(rt.device), trace.now_s()
        with rt.rollout():
            sampling_s = trace.now_s()
            completions = rt.generate(size.token_ids, max_tokens=size.new_tokens, ignore_eos=True)
            sampled_s = trace.now_s()
        sequences = [c.prompt_token_ids + c.token_ids for c in completions]
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
