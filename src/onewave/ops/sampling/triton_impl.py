"""One token a row of logits, greedy or sampled, in two or three launches that share no state with other calls.

A row is cut in pieces, a program each, so that a single row keeps many SMs busy; PyTorch's reductions and
sums give it to one. What is found in the pieces, a program a row puts together. The most likely: an entry is one 64-bit
number, ordered as logits are in its high word and falling with its index in its low one, so that the greatest is the
first of equals. A draw: see op.py; sums of whole numbers, the same in any order. Bound: the launches' own time; the
logits come from L2, where the step that made them left them.

constexpr    meaning [unit] (allowed values)
PIECE        entries of a row that a program looks at
PIECES       pieces of a row, padded to a power of two
UNIT         whole numbers that the most likely token's probability is
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from onewave.gpu.launch import launch_kernel
from onewave.gpu.tape import taken
from onewave.ops.prepared import prepared

PIECE = 4096
"""Entries of a row that a program looks at."""


@triton.jit
def _entries(piece, PIECE: tl.constexpr):
    return piece * PIECE + tl.arange(0, PIECE)


@triton.jit
def _logits(logits_ptr, row, index, vocab, stride):
    """Load a row's logits; -inf beyond it."""
    return tl.load(logits_ptr + row.to(tl.int64) * stride + index, mask=index < vocab, other=float("-inf"))


@triton.jit
def _best_of_piece(logits_ptr, best_ptr, vocab, stride, PIECE: tl.constexpr):
    row, piece = tl.program_id(0), tl.program_id(1)
    # Entries beyond the row are -inf, and their indices are higher: never better than any of the row's own.
    index = _entries(piece, PIECE)
    logits = _logits(logits_ptr, row, index, vocab, stride)
    bits = (logits + 0.0).to(tl.int32, bitcast=True)  # makes both zeros equal
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    order = tl.where(logits != logits, 0x7FFFFFFF, order)  # what is no number comes first, as in PyTorch
    entry = (order.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)
    tl.store(best_ptr + row * tl.num_programs(1) + piece, tl.max(entry, axis=0))


@triton.jit
def _best_of_row(best_ptr, token_ptr, pieces, PIECES: tl.constexpr):
    row = tl.program_id(0)
    piece = tl.arange(0, PIECES)
    entry = tl.load(best_ptr + row * pieces + piece, mask=piece < pieces, other=-(2**63))
    tl.store(token_ptr + row, 0x7FFFFFFF - (tl.max(entry, axis=0) & 0x7FFFFFFF))


@triton.jit
def _max_of_piece(logits_ptr, max_ptr, vocab, stride, PIECE: tl.constexpr):
    row, piece = tl.program_id(0), tl.program_id(1)
    logits = _logits(logits_ptr, row, _entries(piece, PIECE), vocab, stride)
    tl.store(max_ptr + row * tl.num_programs(1) + piece, tl.max(logits, axis=0))


@triton.jit
def _weights(
    logits_ptr, max_ptr, temperature_ptr, min_p_ptr, row, index, pieces, vocab, stride, UNIT: tl.constexpr,
    PIECES: tl.constexpr,
):  # fmt: skip
    """int64: probabilities over the row's largest, in 1 / UNIT; 0 below min_p and beyond the row."""
    logits = _logits(logits_ptr, row, index, vocab, stride)
    temperature = tl.load(temperature_ptr + row)
    other = tl.arange(0, PIECES)
    highest = tl.max(tl.load(max_ptr + row * pieces + other, mask=other < pieces, other=float("-inf")), axis=0)
    # Division keeps the order, so the largest quotient is the largest logit's.
    apart = tl.div_rn(logits, temperature) - tl.div_rn(highest, temperature)
    weight = tl.exp(apart.to(tl.float64)) * UNIT
    weight = (weight + 6755399441055744.0) - 6755399441055744.0  # 1.5 * 2^52: to the nearest whole number, ties to even
    kept = (weight >= tl.load(min_p_ptr + row) * UNIT) & (index < vocab)
    return tl.where(kept, weight, 0.0).to(tl.int64)


@triton.jit
def _sum_of_piece(
    logits_ptr, max_ptr, temperature_ptr, min_p_ptr, sum_ptr, vocab, stride, UNIT: tl.constexpr, PIECE: tl.constexpr,
    PIECES: tl.constexpr,
):  # fmt: skip
    row, piece = tl.program_id(0), tl.program_id(1)
    pieces = tl.num_programs(1)
    index = _entries(piece, PIECE)
    weight = _weights(logits_ptr, max_ptr, temperature_ptr, min_p_ptr, row, index, pieces, vocab, stride, UNIT, PIECES)
    tl.store(sum_ptr + row * pieces + piece, tl.sum(weight, axis=0))


# A row of uniform numbers lies at any multiple of 8 bytes: no build of its own for every second one.
@triton.jit(do_not_specialize_on_alignment=["uniform_ptr"])
def _draw_of_row(
    logits_ptr, max_ptr, temperature_ptr, min_p_ptr, sum_ptr, uniform_ptr, token_ptr, pieces, vocab, stride,
    UNIT: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    number = tl.arange(0, PIECES)
    sums = tl.load(sum_ptr + row * pieces + number, mask=number < pieces, other=0)
    total = tl.sum(sums, axis=0)
    # Rounding may carry the product up to the total itself, which no index passes.
    target = tl.minimum((tl.load(uniform_ptr + row) * total.to(tl.float64)).to(tl.int64), total - 1)
    # The first to pass it; some piece does, and some entry of it. (A weight that is no number is 0; where all are,
    # the target is -1.)
    piece = tl.sum((tl.cumsum(sums, axis=0) <= target).to(tl.int32), axis=0)
    before = tl.sum(tl.where(number < piece, sums, 0), axis=0)
    index = _entries(piece, PIECE)
    weight = _weights(logits_ptr, max_ptr, temperature_ptr, min_p_ptr, row, index, pieces, vocab, stride, UNIT, PIECES)
    place = tl.sum((before + tl.cumsum(weight, axis=0) <= target).to(tl.int32), axis=0)
    tl.store(token_ptr + row, (piece * PIECE + place).to(tl.int64))


def greedy(logits: Tensor) -> Tensor:
    """float32 [rows, vocab], last axis contiguous -> int64 [rows]: the first of the most likely."""
    return greedy_of_pieces(logits)[0]


@prepared
def greedy_of_pieces(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens, and int64 [rows, pieces]: the best entry of each PIECE of a row, what is no number above all."""
    rows, vocab = logits.shape
    pieces = triton.cdiv(vocab, PIECE)
    best = torch.empty(rows, pieces, dtype=torch.int64, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        launch_kernel(_best_of_piece, (rows, pieces), logits, best, vocab, logits.stride(0), PIECE=PIECE, num_warps=8)
        launch_kernel(_best_of_row, (rows,), best, tokens, pieces, PIECES=triton.next_power_of_2(pieces), num_warps=1)
    return tokens, best


@prepared
def max_of_pieces(logits: Tensor) -> Tensor:
    """float32 [rows, vocab], last axis contiguous -> float32 [rows, pieces], the highest of each PIECE of a row
    but for what is no number."""
    rows, vocab = logits.shape
    grid = rows, triton.cdiv(vocab, PIECE)
    highest = torch.empty(grid, dtype=torch.float32, device=logits.device)
    if rows:
        launch_kernel(_max_of_piece, grid, logits, highest, vocab, logits.stride(0), PIECE=PIECE, num_warps=8)
    return highest


def draw(
    logits: Tensor, uniform: Tensor, temperature: Tensor, min_p: Tensor, unit: float, highest: Tensor | None = None
) -> Tensor:
    """float32 [rows, vocab], last axis contiguous -> int64 [rows], each drawn at uniform (float64 [rows]) of the whole
    vocabulary but for what is less likely than min_p (float64 [rows]) times the best. temperature: float32 [rows].
    unit: whole numbers that the most likely token's probability is. highest: max_of_pieces, if it is there."""
    return draw_of_pieces(
        logits, uniform, temperature, min_p, unit, max_of_pieces(logits) if highest is None else highest
    )


@prepared
def draw_of_pieces(
    logits: Tensor, uniform: Tensor, temperature: Tensor, min_p: Tensor, unit: float, highest: Tensor
) -> Tensor:
    """As draw."""
    rows, vocab = logits.shape
    pieces = triton.cdiv(vocab, PIECE)
    sums = taken(partial(torch.empty, (rows, pieces), dtype=torch.int64, device=logits.device))
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        grid, stride = (rows, pieces), logits.stride(0)
        constants = {"UNIT": unit, "PIECE": PIECE, "PIECES": triton.next_power_of_2(pieces), "num_warps": 8}
        launch_kernel(_sum_of_piece, grid, logits, highest, temperature, min_p, sums, vocab, stride, **constants)
        launch_kernel(
            _draw_of_row, (rows,), logits, highest, temperature, min_p, sums, uniform, tokens, pieces, vocab, stride,
            **constants,
        )  # fmt: skip
    return tokens
