"""Copies within one process where the engine's own loader is used: what was given to it is known again."""

import pytest
import torch
from torch import nn

from colo.weights.load_plan import LoadPlan
from colo.weights.sources.module import ModuleSource
from colo.weights.transports.local import LocalTransport


class Loader:
    """An engine of which only the loader is there."""

    def __init__(self, error=None):
        self.given = {}
        self.error = error

    def load_weights(self, weights):
        for name, tensor in weights:
            self.given[name] = tensor.detach().clone()
        if self.error is not None:
            raise self.error


class Odd(nn.Module):
    """Tensors that are not whole words, or not in a row."""

    def __init__(self):
        super().__init__()
        self.short = nn.Parameter(torch.randn(5).to(torch.bfloat16))
        self.matrix = nn.Parameter(torch.randn(6, 4).t())
        self.plain = nn.Parameter(torch.randn(8))


def transport(model, engine, *, verify=True):
    source = ModuleSource(model)
    plan = LoadPlan(copies=(), sources={}, strides={}, fallbacks={"plain": "tested"}, unused=frozenset())
    return LocalTransport(source, engine, plan, why_not_shared="tested", verify=verify)


@pytest.mark.parametrize("name", ["short", "matrix", "plain"])
def test_a_change_of_any_tensor_is_seen_until_it_is_sent(name):
    model, engine = Odd(), Loader()
    local = transport(model, engine)
    assert not local.is_current()
    assert local.transfer() == 5 * 2 + 24 * 4 + 8 * 4
    assert local.is_current()
    getattr(model, name).data.view(-1)[-1:].add_(1) if name != "matrix" else model.matrix.data[3, 5:].add_(1)
    assert not local.is_current()
    local.transfer()
    assert local.is_current()
    assert torch.equal(engine.given[name], getattr(model, name))


def test_what_did_not_arrive_is_not_current():
    model, engine = Odd(), Loader()
    local = transport(model, engine)
    local.transfer()
    engine.error = RuntimeError("tested")
    with pytest.raises(RuntimeError, match="tested"):
        local.transfer()
    assert not local.is_current()


def test_without_verification_nothing_is_read():
    model = Odd()
    local = transport(model, Loader(), verify=False)
    local.transfer()
    model.plain.data.add_(1)
    assert local.is_current()
