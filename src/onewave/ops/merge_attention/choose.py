"""Chooses the implementation of merge_attention: the Triton kernel on a GPU, PyTorch elsewhere."""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch

from onewave.ops.choice import Asked, Choice, Counted, because, empty_on_meta
from onewave.ops.merge_attention.call import MergeCall, check

# Float32 outputs that a program keeps in registers: more spill, fewer leave loads too short.
_FLOATS_IN_FLIGHT = 2048
_NUM_WARPS = 4


@dataclass(frozen=True)
class MergeChoice(Counted, Choice):
    """block_s, block_d: queries and columns of a program; num_programs: thread blocks of the launch."""

    block_s: int
    block_d: int
    num_programs: int
    num_warps: int = _NUM_WARPS

    @property
    def tile(self) -> str:
        return f"{self.block_s} queries x {self.block_d}, {self.num_warps} warps"


def choose(call: MergeCall) -> Choice:
    """Return what runs; see ops/choice.py."""
    if call.backend == "reference" or call.on_cpu:
        why = "asked for" if call.backend == "reference" else "no other implementation for a CPU"
        return Choice("reference", "reference", "merge_attention/reference.py", (because(why),))
    return _on_gpu(tuple(call.first.shape), len(call.outs))


@lru_cache(maxsize=1024)
def _on_gpu(shape: tuple[int, ...], num_tensors: int) -> MergeChoice:
    """shape: of one of the outs."""
    parts, *batch, queries, head_dim = shape
    block_d = 1 << max(0, head_dim - 1).bit_length()
    block_s = max(1, min(1 << (queries - 1).bit_length(), _FLOATS_IN_FLIGHT // block_d))
    programs = -(-queries // block_s) * math.prod(batch)
    text = "{} parts are read once each, in their order; {} numbers a program stay in registers"
    why = because(text, parts * num_tensors, _FLOATS_IN_FLIGHT)
    kernel = "merge_attention/triton_impl.py: merge_kernel"
    return MergeChoice("triton", "triton_impl", kernel, (why,), block_s, block_d, programs)


def describe(asked: Asked) -> MergeCall:
    """A question: the stacked outs."""
    (outs,) = asked.take((3, 4, 5, 6))
    lse = empty_on_meta(outs[:-1], torch.float64 if asked.dtype is torch.float64 else torch.float32)
    backend = asked.options.get("backend", "auto")
    call = MergeCall([empty_on_meta(outs, asked.dtype)], [lse], backend, described=asked.device)
    check(call)
    return call
