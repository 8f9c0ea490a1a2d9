"""State that colo does not see is told of, through the runtime's report and one warning; what it sees is not."""

import gc
import warnings

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adafactor, AdamW, Muon
from torch.optim import optimizer as of_all_optimizers
from transformers import AutoModelForCausalLM

import colo
from colo.config import RuntimeConfig
from colo.optim import MasterWeights
from colo.units import MIB
from tests.runtimes import ALWAYS, make_engine, qwen3

IDS = torch.tensor([[1, 2, 3, 4]])
STREAMED = RuntimeConfig(kv_cache_bytes=MIB, optimizer="streamed", region_bytes=1 << 14)


class Holder:
    """No container that torch looks into."""

    def __init__(self, optimizer):
        self.optimizer = optimizer


class Hiding(torch.optim.Optimizer):
    """Steps an optimizer that it holds where nobody looks."""

    def __init__(self, params):
        params = list(params)
        super().__init__(params, {})
        self.holder = Holder(AdamW(params, lr=1e-3))

    def step(self, closure=None):
        self.holder.optimizer.step()


class KeepingElsewhere(torch.optim.Optimizer):
    """Has its buffers in an attribute of its own."""

    def __init__(self, params):
        super().__init__(list(params), {"lr": 1e-3})
        self.buffers = {}

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                buffer = self.buffers.setdefault(id(p), torch.zeros_like(p))
                p.sub_(buffer.mul_(0.9).add_(p.grad), alpha=group["lr"])


class Around(torch.optim.Optimizer):
    """Has the state of the optimizer that it wraps, as Lookahead."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.wrapped, self.param_groups, self.state = inner, inner.param_groups, inner.state

    def step(self, closure=None):
        self.wrapped.step()


class NoneOfTorchs:
    """An optimizer without torch's class."""

    def __init__(self, params):
        self.params = list(params)

    @torch.no_grad()
    def step(self):
        for p in self.params:
            p.sub_(p.grad, alpha=1e-3)


def halves(model, first, second):
    params = list(model.parameters())
    return first(params[::2]), [second(params[1::2])]


def adamw(params, **options):
    return AdamW(params, lr=1e-3, **options)


def matrices_and_rest(model):
    params = list(model.parameters())
    masters = MasterWeights(lambda given: Muon(given, lr=1e-3))([p for p in params if p.ndim == 2])
    return [masters, adamw([p for p in params if p.ndim != 2])], []


def told(make, config=ALWAYS, dtype=torch.float32):
    """Sentences of the report, and warnings about state, of a run with the optimizers that `make` returns."""
    model = AutoModelForCausalLM.from_config(qwen3()).to(dtype)
    given, others = make(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with colo.share(make_engine(dtype), model, given, config=config) as rt:
            for _ in range(3):
                with rt.rollout():
                    rt.generate([[1, 2]], max_tokens=2)
                with rt.train():
                    model(input_ids=IDS, labels=IDS).loss.backward()
                    for optimizer in [*(given if isinstance(given, list) else [given]), *others]:
                        optimizer.step(*([lambda: model.lm_head.weight.sum()] if isinstance(optimizer, LBFGS) else []))
                    model.zero_grad()
            with rt.rollout():
                fact = rt.report().facts["offload"]
    return fact, [str(w.message) for w in caught if "its state" in str(w.message) or "no state" in str(w.message)]


ELSEWHERE = {
    "foreach": lambda model: halves(model, adamw, lambda ps: adamw(ps, foreach=True)),
    "fused": lambda model: halves(model, adamw, lambda ps: adamw(ps, fused=True)),
    "without state": lambda model: halves(model, adamw, lambda ps: SGD(ps, lr=1e-3)),
    "none of torch's": lambda model: halves(model, adamw, NoneOfTorchs),
    "of masters": lambda model: halves(model, adamw, MasterWeights(adamw)),
    "after a wrapper": lambda model: halves(model, adamw, lambda ps: Around(adamw(ps))),
}


@pytest.mark.parametrize("part", ["model", "lm_head"])
def test_weights_that_are_loaded_are_not_stepped(part):
    model = AutoModelForCausalLM.from_config(qwen3())
    rest = [p for p in model.parameters() if p is not model.lm_head.weight]
    loaded = model if part == "model" else model.lm_head
    with colo.share(make_engine(), model, adamw(rest), config=ALWAYS) as rt:
        for _ in range(2):
            loaded.load_state_dict(loaded.state_dict())
            with rt.rollout():
                fact = rt.report().facts["offload"]
    assert "colo was not given" not in fact
    assert not any(module._load_state_dict_post_hooks for module in model.modules())


@pytest.mark.parametrize("kind", ELSEWHERE)
def test_an_optimizer_that_colo_was_not_given_is_told_of(kind):
    fact, warned = told(ELSEWHERE[kind])
    assert "12 parameters are stepped by an optimizer that colo was not given" in fact
    assert len(warned) == 1 and "Give all optimizers as a list" in warned[0]


def test_a_second_optimizer_of_the_same_parameters_is_told_of():
    fact, warned = told(lambda model: (adamw(model.parameters()), [SGD(model.parameters(), lr=1e-3, momentum=0.9)]))
    assert "parameters are stepped by an optimizer that colo was not given" in fact and len(warned) == 1


def test_state_outside_of_the_optimizers_state_is_told_of():
    fact, warned = told(lambda model: (KeepingElsewhere(model.parameters()), []))
    assert "24 parameters are stepped without state where colo looks for it" in fact
    assert len(warned) == 1 and "Keep it in KeepingElsewhere.state" in warned[0]


def test_an_optimizer_that_another_hides_is_told_of():
    fact, warned = told(lambda model: (Hiding(model.parameters()), []))
    assert "24 parameters are stepped by an optimizer that colo was not given" in fact
    assert any("give the optimizers within it as a list" in text for text in warned)


SEEN = {
    "AdamW": lambda model: (adamw(model.parameters()), []),
    "SGD": lambda model: (SGD(model.parameters(), lr=1e-3), []),
    "SGD with momentum": lambda model: (SGD(model.parameters(), lr=1e-3, momentum=0.9), []),
    "Adafactor": lambda model: (Adafactor(model.parameters()), []),
    "state of all under one parameter": lambda model: (LBFGS(model.parameters(), max_iter=1), []),
    "a wrapper's": lambda model: (Around(adamw(model.parameters())), []),
    "masters": lambda model: (MasterWeights(adamw)(list(model.parameters())), []),
    "a list": matrices_and_rest,
    "of another model": lambda model: (adamw(model.parameters()), [adamw(given_gradients(nn.Linear(2, 2)))]),
}


def given_gradients(module):
    module(torch.ones(1, 2)).sum().backward()
    return module.parameters()


@pytest.mark.parametrize("kind", SEEN)
def test_state_that_is_seen_is_not_told_of(kind):
    fact, warned = told(SEEN[kind], dtype=torch.bfloat16 if kind in ("masters", "a list") else torch.float32)
    assert "parameters are stepped" not in fact and warned == []


@pytest.mark.parametrize("make", [SEEN["AdamW"], SEEN["Adafactor"]])
def test_a_streamed_step_is_the_optimizers_own(make):
    fact, warned = told(make, config=STREAMED)
    assert "parameters are stepped" not in fact and warned == []


@pytest.mark.parametrize("config", [ALWAYS, STREAMED])
def test_parameters_that_join_the_optimizer_later_are_its_own(config):
    model = AutoModelForCausalLM.from_config(qwen3())
    params = list(model.parameters())
    optimizer = adamw(params[::2])
    with warnings.catch_warnings(), colo.share(make_engine(), model, optimizer, config=config) as rt:
        warnings.simplefilter("error")
        for _ in range(3):
            with rt.train():
                model(input_ids=IDS, labels=IDS).loss.backward()
                optimizer.step()
                model.zero_grad()
            with rt.rollout():
                assert "colo was not given" not in rt.report().facts["offload"]
            if len(optimizer.param_groups) == 1:
                optimizer.add_param_group({"params": params[1::2]})


def test_the_hook_of_all_optimizers_goes_with_the_runtime_and_keeps_none_alive():
    gc.collect()  # runtimes of other tests that have been dropped
    before = len(of_all_optimizers._global_optimizer_post_hooks)
    told(SEEN["AdamW"])
    assert len(of_all_optimizers._global_optimizer_post_hooks) == before
    colo.launch(qwen3(), optimizer=adamw, config=ALWAYS)  # and dropped
    gc.collect()
    assert len(of_all_optimizers._global_optimizer_post_hooks) == before
