"""Recording what a loader does, on loaders that do what real ones do."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from colo.errors import TransferError, Unsupported
from colo.memory.load_plan import LoadPlan, num_covered
from colo.weights.sources.names import checkpoint_views


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


def test_recording_writes_nothing_that_a_loader_writes_beside_its_copies():
    engine, scratch = FusedLoader(), torch.zeros(2)
    engine.norm.fill_(5)

    def load(pairs):
        engine.qkv.zero_()
        engine.norm.copy_(torch.ones(4))
        engine.load(pairs)
        engine.embed[50:].fill_(3)
        engine.embed.data[50:].normal_()
        engine.embed[60:].fill_(torch.tensor(3.0))
        torch._foreach_zero_([engine.embed[50:55], engine.embed[55:]])
        torch.ones(14, 4, out=engine.embed[50:])
        scratch.fill_(7)

    plan = LoadPlan.record(load, weights(), engine.destinations)
    assert len(plan.copies) == 5 and not plan.fallbacks
    assert not engine.qkv.any() and not engine.embed.any() and engine.norm.eq(5).all()
    assert scratch.eq(7).all()


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.mul_(2),
        lambda t: t.copy_(t * 2),
        lambda t: torch.mul(t, 2, out=t),
        lambda t: torch._foreach_mul_([t], 2),
        lambda t: t[1:].clamp_(max=0),
    ],
)
def test_a_loader_that_computes_with_what_it_has_copied_is_a_fallback(change):
    engine = FusedLoader()

    def load(pairs):
        engine.load(pairs)
        change(engine.norm.data)

    plan = LoadPlan.record(load, weights(), engine.destinations)
    assert (
        list(plan.fallbacks) == ["norm"] and "computes with what it has copied of it (aten." in plan.fallbacks["norm"]
    )
    assert not engine.norm.any()


def test_a_loader_that_adds_a_weight_to_what_is_there_is_a_fallback():
    engine = FusedLoader()

    def load(pairs):
        for name, tensor in pairs:
            engine.norm.add_(tensor) if name == "norm" else engine.load([(name, tensor)])

    assert list(LoadPlan.record(load, weights(), engine.destinations).fallbacks) == ["norm"]


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


def test_a_source_whose_strides_changed_is_refused_rather_than_misread():
    engine, source = FusedLoader(), weights()
    plan = LoadPlan.record(engine.load, source, engine.destinations)
    with pytest.raises(TransferError, match=r"q has strides \(1, 4\), but \(4, 1\) were recorded"):
        plan.replay(source | {"q": torch.randn(4, 4).t()})
    assert not engine.qkv.any()


def test_a_source_that_is_transposed_in_place_is_not_taken_for_what_was_recorded():
    target = torch.zeros(3, 3)
    source = {"w": torch.arange(9.0).view(3, 3)}
    plan = LoadPlan.record(lambda weights: [target.copy_(w) for _, w in weights], source, {"w": target})
    plan.replay(source)
    assert plan.differences(source) == []
    with pytest.raises(TransferError, match="w has strides"):
        plan.differences({"w": source["w"].t()})


def test_nan_and_negative_zero_are_compared_as_bits():
    engine, source = FusedLoader(), weights()
    source["norm"] = torch.tensor([float("nan"), -0.0, 1.0, 2.0])
    plan = LoadPlan.record(engine.load, source, engine.destinations)
    plan.replay(source)
    assert plan.differences(source) == []
    engine.norm[1] = 0.0
    assert plan.differences(source) == ["norm"]


@settings(max_examples=60)
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


# ---- sources that reach the engine in parts --------------------------------------------------------------------------


class ExpertsLoader:
    """Experts one by one into `w13` [E, 2I, H] and `w2` [E, H, I], with the cuts of vLLM's `RoutedExperts`."""

    def __init__(self, num_experts=3, intermediate=4, hidden=5, *, first="gate_proj"):
        self.w13 = torch.zeros(num_experts, 2 * intermediate, hidden)
        self.w2 = torch.zeros(num_experts, hidden, intermediate)
        self.first = first

    def load(self, pairs):
        for name, tensor in pairs:
            expert, projection = name.removeprefix("mlp.experts.").removesuffix(".weight").split(".")
            data = (self.w2 if projection == "down_proj" else self.w13).data[int(expert)]
            if projection != "down_proj":
                size = data.shape[0] // 2
                data = data.narrow(0, 0 if projection == self.first else size, size)
            data.copy_(tensor.unsqueeze(0).unbind()[0].narrow(0, 0, tensor.shape[0]))

    @property
    def destinations(self):
        return {"w13": self.w13, "w2": self.w2}

    def record(self, source, load=None):
        names = partial(checkpoint_views, model_type="qwen3_moe")
        return LoadPlan.record(load or self.load, source, self.destinations, as_checkpoint=names)


def stacked(engine):
    up, down = torch.randn(engine.w13.shape), torch.randn(engine.w2.shape)
    return {"mlp.experts.gate_up_proj": up, "mlp.experts.down_proj": down}


def test_stacked_experts_are_the_engines_memory_as_a_whole():
    engine = ExpertsLoader()
    source = stacked(engine)
    plan = engine.record(source)
    assert [copy.name for copy in plan.copies] == ["mlp.experts.gate_up_proj"] * 6 + ["mlp.experts.down_proj"] * 3
    assert plan.aliases.keys() == source.keys()
    for name, memory in zip(source, (engine.w13, engine.w2), strict=True):
        alias = plan.aliases[name]
        assert (alias.data_ptr(), alias.shape, alias.stride()) == (memory.data_ptr(), memory.shape, memory.stride())
        alias.copy_(source[name])
        assert torch.equal(memory, source[name])
    assert plan.differences(source) == []


def test_experts_whose_halves_the_engine_swaps_are_replayed_and_not_aliased():
    engine = ExpertsLoader(first="up_proj")
    source = stacked(engine)
    plan = engine.record(source)
    assert list(plan.aliases) == ["mlp.experts.down_proj"]
    gate, up = source["mlp.experts.gate_up_proj"].chunk(2, dim=1)
    assert plan.replay(source) == sum(t.numel() * 4 for t in source.values())
    assert torch.equal(engine.w13, torch.cat([up, gate], dim=1))
    assert torch.equal(engine.w2, source["mlp.experts.down_proj"])
    source["mlp.experts.gate_up_proj"][2, 0, 0] += 1
    assert plan.differences(source) == ["mlp.experts.gate_up_proj"]


def test_an_expert_that_is_never_loaded_is_reported():
    engine = ExpertsLoader()

    def load(pairs):
        engine.load((name, tensor) for name, tensor in pairs if ".2.up_proj." not in name)

    with pytest.raises(TransferError, match="does not cover w13 exactly once: of 120 elements it leaves 20 unwritten"):
        engine.record(stacked(engine), load)


def test_experts_in_the_order_that_another_rank_would_hold_are_not_aliased():
    engine = ExpertsLoader()
    source = stacked(engine)

    def load(pairs):
        engine.load((name.replace(".1.", ".x.").replace(".2.", ".1.").replace(".x.", ".2."), t) for name, t in pairs)

    plan = engine.record(source, load)
    assert plan.aliases == {}
    plan.replay(source)
    assert torch.equal(engine.w2, source["mlp.experts.down_proj"][[0, 2, 1]])


def test_views_that_are_computed_are_fallbacks_of_their_parameter():
    engine, source = FusedLoader(), weights()

    def doubled(tensors):
        return [(name, tensor * 2 if name == "k" else tensor) for name, tensor in tensors.items()]

    plan = LoadPlan.record(engine.load, source, engine.destinations, as_checkpoint=doubled)
    assert list(plan.fallbacks) == ["k"]


def record_one(load, source, target):
    return LoadPlan.record(load, {"t": source}, {"t": target})


def test_a_square_tensor_that_is_transposed_is_no_alias():
    source, target = torch.randn(4, 4), torch.zeros(4, 4)
    plan = record_one(lambda pairs: [target.copy_(t.t()) for _, t in pairs], source, target)
    assert plan.aliases == {}
    plan.replay({"t": source})
    assert torch.equal(target, source.t())


def test_columns_that_keep_their_place_are_an_alias_and_transposed_blocks_are_not():
    source, target = torch.randn(4, 4), torch.zeros(4, 4)

    def columns(pairs):
        for _, t in pairs:
            for part, place in zip(t.split([1, 3], dim=1), target.split([1, 3], dim=1), strict=True):
                place.copy_(part)

    def blocks(pairs):
        for _, t in pairs:
            for part, place in zip(t.split(2), target.split(2), strict=True):
                place.view(2, 2, 2).copy_(part.view(2, 2, 2).transpose(1, 2))

    assert record_one(columns, source, target).aliases["t"].data_ptr() == target.data_ptr()
    assert record_one(blocks, source, target).aliases == {}


def test_another_shape_of_the_same_elements_is_an_alias_in_the_shape_of_the_source():
    source, target = torch.randn(4, 6), torch.zeros(24)
    alias = record_one(lambda pairs: [target.copy_(t.view(-1)) for _, t in pairs], source, target).aliases["t"]
    assert alias.shape == (4, 6) and alias.data_ptr() == target.data_ptr()


def test_parts_of_a_source_in_two_storages_or_with_a_gap_between_them_are_no_alias():
    source, padded = torch.randn(4, 2), torch.zeros(6, 2)
    apart = {"top": torch.zeros(2, 2), "bottom": torch.zeros(4, 2)[2:]}

    def load(pairs, places):
        for _, t in pairs:
            for part, place in zip(t.split(2), places, strict=True):
                place.copy_(part)

    assert LoadPlan.record(partial(load, places=apart.values()), {"t": source}, apart).aliases == {}
    places = {"top": padded[:2], "bottom": padded[4:]}
    assert LoadPlan.record(partial(load, places=places.values()), {"t": source}, places).aliases == {}


def test_a_source_with_an_element_that_is_not_read_is_no_alias():
    source, target = torch.randn(4, 2), torch.zeros(3, 2)
    plan = record_one(
        lambda pairs: [p.copy_(s) for _, t in pairs for p, s in zip(target, t, strict=False)], source, target
    )
    assert plan.aliases == {}


def test_half_of_a_source_twice_is_no_alias():
    """As many elements as the source has, all in their place, and still not the source."""
    source, target = {"t": torch.randn(4, 2), "other": torch.randn(2)}, torch.zeros(4, 2)

    def load(pairs):
        for name, t in pairs:
            for _ in range(2 if name == "t" else 0):
                target[:2].copy_(t[:2])
            if name == "other":
                target[3].copy_(t + 1)

    plan = LoadPlan.record(load, source, {"t": target})
    assert list(plan.fallbacks) == ["other"] and len(plan.copies) == 2
    assert plan.aliases == {}


def test_a_transposed_source_is_an_alias_as_a_whole_and_not_in_parts():
    source, target = torch.randn(2, 4).t(), torch.zeros(4, 2)
    whole = record_one(lambda pairs: [target.copy_(t) for _, t in pairs], source, target)
    rows = record_one(
        lambda pairs: [p.copy_(s) for _, t in pairs for p, s in zip(target, t, strict=True)], source, target
    )
    back = record_one(lambda pairs: [target.view(2, 4).copy_(t.t()) for _, t in pairs], source, target)
    assert whole.aliases["t"].is_contiguous() and whole.aliases["t"].shape == (4, 2)
    assert rows.aliases == back.aliases == {}


def test_parts_that_lie_in_a_row_are_counted_without_looking_at_elements():
    """A destination on the meta device, larger than any memory."""
    source, target = torch.empty(8, 1 << 40, device="meta"), torch.empty(8, 1 << 40, device="meta")
    plan = record_one(
        lambda pairs: [p.copy_(s) for _, t in pairs for p, s in zip(target, t, strict=True)], source, target
    )
    assert plan.aliases["t"].shape == source.shape


@settings(max_examples=100)
@given(
    rows=st.lists(st.integers(1, 4), min_size=1, max_size=6),
    columns=st.integers(1, 5),
    before=st.integers(0, 3),
    order=st.randoms(use_true_random=False),
    swap=st.booleans(),
)
def test_row_blocks_are_an_alias_if_and_only_if_each_keeps_its_place(rows, columns, before, order, swap):
    """Blocks, in any order, to their own places or two of them to each other's, behind `before` rows of others."""
    total = sum(rows)
    source = torch.randn(total, columns)
    memory = torch.zeros(before + total, columns)
    target, blocks, lengths = memory[before:], list(range(len(rows))), list(rows)
    if swap:
        i, j = order.choice(blocks), order.choice(blocks)
        blocks[i], blocks[j] = blocks[j], blocks[i]
        lengths = [rows[block] for block in blocks]
    places = dict(zip(blocks, target.split(lengths), strict=True))
    visited = sorted(blocks, key=lambda _: order.random())

    def load(pairs):
        for _, t in pairs:
            for block in visited:
                places[block].copy_(t.split(rows)[block])

    plan = record_one(load, source, target)
    plan.replay({"t": source})
    assert torch.equal(target, torch.cat([source.split(rows)[block] for block in blocks]))
    assert bool(plan.aliases) == (blocks == sorted(blocks))
    if plan.aliases:
        assert plan.aliases["t"].data_ptr() == target.data_ptr() and torch.equal(plan.aliases["t"], source)


def test_copies_that_continue_one_another_are_replayed_as_one():
    engine = {"w": torch.zeros(6, 4), "swapped": torch.zeros(6, 4)}

    def load(weights):
        for name, tensor in weights:
            for row in range(6):
                engine[name][5 - row if name == "swapped" else row].copy_(tensor[row])

    source = {name: torch.randn(6, 4) for name in engine}
    plan = LoadPlan.record(load, source, engine)
    assert [copy.name for copy in plan.runs] == ["swapped"] * 6 + ["w"]
    assert plan.replay(source) == 2 * 6 * 4 * 4
    assert torch.equal(engine["w"], source["w"]) and torch.equal(engine["swapped"], source["swapped"].flip(0))


class Scattered:
    """A loader that copies parts of one source into views of one memory: of some dtype, side by side or apart."""

    def __init__(self, parts):
        self.memory = torch.zeros(4096, dtype=torch.uint8)
        self.copies, at_bytes = [], 0
        start = 0
        for length, dtype, gap, skip in parts:
            start += skip
            at_bytes = (-(-at_bytes // dtype.itemsize) + gap) * dtype.itemsize
            view = self.memory[at_bytes : at_bytes + length * dtype.itemsize].view(dtype)
            self.copies.append((slice(start, start + length), view))
            start, at_bytes = start + length, at_bytes + length * dtype.itemsize
        self.num_elements = start

    @property
    def destinations(self):
        return {str(number): view for number, (_, view) in enumerate(self.copies)}

    def load(self, pairs):
        for _, tensor in pairs:
            for part, view in self.copies:
                view.copy_(tensor[part])


@settings(max_examples=200)
@given(
    parts=st.lists(
        st.tuples(
            st.sampled_from([1, 2, 3, 4, 8]),
            st.sampled_from([torch.float32, torch.float32, torch.int32, torch.float64, torch.bfloat16]),
            st.sampled_from([0, 0, 0, 1]),
            st.sampled_from([0, 0, 0, 1]),
        ),
        min_size=1,
        max_size=8,
    ),
    order=st.randoms(use_true_random=False),
)
def test_whatever_lies_side_by_side_replaying_writes_what_loading_does_and_no_other_byte(parts, order):
    loaded, replayed = Scattered(parts), Scattered(parts)
    order.shuffle(replayed.copies)
    source = {"t": torch.arange(1.0, loaded.num_elements + 1)}
    loaded.load(source.items())
    plan = LoadPlan.record(replayed.load, source, replayed.destinations)
    assert plan.replay(source) == sum(view.nbytes for _, view in loaded.copies)
    assert torch.equal(loaded.memory, replayed.memory)
    assert plan.differences(source) == []
    assert all(torch.equal(alias, source[name]) for name, alias in plan.aliases.items())
    for part, view in replayed.copies:
        view[-1] += 1
        assert plan.differences(source) == ["t"], part
        view[-1] -= 1


def test_a_plan_of_some_sources_knows_nothing_of_the_others():
    engine, source = FusedLoader(), weights()
    plan = LoadPlan.record(engine.load, source, engine.destinations)
    part = plan.subset(["v", "norm"])
    assert list(part.sources) == list(part.strides) == ["v", "norm"]
    assert {copy.name for copy in part.copies} == {"v", "norm"} and part.fallbacks == {} and not part.unused
    assert part.replay({"v": source["v"], "norm": source["norm"]}) == 4 * (8 + 4)
    assert torch.equal(engine.qkv[6:], source["v"]) and not engine.qkv[:6].any()


def test_what_a_loader_leaves_out_is_counted_unless_it_is_explained():
    source = {"a": torch.randn(4), "b": torch.randn(3), "c": torch.randn(2)}
    target = torch.zeros(2)

    def load(pairs):
        for name, tensor in pairs:
            if name == "a":
                target.copy_(tensor[:2])
            if name == "c":
                tensor * 2

    plan = LoadPlan.record(load, source, {"target": target})
    assert list(plan.fallbacks) == ["c"]
    assert plan.left_out == {"a": [(0, (2,), (1,))], "b": []}
    assert replace(plan, unused=frozenset({"b"})).left_out == {"a": [(0, (2,), (1,))]}


def test_a_part_that_is_copied_twice_does_not_stand_for_one_that_is_not():
    targets = {"one": torch.zeros(2), "other": torch.zeros(2)}

    def load(pairs):
        for _, tensor in pairs:
            for target in targets.values():
                target.copy_(tensor[:2])

    plan = LoadPlan.record(load, {"a": torch.randn(4)}, targets)
    assert plan.left_out == {"a": 2 * [(0, (2,), (1,))]}


@pytest.mark.parametrize("source", [torch.randn(4, 6).t(), torch.randn(8, 9)[::2, 1:5], torch.randn(4, 1).expand(4, 3)])
def test_a_source_of_any_strides_that_is_copied_whole_is_not_left_out(source):
    target = torch.zeros(source.shape)
    plan = record_one(lambda pairs: [target.copy_(tensor) for _, tensor in pairs], source, target)
    assert plan.left_out == {}
    with_less = replace(plan, copies=tuple(replace(c, shape=(c.shape[0] - 1, *c.shape[1:])) for c in plan.copies))
    assert list(with_less.left_out) == ["t"]


def test_elements_that_several_hundred_parts_cover_are_covered():
    assert num_covered(256 * [(0, (2, 2), (3, 1))] + [(2, (2,), (2,))]) == 5


@st.composite
def views(draw):
    """A view of a few rows and columns of a matrix of 6 by 5, of a flat stretch of it, or of every other element."""
    row, column = draw(st.integers(0, 5)), draw(st.integers(0, 4))
    shape = draw(st.integers(0, 6 - row)), draw(st.integers(0, 5 - column))
    return draw(
        st.sampled_from(
            [(5 * row + column, shape, (5, 1)), (row, (sum(shape),), (1,)), (column, (row,), (2,)), (row, (), ())]
        )
    )


@given(st.lists(views(), max_size=6))
def test_elements_are_counted_once_however_parts_overlap(parts):
    indices = [torch.arange(40).as_strided(shape, stride, offset).flatten() for offset, shape, stride in parts]
    assert num_covered(parts) == len(set(torch.cat([*indices, torch.zeros(0, dtype=torch.int64)]).tolist()))


def test_memory_that_is_optional_is_filled_whole_or_not_at_all():
    source = {"t": torch.randn(4)}
    target, optional = torch.zeros(4), torch.zeros(4)

    def record(*places):
        def load(pairs):
            for _, tensor in pairs:
                for place in places:
                    place.copy_(tensor[: len(place)])

        return LoadPlan.record(load, source, {"target": target}, optional={"optional": optional})

    assert len(record(target).copies) == 1
    assert len(record(target, optional).copies) == 2
    with pytest.raises(
        TransferError, match="does not cover optional exactly once: of 4 elements it leaves 1 unwritten"
    ):
        record(target, optional[:3])
    with pytest.raises(TransferError, match="does not cover target exactly once: of 4 elements it leaves 1 unwritten"):
        record(target[:3])


@pytest.mark.parametrize("way", ["strided in the engine", "strided in the source"])
def test_only_what_lies_in_a_row_on_both_sides_is_joined(way):
    source = torch.arange(1.0, 9.0)[None]

    def load(target):
        def copy(pairs):
            for _, t in pairs:
                if way == "strided in the engine":
                    parts = [(target[:, :4], t[:, :4]), (target[:, 4::2], t[:, 4:6]), (target[:, 5::2], t[:, 6:])]
                else:
                    parts = [(target[:, :4], t[:, ::2]), (target[:, 4:], t[:, 4:])]
                for place, part in parts:
                    place.copy_(part)

        return copy

    loaded, replayed = torch.zeros(1, 8), torch.zeros(1, 8)
    load(loaded)([("t", source)])
    plan = record_one(load(replayed), source, replayed)
    assert plan.replay({"t": source}) == 32
    assert torch.equal(loaded, replayed)


def test_copying_returns_the_engines_memory_as_it_always_does():
    target, other, returned = torch.zeros(4), torch.zeros(4), []

    def load(pairs):
        for _, t in pairs:
            returned.extend([target.copy_(t), other.copy_(t * 2)])

    LoadPlan.record(load, {"t": torch.randn(4)}, {"target": target, "other": other})
    assert returned[0] is target and returned[1] is other


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_what_is_computed_in_several_steps_is_the_fallback_of_its_source_alone(steps):
    target, other = torch.zeros(4), torch.zeros(4)
    scale = torch.full((4,), 3.0)

    def load(pairs):
        for name, t in pairs:
            if name == "computed":
                for _ in range(steps):
                    t = t * 2
                target.copy_(t)
            else:
                other.copy_(t)
                scale.mul(2)

    plan = LoadPlan.record(
        load, {"computed": torch.randn(4), "plain": torch.randn(4)}, {"target": target, "other": other}
    )
    assert list(plan.fallbacks) == ["computed"] and "aten.mul" in plan.fallbacks["computed"]
    assert [copy.name for copy in plan.copies] == ["plain"]


def test_parts_that_the_engine_keeps_in_two_dtypes_are_no_alias_though_they_lie_side_by_side():
    memory = torch.zeros(32, dtype=torch.uint8)
    halves = {"top": memory[:16].view(torch.float32), "bottom": memory[16:].view(torch.int32)}

    def load(pairs):
        for _, t in pairs:
            halves["top"].copy_(t[:4])
            halves["bottom"].copy_(t[4:])

    plan = LoadPlan.record(load, {"t": torch.arange(8.0)}, halves)
    assert plan.aliases == {}
    plan.replay({"t": torch.arange(8.0)})
    assert halves["bottom"].tolist() == [4, 5, 6, 7]


def test_what_a_loader_makes_for_itself_is_made_as_it_asks():
    target, made = torch.zeros(4), []

    def load(pairs):
        made.append(torch.ones(3, dtype=torch.int16))
        for _, t in pairs:
            target.copy_(t)

    record_one(load, torch.randn(4), target)
    assert made[0].dtype == torch.int16 and made[0].tolist() == [1, 1, 1]
