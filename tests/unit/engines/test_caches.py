from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

from colo.engines import caches as kv_cache
from colo.engines.caches import BufferCache, BufferLayer, KVCacheBuffer, Wave, forward, plan_groups, plan_waves, prefill
from colo.engines.text import Positions
from colo.errors import BudgetError
from colo.memory.region import allocate_region

CPU = torch.device("cpu")
LAYERS, HEADS, HEAD_DIM = 2, 2, 4
BYTES_PER_TOKEN = 2 * LAYERS * HEADS * HEAD_DIM * 4


def make_buffer(num_tokens: int) -> KVCacheBuffer:
    region = allocate_region(num_tokens * BYTES_PER_TOKEN, CPU, name="kv")
    region.bytes.zero_()
    return KVCacheBuffer(region, num_layers=LAYERS, num_heads=HEADS, head_dim=HEAD_DIM, dtype=torch.float32)


def make_wave(prompts: list[tuple[int, ...]], n: int, max_tokens: int) -> Wave:
    (wave,) = plan_waves(prompts, n=n, limits=[max_tokens] * len(prompts), capacity=10_000)
    return wave


def states(rows: int, tokens: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, HEADS, tokens, HEAD_DIM, generator=torch.Generator().manual_seed(seed))


# ---- room -----------------------------------------------------------------------------------------------------------


def test_a_sequence_too_long_is_refused_with_the_numbers():
    buffer = make_buffer(20)
    assert len(buffer.plan([(1,) * 12], n=1, max_tokens=8)) == 1
    with pytest.raises(BudgetError, match=r"12 tokens and max_tokens=9.*raise kv_cache_bytes to 2688") as caught:
        buffer.plan([(1,), (1,) * 12], n=1, max_tokens=9)
    assert (caught.value.needed_bytes, caught.value.free_bytes) == (21 * BYTES_PER_TOKEN, 20 * BYTES_PER_TOKEN)


def test_a_buffer_without_room_for_a_token_is_refused():
    region = allocate_region(256, CPU, name="kv")
    with pytest.raises(ValueError, match="256 bytes holds no token of 512 bytes: raise kv_cache_bytes"):
        KVCacheBuffer(region, num_layers=4, num_heads=4, head_dim=4, dtype=torch.float32)


# ---- caches ---------------------------------------------------------------------------------------------------------


def test_a_layer_returns_what_transformers_own_cache_returns_without_allocating():
    keys, values = torch.zeros(3, HEADS, 8, HEAD_DIM), torch.zeros(3, HEADS, 8, HEAD_DIM)
    layer, reference = BufferLayer(keys, values), DynamicCache()
    for num_tokens, seed in ((4, 0), (1, 1), (2, 2)):
        new = (states(3, num_tokens, seed), states(3, num_tokens, seed + 10))
        assert layer.get_mask_sizes(num_tokens) == reference.get_mask_sizes(num_tokens, 0)
        for ours, theirs in zip(layer.update(*new), reference.update(*new, 0), strict=True):
            assert torch.equal(ours, theirs)
        assert layer.get_seq_length() == reference.get_seq_length()
    assert layer.keys.data_ptr() == keys.data_ptr()
    assert keys[:, :, 7:].eq(0).all()


def test_caches_of_a_wave_share_no_memory_and_stay_within_the_buffer():
    buffer = make_buffer(64)
    prompts, rows = buffer.open(make_wave([(1, 2, 3), (4,)], n=3, max_tokens=4))
    views = [view for cache in (prompts, rows) for layer in cache.layers for view in layer.room]
    assert [tuple(view.shape) for view in views] == [(2, 2, 3, 4)] * 4 + [(6, 2, 7, 4)] * 4
    for view in views:
        view += 1
    assert all(view.eq(1).all() for view in views)
    written = buffer._region.bytes.view(torch.float32).ne(0).sum().item()
    assert written == sum(view.numel() for view in views) == (2 * 3 + 6 * 7) * BYTES_PER_TOKEN // 4


def test_in_place_the_prompt_and_its_sequence_are_one():
    buffer = make_buffer(8)
    (wave,) = buffer.plan([(1, 2, 3, 4)], n=1, max_tokens=4)
    prompts, rows = buffer.open(wave)
    assert prompts is rows
    assert rows.layers[0].room[0].shape[-2] == 8


def test_taking_and_keeping_rows_moves_their_states_and_their_padding():
    prompts, rows = make_buffer(64).open(make_wave([(1, 2, 3), (4,)], n=2, max_tokens=4))
    new = [(states(2, 3, seed), states(2, 3, seed + 1)) for seed in range(LAYERS)]
    for layer, (keys, values) in enumerate(new):
        prompts.update(keys, values, layer)
    rows.take(prompts, torch.tensor([0, 0, 1, 1]))
    rows.keep(torch.tensor([3, 0]))
    for layer, (keys, values) in enumerate(new):
        found = (rows.layers[layer].keys, rows.layers[layer].values)
        assert all(torch.equal(f, new[[1, 0]]) for f, new in zip(found, (keys, values), strict=True))
    assert rows.position_ids(2).tolist() == [[1, 2], [3, 4]]
    assert rows.attention_mask(1).tolist() == [[False, False, True, True], [True, True, True, True]]
    assert [part.position_ids(1).tolist() for part in rows.parts(1)] == [[[0]], [[0]]]


def test_padding_has_position_zero_and_no_mask_is_made_where_there_is_none():
    prompts, _ = make_buffer(64).open(make_wave([(1, 2, 3), (4,)], n=1, max_tokens=1))
    assert prompts.position_ids(3).tolist() == [[0, 1, 2], [0, 0, 0]]
    assert prompts.attention_mask(3).tolist() == [[True, True, True], [False, False, True]]
    even, _ = make_buffer(64).open(make_wave([(1, 2), (4, 5)], n=1, max_tokens=1))
    assert even.attention_mask(2) is None


# ---- the last prompts -----------------------------------------------------------------------------------------------


def test_the_last_prompts_are_recalled_for_the_same_prompts_and_adapter():
    buffer, logits = make_buffer(64), torch.zeros(1, 5)
    wave, same = make_wave([(1, 2)], n=1, max_tokens=4), make_wave([(1, 2)], n=3, max_tokens=2)
    assert buffer.recall(wave, "a") is None
    buffer.remember(wave, "a", logits)
    assert buffer.recall(same, "a") is logits
    assert buffer.recall(same, None) is None
    assert buffer.recall(same, "a") is None  # forgotten: the wave before has written over it


def test_forgetting_and_running_in_place_leave_nothing_to_recall():
    buffer, logits = make_buffer(8), torch.zeros(1, 5)
    wave = make_wave([(1, 2)], n=1, max_tokens=4)
    buffer.remember(wave, None, logits)
    buffer.forget()
    assert buffer.recall(wave, None) is None
    (in_place,) = buffer.plan([(1, 2, 3)], n=1, max_tokens=5)
    buffer.remember(in_place, None, logits)
    assert buffer.recall(in_place, None) is None


# ---- with a model ---------------------------------------------------------------------------------------------------


def test_the_prefill_is_the_same_in_parts_and_as_transformers_computes_it(monkeypatch):
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=16, intermediate_size=24, num_hidden_layers=LAYERS, num_attention_heads=4)
    config.update({"num_key_value_heads": HEADS, "head_dim": HEAD_DIM, "vocab_size": 30})
    model = AutoModelForCausalLM.from_config(config).eval()
    prompts = [(1, 2, 3), (4,), (5, 6), (7, 8, 9)]
    wave = make_wave(prompts, n=1, max_tokens=2)

    def run(prefill_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        monkeypatch.setattr(kv_cache, "PREFILL_TOKENS", prefill_tokens)
        cache, _ = make_buffer(64).open(wave)
        with torch.no_grad():
            logits = prefill(model, wave, cache)
            cache.set_length(wave.prompt_length)
            return logits, forward(model, torch.tensor([[1], [2], [3], [4]]), narrowed(cache))

    def narrowed(cache: BufferCache) -> BufferCache:
        rows = make_buffer(64).open(wave)[1]
        rows.take(cache, torch.arange(len(prompts)))
        return rows

    whole, parts = run(8192), run(6)
    for a, b in zip(whole, parts, strict=True):
        assert torch.allclose(a, b, atol=1e-5)
    for row, prompt in enumerate(prompts):
        with torch.no_grad():
            expected = model(torch.tensor([[*prompt, row + 1]])).logits[0, -2:]
        assert torch.allclose(torch.stack([whole[0][row], whole[1][row]]), expected, atol=1e-5)


# ---- waves


@settings(max_examples=200)
@given(
    prompts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple), max_size=12),
    n=st.integers(1, 5),
    max_tokens=st.integers(1, 8),
    spare_tokens=st.integers(0, 60),
    max_rows=st.integers(1, 9),
)
def test_waves_hold_every_sequence_once_in_order_and_fit(prompts, n, max_tokens, spare_tokens, max_rows):
    capacity = max(map(len, prompts), default=0) + max_tokens + spare_tokens
    waves = plan_waves(prompts, n=n, limits=[max_tokens] * len(prompts), capacity=capacity, max_rows=max_rows)
    assert [row for wave in waves for row in wave.rows] == [(p, s) for p in range(len(prompts)) for s in range(n)]
    for wave in waves:
        assert len(set(wave.prompts)) == len(wave.prompts)
        assert [wave.prompts[slot] for slot in wave.slots] == [prompts[p] for p, _ in wave.rows]
        assert len(wave.rows) <= max_rows
        prompt_tokens = 0 if wave.in_place else len(wave.prompts) * wave.prompt_length
        assert prompt_tokens + len(wave.rows) * (wave.prompt_length + wave.max_tokens) <= capacity


def test_equal_prompts_are_computed_once():
    wave = make_wave([(1, 2), (3,), (1, 2)], n=2, max_tokens=4)
    assert (wave.prompts, wave.slots) == (((1, 2), (3,)), (0, 0, 1, 1, 0, 0))


def test_a_wave_is_not_cut_before_the_buffer_is_full():
    assert len(plan_waves([(1, 2)], n=3, limits=[4], capacity=2 + 3 * 6)) == 1
    assert [len(w.rows) for w in plan_waves([(1, 2)], n=3, limits=[4], capacity=2 + 3 * 6 - 1)] == [2, 1]


def test_a_sequence_that_fits_alone_runs_in_place():
    waves = plan_waves([(1, 2, 3)], n=2, limits=[4], capacity=7)
    assert [(wave.in_place, wave.rows) for wave in waves] == [(True, ((0, 0),)), (True, ((0, 1),))]


def test_a_row_grows_to_its_own_limit_and_a_wave_to_the_largest():
    (wave,) = plan_waves([(1, 2, 3), (4,)], n=2, limits=[1, 6], capacity=1000)
    assert (wave.limits, wave.max_tokens, wave.prompt_length) == ((1, 1, 6, 6), 6, 3)
    assert [w.limits for w in plan_waves([(1, 2, 3), (4,)], n=1, limits=[1, 6], capacity=10)] == [(1,), (6,)]


def test_sizes_that_do_not_grow_with_the_length_bound_the_rows():
    waves = plan_waves([(1,), (2, 3)], n=4, limits=[100, 100], capacity=5, size=lambda length: 1)
    assert [len(w.prompts) + len(w.rows) for w in waves] == [5, 5]


def test_no_more_prompts_than_allowed_are_in_one_wave():
    waves = plan_waves([(i,) for i in range(5)], n=2, limits=[1] * 5, capacity=1000, max_prompts=2)
    assert [len(w.prompts) for w in waves] == [2, 2, 1]


def test_groups_run_apart_with_the_indices_of_the_call():
    prompts = [(1,), (2, 3), (4,), (5, 6)]
    waves = plan_groups(
        prompts, key=len, limits=[1, 2, 3, 4], plan=lambda p, ends: plan_waves(p, n=1, limits=ends, capacity=1000)
    )
    assert [(w.prompts, w.rows, w.limits) for w in waves] == [
        (((1,), (4,)), ((0, 0), (2, 0)), (1, 3)),
        (((2, 3), (5, 6)), ((1, 0), (3, 0)), (2, 4)),
    ]


# ---- positions ------------------------------------------------------------------------------------------------------


def test_a_prompt_grows_to_the_last_position_and_not_over_the_boundary():
    assert Positions().limits([(1,) * 50], 7) == [7]
    assert Positions(count=64).limits([(1,) * 50, (1,) * 60], 10) == [10, 4]
    positions = Positions(count=64, boundary=16)
    assert positions.limits([(1,) * 15, (1,) * 17, (1,) * 60], 10) == [1, 10, 4]
    assert [positions.is_long((1,) * length) for length in (15, 17)] == [False, True]
    with pytest.raises(ValueError, match="prompt 1 has 16 tokens, after which LongRoPE"):
        positions.limits([(1,), (1,) * 16], 1)
