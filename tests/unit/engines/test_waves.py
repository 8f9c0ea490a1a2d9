from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colo.engines.caches import Positions, Wave, plan_groups, plan_waves


def make_wave(prompts: list[tuple[int, ...]], n: int, max_tokens: int) -> Wave:
    (wave,) = plan_waves(prompts, n=n, limits=[max_tokens] * len(prompts), capacity=10_000)
    return wave


@settings(max_examples=200, deadline=None)
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
