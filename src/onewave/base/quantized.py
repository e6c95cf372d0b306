"""Rows of a matrix in a GGUF number format, as files hold them, and their way back to float32."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from onewave.base.blocks import BLOCK_FORMATS, open_blocks
from onewave.base.errors import UnsupportedError
from onewave.base.gguf_types import TYPES_BY_NAME
from onewave.base.grouped import GroupedMatrix, in_order
from onewave.base.own_blocks import BLOCK, OWN_BLOCK_BYTES, open_own_blocks

_Bytes = npt.NDArray[np.uint8]
_Floats = npt.NDArray[np.float32]

# Elements dequantised at a time: the float32 result and its uint8 source stay inside a core's L2 cache.
_CHUNK_ELEMENTS = 1 << 16


@dataclass(frozen=True, eq=False)
class QuantizedRows:
    """A matrix in the bytes of a number format; bf16, fp16 and fp32 count as formats too.

    qtype: GGUF's name of the format ("Q4_1"), or one of own_blocks.py. data: uint8 [rows, bytes_per_row], often a
    read-only view of the mapped file. shape: (rows, cols) in elements. columns: int64 [cols], the matrix's column that
    each column of the blocks is; None: the same.
    """

    qtype: str
    data: _Bytes
    shape: tuple[int, int]
    columns: npt.NDArray[np.int64] | None = None

    def select(self, rows: slice | Sequence[int] | npt.NDArray[np.integer]) -> "QuantizedRows":
        """Return the chosen rows, in the order given. A slice makes a view, indices make a copy."""
        data = self.data[rows]
        return QuantizedRows(self.qtype, data, (data.shape[0], self.shape[1]), self.columns)

    def dequantize(self) -> _Floats:
        """Return float32 [rows, cols]. Raises UnsupportedError as `dequantize_rows` does."""
        return in_order(dequantize_rows(self.data, self.qtype), self.columns)


def dequantize_rows(data: _Bytes, qtype: str) -> _Floats:
    """Expand packed rows into numbers, bit for bit what the gguf library gives for its types.

    data: uint8 [rows, bytes_per_row], whole blocks. Returns float32 [rows, cols].
    Raises UnsupportedError when the type needs the gguf library and that is missing or does not know it.
    """
    kind = TYPES_BY_NAME.get(qtype)
    fast = _FAST.get(qtype)
    if fast is None:
        return _dequantize_with_gguf(data, qtype)
    elements, size = (BLOCK, OWN_BLOCK_BYTES[qtype]) if kind is None else (kind.block_elements, kind.block_bytes)
    rows, row_bytes = data.shape
    out = np.empty((rows, row_bytes // size * elements), np.float32)
    flat_in = np.ascontiguousarray(data).reshape(-1, size)
    flat_out = out.reshape(-1, elements)
    step = max(1, _CHUNK_ELEMENTS // elements)
    for start in range(0, flat_in.shape[0], step):
        fast(flat_in[start : start + step], flat_out[start : start + step])
    return out


def _f16(blocks: _Bytes, out: _Floats) -> None:
    out[:] = blocks.view("<f2")


def _bf16(blocks: _Bytes, out: _Floats) -> None:
    np.left_shift(blocks.view("<u2"), 16, out=out.view(np.uint32), dtype=np.uint32)


def _f32(blocks: _Bytes, out: _Floats) -> None:
    out[:] = blocks.view("<f4")


def _grouped(unpack: Callable[[_Bytes, str], GroupedMatrix], qtype: str) -> Callable[[_Bytes, _Floats], None]:
    def fill(blocks: _Bytes, out: _Floats) -> None:
        out[:] = unpack(blocks, qtype).dequantize()

    return fill


_FAST: dict[str, Callable[[_Bytes, _Floats], None]] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    **{name: _grouped(open_blocks, name) for name in BLOCK_FORMATS},
    **{name: _grouped(open_own_blocks, name) for name in OWN_BLOCK_BYTES},
}


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
