"""Chooses what runs quantize_rows: a Triton kernel where the GPU rounds to the codes' dtype, PyTorch elsewhere."""

from dataclasses import dataclass

import torch
from torch import Tensor

from onewave.base.device import Device
from onewave.ops.choice import Asked, Call, Choice, Counted, because, empty_on_meta

_MAX_COLS = 1 << 16
_THREAD_COLUMNS = 32 * 4
"""Columns of a block for each warp: a thread loads four numbers at once."""
_ON_CPU = Choice("reference", "reference", "quantize_rows/reference.py", (because("PyTorch's operators on a CPU"),))
_ON_GPU = Choice(
    "reference", "reference", "quantize_rows/reference.py", (because("float8 before sm_89, rows beyond 65,536"),)
)
_WHY = because("a row is read once and stays in registers between its largest magnitude and its scaling")


@dataclass(frozen=True, eq=False)
class QuantizeCall(Call):
    """x: [rows, cols], of SwiGLU's [rows, 2 * cols]. dtype: int8|float8_e4m3fn. scale: float32 [1]; None: by row."""

    x: Tensor
    dtype: torch.dtype
    scale: Tensor | None = None
    swiglu: bool = False
    described: Device | None = None

    @property
    def cols(self) -> int:
        """Columns of the codes."""
        return self.x.shape[1] // (1 + self.swiglu)


@dataclass(frozen=True)
class RowChoice(Counted, Choice):
    """quantize_kernel: a program owns a row of `blocks` times `block` columns."""

    block: int
    blocks: int
    num_warps: int
    num_programs: int

    @property
    def tile(self) -> str:
        return f"1 row of {self.blocks} x {self.block}, {self.num_warps} warps"


def choose(call: QuantizeCall) -> Choice:
    """Return what runs; see ops/choice.py."""
    if not call.on_gpu:
        return _ON_CPU
    capability = call.device.capability
    assert capability is not None
    if (call.dtype is not torch.int8 and capability < (8, 9)) or call.cols > _MAX_COLS:
        return _ON_GPU
    whole = max(16, 1 << max(0, call.cols - 1).bit_length())
    warps = 4 if whole <= 4096 else 8 if whole <= 8192 else 16
    # A longer row in one block would also compute columns past its end: 14,336 columns are seven blocks.
    block = whole if whole <= 4096 else warps * _THREAD_COLUMNS
    kernel = "quantize_rows/triton_impl.py: quantize_kernel"
    return RowChoice("triton", "triton_impl", kernel, (_WHY,), block, -(-call.cols // block), warps, len(call.x))


def describe(asked: Asked) -> QuantizeCall:
    """A question: x."""
    from onewave.ops.quantize_rows.op import quantize_rows

    asked.allow({"codes", "scale", "swiglu"})
    (shape,) = asked.take((2,))
    x, swiglu = empty_on_meta(shape, asked.dtype), bool(asked.options.get("swiglu", False))
    kind = asked.dtype_of("codes", torch.int8)
    quantize_rows(x, kind, swiglu=swiglu)  # on meta: nothing runs but the checks
    return QuantizeCall(x, kind, None, swiglu, described=asked.device)
