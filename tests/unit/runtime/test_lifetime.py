"""Which parts have an open runtime, and how long it lives."""

import copy
import gc
import io
import pickle
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import colo
from colo.config import RuntimeConfig
from colo.errors import PhaseError
from colo.runtime.lifetime import KEEPER, check_free, forget, register, runtime_of
from colo.units import MIB
from tests.models import tiny_qwen3
from tests.runtimes import ALWAYS, adamw, launch, qwen3, train_step

STREAMED = RuntimeConfig(kv_cache_bytes=MIB, optimizer="streamed")
RELEASED = RuntimeConfig(kv_cache_bytes=MIB, release_gradients=True)


class Part:
    """A model, an optimizer or an engine."""


class Driver:
    """A runtime of `model`, whose engine drives `llm`."""

    def __init__(self, llm=None, model=None):
        self.model, self.optimizer, self.engine = model or Part(), Part(), Part()
        if llm is not None:
            self.engine.llm = llm
        register(self)


def test_a_part_is_found_and_refused_until_it_is_forgotten():
    runtime = Driver()
    model, optimizer, engine = runtime.model, runtime.optimizer, runtime.engine
    assert runtime_of(model) is runtime_of(optimizer) is runtime_of(engine) is runtime
    with pytest.raises(PhaseError, match=r"this optimizer has a runtime already: .* colo.Runtime.of\(optimizer\)"):
        check_free({"model": Part(), "optimizer": optimizer})
    forget(runtime)
    forget(runtime)
    check_free({"model": model, "optimizer": optimizer, "engine": engine})
    with pytest.raises(ValueError, match="this Part has no open runtime"):
        runtime_of(model)
    assert not any(hasattr(part, KEEPER) for part in (model, optimizer, engine))


def test_a_model_in_stages_is_found_and_refused_by_each_of_them():
    stages = [nn.Linear(1, 1), nn.Linear(1, 1)]
    model = nn.ModuleList(stages)
    runtime = Driver(model=model)
    assert [runtime_of(part) for part in (model, stages, stages[1])] == [runtime] * 3
    with pytest.raises(PhaseError, match="this model has a runtime already"):
        check_free({"model": nn.ModuleList(stages[1:])})
    forget(runtime)
    check_free({"model": model})
    check_free({"model": stages[0]})


def test_what_an_engine_drives_is_taken_too():
    llm = Part()
    runtime = Driver(llm)
    with pytest.raises(PhaseError, match="this engine has a runtime already"):
        check_free({"engine": llm})
    check_free({"engine": Part(), "model": None})
    forget(runtime)


class WithValues(nn.Module):
    def __init__(self, *models):
        super().__init__()
        self.policies, self.value = nn.ModuleList(models), nn.Linear(1, 1)


@pytest.mark.parametrize(
    "wrap",
    [WithValues, torch.nn.DataParallel, partial(torch.compile, backend="eager")],
    ids=["head", "ranks", "compiled"],
)
def test_a_model_within_another_module_is_found(wrap):
    model = AutoModelForCausalLM.from_config(tiny_qwen3())
    runtime = Driver(model=model)
    assert runtime_of(wrap(model)) is runtime


def test_of_a_module_with_several_models_no_one_runtime_is_found():
    first, second = Driver(model=nn.Linear(1, 1)), Driver(model=nn.Linear(1, 1))
    with pytest.raises(ValueError, match="this WithValues has 2 open runtimes"):
        runtime_of(WithValues(first.model, second.model))


@pytest.mark.parametrize("kept", ["model", "optimizer", "engine"])
def test_any_part_keeps_its_runtime_and_finds_it(kept):
    def part():
        rt = launch(config=ALWAYS)
        with rt.train():
            train_step(rt)
        return getattr(rt, kept)

    one = part()
    gc.collect()
    rt = colo.Runtime.of(one)
    assert rt.generate([[1, 2]])[0].weights_version == 1, "it works"
    rt.close()
    with pytest.raises(ValueError, match="no open runtime"):
        colo.Runtime.of(one)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_runtime_is_neither_copied_nor_pickled_and_goes_on(copied, rt):
    with pytest.raises(TypeError, match=r"neither copied nor pickled.*rt\.model\.state_dict\(\)"):
        copied(rt)
    gc.collect()
    assert rt.generate([[1, 2]])


def share():
    model = AutoModelForCausalLM.from_config(qwen3())
    return colo.share("torch", model, adamw(model.parameters()), config=RuntimeConfig(kv_cache_bytes=MIB))


def references(rt):
    parts = {"runtime": rt, "model": rt.model, "optimizer": rt.optimizer, "engine": rt.engine, "mover": rt.engine.mover}
    return {name: weakref.ref(part) for name, part in parts.items()}


def alive(noted):
    gc.collect()
    return [name for name, reference in noted.items() if reference() is not None]


def just_made(rt):
    """No phase was entered."""


def trained(rt):
    for _ in range(2):
        rt.generate([[1, 2]])
        with rt.train():
            train_step(rt)


def state_is_away(rt):
    trained(rt)
    rt.generate([[1, 2]])


def within_a_rollout(rt):
    rt.enter(colo.Phase.ROLLOUT)


def within_training(rt):
    rt.enter(colo.Phase.TRAIN)
    train_step(rt)


def closed(rt):
    trained(rt)
    rt.close()


@pytest.mark.parametrize("make", [launch, share, *(partial(launch, config=c) for c in (ALWAYS, STREAMED, RELEASED))])
@pytest.mark.parametrize("used", [just_made, trained, state_is_away, within_a_rollout, within_training, closed])
def test_what_nobody_refers_to_goes_model_optimizer_and_engine(make, used):
    def dropped():
        rt = make()
        used(rt)
        return references(rt)

    assert alive(dropped()) == []


def test_an_engine_that_nobody_refers_to_is_closed_and_what_waits_for_the_end_runs():
    done = []

    def dropped():
        rt = launch()
        close = rt.engine.close
        rt.engine.close = lambda: (done.append("engine"), close())
        rt.at_close(lambda: done.append("last"))

    dropped()
    gc.collect()
    assert done == ["engine", "last"]


def test_what_is_to_follow_the_end_runs_once_also_when_it_is_asked_for_late():
    done = []
    rt = launch()
    rt.at_close(lambda: done.append("first"))
    rt.at_close(lambda: rt.at_close(lambda: done.append("within")))
    with pytest.raises(TypeError, match="at_close\\(\\) takes a function without arguments, not None"):
        rt.at_close(None)
    rt.close()
    assert sorted(done) == ["first", "within"]
    rt.at_close(lambda: done.append("late"))
    assert done[2:] == ["late"]
    rt.close()
    with pytest.raises(ZeroDivisionError):
        rt.at_close(lambda: 1 / 0)
    assert len(done) == 3


def test_a_cell_that_is_run_twice_leaves_one_engine():
    gc.collect()
    gc.disable()  # the collector alone would come at some time
    try:
        rt = launch()
        first = references(rt)
        rt = launch()
        rt.generate([[1, 2]])
        assert [name for name, reference in first.items() if reference() is not None] == []
        rt.close()
    finally:
        gc.enable()


def test_an_exception_that_holds_a_cell_keeps_its_runtime_until_it_is_gone():
    noted = {}

    def cell():
        rt = launch()
        noted.update(references(rt))
        with rt.rollout():
            raise KeyError("in the cell")

    try:
        cell()
    except KeyError as error:
        held = error  # as `sys.last_exc` does
    assert colo.Runtime.of(noted["model"]()) is noted["runtime"]()
    again = launch()
    assert len(again.generate([[1, 2]])) == 1
    again.close()
    del held
    assert alive(noted) == []


def test_a_shallow_copy_of_a_model_lets_go_of_a_closed_runtime():
    rt = launch()
    copied, noted = copy.copy(rt.model), references(rt)
    rt.close()
    del rt
    assert alive(noted) == []
    assert next(copied.parameters()).isfinite().all()


def test_parameters_that_are_left_of_a_runtime_train_without_it():
    rt = share()
    trained(rt)
    parameters, noted = list(rt.model.parameters()), references(rt)
    del rt
    assert alive(noted) == []
    sum((p**2).sum() for p in parameters).backward()
    adamw(parameters).step()
    assert all(p.isfinite().all() for p in parameters)


def test_tensors_that_you_have_taken_outlive_a_runtime_that_is_dropped():
    rt = share()
    trained(rt)
    taken = {name: (tensor, tensor.clone()) for name, tensor in rt.model.state_dict().items()}
    noted = references(rt)
    del rt
    assert alive(noted) == []
    assert all(torch.equal(tensor, copied) for tensor, copied in taken.values())


def test_copies_and_files_of_a_model_know_nothing_of_its_runtime():
    rt = launch()
    saved = io.BytesIO()
    torch.save(rt.model, saved)
    saved.seek(0)
    assert b"_Keeper" not in saved.getvalue()
    for model in (copy.deepcopy(rt.model), torch.load(saved, weights_only=False)):
        assert getattr(model, KEEPER) is None
        with pytest.raises(ValueError, match="no open runtime"):
            colo.Runtime.of(model)
    assert copy.deepcopy(rt.optimizer).state_dict().keys() == rt.optimizer.state_dict().keys()
    rt.close()
    assert not hasattr(rt.model, KEEPER)
