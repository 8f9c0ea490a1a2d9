"""Weights whose places no tensor knows: stages of layers, cut by rows and columns, with replicas and ties."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import distributed, nn

from colo.errors import TransferError
from colo.memory.digest import Digest
from colo.memory.load_plan import LoadPlan
from colo.memory.specs import TensorSpec
from colo.weights.boxes import PlacedPart
from colo.weights.sources.spread import Assembled, SpreadSource
from colo.weights.transports.local import LocalTransport
from colo.weights.transports.slices import SlicesTransport

CPU = torch.device("cpu")
SHAPES = {
    "embed.weight": (7, 4),
    "layers.0.q": (6, 4),
    "layers.0.o": (4, 6),
    "layers.1.experts.0": (3, 2),
    "norm": (5,),
}


def whole():
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


BOXES = {
    "embed.weight": [(0, (0, 0), (7, 4)), (1, (0, 0), (7, 4))],  # tied, in both stages
    "layers.0.q": [
        (0, (0, 0), (1, 4)),
        (0, (2, 0), (1, 4)),
        (0, (4, 0), (2, 4)),
        (1, (1, 0), (1, 4)),
        (1, (3, 0), (1, 4)),
    ],
    "layers.0.o": [(0, (0, 0), (4, 3)), (1, (0, 3), (4, 3))],
    "layers.1.experts.0": [(1, (0, 0), (3, 2))],
    "norm": [(0, (0,), (5,))],
}
"""Rank, offset and shape of every part."""


class Placed:
    """What a rank holds, whose weights are its own memory."""

    left_out = ()

    def __init__(self, rank, boxes=BOXES):
        self.specs = [TensorSpec(name, "float32", shape) for name, shape in SHAPES.items()]
        self.groups = [["embed.weight"], ["layers.0.q", "layers.0.o"], ["layers.1.experts.0"], ["norm"]]
        self.group = distributed.group.WORLD
        tensors = whole()
        self.stages = [nn.ParameterList()]
        self.held = []
        for name, places in boxes.items():
            for owner, offset, shape in places:
                if owner == rank:
                    region = tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))
                    self.stages[0].append(nn.Parameter(tensors[name][region].clone()))
                    self.held.append((name, offset, shape, rank, self.stages[0][-1]))

    def parts(self):
        return [PlacedPart(name, offset, shape, rank, p.detach()) for name, offset, shape, rank, p in self.held]

    def fingerprint(self):
        return tuple((p.data_ptr(), p._version) for p in self.stages[0])


def test_any_layout_reaches_engines_that_are_cut_in_another_way_and_a_change_on_one_rank_too(both):
    def body(rank):
        source = SpreadSource(Placed(rank), device=CPU)
        memory = {"q": torch.zeros(3, 4), "rest": {n: torch.zeros(s) for n, s in SHAPES.items() if n != "layers.0.q"}}

        def load(weights):
            for name, tensor in weights:
                if name == "layers.0.q":
                    memory["q"].copy_(tensor.chunk(2)[rank])
                else:
                    memory["rest"][name].copy_(tensor)

        plan = LoadPlan.record(load, source.tensors(), {"q": memory["q"], **memory["rest"]})
        transport = SlicesTransport(source, plan, device=CPU, why_not_shared="tested", bucket_bytes=64)
        transport.transfer()
        transport.verify()
        expected = whole()
        same = [torch.equal(memory["q"], expected["layers.0.q"].chunk(2)[rank])]
        same += [torch.equal(tensor, expected[name]) for name, tensor in memory["rest"].items()]
        before, then = source.fingerprint(), Digest.of(source.held())
        if rank:
            with torch.no_grad():
                source.modules[0][-1].add_(1)  # the expert
        changed = source.fingerprint() != before, bool(Digest.of(source.held()).differs(then))
        current = transport.is_current()
        transport.transfer()
        arrived = torch.equal(memory["rest"]["layers.1.experts.0"], expected["layers.1.experts.0"] + 1)
        return all(same), changed, current, arrived, transport.received_bytes == 2 * transport.bytes_to_receive

    assert both(body) == [(True, (False, False), False, True, True), (True, (True, True), False, True, True)]


def test_loaders_that_compute_are_given_whole_weights_in_turn(both):
    def body(rank):
        source = SpreadSource(Placed(rank), device=CPU)
        with source.gathered(source.tensors()) as gathered:
            names = list(gathered)[: 2 if rank else None]  # the rest is put together for the other rank
            found = {name: gathered[name].clone() for name in names}
        return all(torch.equal(found[name], whole()[name]) for name in names), len(gathered), names

    for rank, (same, count, names) in enumerate(both(body)):
        assert same and count == len(SHAPES)
        assert names == list(SHAPES)[: 2 if rank else None]


def test_an_engine_whose_loader_computes_gets_them_and_knows_when_they_have_changed(both):
    class Engine:
        def load_weights(self, weights):
            self.memory = {name: 2 * tensor for name, tensor in weights}

    def body(rank):
        source, engine = SpreadSource(Placed(rank), device=CPU), Engine()
        plan = LoadPlan.of(source.tensors(), fallbacks=dict.fromkeys(SHAPES, "the loader computes with it"))
        transport = LocalTransport(source, engine, plan, why_not_shared="tested")
        transport.transfer()
        same = all(torch.equal(engine.memory[name], 2 * tensor) for name, tensor in whole().items())
        current = [transport.is_current()]
        if rank:
            with torch.no_grad():
                source.modules[0][-1].add_(1)
        return same, [*current, transport.is_current()]

    assert both(body) == [(True, [True, False])] * 2


def test_recorded_copies_of_whole_weights_are_replayed_and_compared(both):
    def body(rank):
        source = SpreadSource(Placed(rank), device=CPU)
        memory = {name: torch.zeros(shape) for name, shape in SHAPES.items() if name != "layers.0.o"}
        plan = LoadPlan.record(
            lambda ws: [memory[n].copy_(t) for n, t in ws], {n: t for n, t in source if n in memory}, memory
        )
        transport = LocalTransport(source, None, plan, why_not_shared="tested")
        found = [transport.is_current(), transport.transfer() == sum(t.nbytes for t in memory.values())]
        transport.verify()
        found += [torch.equal(tensor, whole()[name]) for name, tensor in memory.items()]
        if rank:
            memory["norm"].add_(1)
        return [*found, transport.is_current()]

    assert both(body) == [[False, True, *[True] * 4, False]] * 2


def test_a_failure_in_one_rank_is_told_in_the_others(both):
    def body(rank):
        source = SpreadSource(Placed(rank), device=CPU)
        try:
            with source.gathered(source.tensors()) as gathered:
                if rank:
                    raise ValueError("tested")
                assert gathered["norm"].shape == (5,)
        except (ValueError, TransferError) as error:
            return f"{type(error).__name__}: {error}"

    here, there = both(body)
    assert here == "TransferError: putting the weights together failed on rank 1: ValueError: tested"
    assert there == "ValueError: tested"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"norm": []}, "no rank of the trainer holds 5 of the 5 elements of norm that the engine of rank 0 takes"),
        ({"norm": [(1, (0,), (4,))]}, "no rank of the trainer holds 1 of the 5 elements of norm"),
    ],
)
def test_elements_that_no_rank_holds_are_named_on_every_rank(both, change, words):
    def body(rank):
        source = SpreadSource(Placed(rank, BOXES | change), device=CPU)
        memory = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        plan = LoadPlan.record(lambda ws: [memory[n].copy_(t) for n, t in ws], source.tensors(), memory)
        with pytest.raises(TransferError) as caught:
            SlicesTransport(source, plan, device=CPU, why_not_shared="tested")
        return str(caught.value)

    for said in both(body):
        assert words in said


def test_a_part_that_reaches_beyond_its_weight_or_has_another_dtype_is_named(both):
    def body(rank):
        placed, said = Placed(rank), []
        for change in ({"offset": (3,)}, {"tensor": torch.zeros(5, dtype=torch.bfloat16)}):
            parts = placed.parts()
            if rank == 0:
                parts[-1] = replace(parts[-1], **change)
            ranks = SpreadSource(placed, device=CPU).ranks
            with pytest.raises(TransferError) as caught:
                Assembled(placed.specs, parts, ranks, device=CPU)
            said.append(str(caught.value))
        return said

    for beyond, other in both(body):
        assert beyond == "rank 0 holds (5,) of norm at (3,) in float32, which is (5,) in float32"
        assert other == "rank 0 holds (5,) of norm at (0,) in bfloat16, which is (5,) in float32"


def test_what_trains_along_is_left_out_and_its_memory_counted_all_the_same(both):
    def body(rank):
        placed = Placed(rank)
        placed.left_out = {"norm", "layers.1.experts.0"}
        source = SpreadSource(placed, device=CPU)
        names = [spec.name for spec in source.specs()]
        assert names == [name for name, _ in source] == [name for group in source.groups() for name in group]
        memory = [tensor.data_ptr() for tensor in source.memory()]
        return (
            names,
            {part.name for part in source.parts()} <= set(names),
            memory == [p.data_ptr() for *_, p in placed.held],
        )

    assert both(body) == [(["embed.weight", "layers.0.q", "layers.0.o"], True, True)] * 2


def test_members_that_have_nothing_to_do_do_nothing(mesh):
    placed = SimpleNamespace(
        specs=[TensorSpec("w", "float32", (2,))], groups=[("w",)], group=mesh.get_group(), left_out=()
    )
    source = SpreadSource(placed, device=CPU)
    assert [(name, t.device.type, isinstance(t, nn.Parameter)) for name, t in source] == [("w", "meta", True)]
    assert source.groups() == [["w"]] and source.specs() == placed.specs
    assert source.given_to(list) == ["w"] and source.outermost_sharded() == []
    assert not source.ranks.is_alone and source.ranks.min(3) == 3
