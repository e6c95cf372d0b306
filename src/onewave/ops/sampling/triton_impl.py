"""The likeliest entry of each row of logits, in two launches that share no state with any other call.

First each program finds the best entry of one piece of a row, then one program a row finds the best of those. An entry
is one 64-bit number, ordered as logits are in its high word and falling with its index in its low one, so that the
greatest is the first of equals. Bound: a launch's time twice; the logits come from the second-level cache, where the
step that made them left them. PyTorch's argmax gives a row to a single multiprocessor.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportMissingTypeStubs=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportIndexIssue=false
# (Triton ships no type information.)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["greedy"]

_PIECE = 4096


@triton.jit
def _best_of_piece(logits_ptr, best_ptr, vocab, stride, PIECE: tl.constexpr):
    piece, row = tl.program_id(0), tl.program_id(1)
    index = piece * PIECE + tl.arange(0, PIECE)
    # Beyond the row: never better than its own entries, which come first.
    logits = tl.load(logits_ptr + row.to(tl.int64) * stride + index, mask=index < vocab, other=float("-inf"))
    bits = (logits + 0.0).to(tl.int32, bitcast=True)  # makes both zeros equal
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    order = tl.where(logits != logits, 0x7FFFFFFF, order)  # what is no number comes first, as in PyTorch
    entry = (order.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)
    tl.store(best_ptr + row * tl.num_programs(0) + piece, tl.max(entry, axis=0))


@triton.jit
def _best_of_row(best_ptr, token_ptr, pieces, MOST: tl.constexpr):
    row = tl.program_id(0)
    piece = tl.arange(0, MOST)
    entry = tl.load(best_ptr + row * pieces + piece, mask=piece < pieces, other=-(2**63))
    tl.store(token_ptr + row, 0x7FFFFFFF - (tl.max(entry, axis=0) & 0x7FFFFFFF))


def greedy(logits: Tensor) -> Tensor:
    """float32 [rows, vocab], last axis contiguous -> int64 [rows]: the first of the likeliest."""
    rows, vocab = logits.shape
    pieces = triton.cdiv(vocab, _PIECE)
    best = torch.empty(rows, pieces, dtype=torch.int64, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        _best_of_piece[(pieces, rows)](logits, best, vocab, logits.stride(0), PIECE=_PIECE, num_warps=8)
        _best_of_row[(rows,)](best, tokens, pieces, MOST=triton.next_power_of_2(pieces), num_warps=1)
    return tokens
