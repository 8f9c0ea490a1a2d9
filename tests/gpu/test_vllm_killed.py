"""vLLM on CUDA in a process of its own that is killed, and started again on the same memory."""

import os
import signal

import pytest
import torch
from tiny_vllm import MARKS, PROMPTS, config_of_0_6b, difference, launch, train_step

from colo.engine import EngineState
from colo.errors import EngineLost

pytestmark = MARKS


def test_a_killed_engine_comes_back_on_the_same_weights():
    rt = launch(config_of_0_6b(), enforce_eager=True)
    train_step(rt, 0)
    with rt.rollout():
        gap = difference(rt.model, rt.generate(PROMPTS, max_tokens=16, temperature=0))
    weights = [p.detach().clone() for p in rt.model.parameters()]
    (pid,) = rt.engine.pids
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineLost, match="recover"):
        rt.generate(PROMPTS)
    assert rt.engine.state is EngineState.LOST
    assert all(torch.equal(a, b) for a, b in zip(weights, rt.model.parameters(), strict=True))
    train_step(rt, 1)
    rt.recover()
    assert rt.engine.pids != (pid,)
    with rt.rollout():
        again = rt.generate(PROMPTS, max_tokens=16, temperature=0)
    assert difference(rt.model, again) < 2 * gap + 0.01
    rt.close()
