"""Which parts have an open runtime."""

import gc

import pytest
from torch import nn
from transformers import AutoModelForCausalLM

from colo.errors import PhaseError
from colo.runtime.registry import check_free, forget, register, runtime_of
from tests.models import tiny_qwen3


class Part:
    """A model, an optimizer or an engine."""


class Driver:
    """A runtime of an engine that drives `llm`."""

    def __init__(self, llm=None):
        self.engine = Part()
        if llm is not None:
            self.engine.llm = llm


def test_a_part_is_found_and_refused_until_it_is_forgotten():
    runtime, model, optimizer = Driver(), Part(), Part()
    register(runtime, [model, optimizer])
    assert runtime_of(model) is runtime_of(optimizer) is runtime
    with pytest.raises(PhaseError, match=r"this optimizer has a runtime already: .* colo.Runtime.of\(optimizer\)"):
        check_free({"model": Part(), "optimizer": optimizer})
    forget([model, Part()])
    check_free({"model": model})
    with pytest.raises(ValueError, match="this Part has no open runtime"):
        runtime_of(model)
    assert runtime_of(optimizer) is runtime


def test_a_model_in_stages_is_found_and_refused_by_each_of_them():
    runtime, stages = Driver(), [nn.Linear(1, 1), nn.Linear(1, 1)]
    model = nn.ModuleList(stages)
    register(runtime, [model])
    assert [runtime_of(part) for part in (model, stages, stages[1])] == [runtime] * 3
    with pytest.raises(PhaseError, match="this model has a runtime already"):
        check_free({"model": nn.ModuleList(stages[1:])})
    forget([model])
    check_free({"model": model})
    check_free({"model": stages[0]})


def test_a_runtime_that_is_gone_holds_no_part():
    runtime, model = Driver(), Part()
    register(runtime, [model])
    del runtime
    gc.collect()
    check_free({"model": model})
    with pytest.raises(ValueError, match="no open runtime"):
        runtime_of(model)


def test_what_an_engine_drives_is_taken_too():
    llm = Part()
    runtime = Driver(llm)
    register(runtime, [runtime.engine])
    with pytest.raises(PhaseError, match="this engine has a runtime already"):
        check_free({"engine": llm})
    check_free({"engine": Part(), "model": None})


def test_an_engine_that_drives_nothing_of_yours_takes_nothing():
    runtime = Driver()
    register(runtime, [runtime.engine])
    check_free({"engine": Part()})


def test_a_model_within_a_module_that_adds_a_head_is_found():
    class WithValues(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.policy, self.value = model, nn.Linear(1, 1)

    model, runtime = AutoModelForCausalLM.from_config(tiny_qwen3()), Driver()
    register(runtime, [model])
    assert runtime_of(WithValues(model)) is runtime
