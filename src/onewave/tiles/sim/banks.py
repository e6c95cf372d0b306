"""Shared memory's banks: swizzled tiles, the addresses of a warp's access, and whether they conflict.

Shared memory has 32 banks of 4 bytes; a pass serves one word of each bank, to any number of lanes. A warp's access of
16 bytes a lane goes in four passes of 8 lanes, of 8 bytes in two of 16, of 4 bytes or less in one of all 32; ldmatrix
and stmatrix take a pass for each 8 x 8 matrix, whose 8 rows of 16 bytes their lanes name. What needs more passes
conflicts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from onewave.base.errors import InvalidArgumentError

_BANKS, _WORD_BYTES, _LANES = 32, 4, 32
_PASS_BYTES = _BANKS * _WORD_BYTES
_ROW_BYTES = 16  # of an 8 x 8 matrix


@dataclass(frozen=True)
class Swizzle:
    """A row-major tile whose rows' pieces are exchanged by exclusive or with the row's phase.

    columns: of a row, of item_bytes each; vec: elements of a piece; rows change phase every per_phase rows, and there
    are max_phase phases, a power of two. max_phase=1 leaves everything in place. Raises InvalidArgumentError.
    """

    columns: int
    vec: int = 8
    per_phase: int = 1
    max_phase: int = 8
    item_bytes: int = 2

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise InvalidArgumentError(f"swizzle: {name}", got=str(value), allowed="1 or more")
        if self.max_phase & (self.max_phase - 1):  # else the exclusive or leaves the row
            raise InvalidArgumentError("swizzle: max_phase", got=str(self.max_phase), allowed="a power of two")
        if self.columns % (self.vec * self.max_phase):
            allowed = f"a multiple of vec x max_phase = {self.vec * self.max_phase}"
            raise InvalidArgumentError("swizzle: columns", got=str(self.columns), allowed=allowed)

    @property
    def piece_bytes(self) -> int:
        """Bytes that stay together."""
        return self.vec * self.item_bytes

    def offset(self, row: int, column: int) -> int:
        """Bytes from the tile's start to an element."""
        piece = (column // self.vec) ^ (row // self.per_phase % self.max_phase)
        return (row * self.columns + piece * self.vec + column % self.vec) * self.item_bytes


def passes(addresses: Sequence[int | None], width: int) -> int:
    """Passes that one access of a warp takes. addresses: bytes, one a lane, None for a lane that sits out.

    width: bytes a lane moves: 1, 2, 4, 8 or 16, at multiples of it (of an 8 x 8 matrix's row: 16).
    """
    if width not in (1, 2, 4, 8, 16) or len(addresses) > _LANES:
        got = f"{len(addresses)} lanes of {width} bytes"
        raise InvalidArgumentError("banks: access", got=got, allowed="at most 32 lanes of 1, 2, 4, 8 or 16 bytes")
    together = min(_LANES, _PASS_BYTES // max(width, _WORD_BYTES))
    needed = 0
    for at in range(0, len(addresses), together):
        words: dict[int, set[int]] = {}
        for address in addresses[at : at + together]:
            if address is None:
                continue
            if address % width:
                raise InvalidArgumentError("banks: address", got=str(address), allowed=f"a multiple of {width}")
            for word in range(address // _WORD_BYTES, (address + width - 1) // _WORD_BYTES + 1):
                words.setdefault(word % _BANKS, set()).add(word)
        needed += max((len(found) for found in words.values()), default=0)
    return needed


def conflicts(addresses: Sequence[int | None], width: int) -> int:
    """Passes beyond the fewest that so many bytes can take."""
    together = min(_LANES, _PASS_BYTES // max(width, _WORD_BYTES))
    groups = [addresses[at : at + together] for at in range(0, len(addresses), together)]
    return passes(addresses, width) - sum(any(address is not None for address in group) for group in groups)


def matrices(tile: Swizzle, rows: int) -> Iterator[list[int]]:
    """Row addresses of each aligned matrix of 8 rows of 16 bytes of a tile, as ldmatrix and stmatrix name them.

    The same rows serve the matrix and, with .trans, its transpose; which lanes of the warp name it changes no bank.
    Raises InvalidArgumentError where a swizzle takes a matrix's row apart.
    """
    if tile.piece_bytes % _ROW_BYTES or _ROW_BYTES % tile.item_bytes or rows % 8:
        got = f"{rows} rows, pieces of {tile.vec} x {tile.item_bytes} bytes"
        raise InvalidArgumentError("banks: matrices", got=got, allowed="multiples of 8 rows and of 16 bytes")
    for row in range(0, rows, 8):
        for column in range(0, tile.columns, _ROW_BYTES // tile.item_bytes):
            yield [tile.offset(row + lane, column) for lane in range(8)]


def copied_rows(tile: Swizzle, rows: int, *, width: int) -> Iterator[list[int]]:
    """Addresses of each warp's access when 32 lanes copy a tile row by row, `width` bytes a lane.

    Raises InvalidArgumentError where a lane's bytes do not lie together.
    """
    if width < 1 or width % tile.item_bytes or tile.piece_bytes % width:
        allowed = f"a multiple of {tile.item_bytes} that divides a piece, {tile.piece_bytes}"
        raise InvalidArgumentError("banks: width", got=str(width), allowed=allowed)
    columns = width // tile.item_bytes
    cells = [(row, column) for row in range(rows) for column in range(0, tile.columns, columns)]
    for at in range(0, len(cells), _LANES):
        yield [tile.offset(row, column) for row, column in cells[at : at + _LANES]]
