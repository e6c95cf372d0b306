"""Pack weights in the order that the wave's thread blocks use them in: one stream of tiles, worker by worker.

The stream is the only copy of the matrices on the GPU. They are packed one by one as they are loaded. Products of
several tokens read compact ones where they lie; others, and products of many tokens, have a plain copy unpacked into a
scratch buffer that the next one reuses, or into a buffer that is kept, if memory allows.
Each format (formats/) says how. Those that round do so after the gain, and unpack to 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onewave.base.errors import ShapeError
from onewave.base.group_rounding import GroupedRows
from onewave.base.weight_formats import COMPACT, WeightFormat
from onewave.wave.plan.layout import LIST_WORDS, TILE_VALUES
from onewave.wave.plan.program import WaveProgram
from onewave.wave.weights.formats import TileFormat, Tiles, tile_format
from onewave.wave.weights.formats.tile_format import UnpackedRows

# Working memory of packing without a kernel. With less, packing takes more steps; with more, loading needs more memory.
_WORKING_BYTES = 128 << 20
# Size of a part of a large matrix. With more, the scratch buffer of a large vocabulary grows.
_PART_BYTES = 128 << 20


@dataclass(frozen=True)
class Weight:
    """A matrix of a program: [rows, cols] 16-bit, or several of one shape with alternating rows.

    gain: [cols], multiplied into the columns in float32 and rounded once (the gain of the norm before the product).
    """

    matrices: tuple[Tensor, ...]
    gain: Tensor | None = None

    def block(self, first: int, last: int, device: torch.device, *, wide: bool = False) -> Tensor:
        """Take rows first to last, zeros beyond the end. Both are multiples of the number of matrices.

        wide: in float32, the product with the gain not rounded.
        """
        count = len(self.matrices)
        cut = torch.stack([matrix[first // count : last // count].to(device) for matrix in self.matrices], dim=1)
        cut = cut.reshape(-1, cut.shape[-1])
        dtype = torch.float32 if wide else cut.dtype
        if self.gain is not None:
            cut = cut.float() * self.gain.to(device).float()
        cut = cut.to(dtype)
        missing = last - first - len(cut)
        return torch.nn.functional.pad(cut, (0, 0, 0, missing)) if missing else cut

    def rows(self, low: NDArray[np.int64], height: int, device: torch.device, *, wide: bool = False) -> Tensor:
        """Take blocks of `height` rows from each of these on, like `block`, in few steps."""
        count = len(self.matrices)
        at = (low[:, None] + np.arange(0, height, count)).flatten() // count
        own = torch.from_numpy(np.minimum(at, len(self.matrices[0]) - 1)).to(self.matrices[0].device)
        few = Weight(tuple(matrix.index_select(0, own) for matrix in self.matrices), self.gain)
        found = few.block(0, count * len(at), device, wide=wide)
        if at[-1] >= len(self.matrices[0]):
            found[torch.from_numpy(np.repeat(at >= len(self.matrices[0]), count)).to(device)] = 0
        return found


class WeightStream:
    """A program's weights on their device, allocated at once, each matrix packed when it is put.

    tensor: [stream tiles * shape.tile_rows, 64], what the kernel streams. Tiles that no worker reads (the shorter
    lanes' ends) are zero. A table of 4 bytes a tile has each tile's place. A scratch buffer has the matrix unpacked
    last; after keep(), a second buffer has all that were unpacked. weight_format: of the packed matrices; None: as they
    are. With one, `scales` has a float32 a row, and dtype is that of unpacked matrices. With COMPACT, `lists` has
    LIST_WORDS words a tile, and `reached` is a flag: whether all matrices put so far were packed without loss.
    gains_apart: whether activations are multiplied by norms' gains, which are in the matrices otherwise.
    """

    def __init__(
        self, program: WaveProgram, dtype: torch.dtype, device: torch.device, weight_format: WeightFormat | None = None
    ):
        self.program, self.shape, self.dtype, self.device = program, program.shape, dtype, device
        self.weight_format = weight_format
        widths = {1, *program.widths.values()}
        self._formats = {width: tile_format(weight_format, program.shape, dtype, width) for width in widths}
        kind = dtype if weight_format is None else torch.uint8
        values = TILE_VALUES * self.shape.images if weight_format is None else self.shape.tile_bytes
        self.images = torch.zeros(program.stream_tiles, values, dtype=kind, device=device)
        self.lists: Tensor | None = None
        if weight_format is COMPACT:
            self.lists = torch.zeros(program.stream_tiles, LIST_WORDS, dtype=torch.int32, device=device)
        self.reached = torch.ones((), dtype=torch.bool, device=device)
        self.scales = None if weight_format is None else torch.zeros(program.num_scales, device=device)
        self._grids: dict[str, tuple[int, int, int]] = {}  # first place, row blocks, tiles a row block
        tables: list[np.ndarray[tuple[int], np.dtype[np.int32]]] = []
        first = 0
        for name, entries in program.stream.items():
            blocks, tiles = (int(entries[:, axis].max()) + 1 for axis in (0, 1))
            table = np.full(blocks * tiles, -1, dtype=np.int32)
            table[entries[:, 0] * tiles + entries[:, 1]] = entries[:, 2]
            assert len(entries) == len(table), f"{name}: {len(entries)} tiles of {len(table)} are in the stream"
            assert table.min() >= 0, f"{name}: a tile is in the stream twice"
            self._grids[name] = (first, blocks, tiles)
            tables.append(table)
            first += len(table)
        # One transfer for all: a small one each would take longer than packing does.
        self._host_places = np.concatenate(tables) if tables else np.zeros(1, dtype=np.int32)
        self._places = torch.from_numpy(self._host_places).to(device)
        self.gains_apart = False
        self._scratch: Tensor | None = None
        self._in_tiles: dict[str, TileMatrix] = {}
        self.keeping = False
        self._kept: dict[str, Tensor] = {}
        self._first: dict[str, int] = {}  # each matrix's first value in the buffer of kept ones
        self._values = 0
        self._room: Tensor | None = None

    @property
    def tensor(self) -> Tensor:
        """The stream, as the kernel reads it."""
        return self.images.view(self.dtype).view(-1, 64)

    @property
    def nbytes(self) -> int:
        """Bytes of the tiles, their lists and the rows' scales."""
        return sum(part.nbytes for part in (self.images, self.lists, self.scales) if part is not None)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all matrices, in the stream's order."""
        return tuple(self._grids)

    def put(self, name: str, weight: Weight) -> int:
        """Pack one matrix from any device; it may be freed afterwards. Returns its tiles. Raises ShapeError."""
        first = weight.matrices[0]
        if any(matrix.shape != first.shape or matrix.dtype is not self.dtype for matrix in weight.matrices):
            raise ShapeError(f"weight {name!r}", got="matrices that differ", allowed="one shape and dtype")
        places = self._places_of(name, len(first) * len(weight.matrices), first.shape[1])
        form, height = self.format_of(name), self.shape.rows
        if self._is_here(weight) and form.pack_by_kernel(
            self._tiles(name), places, weight.matrices, None if weight.gain is None else weight.gain.to(self.device)
        ):
            return len(places)

        def packed(low: int, high: int) -> Tiles:
            return form.pack(weight.block(low * height, high * height, self.device, wide=form.wide))

        return self._put_blocks(name, places, packed)

    def put_rows(self, name: str, rows: GroupedRows) -> int:
        """Pack a matrix that is quantised already, in the form of its width; see `put`."""
        form, height = self.format_of(name), self.shape.rows

        def packed(low: int, high: int) -> Tiles:
            return form.pack_groups(rows.block(low * height, high * height))

        return self._put_blocks(name, self._places_of(name, *rows.codes.shape), packed)

    def _places_of(self, name: str, rows: int, cols: int) -> Tensor:
        """A matrix's tiles in the stream, row block by row block. Raises ShapeError for another size."""
        start, blocks, tiles = self._grids[name]
        shape = self.format_of(name).shape
        if (blocks, tiles) != (-(-rows // shape.rows), -(-cols // shape.cols)):
            allowed = f"{blocks} x {tiles} tiles of {shape.rows} x {shape.cols}"
            raise ShapeError(f"weight {name!r}", got=f"{rows} x {cols}", allowed=allowed)
        return self._places[start : start + blocks * tiles]

    def _put_blocks(self, name: str, places: Tensor, packed: Callable[[int, int], Tiles]) -> int:
        """Put a matrix by plain indexing, as many row blocks at a time as working memory takes. packed: row blocks from
        one to another. Returns the tiles."""
        _, blocks, tiles = self._grids[name]
        form, height, into = self.format_of(name), self.shape.rows, self._tiles(name)
        step = max(1, _WORKING_BYTES // (form.working_bytes * TILE_VALUES * form.shape.images * tiles))
        for low in range(0, blocks, step):
            high = min(blocks, low + step)
            made, at = packed(low, high), places[low * tiles : high * tiles].long()
            into.images.index_copy_(0, at, made.images)
            if made.scales is not None and into.scales is not None:
                into.scales[low * height : high * height] = made.scales
            if made.lists is not None and into.lists is not None:
                into.lists.index_copy_(0, at, made.lists)
            if made.reached is not None:
                self.reached &= made.reached
        return len(places)

    def num_blocks(self, name: str) -> int:
        """Row blocks of a matrix."""
        return self._grids[name][1]

    def format_of(self, name: str) -> TileFormat:
        """How a matrix lies in the stream."""
        return self._formats[self.program.widths.get(name, 1)]

    @property
    def formats(self) -> tuple[TileFormat, ...]:
        """How matrices of each width lie in the stream, the narrowest first."""
        return tuple(self._formats[width] for width in sorted(self._formats))

    def all_tiles(self, first_scale: int = 0) -> Tiles:
        """The whole stream, its scales from one on."""
        return Tiles(self.images, None if self.scales is None else self.scales[first_scale:], self.lists, self.reached)

    def _tiles(self, name: str) -> Tiles:
        """The whole stream, its scales from those of a matrix on."""
        return self.all_tiles(self.program.first_scale.get(name, 0))

    def _is_here(self, weight: Weight) -> bool:
        """Whether a kernel of the stream's GPU can read this weight."""
        return all(matrix.is_cuda and matrix.device == self.device for matrix in weight.matrices) and _fits(weight)

    def matrix(self, name: str, height: int, cols: int, count: int = 1) -> StreamMatrix:
        """Refer to a packed matrix as plain operators use it: `count` matrices [height, cols] below one another."""
        made = StreamMatrix(self, name, height, cols, count)
        if name not in self._first:
            self._first[name] = self._values
            self._values += made.shape.numel()
        return made

    @property
    def unpacked_bytes(self) -> int:
        """Bytes that all requested matrices take when they are kept."""
        return self._values * self.dtype.itemsize

    @property
    def may_keep(self) -> bool:
        """Whether matrices are worth keeping unpacked: of 16 bits, and compact ones in tiles of eight rows, which take
        long to widen. Others are read where they lie; rounded or quantised ones are there to save memory."""
        return self.weight_format is None or (self.weight_format is COMPACT and self.shape.rows == 8)

    def keep(self) -> None:
        """Keep matrices unpacked from now on. The first one allocates unpacked_bytes."""
        self.keeping = True

    def release(self) -> bool:
        """Free all kept matrices and keep no more. Returns whether any were kept."""
        had = self._room is not None
        self.keeping, self._room = False, None
        self._kept.clear()
        return had

    def kept(self, matrix: StreamMatrix) -> Tensor | None:
        """Return a kept matrix, unpacked at its first use; None if none are kept."""
        if not self.keeping:
            return None
        found = self._kept.get(matrix.name)
        if found is None:
            if self._room is None:
                try:
                    self._room = self._buffer(self._values)
                except torch.OutOfMemoryError:
                    self.release()
                    return None
            first, size = self._first[matrix.name], matrix.shape.numel()
            out = self._room[first : first + size].view(matrix.count, matrix.height, matrix.cols)
            found = self._kept[matrix.name] = self._unpack(matrix, 0, matrix.height, out)
        return found

    def in_tiles(self, matrix: StreamMatrix) -> TileMatrix | None:
        """Return a matrix as it lies in the stream; None in a format whose tiles no product of several tokens reads.
        All are put by then: the first call with COMPACT waits for the device."""
        form = self.format_of(matrix.name).product
        if not form or self.scales is None:
            return None
        found = self._in_tiles.get(matrix.name)
        if found is None:
            first, blocks, tiles = self._grids[matrix.name]
            found = self._in_tiles[matrix.name] = TileMatrix(
                form=form,
                words=self.images.view(torch.int32).view(-1),
                lists=self.lists,
                places=self._places,
                scales=self.scales,
                first_place=first,
                first_scale=self.program.first_scale[matrix.name],
                rows=matrix.shape[0],
                blocks=blocks,
                tiles=tiles,
                longest=None if self.lists is None else self._longest_lists(first, blocks, tiles),
                listed=self.lists is not None and bool(self._listed[first : first + blocks * tiles].any()),
            )
        return found

    def _longest_lists(self, first: int, blocks: int, tiles: int) -> Tensor:
        """Find the longest list of each 64 rows' tiles, place by place along K: int32 [64 rows, tiles]."""
        counts = self._list_lengths[first : first + blocks * tiles].view(blocks, tiles)
        together = 64 // self.shape.rows
        missing = -blocks % together
        whole = torch.nn.functional.pad(counts, (0, 0, 0, missing)) if missing else counts
        return whole.view(-1, together, tiles).amax(dim=1)

    @cached_property
    def _list_lengths(self) -> Tensor:
        """The list length of each matrix's tiles, in turn."""
        assert self.lists is not None
        return self.lists[:, 0][self._places.long()]

    @cached_property
    def _listed(self) -> NDArray[np.bool_]:
        """Whether each matrix's tiles, in turn, list a weight."""
        return (self._list_lengths > 0).cpu().numpy()

    def unpack(self, matrix: StreamMatrix, first: int, last: int) -> Tensor:
        """Unpack rows first to last of each of its matrices, [count * (last - first), cols], to the scratch buffer.

        Valid until the next call; on a GPU, for work that the current stream is given before that call.
        """
        rows = last - first
        wanted = matrix.count * rows * matrix.cols
        if self._scratch is None or self._scratch.numel() < wanted:
            self._scratch = None  # the old one goes before the new one comes
            self._scratch = self._buffer(wanted)
        return self._unpack(matrix, first, last, self._scratch[:wanted].view(matrix.count, rows, matrix.cols))

    @torch.inference_mode(False)  # callers may be in inference mode or not; the buffer serves both
    def _buffer(self, values: int) -> Tensor:
        return torch.empty(values, dtype=self.dtype, device=self.device)

    def _unpack(self, matrix: StreamMatrix, first: int, last: int, out: Tensor) -> Tensor:
        name, cols, count = matrix.name, matrix.cols, matrix.count
        rows, (start, _, tiles) = last - first, self._grids[name]
        low, high = first * count // self.shape.rows, -(-last * count // self.shape.rows)
        places = self._places[start : start + self._grids[name][1] * tiles]
        if not self.images.is_cuda:
            whole = self.read_blocks(name, cols, low, high)[first * count - low * self.shape.rows :][: rows * count]
            out.copy_(whole.view(rows, count, cols).transpose(0, 1))
            return out.view(count * rows, cols)
        self.format_of(name).unpack(self._tiles(name), places, UnpackedRows(out, count, first, low, high - low))
        return out.view(count * rows, cols)

    def read_blocks(self, name: str, cols: int, low: int, high: int) -> Tensor:
        """Read row blocks low to high as Weight.block has them, by plain indexing on any device; checks `unpack`."""
        return self.read_runs(cols, [(name, low, high)])

    def read_runs(self, cols: int, runs: Sequence[tuple[str, int, int]]) -> Tensor:
        """Read runs of row blocks, each of a matrix, from one block to another; one below the other. The matrices have
        one format and width."""

        def spans(of_run: Iterable[tuple[int, int]]) -> NDArray[np.int64]:
            return np.concatenate([np.arange(first, last) for first, last in of_run])

        height = self.shape.rows
        grids = [(self._grids[name], low, high) for name, low, high in runs]
        at = spans((start + low * tiles, start + high * tiles) for (start, _, tiles), low, high in grids)
        places = torch.from_numpy(self._host_places[at]).to(self.device).long()
        scales = ((self.program.first_scale.get(name, 0), low, high) for name, low, high in runs)
        rows = torch.from_numpy(spans((first + low * height, first + high * height) for first, low, high in scales))
        found = Tiles(
            self.images[places],
            None if self.scales is None else self.scales[rows.to(self.device)],
            None if self.lists is None else self.lists[places],
        )
        return self.format_of(runs[0][0]).restore(found, cols)


@dataclass(frozen=True, eq=False)
class TileMatrix:
    """A matrix as it lies in a stream, for a product that reads it there.

    form: the number of its format. words: int32, lists: int32 [stream tiles, LIST_WORDS], places: int32, of tiles,
    scales: float32: of the whole stream; first_place, first_scale: of the matrix. rows: of the matrix, or of several
    with alternating rows. blocks: row blocks, of so many tiles. longest: int32 [64 rows, tiles], of the lists of the
    tiles that hold them. listed: whether any tile lists a weight. No lists: of other than compact tiles.
    """

    form: int
    words: Tensor
    lists: Tensor | None
    places: Tensor
    scales: Tensor
    first_place: int
    first_scale: int
    rows: int
    blocks: int
    tiles: int
    longest: Tensor | None
    listed: bool


@dataclass(frozen=True, eq=False)
class StreamMatrix:
    """A matrix in a stream: [count * height, cols] when unpacked, the matrices below one another.

    Its gain is included.
    """

    stream: WeightStream
    name: str
    height: int
    cols: int
    count: int = 1

    @property
    def shape(self) -> torch.Size:
        """[rows, cols]."""
        return torch.Size((self.count * self.height, self.cols))

    @property
    def nbytes(self) -> int:
        """Bytes in the stream: values, scales of weights below 16 bits, lists of compact ones."""
        shape, values = self.stream.format_of(self.name).shape, self.shape.numel()
        scales = 0 if self.stream.weight_format is None else 4 * self.shape[0]
        return int(values * shape.weight_bytes / shape.tile_bytes * shape.slot_bytes) + scales

    @property
    def tiles(self) -> TileMatrix | None:
        """The matrix as it lies in the stream; None in a format whose tiles no product of several tokens reads."""
        return self.stream.in_tiles(self)

    def dense(self) -> Tensor:
        """Return the whole matrix. If none are kept it is in the scratch buffer, valid until the next is requested."""
        kept = self.stream.kept(self)
        return self.stream.unpack(self, 0, self.height) if kept is None else kept

    def parts(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the matrix in parts of at most about 128 MiB: (first row, rows), each valid until the next.

        Several matrices with alternating rows are one part. Kept matrices have the same parts.
        """
        kept = self.stream.kept(self)
        step = max(1, _PART_BYTES // (self.cols * self.stream.dtype.itemsize)) if self.count == 1 else self.height
        for first in range(0, self.height, step):
            last = min(self.height, first + step)
            whole = self.count * (last - first)
            yield first, self.stream.unpack(self, first, last) if kept is None else kept[first : first + whole]


def pack_stream(program: WaveProgram, weights: Mapping[str, Weight], device: torch.device) -> WeightStream:
    """Pack all matrices of a program as they are, in a stream on `device`.

    The matrices may lie on another device; packing holds about 256 MiB beside them and the stream. Raises ShapeError.
    """
    stream = WeightStream(program, next(iter(weights.values())).matrices[0].dtype, device)
    for name in stream.names:
        stream.put(name, weights[name])
    return stream


def _fits(weight: Weight) -> bool:
    """Whether the packing kernel supports these matrices."""
    strides = {matrix.stride() for matrix in weight.matrices}
    return len(weight.matrices) <= 2 and len(strides) == 1 and strides.pop()[1] == 1
