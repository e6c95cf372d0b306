"""Shares of an SM's registers and shared memory in a launch of the wave kernel."""

from __future__ import annotations

from onewave.base.weight_formats import NESTED
from onewave.wave.plan.layout import TileShape

# Registers of an exchange thread, by the tiles that the multiply partition holds: that must not be short of registers
# (docs/log/wave.md: registers). Heads of 128 need more for attention.
_EXCHANGE_REGISTERS = {0: 208, 2: 168, 4: 144}
_WIDE_REGISTERS = {0: 208, 2: 176}
_LOADER_REGISTERS, _LOADER_REGISTERS_CROWDED = 24, 32
# Registers of an exchange, a loading and a multiplying thread where two partitions multiply: five warp groups start
# with 96.
_TWO_MULTIPLIERS = (112, 32, 112)
# Registers of an exchange and a loading thread beside products of one-byte and compact weights, which need more.
_BYTE_REGISTERS = (184, 40)
# The same beside products of 4-bit weights: four chains of sums at once.
_NIBBLE_REGISTERS = (168, 40)
# Beside nested weights, one sequence in pages that do not stream spills nothing with these.
_NESTED_REGISTERS = (176, 32)


def kernel_resources(shape: TileShape, head_dim: int, *, paged: bool = False, streams: bool = False) -> dict[str, int]:
    """How the kernel shares registers and shared memory: tiles held by the multiply partition, registers of an exchange
    thread, of a loading one and of one of a second multiply partition, and tiles of the ring.

    paged: whether attention looks for its keys in pages, which leaves less. streams: whether keys come through the
    ring, which the loading warp keeps more for."""
    held = min(shape.held, 2) if paged else shape.held
    exchange = _WIDE_REGISTERS if head_dim > 64 else _EXCHANGE_REGISTERS
    # Values computed of a thread's number are computed before the partitions part, and kept by the loading warp, too.
    crowded = streams or held == 4 or (paged and head_dim <= 64)
    registers, loading = exchange[held], _LOADER_REGISTERS_CROWDED if crowded else _LOADER_REGISTERS
    if shape.weight_bytes < 2:
        registers, loading = _BYTE_REGISTERS if shape.weight_bytes >= 1 else _NIBBLE_REGISTERS
        if paged and not streams and head_dim > 64 and shape.batch == 1 and shape.weight_bytes == NESTED.weight_bytes:
            registers, loading = _NESTED_REGISTERS
    multiplying = 0
    if shape.multipliers > 1:
        registers, loading, multiplying = _TWO_MULTIPLIERS
    return {"HELD": held, "XREGS": registers, "LREGS": loading, "MREGS": multiplying, "S": shape.ring}
