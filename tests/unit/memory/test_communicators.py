"""NCCL's communicators, of which a CPU has none: backends that note what is asked of them."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import distributed

from colo.errors import Unsupported
from colo.memory.communicators import Communicators, megatron_groups

DEVICE = torch.device("cuda", 0)


class Backend:
    def __init__(self, kind="nccl"):
        self.kind, self.said = kind, []

    def name(self):
        return self.kind

    def memory_stats(self):
        return {}

    def suspend(self):
        self.said.append("suspend")

    def resume(self):
        self.said.append("resume")


def group_of(backend):
    def get(device):
        if backend is None:
            raise RuntimeError("No backend type associated with device type cuda")
        return backend

    return SimpleNamespace(_get_backend=get)


def test_every_communicator_is_suspended_and_resumed_once():
    first, second, gloo = Backend(), Backend(), Backend("gloo")
    found = Communicators(map(group_of, (first, gloo, None, second, first)), DEVICE)
    found.resume()
    for _ in range(2):
        found.suspend()
        found.suspend()
        found.resume()
        found.resume()
    assert first.said == second.said == ["suspend", "resume"] * 2 and gloo.said == []


def test_one_that_cannot_be_suspended_leaves_the_others_to_be_resumed():
    first, second = Backend(), Backend()
    second.suspend = lambda: (_ for _ in ()).throw(RuntimeError("in use"))
    found = Communicators(map(group_of, (first, second)), DEVICE)
    with pytest.raises(RuntimeError, match="in use"):
        found.suspend()
    found.resume()
    assert first.said == ["suspend", "resume"] and second.said == []


def test_a_torch_or_nccl_that_is_too_old_is_refused():
    old = Backend()
    old.memory_stats = lambda: (_ for _ in ()).throw(RuntimeError("requires NCCL 2.29.7"))
    with pytest.raises(Unsupported, match=r"needs torch 2.13 or later with NCCL 2.29.7 .* \(requires NCCL 2.29.7\)"):
        Communicators([group_of(old)], DEVICE)
    older = SimpleNamespace(name=lambda: "nccl")
    with pytest.raises(Unsupported, match="memory_stats"):
        Communicators([group_of(older)], DEVICE)


def test_a_group_over_gloo_has_none(mesh):
    found = Communicators([mesh.get_group()], torch.device("cpu"))
    found.suspend()
    assert found._backends == found._suspended == []


def test_groups_of_megatron_are_found_where_it_is_imported(mesh, monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", SimpleNamespace(_TP=mesh.get_group(), _RANKS=[0]))
    assert megatron_groups() == [mesh.get_group()]
    monkeypatch.delitem(sys.modules, "megatron.core.parallel_state")
    assert megatron_groups() == []
    assert isinstance(mesh.get_group(), distributed.ProcessGroup)
