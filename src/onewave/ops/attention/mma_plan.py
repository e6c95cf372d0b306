"""What the m16n8k16 kernel takes, and its tile for each head_dim; from shapes and flags alone.

The tiles are chosen by registers (`onewave bench ops attention --resources`), not yet by measurement: the operator
never takes this kernel by itself.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MmaTile", "mma_refusal", "mma_tile"]

_OLDEST, _NEWEST = (8, 0), (9, 0)


@dataclass(frozen=True)
class MmaTile:
    """queries and keys of a tile; warps of a program; registers: the most that a thread may have.

    A tile of queries leaves through the memory of K and V, so there are at most twice as many queries as keys.
    """

    width: int
    queries: int
    keys: int
    warps: int
    registers: int

    @property
    def shared_bytes(self) -> int:
        """One tile of K and one of V."""
        return 4 * self.keys * self.width


# 128 registers leave room for 4 programs on an SM, 168 for 3. One key tile of 64 needs more at 128 columns.
_TILES = {
    16: MmaTile(16, 64, 64, 4, 128),
    32: MmaTile(32, 64, 64, 4, 128),
    64: MmaTile(64, 64, 64, 4, 168),
    128: MmaTile(128, 64, 32, 4, 168),
    256: MmaTile(256, 32, 32, 4, 168),
}


def mma_tile(head_dim: int) -> MmaTile:
    """The tile for heads of head_dim, which is computed as the next power of two."""
    return next(tile for width, tile in _TILES.items() if head_dim <= width)


def mma_refusal(capability: tuple[int, int], *, alibi: bool, bias: bool, missing: str | None = None) -> str | None:
    """Why the kernel does not take a call, None if it does. missing: why Triton can't compile it, None if it can."""
    if not _OLDEST <= capability <= _NEWEST:
        return f"the m16n8k16 kernel is for sm_80 to sm_90, and this is sm_{capability[0]}{capability[1]}"
    if missing is not None:
        return f"the m16n8k16 kernel needs Triton 3.6's Gluon: {missing}"
    if alibi or bias:
        return "the m16n8k16 kernel has neither ALiBi nor bias"
    return None
