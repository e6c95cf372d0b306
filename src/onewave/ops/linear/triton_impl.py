"""y = x W^T for few tokens: one pass over the weights at the speed of memory.

`row_kernel`, one token: a program owns a few rows of W and adds W * x elementwise in registers, no shared memory; the
loop over K is unrolled so that the next loads are in flight while the last are summed. Before it waits for the kernel
that makes x, it asks for its first weights to be brought into L2. `tile_kernel`, up to 64 tokens:
the weights are the tall operand of the tensor-core product and the tokens, padded to 16, 32 or 64, the narrow one. It
serves the output head, whose logits it keeps in float32. In both a row of W is finished by one program, in one order:
nothing is summed across programs.

constexpr    meaning [unit] (allowed values)
HAS_BIAS     whether there is a bias (False, True)
BLOCK_N      rows of the weights a program
BLOCK_K      columns that it adds at a time
BLOCK_T      tokens, padded (16, 32, 64)
EVEN         whether BLOCK_K divides the columns (False, True)
AHEAD        programs that ask for the first AHEAD_BYTES of their rows before they wait (0 unless rows are aligned)
PDL          whether launches overlap (programmatic dependent launch; False, True)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from onewave.base.device import num_sms
from onewave.gpu.dependent_launch import after_last, dependent_launch, has_dependent_launch
from onewave.gpu.launch import launch_kernel
from onewave.ops.linear.choose import LinearCall, RowsChoice, TileChoice

# A program's request ahead, and how many programs an SM make one: 8 MiB on an H200, what memory delivers during a norm.
# Half of them have a place before the wait. Asking for whole rows, or in every program, was slower than not at all.
_AHEAD_BYTES, _ASKING = 4096, 16


@triton.jit
def ask_for(pointer, num_bytes):
    """Have bytes brought into L2; one request a program. Both multiples of 16."""
    tl.inline_asm_elementwise(
        "{ .reg .pred one; .reg .b32 thread; mov.u32 thread, %tid.x; setp.eq.u32 one, thread, 0;"
        " @one cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r", [pointer.to(tl.int64), num_bytes], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def row_kernel(
    x_ptr, w_ptr, bias_ptr, out_ptr, rows,
    cols: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, AHEAD: tl.constexpr,
    AHEAD_BYTES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if AHEAD > 0:
        first = tl.program_id(0) * BLOCK_N
        if tl.program_id(0) < AHEAD:
            own = tl.minimum(BLOCK_N, rows - first) * cols * (w_ptr.dtype.element_ty.primitive_bitwidth // 8)
            ask_for(w_ptr + first.to(tl.int64) * cols, tl.minimum(own, AHEAD_BYTES))
    after_last(PDL)
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # Rows past the end re-read the last one; their results are not stored.
    w_at = w_ptr + tl.minimum(row, rows - 1)[:, None].to(tl.int64) * cols + k[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for start in tl.static_range(0, cols, BLOCK_K):
        if start + BLOCK_K <= cols:
            w = tl.load(w_at + start, eviction_policy="evict_first")
            x = tl.load(x_ptr + start + k)
        else:
            inside = start + k < cols
            w = tl.load(w_at + start, mask=inside[None, :], other=0.0)
            x = tl.load(x_ptr + start + k, mask=inside, other=0.0)
        acc += w.to(tl.float32) * x.to(tl.float32)[None, :]
    y = tl.sum(acc, axis=1)
    if HAS_BIAS:
        y += tl.load(bias_ptr + row, mask=row < rows, other=0.0).to(tl.float32)
    tl.store(out_ptr + row, y.to(out_ptr.dtype.element_ty), mask=row < rows)


@triton.jit
def tile_kernel(
    x_ptr, w_ptr, bias_ptr, out_ptr, tokens, rows, cols,
    HAS_BIAS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    after_last(PDL)
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    token, k = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_K)
    w_at = w_ptr + tl.minimum(row, rows - 1)[:, None].to(tl.int64) * cols + k[None, :]
    x_at = x_ptr + tl.minimum(token, tokens - 1)[None, :] * cols + k[:, None]
    acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    for start in range(0, cols, BLOCK_K):
        if EVEN:
            w = tl.load(w_at + start, eviction_policy="evict_first")
            x = tl.load(x_at + start)
        else:
            inside = start + k < cols
            w = tl.load(w_at + start, mask=inside[None, :], other=0.0)
            x = tl.load(x_at + start, mask=inside[:, None], other=0.0)
        acc = tl.dot(w, x, acc, input_precision="ieee")
    if HAS_BIAS:
        acc += tl.load(bias_ptr + row, mask=row < rows, other=0.0).to(tl.float32)[:, None]
    out_at = out_ptr + token[None, :].to(tl.int64) * rows + row[:, None]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=(row < rows)[:, None] & (token < tokens)[None, :])


def _may_ask_ahead(weight: Tensor) -> bool:
    """Whether there is a time before the wait, and something to ask for: rows that begin at multiples of 16 bytes."""
    row_bytes = weight.shape[1] * weight.element_size()
    return has_dependent_launch(weight) and row_bytes > 0 and weight.data_ptr() % 16 == 0 and row_bytes % 16 == 0


def run(call: LinearCall, choice: RowsChoice | TileChoice) -> Tensor:
    """Launch the kernel that was chosen; return [tokens, rows] in out_dtype."""
    x, weight, bias = call.x.contiguous(), call.weight, call.bias
    tokens, (rows, cols) = x.shape[0], weight.shape
    out = torch.empty((tokens, rows), dtype=call.out_dtype or x.dtype, device=x.device)
    given = (x, weight, weight if bias is None else bias.contiguous(), out)
    constants = {"HAS_BIAS": bias is not None, "BLOCK_N": choice.block_n, "BLOCK_K": choice.block_k}
    pdl = dependent_launch(out)
    if isinstance(choice, RowsChoice):
        ahead = _ASKING * num_sms(x.device) if _may_ask_ahead(weight) else 0
        launch_kernel(
            row_kernel, (choice.num_programs,), *given, rows, cols, **constants, AHEAD=ahead, AHEAD_BYTES=_AHEAD_BYTES,
            num_warps=choice.num_warps, **pdl,
        )  # fmt: skip
    else:
        launch_kernel(
            tile_kernel, (triton.cdiv(rows, choice.block_n),), *given, tokens, rows, cols, **constants,
            BLOCK_T=max(16, triton.next_power_of_2(tokens)), EVEN=cols % choice.block_k == 0,
            num_warps=choice.num_warps, num_stages=choice.num_stages, **pdl,
        )  # fmt: skip
    return out
