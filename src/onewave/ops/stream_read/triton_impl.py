"""A streaming sum in Triton.

Persistent: a few programs an SM stride over the buffer together, so that at any moment they read
neighbouring blocks. Every thread of a program's 8 warps has BLOCK / 1024 independent 16-byte loads in flight before the
first addition, its partial sums stay in registers, and a program writes one number at its end. Nothing is read twice,
so blocks leave the caches first. Bound: memory alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from onewave.base.device import num_sms
from onewave.gpu.launch import launch_kernel

_BLOCK = 8192
_PROGRAMS_PER_SM = 4


@triton.jit
def stream_read_kernel(buffer_ptr, partial_ptr, num_blocks, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    pointers = buffer_ptr + program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    stride = tl.num_programs(0).to(tl.int64) * BLOCK
    total = tl.zeros((BLOCK,), dtype=tl.int32)
    for _ in range(program, num_blocks, tl.num_programs(0)):
        total += tl.load(pointers, eviction_policy="evict_first")
        pointers += stride
    tl.store(partial_ptr + program, tl.sum(total, axis=0))


def stream_read(buffer: Tensor) -> Tensor:
    """See op.stream_read."""
    return launch(buffer, block=_BLOCK, programs_per_sm=_PROGRAMS_PER_SM)


def launch(buffer: Tensor, *, block: int, programs_per_sm: int) -> Tensor:
    """The same with a given shape of the launch. block: elements, a power of two that divides the buffer's length."""
    num_blocks = len(buffer) // block
    programs = min(num_sms(buffer.device) * programs_per_sm, num_blocks)
    partial = torch.empty(programs, dtype=torch.int32, device=buffer.device)
    launch_kernel(stream_read_kernel, (len(partial),), buffer, partial, num_blocks, BLOCK=block, num_warps=8)
    return partial
