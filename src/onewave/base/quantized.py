"""Rows of a matrix in a GGUF number format, as files hold them, and their way back to float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from onewave.base.blocks import BLOCK_FORMATS, open_blocks
from onewave.base.errors import UnsupportedError
from onewave.base.gguf_types import gguf_type_named

_Bytes = npt.NDArray[np.uint8]
_Floats = npt.NDArray[np.float32]

# Elements dequantised at a time: the float32 result and its uint8 source stay inside a core's L2 cache.
_CHUNK_ELEMENTS = 1 << 16


@dataclass(frozen=True, eq=False)
class QuantizedRows:
    """A matrix in the bytes of a number format; bf16, fp16 and fp32 count as formats too.

    qtype: GGUF's name of the format ("Q4_1"). data: uint8 [rows, bytes_per_row], often a read-only view of the mapped
    file. shape: (rows, cols) in elements.
    """

    qtype: str
    data: _Bytes
    shape: tuple[int, int]

    def select(self, rows: slice | Sequence[int] | npt.NDArray[np.integer]) -> QuantizedRows:
        """Return the chosen rows, in the order given. A slice makes a view, indices make a copy."""
        data = self.data[rows]
        return QuantizedRows(self.qtype, data, (data.shape[0], self.shape[1]))

    def dequantize(self) -> _Floats:
        """Return float32 [rows, cols]. Raises UnsupportedError as `dequantize_rows` does."""
        return dequantize_rows(self.data, self.qtype)


def dequantize_rows(data: _Bytes, qtype: str) -> _Floats:
    """Expand packed rows into numbers, bit for bit what the gguf library gives.

    data: uint8 [rows, bytes_per_row], whole blocks. Returns float32 [rows, cols].
    Raises UnsupportedError when the type needs the gguf library and that is missing or does not know it.
    """
    kind = gguf_type_named(qtype)
    fast = _FAST.get(qtype)
    if kind is None or fast is None:
        return _dequantize_with_gguf(data, qtype)
    rows, row_bytes = data.shape
    blocks = row_bytes // kind.block_bytes
    out = np.empty((rows, blocks * kind.block_elements), np.float32)
    flat_in = np.ascontiguousarray(data).reshape(-1, kind.block_bytes)
    flat_out = out.reshape(-1, kind.block_elements)
    step = max(1, _CHUNK_ELEMENTS // kind.block_elements)
    for start in range(0, flat_in.shape[0], step):
        fast(flat_in[start : start + step], flat_out[start : start + step])
    return out


def _f16(blocks: _Bytes, out: _Floats) -> None:
    out[:] = blocks.view("<f2")


def _bf16(blocks: _Bytes, out: _Floats) -> None:
    np.left_shift(blocks.view("<u2"), 16, out=out.view(np.uint32), dtype=np.uint32)


def _f32(blocks: _Bytes, out: _Floats) -> None:
    out[:] = blocks.view("<f4")


def _grouped(qtype: str) -> Callable[[_Bytes, _Floats], None]:
    def fill(blocks: _Bytes, out: _Floats) -> None:
        out[:] = open_blocks(blocks, qtype).dequantize()

    return fill


_FAST: dict[str, Callable[[_Bytes, _Floats], None]] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
} | {name: _grouped(name) for name in BLOCK_FORMATS}


def _dequantize_with_gguf(data: _Bytes, qtype: str) -> _Floats:
    try:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize
    except ImportError:
        raise UnsupportedError(
            "dequantising without the gguf library",
            got=qtype,
            allowed=", ".join(_FAST),
            next="Install it with `pip install gguf`.",
        ) from None
    try:
        return np.asarray(dequantize(data, GGMLQuantizationType[qtype]), dtype=np.float32)
    except (KeyError, NotImplementedError):
        raise UnsupportedError(
            "dequantising with the installed gguf library",
            got=qtype,
            next="Upgrade it with `pip install -U gguf`, or convert the model to Q8_0.",
        ) from None
