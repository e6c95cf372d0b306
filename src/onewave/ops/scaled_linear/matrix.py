"""A matrix of one-byte weights that multiplies activations quantised on the way: W8A8 and fp8 checkpoints' layers."""

from dataclasses import dataclass

import torch
from torch import Tensor

from onewave.base.errors import ShapeError
from onewave.ops.quantize_rows import QuantizedRows, quantize_rows
from onewave.ops.scaled_linear.op import linear_fp8, linear_int8


@dataclass(frozen=True, eq=False)
class ScaledPart:
    """Rows of a matrix that share how activations are quantised.

    codes: int8|float8_e4m3fn [rows, cols]. scale: float32 [rows] or [1]. x_scale: float32 [1], static; None: each
    token's own, from its largest magnitude (quantize_rows).
    """

    codes: Tensor
    scale: Tensor
    x_scale: Tensor | None = None

    def multiply(
        self, x: Tensor | QuantizedRows, bias: Tensor | None, out_dtype: torch.dtype, *, gated: bool
    ) -> Tensor:
        """Quantise x, or with `gated` SwiGLU of x, and multiply."""
        if isinstance(x, QuantizedRows):
            codes, scale = x.codes, x.scale
        else:
            codes, scale = quantize_rows(x, self.codes.dtype, self.x_scale, swiglu=gated)
        product = linear_int8 if self.codes.dtype is torch.int8 else linear_fp8
        return product(codes, self.codes, scale, self.scale, bias=bias, out_dtype=out_dtype)


@dataclass(frozen=True, eq=False)
class ScaledMatrix:
    """A matrix [rows, cols] in parts, one below the other."""

    parts: tuple[ScaledPart, ...]

    @property
    def shape(self) -> torch.Size:
        """[rows, cols]."""
        return torch.Size((sum(len(part.codes) for part in self.parts), self.parts[0].codes.shape[1]))

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return sum(part.codes.nbytes + part.scale.nbytes for part in self.parts)

    @property
    def row_codes(self) -> torch.dtype | None:
        """The dtype to which all parts quantise activations by each token's own scale; None where they do not."""
        first = self.parts[0].codes.dtype
        alike = all(part.x_scale is None and part.codes.dtype is first for part in self.parts)
        return first if alike else None

    def multiply(
        self,
        x: Tensor | QuantizedRows,
        bias: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        *,
        gated: bool = False,
    ) -> Tensor:
        """x W^T + bias, of x [tokens, cols], quantised as each part says; [tokens, rows] in out_dtype, by default x's.

        x: also as quantize_rows gives it, where row_codes names its dtype. gated: x is [tokens, 2 * cols], and SwiGLU
        of it is multiplied. Raises ShapeError.
        """
        rows, cols = self.shape
        shape = x.codes.shape if isinstance(x, QuantizedRows) else x.shape
        if len(shape) != 2 or shape[1] != cols * (1 + gated):
            got = f"{tuple(shape)}, {(rows, cols)}"
            raise ShapeError("linear: x, weight", got=got, allowed="[tokens, cols] and [rows, cols]")
        first, outs = 0, list[Tensor]()
        for part in self.parts:
            last = first + len(part.codes)
            own = None if bias is None else bias[first:last]
            outs.append(part.multiply(x, own, out_dtype or x.dtype, gated=gated))
            first = last
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)

    def dequantize(self) -> Tensor:
        """Return float32 [rows, cols]."""
        return torch.cat([part.codes.float() * part.scale.reshape(-1, 1) for part in self.parts])
