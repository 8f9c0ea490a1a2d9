"""A weight and a remainder are a master, whatever its bits."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from colo.trainer.remainders import (
    DIGEST_ELEMENTS,
    block_digests,
    join,
    round_stochastically,
    round_to_nearest,
    split,
    written_blocks,
)

SPECIAL = [0x00000000, 0x80000000, 0x00000001, 0x807FFFFF, 0x00007FFF, 0x00008000, 0x00008001, 0x7F7FFFFF, 0xFF7FFFFF]
SPECIAL += [0x7F800000, 0xFF800000, 0x7F7F8000, 0x3F808000, 0x3F818000, 0xBF808000, 0x3F807FFF, 0x3F808001, 0x00800000]
NANS = [0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF, 0x7FFFFFFF, 0x7F808000, 0xFF807FFF]


def floats(bits):
    return torch.from_numpy(np.array(bits, dtype=np.uint32).view(np.int32)).view(torch.float32)


def assert_exact(master):
    weight, remainder = split(master)
    assert (weight.dtype, remainder.dtype, weight.shape) == (torch.bfloat16, torch.int16, master.shape)
    again, is_nan = join(weight, remainder), master.isnan()
    assert torch.equal(again.isnan(), is_nan) and torch.equal(weight.isnan(), is_nan)
    assert torch.equal(again.view(torch.int32)[~is_nan], master.view(torch.int32)[~is_nan])
    nearest, is_tie = master.bfloat16(), (master.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(weight[~is_nan & ~is_tie], nearest[~is_nan & ~is_tie])
    away = is_tie & ~is_nan
    assert torch.equal(weight[away].float().abs() - master[away].abs(), (weight[away].float() - master[away]).abs())


@settings(max_examples=200)
@given(st.lists(st.one_of(st.integers(0, 2**32 - 1), st.sampled_from(SPECIAL + NANS)), min_size=1, max_size=64))
def test_every_master_but_a_nan_comes_back_bit_for_bit_and_its_weight_is_the_nearest(bits):
    assert_exact(floats(bits))


def test_special_masters_of_both_signs_come_back():
    assert_exact(floats(SPECIAL + NANS))


@pytest.mark.parametrize("upper", [0x3F80, 0x3F81, 0x0000, 0x007F, 0x0080, 0x7F7F, 0x8000, 0xBF80])
def test_all_masters_around_a_weight_come_back(upper):
    assert_exact(floats((upper << 16) + np.arange(1 << 16)))


@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 4), (2, 700, 4)])
def test_shapes_are_kept_and_blocks_are_of_elements_in_order(shape):
    master = torch.randn(shape)
    weight, remainder = split(master)
    assert weight.shape == remainder.shape == join(weight, remainder).shape == shape
    digests = block_digests(weight)
    assert digests.shape == (-(-weight.numel() // DIGEST_ELEMENTS),)
    flat = weight.reshape(-1)
    for number, digest in enumerate(digests):
        part = flat[number * DIGEST_ELEMENTS : (number + 1) * DIGEST_ELEMENTS]
        assert torch.equal(block_digests(part), digest.view(1)), "a part that begins at a block has the same"


@settings(max_examples=100)
@given(st.integers(0, 2**16 - 1), st.integers(0, 2**16 - 1), st.integers(0, 2499))
def test_a_block_in_which_one_element_has_changed_has_another_digest(before, after, place):
    bits = torch.from_numpy(np.full(2500, before, dtype=np.uint16).view(np.int16))
    digests = block_digests(bits.view(torch.bfloat16))
    bits[place] = int(np.uint16(after).view(np.int16))
    weight = bits.view(torch.bfloat16)
    block = place // DIGEST_ELEMENTS
    assert (block_digests(weight) != digests).tolist() == [n == block and before != after for n in range(3)]
    written = written_blocks(weight, digests).nonzero().flatten()
    within = torch.arange(block * DIGEST_ELEMENTS, min(2500, (block + 1) * DIGEST_ELEMENTS))
    assert torch.equal(written, within if before != after else within[:0])


def test_a_thousand_steps_are_those_of_fp32_bit_for_bit():
    generator = torch.Generator().manual_seed(0)
    expected = torch.randn(64, 33, generator=generator)
    expected[0] = 0
    expected[1] = 1e-40
    expected[2] = 3e38
    weight, remainder = split(expected)
    for _ in range(1000):
        step = torch.randn(64, 33, generator=generator) * 10.0 ** torch.randint(-9, 1, (64, 1), generator=generator)
        step[2] *= 1e37
        expected = expected - 1e-3 * step
        weight, remainder = split(join(weight, remainder) - 1e-3 * step)
        assert torch.equal(join(weight, remainder), expected)
    assert expected.isinf().any() or expected[2].abs().max() > 1e38


def rounded(values, seed=0):
    """Round, over memory that has something else in it."""
    made = torch.full(values.shape, 7.0, dtype=torch.bfloat16)
    bits = torch.full(values.shape, -1, dtype=torch.int32)
    round_stochastically(values, made, bits, seed)
    return made


@settings(max_examples=200)
@given(st.lists(st.one_of(st.integers(0, 2**32 - 1), st.sampled_from(SPECIAL + NANS)), min_size=1, max_size=64))
def test_what_is_rounded_at_random_is_a_neighbour_and_what_bf16_has_stays(bits):
    values = floats(bits)
    made, is_nan = rounded(values), values.isnan()
    assert torch.equal(made.isnan(), is_nan)
    below = (values.view(torch.int32) & (-1 << 16))[~is_nan]  # towards zero
    steps = made.float().view(torch.int32)[~is_nan] - below
    is_exact = (values.view(torch.int32)[~is_nan] & 0xFFFF) == 0
    assert torch.all((steps == 0) | (steps == 1 << 16)) and torch.all(steps[is_exact] == 0)


BEYOND = [0x7F7F0000, 0x7F7F0001, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFE, 0x7F7FFFFF]  # of bf16's largest, and beyond it


def test_what_is_finite_stays_finite_and_infinity_what_it_is():
    values = floats((BEYOND + [bits | 1 << 31 for bits in BEYOND] + [0x7F800000, 0xFF800000, *NANS]) * 500)
    expected = values.clamp(-torch.finfo(torch.bfloat16).max, torch.finfo(torch.bfloat16).max)
    expected = torch.where(values.isinf(), values, expected).bfloat16()
    nearest = torch.empty_like(expected)
    round_to_nearest(values, nearest)
    for made in (rounded(values), nearest):
        assert torch.equal(made.isnan(), values.isnan())
        assert torch.equal(made[~made.isnan()], expected[~values.isnan()])


@settings(max_examples=30, deadline=None)
@given(st.floats(-(2.0**99), 2.0**99, width=32).filter(lambda x: abs(x) > 1e-30), st.integers(0, 2**32))
def test_rounding_at_random_is_right_in_the_mean(value, seed):
    values = torch.full((1 << 16,), value)
    made = rounded(values, seed).double()
    gap = (made.max() - made.min()).item()
    # six standard deviations of a mean of 65,536 draws between two neighbours
    assert abs(made.mean().item() - values[0].item()) <= 6 * 0.5 * gap / 256 + 1e-12 * abs(value)


def test_a_mean_over_a_thousand_steps_falls_as_it_would_in_fp32():
    nearest, random = torch.ones(4096, dtype=torch.bfloat16), torch.ones(4096, dtype=torch.bfloat16)
    for number in range(2000):
        nearest.copy_(nearest.float() * 0.999)
        random = rounded(random.float() * 0.999, number)
    assert torch.all(nearest == 1), "to the nearest it would stay what it is"
    assert random.float().mean().item() == pytest.approx(0.999**2000, rel=0.02)
    assert random.float().std().item() < 0.1 * 0.999**2000
