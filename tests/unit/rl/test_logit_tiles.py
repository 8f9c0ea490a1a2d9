"""How the logits of an LM head are cut; what is computed from the tiles is tested in test_logprob.py."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from colo.rl.logit_tiles import tile_sides
from colo.units import KIB, MIB


@settings(max_examples=200)
@given(
    num_tokens=st.integers(1, 100_000),
    vocab=st.integers(1, 300_000),
    hidden=st.integers(1, 16_384),
    workspace_bytes=st.integers(64 * MIB, 2048 * MIB),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.float64]),
)
def test_derived_tiles_fit_the_workspace(num_tokens, vocab, hidden, workspace_bytes, dtype):
    like = torch.empty((num_tokens, hidden), dtype=dtype, device="meta")
    rows, columns = tile_sides(num_tokens, vocab, like, workspace_bytes)
    assert 1 <= rows <= num_tokens
    assert 1 <= columns <= vocab
    item, stat = dtype.itemsize, max(4, dtype.itemsize)
    buffers_bytes = (item + (0 if item == stat else stat)) * rows * columns
    forward_bytes = (2 * item + stat) * rows * hidden
    backward_bytes = (item + stat) * columns * hidden + item * rows * hidden
    at_least = 128  # a side below which nothing is gained
    if columns > at_least and rows > at_least:
        assert buffers_bytes + max(forward_bytes, backward_bytes) <= workspace_bytes


def test_tiles_do_not_shrink_below_128():
    like = torch.empty((1000, 4096), device="meta")
    assert tile_sides(1000, 1000, like, 1 * KIB) == (128, 128)
