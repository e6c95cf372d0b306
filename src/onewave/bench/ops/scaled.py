"""Speed of one-byte products at the shapes of a model, beside 16 bits' and what PyTorch offers for the same work."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from onewave.bench.ops.operators import Trial
from onewave.models.config.model_config import ModelConfig
from onewave.ops.linear import linear
from onewave.ops.quantize_rows import quantize_rows
from onewave.ops.scaled_linear import linear_fp8, linear_int8

KINDS: Mapping[str, torch.dtype] = {"linear_fp8": torch.float8_e4m3fn, "linear_int8": torch.int8}
"""Operators by name, and their operands' dtype."""
# PyTorch's integer product on a GPU refuses fewer.
_MIN_TORCH_TOKENS = 17


def scaled_trials(
    operator: str, config: ModelConfig, device: torch.device, dtype: torch.dtype, *, tokens: int
) -> Iterator[Trial]:
    """Products of one of KINDS in a layer: ours with a scale a row on both sides, `linear` in the model's dtype, and
    PyTorch's. torch: `_int_mm`, whose sums stay int32, or `_scaled_mm` with the same scales and its fast sums."""
    kind, hidden, inner = KINDS[operator], config.hidden_size, config.intermediate_size
    attended = config.num_heads * config.head_dim
    qkv = attended + 2 * config.num_kv_heads * config.head_dim
    in_torch = device.type == "cuda" if kind is not torch.int8 else device.type == "cpu" or tokens >= _MIN_TORCH_TOKENS
    for rows, cols in ((qkv, hidden), (hidden, attended), (2 * inner, hidden), (hidden, inner)):
        make = _Operands(kind, tokens, rows, cols, device)
        shape, nbytes = f"{rows}x{cols}", rows * cols
        yield Trial(operator, "onewave", shape, tokens, nbytes, partial(make.ours, dtype))
        name = f"onewave {str(dtype).removeprefix('torch.')}"
        yield Trial(operator, name, shape, tokens, nbytes * dtype.itemsize, partial(make.plain, dtype))
        if in_torch:
            name = "torch _int_mm" if kind is torch.int8 else "torch _scaled_mm"
            yield Trial(operator, name, shape, tokens, nbytes, make.in_torch)


@dataclass(frozen=True)
class _Operands:
    """Makes random operands of a product and closes a call over them."""

    kind: torch.dtype
    tokens: int
    rows: int
    cols: int
    device: torch.device

    def ours(self, dtype: torch.dtype) -> Callable[[], object]:
        x, weight, *scales = self._codes()
        product = linear_int8 if self.kind is torch.int8 else linear_fp8
        return lambda: product(x, weight, *scales, out_dtype=dtype)

    def plain(self, dtype: torch.dtype) -> Callable[[], object]:
        x, weight = (torch.randn(n, self.cols, device=self.device, dtype=dtype) for n in (self.tokens, self.rows))
        return lambda: linear(x, weight)

    def in_torch(self) -> Callable[[], object]:
        x, weight, x_scale, scale = self._codes()
        if self.kind is torch.int8:
            return lambda: torch.ops.aten._int_mm(x, weight.t())
        scales, options = (x_scale[:, None], scale[None]), {"out_dtype": torch.bfloat16, "use_fast_accum": True}
        return lambda: torch.ops.aten._scaled_mm(x, weight.t(), *scales, **options)

    def _codes(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Codes of activations and weights, and their scales."""
        (x, x_scale), (weight, scale) = (
            quantize_rows(torch.randn(n, self.cols, device=self.device), self.kind) for n in (self.tokens, self.rows)
        )
        return x, weight, x_scale, scale
