"""fp32 masters in two bytes, what a bf16 weight is short of its master; and moments in two, rounded stochastically.

A bf16 number is the upper half of an fp32 one. Taken as integers, a master is its weight, 16 bits further up, and a
signed remainder of 16 bits: masters round to the nearest weight, and what is rounded away is what is kept. Every fp32
number but NaN, whose payload is dropped, comes back bit for bit. Megatron's precision-aware optimizer and Apex's
`store_param_remainders` do the same.

A master halfway between two weights rounds away from zero, not to the even one: 65,537 masters round to each even
weight then, one more than 16 bits tell apart.

Of moments the lower half is dropped, which loses numbers and is asked for. A mean over 1,000 steps changes by a
thousandth of itself in one, and rounded to the nearest bf16 number, 1/256 away, would stay what it is for ever. Rounded
up or down at random, by how near the two are, it is right in the mean (stochastic rounding, Gupta et al. 2015).
"""

from __future__ import annotations

from functools import lru_cache

import torch

from colo.memory.copy_plan import kernels

MASTER_WEIGHT = "master_weight"
"""Key under which an optimizer's state keeps a parameter's fp32 master (`colo.optim.MasterWeights`)."""

MASTER_REMAINDER, MASTER_DIGESTS = "master_remainder", "master_digests"
"""Keys of what a bf16 weight is short of its master (int16), and of digests of the weight's blocks (int64)."""

OF_MASTERS = (MASTER_WEIGHT, MASTER_REMAINDER, MASTER_DIGESTS)  # keys of everything that is kept of a master

MOMENTS = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg"}
    | {"acc_delta", "sum"}
)
"""Keys under which torch's classes keep means and sums of gradients, and of their squares."""

OF_VARIANCE = frozenset({"square_avg", "grad_avg"})
"""Keys of two of which a centered RMSprop takes the root of a small difference: rounded, that would be below zero."""

DIGEST_ELEMENTS = 1024  # elements of a weight, in their order in memory, that one digest covers

_SIGN_AND_QUIET_NAN = (-64, 0x7FC0)  # as int16, of a negative and of a positive NaN
_INFINITY = 0x7F800000
_LARGEST = torch.finfo(torch.bfloat16).max
_HALF = 0x8000


def split(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight (bf16) and the remainder (int16) of masters (fp32), in the shape of `master`."""
    bits = master.detach().contiguous().view(torch.int32)
    compiled = kernels(master.device)
    if compiled is not None:
        weight, remainder = compiled.split_masters(bits)
        return weight.view(torch.bfloat16), remainder
    negative, positive = _SIGN_AND_QUIET_NAN
    is_nan = (bits & 0x7FFFFFFF) > _INFINITY
    # adds half of a weight's last place before the cut: rounds to nearest, halves away from zero
    upper = (bits + _HALF) >> 16
    remainder = bits - (upper << 16)
    weight = torch.where(is_nan, torch.where(bits < 0, negative, positive), upper)
    return weight.to(torch.int16).view(torch.bfloat16), torch.where(is_nan, 0, remainder).to(torch.int16)


def join(weight: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The masters (fp32) that `split` has made `weight` (bf16) and `remainder` (int16) of."""
    # as signed integers: the shift keeps the sign on top, and a negative remainder borrows from the upper half
    upper = weight.detach().contiguous().view(torch.int16)
    return (upper.to(torch.int32) << 16).add_(remainder).view(torch.float32)


def block_digests(weight: torch.Tensor) -> torch.Tensor:
    """Digest a weight (bf16): a number (int64) for each `DIGEST_ELEMENTS` elements in order, shape [num_blocks].

    A block in which one element has changed always has another; one with several changes has the same with a
    probability of about 2**-32. Blocks are of elements rather than rows, so that a part of a weight that begins at a
    block can be digested by itself.
    """
    # digests tell of writes that torch does not count, such as those through `.data` or by another process
    flat = weight.detach().reshape(-1).view(torch.int16)
    size, rest = flat.numel(), -flat.numel() % DIGEST_ELEMENTS
    if rest:
        flat = torch.nn.functional.pad(flat, (0, rest))
    blocks = flat.view(-1, DIGEST_ELEMENTS) if size else flat.view(0, DIGEST_ELEMENTS)
    mixed = blocks.to(torch.int32).mul_(_odd_numbers(DIGEST_ELEMENTS, blocks.device))
    return mixed.sum(-1, dtype=torch.int64)


def written_blocks(weight: torch.Tensor, digests: torch.Tensor) -> torch.Tensor:
    """Tell for each element of `weight`, in order, whether its block is another than `digests` were made of; shape [n].

    A part of a weight has to begin at a block, and `digests` to be those of the part.
    """
    return (block_digests(weight) != digests).repeat_interleave(DIGEST_ELEMENTS)[: weight.numel()]


def open_masters(weight: torch.Tensor, remainder: torch.Tensor, digests: torch.Tensor, master: torch.Tensor) -> None:
    """Write the masters of `weight` (bf16) into `master` (fp32); all flat. What was written to is its own master."""
    compiled = kernels(weight.device)
    if compiled is not None:
        numbers = _odd_numbers(DIGEST_ELEMENTS, weight.device)
        compiled.open_masters(weight.view(torch.int16), remainder, digests, numbers, master.view(torch.int32))
    else:
        master.copy_(join(weight, remainder.masked_fill(written_blocks(weight, digests), 0)))


def close_masters(
    master: torch.Tensor, weight: torch.Tensor, remainder: torch.Tensor, digests: torch.Tensor, changed: torch.Tensor
) -> None:
    """Write `master` (fp32) as weight, remainder and digests, and add to `changed` how many elements are others."""
    compiled = kernels(weight.device)
    if compiled is not None:
        numbers = _odd_numbers(DIGEST_ELEMENTS, weight.device)
        compiled.close_masters(master.view(torch.int32), weight.view(torch.int16), remainder, digests, numbers, changed)
        return
    rounded, rest = split(master)
    # counted against the old weight, before the next line replaces it
    changed += (rounded != weight).sum()
    weight.copy_(rounded)
    remainder.copy_(rest)
    # of the new weight: the next step takes a block with another digest for one that somebody has written to
    digests.copy_(block_digests(rounded))


def round_stochastically(values: torch.Tensor, rounded: torch.Tensor, bits: torch.Tensor, seed: int) -> None:
    """Round `values` (fp32) up or down to `rounded` (bf16), right in the mean; overwrites `bits` (int32). All flat.

    What bf16 has stays as it is, infinities and NaN too. Finite numbers beyond its largest become that one.
    """
    compiled = kernels(values.device)
    if compiled is not None:
        compiled.round_stochastically(values.view(torch.int32), rounded.view(torch.int16), seed)
        return
    # a carry from the random lower half rounds up: its probability is the lower half's share of a last place
    bits.random_(0, 1 << 16, generator=torch.Generator(values.device).manual_seed(seed))
    bits.add_(values.view(torch.int32)).bitwise_and_(-1 << 16)
    # a carry leads out of finite numbers, and of a NaN whose payload is ones into the sign
    rounded.copy_(torch.where(values.isfinite(), bits.view(torch.float32).clamp(-_LARGEST, _LARGEST), values))


def round_to_nearest(values: torch.Tensor, rounded: torch.Tensor) -> None:
    """Round `values` to the nearest `rounded` (bf16); finite ones beyond its largest number become that one."""
    rounded.copy_(values)
    if rounded.isinf().any():
        rounded.copy_(torch.where(values.isfinite(), values.clamp(-_LARGEST, _LARGEST), values))


@lru_cache(maxsize=16)
def _odd_numbers(count: int, device: torch.device) -> torch.Tensor:
    """Odd numbers (int32): multiplying by one loses no bit (Knuth's multiplicative hashing)."""
    spread = torch.arange(1, count + 1, dtype=torch.int64, device=device) * 0x9E3779B1
    return ((spread & 0x7FFFFFFF) | 1).to(torch.int32)
