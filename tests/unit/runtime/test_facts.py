"""The sentences of a report, from parts that say one thing each."""

from types import SimpleNamespace

import pytest
import torch

from colo.config import RuntimeConfig
from colo.memory.parking import Kept
from colo.phases.phase import Phase
from colo.phases.trace import MemorySample, Trace
from colo.runtime.runtime import facts_of
from colo.units import GIB, MIB

NOTHING_UNSEEN = SimpleNamespace(num_stepped_elsewhere=0, num_without_state=0)


def facts(*, trace=None, residual=None, kept=(), is_compared=True, **config):
    trace = Trace(capacity_bytes=GIB) if trace is None else trace
    rt = SimpleNamespace(
        engine=SimpleNamespace(name="vllm", placement="in another process", residual_bytes=residual or {}, segments=()),
        transport=SimpleNamespace(name="ipc", reason="weights are copied", shares=False, source=None),
        versions=SimpleNamespace(publisher=SimpleNamespace(version=3, num_published=2, bytes_synced=5 * MIB)),
        trace=trace,
        config=RuntimeConfig(**config),
        device=torch.device("cpu"),
        kept_state=kept,
    )
    side = SimpleNamespace(why="resident: it fits", session=SimpleNamespace(unseen=NOTHING_UNSEEN))
    return facts_of(rt, side, is_compared=is_compared)


def record(trace, phase, num_bytes):
    trace.record(
        MemorySample(time_s=0.0, phase=phase, segments={"all": num_bytes}, host_bytes=0, device_used_bytes=None)
    )


def test_what_every_report_says():
    trace = Trace(capacity_bytes=GIB)
    for phase, size in ((Phase.ROLLOUT, 3 * MIB), (Phase.TRAIN, 2 * MIB), (Phase.IDLE, 4 * MIB)):
        record(trace, phase, size)
    assert facts(trace=trace) == {
        "engine": "vllm on cpu: in another process",
        "weights": "ipc: weights are copied",
        "version": "3, 2 publications, 5.00 MiB copied",
        "peak": "rollout 3.00 MiB, train 2.00 MiB, ever 4.00 MiB",
        "offload": "auto: no state of the trainer had to leave the device",
        "optimizer": "resident: it fits",
    }


def test_a_model_whose_passes_colo_does_not_run_is_said_not_to_be_compared_unless_the_loop_does():
    assert "rt.log(mismatch=...) adds yours" in facts(is_compared=False)["mismatch"]
    trace = Trace(capacity_bytes=GIB)
    trace.metric("mismatch", 0.25)
    assert facts(trace=trace, is_compared=False)["mismatch"].startswith("0.25 mean")


def test_what_has_left_for_rollouts_is_named_once_in_order():
    trace = Trace(capacity_bytes=GIB)
    for name in (
        "out trainer.optimizer",
        "in trainer.optimizer",
        "out trainer.gradients",
        "out trainer.optimizer",
    ):
        trace.add(name, 0.0, category="step", phase=Phase.ROLLOUT)
    expected = "always: trainer.gradients, trainer.optimizer left the device for rollouts"
    assert facts(trace=trace, offload="always")["offload"] == expected


def test_what_stays_with_a_sleeping_engine_is_added_up():
    found = facts(residual={"CUDA context": 2 * MIB, "NCCL": MIB})
    assert found["asleep"] == "3.00 MiB stay with the engine: CUDA context 2.00 MiB, NCCL 1.00 MiB"


def test_kept_state_is_named_by_reason_with_the_first_of_each():
    kept = [Kept("a", MIB, "sparse"), Kept("b", MIB, "referred to"), Kept("c", 2 * MIB, "sparse")]
    kept += [Kept("d", 2 * MIB, "sparse")]
    assert facts(kept=kept)["kept"] == (
        "6.00 MiB of the optimizer's state stay on the device: a and 2 others: sparse; b: referred to"
    )
    assert "a and 1 others: sparse" in facts(kept=kept[:3])["kept"]


@pytest.mark.parametrize("name", ["mismatch", "mismatch_sampled"])
def test_metrics_of_the_last_step_are_told(name):
    trace = Trace(capacity_bytes=GIB)
    for value in (0.5, 0.25, 0.125):
        trace.metric("changed_fraction", value)
        trace.metric(name, value / 100)
    found = facts(trace=trace)
    assert found["changed"] == "12.5% of the 16-bit weights in the last step"
    assert found["mismatch"] == "0.0013 mean |log p(engine) - log p(trainer)| in the last step"


def test_a_loops_own_mismatch_is_told_rather_than_that_of_samples():
    trace = Trace(capacity_bytes=GIB)
    trace.metric("mismatch", 0.5)
    trace.metric("mismatch_sampled", 0.25)
    assert facts(trace=trace)["mismatch"].startswith("0.5 mean")
