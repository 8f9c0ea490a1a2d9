"""What is left of a runtime that could not be built, and of a publication that failed: nothing in anybody's way."""

import copy

import pytest
import torch
from torch.optim import AdamW
from transformers import AutoModelForCausalLM

import colo
from colo.config import RuntimeConfig
from colo.phases.phase import Phase
from tests import runtimes
from tests.models import tiny_qwen3

CONFIG = tiny_qwen3()


def make_engine(dtype=torch.float32):
    return runtimes.make_engine(dtype, CONFIG)


def step(model, optimizer, number):
    ids = torch.tensor([[number, 2, 3, 4]])
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.fixture
def trainer():
    model = AutoModelForCausalLM.from_config(CONFIG)
    return model, AdamW(model.parameters(), lr=1e-2)


@pytest.fixture
def twin(trainer):
    model = copy.deepcopy(trainer[0])
    return model, AdamW(model.parameters(), lr=1e-2)


def same(trainer, twin):
    models = zip(trainer[0].parameters(), twin[0].parameters(), strict=True)
    states = zip(trainer[1].state_dict()["state"].values(), twin[1].state_dict()["state"].values(), strict=True)
    return all(torch.equal(a, b) for a, b in models) and all(torch.equal(a[k], b[k]) for a, b in states for k in a)


def hooks(model, optimizer):
    """How many there are on either, by where."""
    found = {name: len(held) for name, held in vars(optimizer).items() if "_hooks" in name}
    for name, parameter in model.named_parameters():
        found[name] = len(parameter._backward_hooks or ()) + len(parameter._post_accumulate_grad_hooks or ())
    for name, module in model.named_modules():
        found[f"{name}()"] = sum(len(held) for key, held in vars(module).items() if key.endswith("_hooks"))
    return found


@pytest.mark.parametrize("moment", ["reset_prefix_cache", "commit"])
@pytest.mark.parametrize("error", [RuntimeError("the engine broke"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_a_runtime_that_could_not_be_built_leaves_model_and_optimizer_as_they_were(
    trainer, twin, moment, error, monkeypatch
):
    model, optimizer = trainer
    for number in range(2):
        step(*trainer, number)
        step(*twin, number)
    before = hooks(model, optimizer)

    def fail(*arguments):
        raise error

    engine = make_engine()
    with monkeypatch.context() as patch, pytest.raises(type(error)):
        patch.setattr(engine, moment, fail)
        colo.share(engine, model, optimizer, config=RuntimeConfig(offload="always"))
    assert hooks(model, optimizer) == before
    for part in (model, optimizer, engine):
        with pytest.raises(ValueError, match="has no open runtime"):
            colo.Runtime.of(part)
    engine.close()
    step(*trainer, 2)
    step(*twin, 2)
    assert same(trainer, twin)

    with colo.share(make_engine(), model, optimizer, config=RuntimeConfig(offload="always")) as rt:
        rt.generate([[1, 2]], max_tokens=2)
        with rt.train():
            step(*trainer, 3)
        step(*twin, 3)
        rt.generate([[1, 2]], max_tokens=2)
    assert same(trainer, twin)
    assert hooks(model, optimizer) == before


def test_a_publication_that_fails_leaves_the_runtime_idle_and_the_next_one_publishes(trainer, monkeypatch):
    model, optimizer = trainer
    rt = colo.share(make_engine(torch.bfloat16), model, optimizer)
    with rt.train():
        step(*trainer, 1)

    def fail(version):
        raise RuntimeError("the bus is down")

    with monkeypatch.context() as patch:
        patch.setattr(rt.transport, "transfer", fail)
        with pytest.raises(RuntimeError, match="the bus is down"), rt.rollout():
            pytest.fail("entered")
        assert rt.phase is rt.scheduler.phase is Phase.IDLE
    assert [publication.version for publication in rt.publications] == [0]
    assert rt.generate([[1, 2]], max_tokens=1)[0].weights_version == 1
    assert [publication.version for publication in rt.publications] == [0, 1]
    rt.close()
