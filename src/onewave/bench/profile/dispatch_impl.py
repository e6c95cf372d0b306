"""Which thread block ran on which SM, and when: a probe of how a GPU hands out the blocks of a launch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from onewave.gpu.launch import launch_kernel


@triton.jit
def _clock() -> tl.tensor:
    """Nanoseconds of the device's clock."""
    return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


# Stores of the block's own number, as in a cluster a program is several blocks: [block] is (SM, begin, end), 24 bytes.
_STORE = """{
  .reg .b32 sm, block; .reg .b64 where, what;
  mov.u32 sm, %smid; mov.u32 block, %ctaid.x; cvt.u64.u32 what, sm;
  mad.wide.u32 where, block, 24, $1;
  st.global.u64 [where], what; st.global.u64 [where + 8], $2; st.global.u64 [where + 16], $3;
  mov.u32 $0, sm;
}"""


# Constexprs: SPIN: the least nanoseconds that a block stays; MAX_POLLS: looks at the clock before it gives up; STORE.
@triton.jit
def dispatch_kernel(out, room, SPIN: tl.constexpr, MAX_POLLS: tl.constexpr, STORE: tl.constexpr):
    """Write int64 [blocks, 3]: the SM, and when the block began and ended. room: int32 [programs, 256], as a cluster of
    several blocks needs a tensor to share."""
    begin = _clock()
    end = begin
    polls = 0
    while (end - begin < SPIN) & (polls < MAX_POLLS):
        end = _clock()
        polls += 1
    place = out.to(tl.int64, bitcast=True)
    tl.inline_asm_elementwise(STORE, "=r,l,l,l", [place, begin, end], dtype=tl.int32, is_pure=False, pack=1)
    tl.store(room + tl.program_id(0) * 256 + tl.arange(0, 256), tl.zeros((256,), tl.int32))


@dataclass(frozen=True)
class Dispatch:
    """Each thread block's SM, and when it began and ended, ns after the first, in order. cluster: its size."""

    sm: list[int]
    begin: list[int]
    end: list[int]
    cluster: int

    @property
    def in_order(self) -> bool:
        """Whether no block began before one of a lower number."""
        return all(first <= second for first, second in zip(self.begin, self.begin[1:], strict=False))


def launch_probe(out: Tensor, room: Tensor, *, cluster: int = 1, spin_ns: int = 20_000) -> None:
    """Launch a thread block for each row of `out`, int64 [blocks, 3]. room: int32 [blocks / cluster * 256]."""
    launch_kernel(
        dispatch_kernel, (len(out) // cluster,), out, room, SPIN=spin_ns, MAX_POLLS=1 << 20, STORE=_STORE, num_warps=4,
        num_ctas=cluster,
    )  # fmt: skip


def probe(device: torch.device, *, blocks: int, spin_ns: int = 20_000, cluster: int = 1) -> Dispatch:
    """Launch so many thread blocks of at least spin_ns each, `cluster` of them together, which divides them; say where
    and when they ran."""
    out = torch.zeros(blocks, 3, dtype=torch.int64, device=device)
    room = torch.empty(blocks // cluster * 256, dtype=torch.int32, device=device)
    launch_probe(out, room, cluster=cluster, spin_ns=spin_ns)
    sm, begin, end = out.T.tolist()
    return Dispatch(sm, [each - min(begin) for each in begin], [each - min(begin) for each in end], cluster)
