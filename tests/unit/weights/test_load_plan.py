"""Recording what a loader does, on loaders that do what real ones do."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from colo.errors import TransferError, Unsupported
from colo.weights.load_plan import LoadPlan


class FusedLoader:
    """q, k and v into one tensor, an embedding into padded rows, the norm as it is: vLLM's ways in miniature."""

    def __init__(self, dtype=torch.float32):
        self.qkv = torch.zeros(8, 4, dtype=dtype)
        self.embed = torch.zeros(64, 4, dtype=dtype)
        self.norm = torch.zeros(4, dtype=dtype)
        self.calls = 0

    def load(self, weights):
        self.calls += 1
        rows = {"q": (0, 4), "k": (4, 2), "v": (6, 2)}
        for name, tensor in weights:
            if name in rows:
                self.qkv.data.narrow(0, *rows[name]).copy_(tensor)
            elif name == "embed":
                self.embed[: tensor.shape[0]].data.copy_(tensor)
            elif name == "norm":
                self.norm.data.copy_(tensor)
            else:
                raise KeyError(name)

    @property
    def destinations(self):
        return {"qkv": self.qkv, "embed": self.embed[:50], "norm": self.norm}


def weights(dtype=torch.float32):
    shapes = {"q": (4, 4), "k": (2, 4), "v": (2, 4), "embed": (50, 4), "norm": (4,)}
    return {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}


def test_recording_moves_no_byte():
    engine = FusedLoader()
    LoadPlan.record(engine.load, weights(), engine.destinations)
    assert engine.calls == 1
    assert not engine.qkv.any() and not engine.embed.any() and not engine.norm.any()


def test_replaying_does_what_the_loader_does_bit_for_bit():
    loaded, replayed, source = FusedLoader(), FusedLoader(), weights()
    loaded.load(source.items())
    plan = LoadPlan.record(replayed.load, source, replayed.destinations)
    assert plan.differences(source) == list(source)
    written = plan.replay(source)
    assert written == sum(t.numel() * 4 for t in source.values())
    for name in ("qkv", "embed", "norm"):
        assert torch.equal(getattr(loaded, name), getattr(replayed, name))
    assert plan.differences(source) == []


def test_sources_may_be_strided_views():
    engine, source = FusedLoader(), weights()
    source["k"] = torch.randn(4, 2).t()
    source["v"] = torch.randn(9, 4)[3:7:2]
    plan = LoadPlan.record(engine.load, source, engine.destinations)
    plan.replay(source)
    assert torch.equal(engine.qkv[4:6], source["k"])
    assert torch.equal(engine.qkv[6:], source["v"])


def test_every_parameter_can_be_the_engines_memory():
    engine, source = FusedLoader(), weights()
    plan = LoadPlan.record(engine.load, source, engine.destinations)
    assert plan.aliases.keys() == source.keys()
    plan.aliases["k"].fill_(7)
    assert engine.qkv[4:6].eq(7).all() and not engine.qkv[:4].any()


def test_another_dtype_cannot_alias_but_is_replayed_with_conversion():
    engine, source = FusedLoader(torch.bfloat16), weights()
    plan = LoadPlan.record(engine.load, source, engine.destinations)
    assert plan.aliases == {}
    plan.replay(source)
    assert torch.equal(engine.norm, source["norm"].to(torch.bfloat16))
    assert plan.differences(source) == []


def test_a_loader_that_computes_is_named_with_the_reason_and_not_replayed():
    engine = FusedLoader()

    def load(pairs):
        engine.load((name, tensor * 2 if name == "k" else tensor) for name, tensor in pairs)

    plan = LoadPlan.record(load, weights(), engine.destinations)
    assert list(plan.fallbacks) == ["k"]
    assert "aten.mul" in plan.fallbacks["k"]
    assert "k" not in plan.aliases
    with pytest.raises(Unsupported, match=r"1 tensors cannot be replayed, k for one: the loader computes with it"):
        plan.replay(weights())


def test_a_loader_that_looks_at_values_is_a_fallback_for_everything():
    engine = FusedLoader()

    def load(pairs):
        engine.load((name, tensor) for name, tensor in pairs if float(tensor.sum()) < 1e9)

    plan = LoadPlan.record(load, weights(), engine.destinations)
    assert plan.fallbacks.keys() == weights().keys()
    assert "looks at values" in plan.fallbacks["q"]


def test_a_broadcast_is_a_fallback():
    engine = FusedLoader()
    source = weights() | {"norm": torch.randn(1)}
    plan = LoadPlan.record(engine.load, source, engine.destinations)
    assert plan.fallbacks == {"norm": "the loader broadcasts it"}


def test_memory_that_nothing_fills_is_reported():
    engine, source = FusedLoader(), weights()
    del source["v"]
    with pytest.raises(TransferError, match="does not cover qkv exactly once: of 32 elements it leaves 8 unwritten"):
        LoadPlan.record(engine.load, source, engine.destinations)


def test_memory_that_is_filled_twice_is_reported():
    engine, source = FusedLoader(), weights()

    def load(pairs):
        for name, tensor in pairs:
            engine.load([(name, tensor)] * (2 if name == "k" else 1))

    with pytest.raises(TransferError, match="qkv exactly once: .* writes 8 more than once"):
        LoadPlan.record(load, source, engine.destinations)


def test_memory_that_is_no_parameter_is_reported():
    engine, source = FusedLoader(), weights()
    destinations = {name: t for name, t in engine.destinations.items() if name != "norm"}
    with pytest.raises(TransferError, match="copies norm to memory that is no parameter"):
        LoadPlan.record(engine.load, source, destinations)


def test_a_source_that_changed_shape_or_is_gone_is_refused_before_anything_is_written():
    engine, source = FusedLoader(), weights()
    plan = LoadPlan.record(engine.load, source, engine.destinations)
    with pytest.raises(TransferError, match=r"norm has shape \(5,\), but \(4,\) was recorded"):
        plan.replay(source | {"norm": torch.randn(5)})
    with pytest.raises(TransferError, match="1 of 5 tensors are missing, q for one"):
        plan.replay({name: t for name, t in source.items() if name != "q"})
    assert not engine.qkv.any() and not engine.norm.any()


def test_nan_and_negative_zero_are_compared_as_bits():
    engine, source = FusedLoader(), weights()
    source["norm"] = torch.tensor([float("nan"), -0.0, 1.0, 2.0])
    plan = LoadPlan.record(engine.load, source, engine.destinations)
    plan.replay(source)
    assert plan.differences(source) == []
    engine.norm[1] = 0.0
    assert plan.differences(source) == ["norm"]


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    columns=st.integers(1, 6),
    by_column=st.booleans(),
    drop=st.integers(0, 5),
)
def test_coverage_counts_every_element_however_the_parts_lie(rows, columns, by_column, drop):
    """Parts side by side by rows (contiguous) or by columns, as tensor-parallel slices are; one may be missing."""
    total = sum(rows)
    target = torch.zeros((columns, total) if by_column else (total, columns))
    starts = [sum(rows[:i]) for i in range(len(rows))]
    source = {str(i): torch.randn((columns, n) if by_column else (n, columns)) for i, n in enumerate(rows)}
    kept = {name: t for name, t in source.items() if int(name) != drop}

    def load(pairs):
        for name, tensor in pairs:
            target.narrow(1 if by_column else 0, starts[int(name)], rows[int(name)]).copy_(tensor)

    if len(kept) == len(source):
        plan = LoadPlan.record(load, kept, {"t": target})
        plan.replay(kept)
        assert torch.equal(target, torch.cat(list(source.values()), dim=1 if by_column else 0))
    else:
        with pytest.raises(TransferError, match=f"leaves {rows[drop] * columns} unwritten"):
            LoadPlan.record(load, kept, {"t": target})
