"""Interface of a stream's formats: turn whole row blocks into tiles and back, in plain indexing and by kernels."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from onewave.base.group_rounding import GroupedRows
from onewave.base.weight_formats import WeightFormat
from onewave.wave.plan.layout import TileShape


@dataclass(frozen=True)
class Tiles:
    """Tiles of a stream, and what belongs to them.

    images: [tiles, values], 16-bit or bytes: what the ring streams. scales: float32, of rows' sums; None for 16-bit
    weights. lists: int32 [tiles, LIST_WORDS], of compact weights. reached: a flag, whether tiles and lists hold all
    weights; None: they always do.
    """

    images: Tensor
    scales: Tensor | None = None
    lists: Tensor | None = None
    reached: Tensor | None = None


@dataclass(frozen=True)
class UnpackedRows:
    """Rows to read back, of `count` matrices with alternating rows in the stream.

    out: [count, rows, cols], contiguous: each matrix's rows from first_row on. first_block, blocks: the stream's row
    blocks that hold them.
    """

    out: Tensor
    count: int
    first_row: int
    first_block: int
    blocks: int


@dataclass(frozen=True)
class Groups:
    """How a kernel reads weights in groups. bits: of a code, 16 of a weight as it is. size: columns of a group. number:
    of scales and minima. nested: as formats/nested.py has them. floats: codes of eight bits are e4m3, in pairs."""

    bits: int
    size: int = 128
    number: torch.dtype = torch.float16
    minima: bool = False
    nested: bool = False
    floats: bool = False


class TileFormat(ABC):
    """A format of weights in a stream. form: None for 16 bits. dtype: of plain matrices.

    working_bytes: of a value while it is packed without a kernel. groups: of formats with a scale a group. wide: rows
    come in float32, the product with the gain not rounded. product: the FORMAT of the product of several tokens that
    reads such tiles; 0: none does.
    """

    working_bytes: int
    groups: Groups
    wide = False
    product = 0

    def __init__(self, form: WeightFormat | None, shape: TileShape, dtype: torch.dtype):
        self.form, self.shape, self.dtype = form, shape, dtype

    def pack(self, rows: Tensor) -> Tiles:
        """Lay whole row blocks out, [blocks * shape.rows, cols]: tile by tile along a row block, columns padded to
        whole tiles; of formats that rows are rounded to, or that hold them as they are."""
        raise NotImplementedError(type(self).__name__)

    @abstractmethod
    def restore(self, tiles: Tiles, cols: int) -> Tensor:
        """Undo pack: [blocks * shape.rows, cols] of dtype."""

    def pack_groups(self, rows: GroupedRows) -> Tiles:
        """Lay out rows that are quantised already, as `pack` does; of formats with a scale a group."""
        raise NotImplementedError(type(self).__name__)

    def restore_groups(self, rows: GroupedRows) -> Tensor:
        """Dequantise such rows as `restore` does."""
        raise NotImplementedError(type(self).__name__)

    def expected(self, rows: Tensor) -> Tensor:
        """Return what `restore` is to make of packed rows, found without a tile."""
        return rows

    def pack_by_kernel(self, into: Tiles, places: Tensor, matrices: tuple[Tensor, ...], gain: Tensor | None) -> bool:
        """Pack matrices on their GPU by a kernel; False where there is none.

        into: the whole stream; its scales begin with the matrices'. places: int32, of each tile, row block by row
        block. matrices: one, or two with alternating rows, [height, cols], last axis contiguous.
        """
        return False

    def unpack(self, tiles: Tiles, places: Tensor, part: UnpackedRows) -> None:
        """Read rows back by a kernel. tiles, places: as of pack_by_kernel."""
        from onewave.wave.weights.pack_impl import unpack_groups

        unpack_groups(tiles, places, part, self.shape, self.groups)


def padded(rows: Tensor, shape: TileShape, value: int = 0) -> Tensor:
    """Pad rows to whole tiles."""
    missing = -rows.shape[1] % shape.cols
    return torch.nn.functional.pad(rows, (0, missing), value=value) if missing else rows


def operands_of(rows: Tensor, shape: TileShape) -> Tensor:
    """Cut whole row blocks of whole tiles into operands A: [images, 64, 128].

    Row q * shape.rows + r is row r of the block, column group q.
    """
    blocks = len(rows) // shape.rows
    cut = rows.view(blocks, shape.rows, -1, shape.quarters, 128)
    return cut.permute(0, 2, 3, 1, 4).reshape(-1, 64, 128)


def rows_of(operands: Tensor, cols: int, shape: TileShape) -> Tensor:
    """Undo operands_of, and drop the columns that fill up the last tile."""
    tiles = -(-cols // shape.cols)
    cut = operands.view(-1, tiles * shape.images, shape.quarters, shape.rows, 128).permute(0, 3, 1, 2, 4)
    return cut.reshape(-1, tiles * shape.cols)[:, :cols].contiguous()
