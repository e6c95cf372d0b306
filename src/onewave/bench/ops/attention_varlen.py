"""Attention over packed sequences beside its peers: lengths as uneven as those of requests, and no padding."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from onewave.bench.ops.attention import OURS, REFERENCE, AttentionShape, Engine, Operands
from onewave.bench.ops.attention_engines import output_of, with_flash
from onewave.ops.attention.op import attention_varlen

VARLEN_SHAPES = ("64,16,65536,128", "64,32/8,65536,128", "64,32,65536,64")
"""Sequences, heads, tokens of all sequences, head_dim."""
# Shapes that a CPU does in a moment.
SMALL_VARLEN_SHAPES = ("4,4/2,300,64",)

# A log-normal's spread: the longest of 64 sequences is some ten times the mean.
_SPREAD = 1.0


def ragged_lengths(shape: AttentionShape) -> list[int]:
    """Lengths of shape.batch sequences, log-normal, each at least 1 where the tokens suffice, shape.length in all."""
    draw = random.Random(0)
    weights = [draw.lognormvariate(0.0, _SPREAD) for _ in range(shape.batch)]
    least = min(1, shape.length // shape.batch)
    spare = shape.length - least * shape.batch
    ends = [round(spare * sum(weights[: at + 1]) / sum(weights)) for at in range(shape.batch)]
    return [least + end - begin for begin, end in zip([0, *ends], ends, strict=False)]


@dataclass(frozen=True)
class PackedOperands(Operands):
    """q: [tokens, heads, head_dim], k, v: [tokens, kv_heads, head_dim]; starts: int32 [sequences + 1]."""

    starts: Tensor
    lengths: tuple[int, ...]

    @classmethod
    def make(cls, shape: AttentionShape, causal: bool, device: torch.device, dtype: torch.dtype) -> "PackedOperands":
        """Random operands; shape.length is the number of tokens in all."""
        lengths = ragged_lengths(shape)
        q, k, v = (
            torch.randn(shape.length, heads, shape.head_dim, dtype=dtype, device=device)
            for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
        )
        seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
        starts = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
        return cls(shape, causal, q, k, v, seq_lens, starts, tuple(lengths))

    @property
    def flops(self) -> float:
        """FLOPs of the two products over each sequence's own keys; causal counts half, as its peers count it."""
        share = 0.5 if self.causal else 1.0
        return 4.0 * self.shape.heads * self.shape.head_dim * share * sum(n * n for n in self.lengths)


def varlen_engines(device: torch.device) -> tuple[list[Engine], list[str]]:
    """Engines that can be tried here, ours first, and a note for each peer that is not installed."""
    engines = [_ours(OURS, "auto")]
    if device.type == "cuda":
        engines += [_ours(f"{OURS} {backend}", backend) for backend in ("triton", "gluon")]
    # It reads the lengths on the host, which no graph can hold.
    engines.append(_ours(REFERENCE, "reference", graph=False))
    return with_flash(engines, _flash)


def _ours(name: str, backend: str, *, graph: bool = True) -> Engine:
    def prepare(o: Operands) -> Callable[[], Tensor]:
        packed = cast("PackedOperands", o)
        ends = (packed.starts, packed.starts, max(packed.lengths), max(packed.lengths))
        return lambda: cast("Tensor", attention_varlen(o.q, o.k, o.v, *ends, causal=o.causal, backend=backend))

    return Engine(name, prepare, graph)


def _flash(module: Any, o: Operands) -> Callable[[], Tensor]:
    starts, longest = cast("PackedOperands", o).starts, max(cast("PackedOperands", o).lengths)
    ends = (starts, starts, longest, longest)
    return lambda: output_of(module.flash_attn_varlen_func(o.q, o.k, o.v, *ends, causal=o.causal))
