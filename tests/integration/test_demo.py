"""The demo is the package's first promise: it learns, sends nothing, and peaks at the larger phase."""

import pytest

from colo.demo import LEARNING_RATE
from colo.phases.phase import Phase


def check_promises(result, steps):
    """What holds for any number of steps, in both modes."""
    rt = result.runtime
    assert (result.bytes_synced, result.weights_version, len(result.rewards)) == (0, steps, steps)
    assert rt.transport.name == "shared"
    assert result.base_unchanged is (True if result.mode == "lora" else None)
    larger_bytes = max(result.phase_peak_bytes.values())
    assert result.peak_bytes <= 1.05 * larger_bytes
    held_bytes = sum(segment.size_bytes for segment in rt.scheduler.segments.values())
    assert result.peak_bytes <= rt.trace.capacity_bytes < held_bytes
    for sample in rt.trace.samples:
        if sample.phase is Phase.ROLLOUT:
            assert sample.segments["engine.kv_cache"] > 0
        if sample.phase is Phase.TRAIN:
            assert sample.total_bytes <= rt.trace.capacity_bytes


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "steps"), [("full", 100), ("lora", 200)])
def test_the_demo_learns(run_demo, mode, steps):
    result = run_demo(steps=steps, mode=mode, seed=0)
    assert sum(result.rewards[-5:]) - sum(result.rewards[:5]) >= 5 * 0.3
    check_promises(result, steps=steps)


@pytest.mark.parametrize("mode", list(LEARNING_RATE))
def test_two_steps_keep_every_promise_but_learning(run_demo, mode):
    steps = []
    result = run_demo(mode=mode, on_step=steps.append)
    check_promises(result, steps=2)
    assert (result.engine, result.device, result.mode) == ("torch", "cpu", mode)
    assert [metrics["reward"] for metrics in steps] == result.rewards
    assert all(metrics["mismatch"] < 1e-5 for metrics in steps)
    assert all(metrics["tokens_per_s"] > 0 for metrics in steps)
    assert steps[-1]["device_bytes"] == result.peak_bytes
    assert 0 < result.rewards[0] < 0.5
