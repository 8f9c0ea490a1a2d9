"""Deltas: what has changed, and nothing else, in the fewest bytes, bit for bit."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from colo.engines.buckets import bytes_of
from colo.errors import TransferError, Unsupported
from colo.memory import digest
from colo.memory.load_plan import LoadPlan
from colo.optim import MasterWeights
from colo.weights import delta
from colo.weights.delta import BucketSums, DeltaBase, DeltaTarget, changes_of

CPU = torch.device("cpu")
KINDS = [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int64, torch.bool, torch.float64]


def random_bits(shape, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    size = math.prod(shape) * dtype.itemsize
    return torch.randint(0, 256, (size,), generator=generator).to(torch.uint8).view(dtype).view(shape)  # NaNs too


def changed(tensor, share, seed):
    """A copy in which about `share` of the entries have another lowest bit."""
    generator = torch.Generator().manual_seed(seed)
    here = torch.rand(tensor.shape, generator=generator) < share
    if tensor.dtype is torch.bool:
        return tensor ^ here
    word = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return (tensor.view(word) ^ here.to(word)).view(tensor.dtype)


def same(left, right):
    return (left.shape, left.dtype) == (right.shape, right.dtype) and torch.equal(bytes_of(left), bytes_of(right))


class Engine:
    """A model whose loader fuses two weights by rows, takes the half of one by columns, and renames the rest."""

    def __init__(self, weights, *, half=0):
        self.half = half
        q, k, o = (weights[name] for name in ("q", "k", "o"))
        self.parameters = {
            "qk": torch.zeros(len(q) + len(k), *q.shape[1:], dtype=q.dtype),
            "o": torch.zeros(o.shape[0], o.shape[1] // 2, dtype=o.dtype),
            "tail": torch.zeros_like(weights["rest"]),
        }
        self.plan = LoadPlan.record(self.load, {n: t.contiguous() for n, t in weights.items()}, self.parameters)

    def load(self, weights):
        for name, weight in weights:
            if name == "q":
                self.parameters["qk"][: len(weight)].copy_(weight)
            elif name == "k":
                self.parameters["qk"][-len(weight) :].copy_(weight)
            elif name == "o":
                columns = self.parameters["o"].shape[1]
                self.parameters["o"].copy_(weight[:, self.half * columns : (self.half + 1) * columns])
            else:
                self.parameters["tail"].copy_(weight)


def model_of(dtype, seed, rows=3):
    shapes = {"q": (rows, 4), "k": (2, 4), "o": (5, 6), "rest": (7,)}
    return {name: random_bits(shape, dtype, seed + n) for n, (name, shape) in enumerate(shapes.items())}


@given(
    dtype=st.sampled_from(KINDS),
    shares=st.lists(st.sampled_from([0.0, 0.001, 0.02, 0.3, 0.97, 1.0]), min_size=1, max_size=5),
    seed=st.integers(0, 1000),
    half=st.integers(0, 1),
    rows=st.sampled_from([1, 3, 40]),
)
def test_an_engine_that_takes_changes_holds_what_one_that_takes_everything_does(dtype, shares, seed, half, rows):
    weights = model_of(dtype, seed, rows)
    engine, other = Engine(weights, half=half), Engine(weights, half=half)
    base, target = DeltaBase(), DeltaTarget(engine.plan)
    sums = BucketSums(target.regions, CPU)
    base.keep(list(weights.items()))
    engine.load(weights.items())
    for number, share in enumerate(shares):
        weights = {name: changed(tensor, share, seed + number) for name, tensor in weights.items()}
        changes = base.changes(list(weights.items()))
        target.apply(changes)
        target.apply(changes)  # once more does nothing
        other.load(weights.items())
        assert all(same(engine.parameters[name], other.parameters[name]) for name in engine.parameters)
        sums.begin()
        sums.add(list(weights.items()))
        assert sums.numbers() == target.sums()
        assert all(same(one, weights[name]) for bucket in base.kept() for name, one in bucket)
        assert sum(t.nbytes for t in changes.values()) <= sum(t.nbytes for t in weights.values())


@pytest.mark.parametrize(
    ("share", "kind", "most"),
    [(0.0, None, 0), (0.01, delta.SPARSE, 0.0206), (0.2, delta.BITMAP, 0.27), (0.97, "", 1.0)],
)
def test_the_smallest_form_is_sent(share, kind, most):
    old = random_bits((1000, 400), torch.bfloat16, 1)
    found = changes_of({"w": (changed(old, share, 2), old)})
    assert list(found) == ([] if kind is None else [f"w{kind}"])
    assert sum(t.nbytes for t in found.values()) <= most * old.nbytes


@pytest.mark.parametrize("at", [[0], [65534], [65535], [65536], [200_000], [3, 65538, 65539, 199_999]])
def test_entries_that_are_far_apart_arrive(at):
    old = random_bits((200_001,), torch.float32, 3)
    new = old.clone()
    new.view(torch.int32)[at] ^= 1
    ((name, sent),) = changes_of({"w": (new, old)}).items()
    assert name == "w:sparse" and sent.nbytes <= 6 * (len(at) + 3)
    index, bits = delta.entries_of(delta.SPARSE, sent, torch.float32, old.numel())
    found = old.clone()
    found.view(torch.int32)[index] = bits
    assert same(found, new)


def test_values_are_converted_as_the_loader_converts_them():
    source = random_bits((6, 4), torch.float32, 5)
    held = torch.zeros(6, 4, dtype=torch.bfloat16)
    plan = LoadPlan.record(lambda weights: [held.copy_(w) for _, w in weights], {"w": source}, {"w": held})
    target, base = DeltaTarget(plan), DeltaBase()
    base.keep([("w", source)])
    held.copy_(source)
    source = changed(source, 0.1, 6) + 1
    target.apply(base.changes([("w", source)]))
    assert same(held, source.to(torch.bfloat16))
    sums = BucketSums(target.regions, CPU)
    assert sums.numbers() == [0]
    sums.add([("w", source)])
    assert sums.numbers() == target.sums()
    sums.begin()  # what has not come again is not taken for what came before
    assert sums.numbers() == [0]


def test_what_an_engine_holds_is_planned_once_and_read_each_time(monkeypatch):
    fused = torch.zeros(6, 8)
    held = {"left": fused[:, :4], "right": fused[:, 4:]}  # columns of one parameter
    sources = {name: random_bits((6, 4), torch.float32, 5) for name in held}

    def load(weights):
        for name, weight in weights:
            held[name].copy_(weight)

    target = DeltaTarget(LoadPlan.record(load, sources, {"fused": fused}))
    sums, planned, seen = BucketSums(target.regions, CPU), [], []
    prepared = digest._Prepared
    monkeypatch.setattr(digest, "_Prepared", lambda tensors: planned.append(len(tensors)) or prepared(tensors))
    for number in range(3):
        load(sources.items())
        seen.append(target.sums())
        sums.begin()
        sums.add(list(sources.items()))
        assert sums.numbers() == seen[-1]
        sources["right"] = changed(sources["right"], 0.1, number)
    assert len({left for left, _ in seen}) == 1 and len({right for _, right in seen}) == 3
    assert len(planned) == 1 + 3  # the trainer's, of which a CPU keeps none


def test_what_is_no_delta_of_a_weight_is_refused_and_nothing_is_written():
    weights = model_of(torch.bfloat16, 1)
    engine = Engine(weights)
    target = DeltaTarget(engine.plan)
    engine.load(weights.items())
    before = target.sums()
    wrong = {
        "q:sparse": [torch.zeros(3, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8), bytes_of(torch.tensor([7]))],
        "q:bitmap": [torch.zeros(1, dtype=torch.uint8), torch.full((4,), 255, dtype=torch.uint8)],
        "q": [torch.zeros(5)],
        "other": [torch.zeros(5)],
    }
    for name, sent in wrong.items():
        for one in sent:
            with pytest.raises(TransferError, match=r"the change of q cannot be applied|other has changed, and is no"):
                target.apply({name: one})
    assert target.sums() == before


def test_other_weights_than_were_kept_are_refused():
    weights = model_of(torch.bfloat16, 1)
    base = DeltaBase()
    base.keep(list(weights.items()))
    with pytest.raises(TransferError, match="q, or one of 4 weights from it on, was not sent before"):
        base.changes(list((weights | {"o": weights["o"].float()}).items()))


def test_a_loader_that_computes_takes_no_changes():
    source, target = torch.ones(2, 2), torch.zeros(2, 2)
    plan = LoadPlan.record(lambda weights: [target.copy_(w * 2) for _, w in weights], {"w": source}, {"w": target})
    with pytest.raises(Unsupported, match=r"changes alone cannot be loaded, of 1 weights \(w: the loader computes"):
        DeltaTarget(plan)


def test_a_hundred_steps_of_deltas_are_bit_equal_to_whole_versions():
    """Weights in bf16 with fp32 masters, at a step of training's size: a few of a hundred entries change."""
    torch.manual_seed(0)
    model = torch.nn.ParameterDict({n: torch.randn(40, 64) / 8 for n in ("q", "k", "o", "rest")}).bfloat16()
    optimizer = MasterWeights(lambda parameters: torch.optim.AdamW(parameters, lr=1e-5))(model.parameters())
    weights = lambda: [(name, parameter.detach()) for name, parameter in model.items()]  # noqa: E731
    engine, dense = Engine(dict(weights())), Engine(dict(weights()))
    base, target, sent_bytes = DeltaBase(), DeltaTarget(engine.plan), 0
    base.keep(weights())
    engine.load(weights())
    for _ in range(100):
        for parameter in model.values():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        changes = base.changes(weights())
        sent_bytes += sum(tensor.nbytes for tensor in changes.values())
        target.apply(changes)
        dense.load(weights())
        assert all(same(engine.parameters[name], dense.parameters[name]) for name in dense.parameters)
    assert 0 < sent_bytes < 0.2 * 100 * sum(tensor.nbytes for _, tensor in weights())
