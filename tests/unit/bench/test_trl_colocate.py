"""TRL's own trainer, one step at a time, sampling with transformers: a CPU has no vLLM that sleeps."""

import threading
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("trl", reason="TRL is not installed: pip install 'colo-rl[trl]'")

from colo.bench.common import silent
from colo.bench.trl_colocate import WAY, TRLColocate, why_skipped
from colo.bench.workload import prepared
from colo.errors import Unsupported

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*checkpointing` is deprecated:FutureWarning"),  # TRL sets it by itself
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
]


@pytest.fixture(scope="module")
def setup():
    with prepared("step", "0.6b", "cpu", silent) as made:
        yield made


def weights(tenants):
    return [p.detach().clone() for p in tenants._trainer.model.parameters()]


def test_every_step_is_one_of_the_trainers_and_nothing_happens_between(setup):
    tenants = TRLColocate(setup, own_process=False, with_vllm=False)
    trainer = tenants._trainer
    for number in range(1, 4):
        before = weights(tenants)
        watch = tenants.step(WAY)
        assert trainer.state.global_step == number
        assert 0 < watch.total_s == sum(watch.parts_s.values()) == watch.parts_s["train"]
        assert watch.sent_bytes == sum(tensor.nbytes for tensor in before)
        after = weights(tenants)
        assert any(not torch.equal(one, other) for one, other in zip(before, after, strict=True))
        tenants.rest()
    tenants.close()
    assert trainer.state.global_step == 3
    assert not any(thread.name == "trl" for thread in threading.enumerate())


def test_an_error_of_the_trainers_is_raised_by_the_step_and_by_later_ones(setup):
    tenants = TRLColocate(setup, own_process=False, with_vllm=False)

    def fail(*_, **__):
        raise ValueError("no gradients")

    tenants._trainer.training_step = fail
    for _ in range(2):
        with pytest.raises(ValueError, match="no gradients"):
            tenants.step(WAY)
    tenants.close()


def test_calls_of_vllm_count_as_parts_of_a_step(setup):
    tenants = TRLColocate(setup, own_process=False, with_vllm=False)
    calls = SimpleNamespace(generate=lambda: calls.wake_up(), wake_up=lambda: 5)
    tenants._clock(calls, "wake_up", "switch")
    tenants._clock(calls, "generate", "rollout")
    training_step = tenants._trainer.training_step

    def step(*given, **options):
        assert calls.generate() == 5
        return training_step(*given, **options)

    tenants._trainer.training_step = step
    watch = tenants.step(WAY)
    assert min(watch.parts_s[part] for part in ("rollout", "switch", "train")) > 0
    assert sum(watch.parts_s.values()) == pytest.approx(watch.total_s)
    tenants.close()


def test_it_says_where_it_cannot_be(setup):
    assert why_skipped(torch.device("cpu")) == "vLLM has no sleep mode on a CPU"
    assert why_skipped(torch.device("cuda")) is None
    with pytest.raises(Unsupported, match="in the trainer's process"):
        TRLColocate(setup, own_process=True)
