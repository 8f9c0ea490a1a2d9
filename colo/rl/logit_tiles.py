"""The logits of an LM head in tiles: the forward and backward passes behind `colo.rl.logprob.token_logprobs`.

Forward keeps a running maximum and sum of exponentials for each token (online softmax, arXiv:1805.02867), and beside
them the running average of weight rows that is, but for a factor a token, the gradient in the hidden state. Backward
multiplies that factor in; only a head that is trained has its tiles computed again. In matrix products: two for a
frozen head, as in full, and four in place of three for a trained one.

A model's own last steps are applied to each tile in the model's order and dtype, so that rounding is the model's too:
y = steps(hidden @ weight.T + bias). With gain g, the product of all scales, and cap k, the product of those after the
tanh, dy/dx = g (1 - (y / k)^2), and g without a tanh; "bend" below is that factor without g.

Shape suffixes: N tokens, V vocabulary, D hidden size; K the tokens that count, R and C the rows and columns of a tile.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from colo.units import align_up

_ROWS_AT_MOST = 4096
"""More rows than this do not make a tile's matrix products faster."""

_ALIGNMENT = 128
"""Derived tile sides are multiples of this, so that tensor cores are used without padding."""


LogitStep: TypeAlias = tuple[Literal["mul", "div", "tanh", "float"], float]
"""A step from the head's logits to the model's, and its number: a factor, a divisor, or 0 for those without one."""


def check_steps(steps: Sequence[LogitStep]) -> str | None:
    """Say why the derivative of these steps is not g (1 - (y / k)^2), or `None` where it is."""
    names = [name for name, _ in steps]
    if unknown := sorted(set(names) - {"mul", "div", "tanh", "float"}):
        return f"{', '.join(unknown)} is none of mul, div, tanh and float"
    if names.count("tanh") > 1:
        return "there is more than one tanh"
    if not all(math.isfinite(value) and (value or name in ("tanh", "float")) for name, value in steps):
        return "a factor is 0 or not finite"
    return None


def _product(steps: Sequence[LogitStep]) -> float:
    return math.prod(value if name == "mul" else 1 / value for name, value in steps if name in ("mul", "div"))


def _statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def tile_sides(
    num_tokens: int, vocab_size: int, hidden: Tensor, workspace_bytes: int, steps: Sequence[LogitStep] = ()
) -> tuple[int, int]:
    """Rows and columns of a tile such that what is allocated to work on one fits into `workspace_bytes`.

    For an input of i bytes an element, statistics of s and a hidden size of D, a tile of r rows and c columns needs
    (i + s) r c for logits and exponentials, in backward (i + s) c D for an accumulator and what is added to it, and
    (2 i + s) r D for rows of hidden states, accumulator and addend. The last may take half of the workspace. The bend
    of capped logits takes another s r c.
    """
    if workspace_bytes < 1:
        raise ValueError(f"workspace_bytes must be at least 1, but is {workspace_bytes}")
    item, stat = hidden.element_size(), _statistics_dtype(hidden.dtype).itemsize
    row_bytes = (2 * item + stat) * max(1, hidden.shape[-1])
    rows = max(_ALIGNMENT, min(_ROWS_AT_MOST, workspace_bytes // (2 * row_bytes) // _ALIGNMENT * _ALIGNMENT))
    column_bytes = (item + stat) * (rows + hidden.shape[-1]) + (stat * rows if ("tanh", 0.0) in steps else 0)
    columns = max(_ALIGNMENT, (workspace_bytes - rows * row_bytes) // column_bytes // _ALIGNMENT * _ALIGNMENT)
    # equal stripes, so that the last one is no remainder
    num_tiles = -(-vocab_size // columns)
    even_columns = align_up(-(-vocab_size // num_tiles), _ALIGNMENT)
    return max(1, min(rows, num_tokens)), min(even_columns, vocab_size)


def _slices(length: int, step: int) -> Iterator[slice]:
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


def _accumulate(sums: Tensor, left: Tensor, right: Tensor, *, first: bool = False) -> None:
    """`sums += left @ right`, or `=` for the first; the sums may be of a wider dtype."""
    beta = 0 if first else 1
    if sums.dtype == left.dtype:
        sums.addmm_(left, right, beta=beta)
    elif sums.is_cuda:
        # `out_dtype` accumulates in fp32 without a copy of the product, on CUDA alone
        torch.addmm(sums, left, right, out_dtype=sums.dtype, beta=beta, out=sums)
    elif first:
        sums.copy_(left @ right)
    else:
        sums.add_(left @ right)


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """Settings of a pass: the head's size and temperature, the tile sides, and whether the slope is wanted."""

    vocab_size: int
    inverse_temperature: float
    tile_rows: int
    tile_columns: int
    with_slope: bool
    steps: tuple[LogitStep, ...] = ()

    @property
    def gain(self) -> float:
        """Product of all scales: the derivative of the steps where nothing is capped."""
        return _product(self.steps)

    @property
    def cap(self) -> float | None:
        """Largest logit that a tanh leaves, or `None` without one."""
        names = [name for name, _ in self.steps]
        return _product(self.steps[names.index("tanh") :]) if "tanh" in names else None


class _Tiles:
    """Tiles of the logits of the tokens that count, in two buffers that every tile reuses."""

    def __init__(
        self, head: Head, hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, rows_K: Tensor, ids_K: Tensor
    ) -> None:
        self.head, self.hidden_ND, self.weight_VD, self.bias_V = head, hidden_ND, weight_VD, bias_V
        self.rows_K, self.ids_K = rows_K, ids_K
        self.dtype = _statistics_dtype(hidden_ND.dtype)
        area = min(head.tile_rows, len(rows_K)) * min(head.tile_columns, head.vocab_size)
        self._narrow = hidden_ND.new_empty(area)
        same = hidden_ND.dtype == self.dtype
        self._wide = self._narrow if same else hidden_ND.new_empty(area, dtype=self.dtype)
        # a model that casts before it caps rounds as its wider dtype does
        self.logits_dtype = self.dtype if ("float", 0.0) in head.steps else hidden_ND.dtype
        self._bend = hidden_ND.new_empty(0 if head.cap is None else area, dtype=self.dtype)

    def rows(self) -> Iterator[slice]:
        return _slices(len(self.rows_K), self.head.tile_rows)

    def columns(self) -> Iterator[slice]:
        return _slices(self.head.vocab_size, self.head.tile_columns)

    def hidden(self, rows: slice) -> Tensor:
        """A copy of the hidden states (R, D) of these tokens."""
        return self.hidden_ND.index_select(0, self.rows_K[rows])

    def logits(self, hidden_RD: Tensor, columns: slice) -> Tensor:
        """Logits (R, C) before the temperature, in `logits_dtype`. Overwrites the tile before."""
        weight_DC = self.weight_VD[columns].T
        out_RC = self._narrow[: len(hidden_RD) * weight_DC.shape[1]].view(len(hidden_RD), -1)
        if self.bias_V is None:
            # `out=`: a tile allocates nothing
            torch.mm(hidden_RD, weight_DC, out=out_RC)
        else:
            torch.addmm(self.bias_V[columns], hidden_RD, weight_DC, out=out_RC)
        for name, value in self.head.steps:
            if name == "float":
                out_RC = self._wide[: out_RC.numel()].view(out_RC.shape).copy_(out_RC)
            elif name == "tanh":
                out_RC.tanh_()
            else:
                out_RC = out_RC.mul_(value) if name == "mul" else out_RC.div_(value)
        return out_RC

    def bend(self, logits: Tensor) -> Tensor | None:
        """Factor 1 - (y / cap)^2 by which a cap lowers the derivative at these logits, `None` without a cap.

        A tile's overwrites that of the tile before.
        """
        if self.head.cap is None:
            return None
        out = self._bend[: logits.numel()].view(logits.shape)
        return out.copy_(logits).div_(self.head.cap).square_().neg_().add_(1)

    def add_shift(self, logits_RC: Tensor, shift_R: Tensor) -> Tensor:
        """`logits / temperature + shift` in the statistics dtype; where that is the inputs' it replaces the logits."""
        out_RC = self._wide[: logits_RC.numel()].view(logits_RC.shape)
        return torch.add(shift_R[:, None], logits_RC, alpha=self.head.inverse_temperature, out=out_RC)

    def narrow(self, wide_RC: Tensor) -> Tensor:
        """Buffer for a tile in the inputs' dtype: the logits' own, or the tile itself where dtypes are equal."""
        return wide_RC if self._wide is self._narrow else self._narrow[: wide_RC.numel()].view(wide_RC.shape)

    def locate(self, rows: slice, columns: slice) -> tuple[Tensor, Tensor]:
        """The column (R, 1) of each row's token, and whether it is in this tile; an end column if not."""
        index_R1 = self.ids_K[rows, None] - columns.start
        column_R1 = index_R1.clamp(0, columns.stop - columns.start - 1)
        return column_R1, column_R1 == index_R1


class _Running:
    """Running statistics of rows whose logits arrive a tile at a time.

    With `e = exp((logit - top) / temperature)`, over all tokens but the target: `total` is the sum of e, and `pull`
    (R, D) the sum of e times the weight row. The target joins at the end: the little that is left beside a nearly
    certain token then keeps its precision.
    """

    def __init__(self, num_rows: int, tiles: _Tiles) -> None:
        self._tiles = tiles
        # finite, so that a tile which is -inf throughout adds nothing instead of inf - inf
        lowest = max(torch.finfo(tiles.logits_dtype).min, -1e30)
        self._top_R = tiles.hidden_ND.new_full((num_rows,), lowest, dtype=tiles.logits_dtype)
        self._target_R1 = torch.zeros_like(self._top_R)[:, None]
        self._shift_R = self._negated(self._top_R)
        self._total_R = torch.zeros_like(self._shift_R)
        width = tiles.hidden_ND.shape[1] if tiles.head.with_slope else 0
        self._pull_RD = self._shift_R.new_zeros((num_rows, width))

    def add(self, hidden_RD: Tensor, rows: slice, columns: slice) -> None:
        """Compute one tile and add it to the statistics."""
        tiles, head = self._tiles, self._tiles.head
        logits_RC = tiles.logits(hidden_RD, columns)
        bend_RC = tiles.bend(logits_RC) if head.with_slope else None
        column_R1, inside_R1 = tiles.locate(rows, columns)
        found_R1 = logits_RC.gather(1, column_R1)
        self._target_R1 = torch.where(inside_R1, found_R1, self._target_R1)
        # the target is left out of the sums, and joins them at the end
        logits_RC.scatter_(1, column_R1, found_R1.masked_fill_(inside_R1, -torch.inf))
        self._raise_top(torch.maximum(self._top_R, logits_RC.amax(1)))
        # the target's own e is 0 here, exp(-inf)
        e_RC = tiles.add_shift(logits_RC, self._shift_R).exp_()
        self._total_R += e_RC.sum(1)
        if head.with_slope:
            pull_RC = e_RC if bend_RC is None else bend_RC.mul_(e_RC)
            # where the tile is fp32 the product takes 16 bits, as the weight has
            narrow_RC = pull_RC if pull_RC.dtype == tiles.hidden_ND.dtype else tiles.narrow(e_RC).copy_(pull_RC)
            _accumulate(self._pull_RD, narrow_RC, tiles.weight_VD[columns])

    def finish(self, ids_R: Tensor, results_2R: Tensor) -> Tensor:
        """Write log-probability and log-sum-exp; return the slope (R, D) and spend `pull` on it."""
        self._raise_top(torch.maximum(self._top_R, self._target_R1.squeeze(1)))
        distance_R = self._shift_R - self._negated(self._target_R1.squeeze(1))
        # log1p of expm1: exact where the target has nearly all of the probability
        log_total_R = (self._total_R + distance_R.expm1()).log1p()
        results_2R[0] = distance_R - log_total_R
        results_2R[1] = log_total_R - self._shift_R
        if not self._tiles.head.with_slope:
            return self._pull_RD
        weight_RD = self._tiles.weight_VD.index_select(0, ids_R)
        bend_R1 = self._tiles.bend(self._target_R1)
        at_target_R1 = results_2R[0].expm1()[:, None]
        if bend_R1 is not None:
            at_target_R1 = at_target_R1 * bend_R1
        total_R = self._total_R + distance_R.exp()
        return self._pull_RD.div_(total_R[:, None]).addcmul_(weight_RD, at_target_R1)

    def _negated(self, logits_R: Tensor) -> Tensor:
        return logits_R.to(self._tiles.dtype) * -self._tiles.head.inverse_temperature

    def _raise_top(self, top_R: Tensor) -> None:
        shift_R = self._negated(top_R)
        # what has been summed up is scaled to the new maximum
        keep_R = torch.exp(shift_R - self._shift_R)
        self._total_R *= keep_R
        self._pull_RD *= keep_R[:, None]
        self._top_R, self._shift_R = top_R, shift_R


def _scan(tiles: _Tiles) -> tuple[Tensor, Tensor]:
    """Log-probability and log-sum-exp (2, K), and the slope (K, D) where wanted, otherwise (K, 0).

    The slope is the gradient of minus the log-probability in the hidden state, times the temperature and over the gain:
    the weight rows averaged under the model's distribution, minus the row of the token, each times its bend.
    """
    width = tiles.hidden_ND.shape[1] if tiles.head.with_slope else 0
    slope_KD = tiles.hidden_ND.new_empty((len(tiles.rows_K), width))
    results_2K = tiles.hidden_ND.new_empty((2, len(tiles.rows_K)), dtype=tiles.dtype)
    for rows in tiles.rows():
        hidden_RD = tiles.hidden(rows)
        running = _Running(len(hidden_RD), tiles)
        for columns in tiles.columns():
            running.add(hidden_RD, rows, columns)
        slope_KD[rows] = running.finish(tiles.ids_K[rows], results_2K[:, rows])
    return results_2K, slope_KD


def _head_gradients(
    tiles: _Tiles, results_2K: Tensor, scale_K: Tensor, weight_grad_VD: Tensor, bias_grad_V: Tensor
) -> None:
    """Fill the gradients of weight and bias; one of length 0 is not wanted.

    Every tile is computed again. A stripe of columns is finished before the next begins, so that a weight gradient in
    16 bits needs a float32 accumulator of one stripe only.
    """
    narrow = tiles.hidden_ND.dtype
    # from the log-probability, since p - 1 would lose what p lost to rounding
    at_target_K1, shift_K = results_2K[0].expm1().to(narrow)[:, None], -results_2K[1]
    for columns in tiles.columns():
        grad_CD, grad_C1 = weight_grad_VD[columns], bias_grad_V[columns, None]
        sums_CD = grad_CD if narrow == tiles.dtype else torch.empty_like(grad_CD, dtype=tiles.dtype)
        for rows in tiles.rows():
            hidden_RD, scale_R1 = tiles.hidden(rows), scale_K[rows, None]
            residual_RC = _residual(tiles, tiles.logits(hidden_RD, columns), rows, columns, at_target_K1, shift_K)
            if len(grad_C1):
                _accumulate(grad_C1, residual_RC.T, scale_R1.to(narrow))
            if len(grad_CD):
                _accumulate(sums_CD, residual_RC.T, hidden_RD.mul_(scale_R1), first=rows.start == 0)
        if sums_CD is not grad_CD:
            grad_CD.copy_(sums_CD)
    # rows that pad the vocabulary get no gradient
    weight_grad_VD[tiles.head.vocab_size :] = 0


def _residual(
    tiles: _Tiles, logits_RC: Tensor, rows: slice, columns: slice, at_target_K1: Tensor, shift_K: Tensor
) -> Tensor:
    """Probabilities minus the one-hot target, times the bend (R, C), in the inputs' dtype. Replaces the logits."""
    bend_RC = tiles.bend(logits_RC)
    exponent_RC = tiles.add_shift(logits_RC, shift_K[rows])
    p_RC = torch.exp(exponent_RC, out=tiles.narrow(exponent_RC))
    column_R1, inside_R1 = tiles.locate(rows, columns)
    p_RC.scatter_(1, column_R1, torch.where(inside_R1, at_target_K1[rows], p_RC.gather(1, column_R1)))
    return p_RC if bend_RC is None else p_RC.mul_(bend_RC)


class TokenLogprobs(torch.autograd.Function):
    """Autograd function: forward keeps the hidden gradient but for its scale, backward computes the tiles again."""

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, token_ids_N: Tensor, head: Head
    ) -> Tensor:
        """Log-probabilities (N,), 0 at negative ids."""
        rows_K = (token_ids_N >= 0).nonzero().squeeze(1)
        ids_K = token_ids_N.index_select(0, rows_K).long()
        results_2K, slope_KD = _scan(_Tiles(head, hidden_ND, weight_VD, bias_V, rows_K, ids_K))
        with_head = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        ctx.save_for_backward(hidden_ND if with_head else None, weight_VD, bias_V, rows_K, ids_K, results_2K, slope_KD)
        ctx.head = head
        zeros_N = results_2K.new_zeros(len(token_ids_N))
        return zeros_N.index_copy(0, rows_K, results_2K[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of hidden, weight and bias, `None` where not needed."""
        hidden_ND, weight_VD, bias_V, rows_K, ids_K, results_2K, slope_KD = ctx.saved_tensors
        scale_K = grad_N.index_select(0, rows_K) * (-ctx.head.inverse_temperature * ctx.head.gain)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        weight_grad_VD = weight_VD.new_empty(weight_VD.shape if needs_weight else (0, 0))
        bias_grad_V = scale_K.new_zeros(len(weight_VD) if needs_bias else 0)
        if not len(rows_K):
            weight_grad_VD.zero_()
        elif needs_weight or needs_bias:
            tiles = _Tiles(ctx.head, hidden_ND, weight_VD, bias_V, rows_K, ids_K)
            _head_gradients(tiles, results_2K, scale_K, weight_grad_VD, bias_grad_V)
            # the buffers go before the hidden gradient takes its own memory
            del tiles
        return (
            _scaled_rows(len(grad_N), rows_K, slope_KD, scale_K, ctx.head.tile_rows) if needs_hidden else None,
            weight_grad_VD if needs_weight else None,
            bias_grad_V.to(weight_VD.dtype) if needs_bias else None,
            None,
            None,
        )


def _scaled_rows(num_rows: int, rows_K: Tensor, slope_KD: Tensor, scale_K: Tensor, tile_rows: int) -> Tensor:
    """The slopes times their scales, at their rows of (N, D), and zeros elsewhere."""
    grad_ND = slope_KD.new_zeros((num_rows, slope_KD.shape[1]))
    for rows in _slices(len(rows_K), tile_rows):
        grad_ND.index_copy_(0, rows_K[rows], (slope_KD[rows] * scale_K[rows, None]).to(grad_ND.dtype))
    return grad_ND
