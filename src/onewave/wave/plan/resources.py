"""How a launch of the wave kernel shares a multiprocessor's registers and shared memory, by what it has to do."""

from __future__ import annotations

from onewave.wave.plan.layout import TileShape, drawing_ring, held_tiles

__all__ = ["kernel_resources"]

# Of an exchange thread, by the tiles that the multiply partition holds in its own registers, of which it must not be
# short (docs/log/wave.md: registers); with heads of 128, whose attention needs more, most of all in a launch of several
# tokens.
_EXCHANGE_REGISTERS = {0: 208, 2: 168, 4: 144}
_WIDE_REGISTERS, _WIDE_REGISTERS_SEVERAL = {0: 208, 2: 176}, {0: 208, 2: 184}
_LOADER_REGISTERS, _LOADER_REGISTERS_CROWDED = 24, 32
# Of an exchange, a loading and a multiplying thread where two partitions multiply: five warp groups start with 96.
_TWO_MULTIPLIERS = (112, 32, 112)
# Of an exchange and a loading thread beside products of one-byte and compact weights, which need more themselves; where
# tokens are drawn, what draws them needs more.
_BYTE_REGISTERS, _BYTE_REGISTERS_DRAWING = (184, 40), (192, 32)


def kernel_resources(
    shape: TileShape,
    head_dim: int,
    *,
    several: bool = False,
    draws: bool = False,
    paged: bool = False,
    streams: bool = False,
) -> dict[str, int]:
    """How the kernel shares registers and shared memory: tiles held by the multiply partition, registers of an exchange
    thread, of a loading one and of one of a second multiply partition, and tiles of the ring.

    several: whether a launch makes several tokens. draws: whether it draws them, which keeps more from one token to the
    next, and leaves no room to hold tiles. paged: whether attention looks for its keys in pages, which leaves less.
    streams: whether keys come through the ring, which the loading warp keeps more for."""
    held = 0 if draws else min(shape.held, 2) if paged else shape.held
    if several:
        held = min(held, held_tiles(shape.batch, head_dim, crowded=True))
    wide = _WIDE_REGISTERS_SEVERAL if several else _WIDE_REGISTERS
    exchange = wide if head_dim > 64 else _EXCHANGE_REGISTERS
    # What is computed of a thread's number is computed before the partitions part, and kept by the loading warp, too.
    crowded = streams or held == 4 or (paged and head_dim <= 64) or (several and held > 0 and head_dim > 64)
    registers, loading = exchange[held], _LOADER_REGISTERS_CROWDED if crowded else _LOADER_REGISTERS
    if shape.weight_bytes < 2:
        registers, loading = _BYTE_REGISTERS_DRAWING if draws else _BYTE_REGISTERS
    multiplying = 0
    if shape.multipliers > 1:
        registers, loading, multiplying = _TWO_MULTIPLIERS
    ring = drawing_ring(shape, head_dim) if draws else shape.ring
    return {"HELD": held, "XREGS": registers, "LREGS": loading, "MREGS": multiplying, "S": ring}
