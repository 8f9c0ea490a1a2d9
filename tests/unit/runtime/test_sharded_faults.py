"""An engine of one rank that dies at any moment: all ranks learn of it, none samples from mixed weights."""

from contextlib import suppress

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

import colo
from colo.engine import EngineState
from colo.engines.torch import TorchEngine
from colo.memory.offload import Mover
from colo.units import MIB
from colo.weights.exchange import Exchange
from tests.runtimes import PROMPTS, adamw, qwen3, train_step

CPU = torch.device("cpu")
LOST = "EngineLost: the engine is lost: it was killed"


class Mortal(TorchEngine):
    """An engine in this process that dies as one in another would: it notices when it is asked for something."""

    def __init__(self):
        super().__init__(qwen3(), device="cpu", dtype=torch.float32, kv_cache_bytes=MIB, mover=Mover(CPU))
        self.is_dead, self.dies_at = False, None
        self._status._check_alive = self.check_alive

    def check_alive(self):
        if self.is_dead and self._status.lost is None:
            raise self._status.lose("it was killed")

    def die(self, moment):
        if self.dies_at == moment:
            self.is_dead = True

    def commit(self, version):
        self.die("commit")
        super().commit(version)

    def generate(self, *arguments, **options):
        self.die("generation")
        return super().generate(*arguments, **options)

    def recover(self):
        self.is_dead, self.dies_at = False, None
        self._status.revive()
        for region in self.weights.regions:
            region.bytes.zero_()


def make():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(qwen3())
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return colo.share(Mortal(), model, adamw(model.parameters()))


def outcome(call):
    try:
        call()
    except colo.ColoError as error:
        return f"{type(error).__name__}: {error}"
    return "done"


def step(rt):
    with rt.train():
        train_step(rt)


def train(rt):
    with rt.train():
        pass


def sample(engine):
    """Past the runtime."""
    engine.resume()
    engine.generate(PROMPTS, engine.sampling_params(max_tokens=2))


def holds(rt):
    """Whether the engine holds the trainer's weights, and which version it says that it holds."""
    views = rt.engine.weights.hf_views()
    same = all(torch.equal(views[name], p.full_tensor()) for name, p in rt.model.named_parameters())
    return same, rt.engine.weights_version == rt.weights_version


@pytest.mark.parametrize("moment", ["between", "transfer", "commit"])
def test_an_engine_that_dies_before_it_samples_ends_the_rollout_of_all_ranks(both, monkeypatch, moment):
    def body(rank):
        rt = make()
        rt.generate(PROMPTS, max_tokens=2)
        step(rt)
        if rank:
            rt.engine.dies_at = moment
            rt.engine.die("between")
            unpack = Exchange._unpack

            def die(*arguments):
                unpack(*arguments)
                rt.engine.die("transfer")

            monkeypatch.setattr(Exchange, "_unpack", die)
        said = outcome(lambda: rt.generate(PROMPTS, max_tokens=2))
        monkeypatch.undo()
        version, state = rt.engine.weights_version, rt.engine.state
        refuses = outcome(lambda: sample(rt.engine))
        rt.recover()
        completions = rt.generate(PROMPTS, max_tokens=2)
        found = said, version, state, refuses.partition(":")[0], holds(rt), {c.weights_version for c in completions}
        rt.close()
        return found

    here, there = both(body)
    assert here[0].startswith(f"TransferError: publishing version 1 failed on rank 1: {LOST}")
    assert there[0].startswith(LOST)
    assert there[1:4] == (None, EngineState.LOST, "EngineLost")
    assert here[1:4] == (None, EngineState.PAUSED, "StaleWeights")  # it holds no version either
    for found in (here, there):
        assert found[4:] == ((True, True), {1})


class Unwatched(Mortal):
    """An engine that has to be asked whether it lives, and is started again only where it does not."""

    def __init__(self):
        super().__init__()
        self._status._check_alive = lambda: None

    def look(self):
        with suppress(colo.EngineLost):
            self.check_alive()

    def recover(self):
        if self.state is not EngineState.LOST:
            raise colo.PhaseError("the engine is not lost: nothing to recover")
        super().recover()


def test_an_engine_that_has_died_unseen_is_recovered_by_all_ranks(both, monkeypatch):
    monkeypatch.setitem(globals(), "Mortal", Unwatched)

    def body(rank):
        rt = make()
        rt.generate(PROMPTS, max_tokens=2)
        rt.engine.is_dead = rank == 1
        rt.recover()
        rt.generate(PROMPTS, max_tokens=2)
        found = holds(rt), outcome(rt.recover)
        rt.close()
        return found

    for held, again in both(body):
        assert held == (True, True) and "nothing to recover" in again


def test_an_engine_that_dies_while_it_samples_is_told_where_ranks_meet_again(both):
    def body(rank):
        rt = make()
        step(rt)
        if rank:
            rt.engine.dies_at = "generation"
        said = [outcome(lambda: rt.generate(PROMPTS, max_tokens=2))]
        said.append(outcome(lambda: rt.recover() if said[0] != "done" else train(rt)))
        rt.recover()
        rt.generate(PROMPTS, max_tokens=2)
        found = said, holds(rt)
        rt.close()
        return found

    (here, mine), (there, theirs) = both(body)
    assert here[0] == "done" and there[0].startswith(LOST)
    words = "TransferError: the trainer's ranks are out of step: this one, rank {}, is at {!r}"
    assert here[1].startswith(words.format(0, "entering a training phase"))
    assert there[1].startswith(words.format(1, "recovering the engine"))
    assert mine == theirs == (True, True)
