"""What multiplies by dense weights: our kernels for few tokens on a GPU, PyTorch's matmul for the rest."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from onewave.ops.choice import Asked, Call, Choice, because, empty_on_meta

_HALVES = (torch.bfloat16, torch.float16)
_MAX_TILE_TOKENS = 64
_MATMUL = "torch.nn.functional.linear"
_ON_CPU = Choice("torch", "torch_impl", _MATMUL, (because("dense weights on a CPU"),))
_ON_GPU = Choice(
    "torch", "torch_impl", _MATMUL, (because("several tokens: PyTorch's matmul (cuBLAS) is the better kernel"),)
)


@dataclass(frozen=True, eq=False)
class LinearCall(Call):
    """One call with dense weights; see op.linear. out_dtype: None for x's."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None = None
    out_dtype: torch.dtype | None = None

    @property
    def first(self) -> Tensor:
        return self.x


@dataclass(frozen=True)
class RowsChoice(Choice):
    """row_kernel: one token; a program owns block_n rows of the weights and adds block_k columns at a time."""

    block_n: int
    block_k: int
    num_programs: int
    num_warps: int = 4

    @property
    def tile(self) -> str:
        return f"{self.block_n} rows x {self.block_k}, {self.num_warps} warps"

    @property
    def programs(self) -> str:
        return str(self.num_programs)


@dataclass(frozen=True)
class TileChoice(Choice):
    """tile_kernel: up to 64 tokens; a program owns block_n rows of the weights."""

    block_n: int = 128
    block_k: int = 128
    num_warps: int = 8
    num_stages: int = 3

    @property
    def tile(self) -> str:
        return f"{self.block_n} rows x {self.block_k}"


def choose(call: LinearCall) -> Choice:
    """Return what runs; see ops/choice.py."""
    x, weight = call.x, call.weight
    if not call.on_gpu:
        return _ON_CPU
    if x.dtype not in _HALVES or not weight.is_contiguous():
        return _ON_GPU
    widened = call.out_dtype if call.out_dtype is not x.dtype else None
    return _on_gpu(x.shape[0], weight.shape[0], weight.shape[1], widened)


@lru_cache(maxsize=1024)
def _on_gpu(tokens: int, rows: int, cols: int, widened: torch.dtype | None) -> Choice:
    """widened: the output's dtype where it is not x's."""
    if tokens == 1:
        # Fastest of 4 tilings on the shapes of Llama-3.2-1B and 3.1-8B.
        block_n, block_k = (4, 1024) if cols <= 2048 else (2, 2048)
        why = because("one token: memory bound, a program sums whole rows of the weights in registers")
        kernel = "linear/triton_impl.py: row_kernel"
        return RowsChoice("triton", "triton_impl", kernel, (why,), block_n, block_k, -(-rows // block_n))
    if widened is not None and 1 < tokens <= _MAX_TILE_TOKENS:
        name = str(widened).removeprefix("torch.")
        why = because("few tokens whose products stay in {}, which PyTorch's matmul would round", name)
        return TileChoice("triton", "triton_impl", "linear/triton_impl.py: tile_kernel", (why,))
    return _ON_GPU


def describe(asked: Asked) -> LinearCall:
    """A question: x, weight."""
    from onewave.ops.linear.op import linear

    x, weight = (empty_on_meta(shape, asked.dtype) for shape in asked.take((2,), (2,)))
    out = asked.dtype_of("out_dtype", asked.dtype) if "out_dtype" in asked.options else None
    linear(x, weight, out_dtype=out)  # on meta: nothing runs but the checks
    return LinearCall(x, weight, None, out, described=asked.device)
