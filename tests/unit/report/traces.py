"""Traces that the pictures are tested with."""

import math

from colo.phases.phase import Phase
from colo.phases.trace import MemorySample, Trace
from colo.units import GIB, MIB


def sample(time_s, phase, segments, used=None):
    return MemorySample(time_s=time_s, phase=phase, segments=segments, device_used_bytes=used)


def run(num_steps: int = 4, samples_per_phase: int = 3) -> Trace:
    """Training steps of ten seconds on a device of 40 GiB."""
    trace = Trace(capacity_bytes=40 * GIB)
    for i in range(num_steps):
        t = 10.0 * i
        trace.add("offload trainer.optimizer", t, end_s=t + 1, category="step", phase=Phase.ROLLOUT, resource="d2h")
        trace.add("rollout", t + 1, end_s=t + 6, category="phase", phase=Phase.ROLLOUT, resource="engine")
        trace.add("generate", t + 1, end_s=t + 6, phase=Phase.ROLLOUT, resource="engine")
        trace.add("train", t + 7, end_s=t + 10, category="phase", phase=Phase.TRAIN, resource="device")
        for j in range(samples_per_phase):
            held = {"engine.weights": 8 * GIB, "engine.kv_cache": 16 * GIB, "trainer.optimizer": 0}
            trace.samples.append(sample(t + 1 + 5 * j / samples_per_phase, Phase.ROLLOUT, held, 25 * GIB))
        for j in range(samples_per_phase):
            held = {"engine.weights": 8 * GIB, "engine.kv_cache": 0, "trainer.optimizer": 20 * GIB + j}
            trace.samples.append(sample(t + 7 + 3 * j / samples_per_phase, Phase.TRAIN, held, 30 * GIB))
        trace.metric("reward", i / num_steps)
    return trace


def only_samples():
    trace = Trace()
    trace.samples.append(sample(1.0, Phase.IDLE, {"a": MIB}))
    return trace


def only_spans():
    trace = Trace()
    trace.add("load", 0.0, end_s=1.0, resource="host")
    return trace


def only_phases():
    trace = Trace()
    trace.add("rollout", 2.0, end_s=2.0, category="phase", phase=Phase.ROLLOUT)
    return trace


def only_rewards():
    trace = Trace()
    trace.metric("reward", 0.0)
    return trace


def only_unusable_rewards():
    trace = Trace()
    trace.metric("reward", math.nan)
    return trace


def largest_rewards():
    trace = Trace()
    for reward in (1.7e308, -1.7e308, 1e-300):
        trace.metric("reward", reward)
    return trace


def nothing_held():
    trace = run(2)
    trace.samples = [sample(0.0, Phase.IDLE, {}), sample(1.0, Phase.IDLE, {"a": 0})]
    return trace


PARTIAL = [Trace, only_samples, only_spans, only_phases, only_rewards, only_unusable_rewards, largest_rewards]
PARTIAL += [nothing_held, run]
