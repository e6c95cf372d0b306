"""One-byte products on any GPU: a program owns BLOCK_M tokens and BLOCK_N rows of the weights, and all of K.

Tokens lie next to each other in the grid's order, so that programs that run together read the same weights. Int8 goes
to the tensor cores as it is and sums in int32. Bytes of e4m3 become float16 of the same bits, which is the number over
2^8: the tensor cores multiply these exactly and sum in float32; a power of two takes the 2^16 back. The epilogue's
operations are not fused (enable_fp_fusion), so int8 gives the bits of reference.py. Bound: the tensor cores of many
tokens, the weights' bytes of few.

constexpr       meaning [unit] (allowed values)
FP8             whether operands are e4m3, else int8 (False, True)
X_SCALE,        numbers of a scale (0: none, 1: one, 2: each token's or row's)
W_SCALE
OUT             what goes out (0: sums, 1: rounded to out's dtype, 2: int8)
LOW, HIGH       bounds of int8 results
HALF_AWAY       how these are rounded (False: half to even, True: half away from zero)
BLOCK_M, ..     a program's tokens, rows of the weights, and columns at a time
PDL             whether launches overlap (programmatic dependent launch; False, True)
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from onewave.gpu.dependent_launch import after_last, dependent_launch
from onewave.gpu.launch import launch_kernel
from onewave.ops.scaled_linear.call import ScaledCall
from onewave.ops.scaled_linear.choose import TileChoice
from onewave.ops.scaled_linear.rounding_impl import to_int8


@triton.jit
def widened(codes):
    """Bytes of e4m3 as float16, each the number over 2^8; NaN for NaN."""
    size = codes & 0x7F
    half = (size.to(tl.uint16) << 7) | ((codes & 0x80).to(tl.uint16) << 8)
    half = tl.where(size == 0x7F, 0x7E00, half).to(tl.uint16)
    return half.to(tl.float16, bitcast=True)


@triton.jit
def product_kernel(
    x_ptr, w_ptr, out_ptr, x_scale_ptr, w_scale_ptr, bias_ptr, shift_ptr, smooth_ptr, factor, tokens, rows, cols,
    x_stride, w_stride,
    FP8: tl.constexpr, X_SCALE: tl.constexpr, W_SCALE: tl.constexpr, OUT: tl.constexpr, LOW: tl.constexpr,
    HIGH: tl.constexpr, HALF_AWAY: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    after_last(PDL)
    down = tl.cdiv(tokens, BLOCK_M)
    token = (tl.program_id(0) % down) * BLOCK_M + tl.arange(0, BLOCK_M)
    row = (tl.program_id(0) // down) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # Tokens and rows past the end re-read the last one; their results are not stored.
    x_at = x_ptr + tl.minimum(token, tokens - 1).to(tl.int64)[:, None] * x_stride + k[None, :]
    w_at = w_ptr + tl.minimum(row, rows - 1).to(tl.int64)[None, :] * w_stride + k[:, None]
    if FP8:
        sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    else:
        sums = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
    for start in range(0, cols, BLOCK_K):
        inside = start + k < cols
        x = tl.load(x_at + start, mask=inside[None, :], other=0)
        w = tl.load(w_at + start, mask=inside[:, None], other=0)
        if FP8:
            sums = tl.dot(widened(x), widened(w), sums)
        else:
            sums = tl.dot(x, w, sums, out_dtype=tl.int32)
    stored = (token < tokens)[:, None] & (row < rows)[None, :]
    out_at = out_ptr + token.to(tl.int64)[:, None] * rows + row[None, :]
    if OUT == 0:
        tl.store(out_at, sums, mask=stored)
    else:
        y = sums.to(tl.float32)
        if FP8:
            y = y * 65536.0
        if W_SCALE == 1:
            y = y * tl.load(w_scale_ptr)
        if W_SCALE == 2:
            y = y * tl.load(w_scale_ptr + row, mask=row < rows, other=0.0)[None, :]
        if X_SCALE == 1:
            y = y * tl.load(x_scale_ptr)
        if X_SCALE == 2:
            y = y * tl.load(x_scale_ptr + token, mask=token < tokens, other=0.0)[:, None]
        if bias_ptr is not None:
            y = y + tl.load(bias_ptr + row, mask=row < rows, other=0.0).to(tl.float32)[None, :]
        if shift_ptr is not None:
            y = y + tl.load(shift_ptr + row, mask=row < rows, other=0.0).to(tl.float32)[None, :]
        if smooth_ptr is not None:
            y = y * tl.load(smooth_ptr + row, mask=row < rows, other=0.0).to(tl.float32)[None, :]
        if OUT == 2:
            tl.store(out_at, to_int8(y, factor, LOW, HIGH, HALF_AWAY), mask=stored)
        else:
            tl.store(out_at, y.to(out_ptr.dtype.element_ty), mask=stored)


def numbers_of(scale: Tensor | None) -> int:
    """How many numbers a scale has, as X_SCALE and W_SCALE say it."""
    return 0 if scale is None else 1 if scale.numel() == 1 else 2


def epilogue_constants(call: ScaledCall) -> dict[str, Any]:
    """The constants of an epilogue that the portable kernel and Hopper's share."""
    e = call.epilogue
    kind = 0 if call.out_dtype is torch.int32 else 2 if e.out_scale is not None else 1
    return {
        "X_SCALE": numbers_of(e.x_scale), "W_SCALE": numbers_of(e.weight_scale), "OUT": kind,
        "LOW": float(e.min_bound), "HIGH": float(e.max_bound), "HALF_AWAY": e.half_away, "enable_fp_fusion": False,
    }  # fmt: skip


def epilogue_tensors(call: ScaledCall) -> tuple[Tensor | None, ...]:
    """Its scales and vectors, dense."""
    return tuple(None if each is None else each.contiguous() for each in call.epilogue.tensors)


def factor_of(call: ScaledCall) -> float:
    """The factor of int8 results; 1 of others."""
    return 1.0 if call.epilogue.out_scale is None else call.epilogue.factor


def run(call: ScaledCall, choice: TileChoice) -> Tensor:
    """Launch the kernel that was chosen; return [tokens, rows] in out_dtype."""
    x, weight, out = call.x, call.weight, call.output()
    x = x if x.stride(1) == 1 else x.contiguous()
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    (tokens, cols), rows = x.shape, weight.shape[0]
    if out.numel() == 0:
        return out
    fp8 = x.dtype is not torch.int8
    if fp8:
        x, weight = x.view(torch.uint8), weight.view(torch.uint8)
    launch_kernel(
        product_kernel, (choice.num_programs,), x, weight, out, *epilogue_tensors(call), factor_of(call),
        tokens, rows, cols, x.stride(0), weight.stride(0), FP8=fp8, **epilogue_constants(call),
        BLOCK_M=choice.block_m, BLOCK_N=choice.block_n, BLOCK_K=choice.block_k,
        num_warps=choice.num_warps, num_stages=choice.num_stages, **dependent_launch(out),
    )  # fmt: skip
    return out
