"""Optimizers that come in parts: a list of them, or a container whose parts hold the state."""

import copy
import warnings

import pytest
import torch
from torch.optim import SGD, AdamW, Muon
from transformers import AutoModelForCausalLM

import colo
from colo.optim import MasterWeights
from colo.phases.phase import Residency
from tests.runtimes import ALWAYS, make_engine, qwen3

IDS = torch.tensor([[1, 2, 3, 4]])


class Container(torch.optim.Optimizer):
    """As torchtitan's: parameters of all, the state in the parts, which it steps."""

    def __init__(self, parts):
        self.parts = parts
        every = list(parts.values()) if isinstance(parts, dict) else list(parts)
        super().__init__([p for part in every for g in part.param_groups for p in g["params"]], {})
        self.every = every

    @torch.no_grad()
    def step(self, closure=None):
        for part in self.every:
            part.step()


class Counting(Container):
    """With state of its own beside that of its parts."""

    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].setdefault("seen", torch.zeros_like(p)).add_(p.grad)


def halves(model):
    matrices = [p for p in model.parameters() if p.ndim == 2]
    return matrices, [p for p in model.parameters() if p.ndim != 2]


def muon_and_adamw(model):
    matrices, rest = halves(model)
    return [Muon(matrices, lr=1e-2), AdamW(rest, lr=1e-3)]


def two_adamw(model):
    matrices, rest = halves(model)
    return [AdamW(matrices, lr=1e-2), AdamW(rest, lr=1e-3, fused=True)]


def three(model):
    matrices, rest = halves(model)
    return [AdamW(matrices[:3], lr=1e-2), SGD(matrices[3:], lr=1e-2, momentum=0.9), AdamW(rest, lr=1e-3)]


def masters(model):
    matrices, rest = halves(model)
    return [MasterWeights(lambda ps: AdamW(ps, lr=1e-2))(matrices), AdamW(rest, lr=1e-3)]


KINDS = {
    "list": muon_and_adamw,
    "tuple": lambda model: tuple(two_adamw(model)),
    "list of one": lambda model: [AdamW(model.parameters(), lr=1e-2)],
    "three": three,
    "masters": masters,
    "container": lambda model: Container(muon_and_adamw(model)),
    "container of a dict": lambda model: Container(dict(zip("ab", two_adamw(model), strict=True))),
    "container of containers": lambda model: Container([Container(part) for part in ([p] for p in three(model))]),
    "container with state": lambda model: Counting(two_adamw(model)),
    "list of containers": lambda model: [Container([part]) for part in muon_and_adamw(model)],
    "container of masters": lambda model: Container(masters(model)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_of_every_part_leaves_and_weights_are_those_of_plain_torch(kind, dtype):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(qwen3()).to(dtype)
    twin = copy.deepcopy(model)
    given, other = KINDS[kind](model), KINDS[kind](twin)
    with colo.share(make_engine(dtype), model, given, config=ALWAYS) as rt:
        assert colo.Runtime.of(given) is rt
        for _ in range(3):
            with rt.rollout():
                rt.generate([[1, 2]], max_tokens=2)
                segments = rt.scheduler.segments.values()
                assert sum(s.device_bytes for s in segments if s.name.startswith("trainer.o")) == 0
            with rt.train():
                for net, optimizers in ((model, given), (twin, other)):
                    net(input_ids=IDS, labels=IDS).loss.backward()
                    for optimizer in optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]:
                        optimizer.step()
                    net.zero_grad()
        assert rt.scheduler.segments["trainer.optimizer"].size_bytes > 0
        assert rt.scheduler.segments["trainer.optimizer"].residency is Residency.OFFLOADED
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
        assert "left the device" in rt.report().facts["offload"]


def test_an_optimizer_that_colo_was_not_given_is_told_of_once():
    model = AutoModelForCausalLM.from_config(qwen3())
    known, unknown, _ = three(model)
    with colo.share(make_engine(), model, known, config=ALWAYS) as rt:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for _ in range(3):
                with rt.rollout():
                    rt.generate([[1, 2]], max_tokens=2)
                with rt.train():
                    model(input_ids=IDS, labels=IDS).loss.backward()
                    known.step(), unknown.step()
                    model.zero_grad()
        assert sum("Give all optimizers as a list" in str(w.message) for w in told) == 1
        assert "12 parameters are stepped by an optimizer that colo was not given" in rt.report().facts["offload"]


def test_a_list_of_other_things_is_refused():
    model = AutoModelForCausalLM.from_config(qwen3())
    with pytest.raises(TypeError, match="takes an optimizer of the model's parameters.*not a list"):
        colo.share(make_engine(), model, [])
    with pytest.raises(TypeError, match="takes an optimizer of the model's parameters"):
        colo.share(make_engine(), model, [AdamW(model.parameters()), AdamW])


@pytest.mark.parametrize("kind", ["list", "three", "container", "masters"])
def test_a_report_counts_their_steps_on_the_same_gradients_once(kind):
    model = AutoModelForCausalLM.from_config(qwen3())
    optimizer = KINDS[kind](model)
    with colo.share(make_engine(), model, optimizer, config=ALWAYS) as rt:
        rt.generate([[1, 2]])
        with rt.train():
            for _ in range(3):
                model(input_ids=IDS, labels=IDS).loss.backward()
                for one in optimizer if isinstance(optimizer, list) else [optimizer]:
                    one.step()
                model.zero_grad()
        assert rt.report().to_json()["num_steps"] == 3
