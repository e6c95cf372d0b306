"""Chooses the implementation of rms_norm and add_rms_norm, and the tile of their kernel."""

from onewave.ops import rows
from onewave.ops.choice import Asked, Choice, because

_WHY = because("a row is read once and stays in registers between its sum of squares and its scaling")


def tile_of(hidden: int) -> tuple[int, int]:
    """Return (columns, warps) of a program, which owns a row."""
    block = 1 << (hidden - 1).bit_length()
    return block, 8 if block >= 2048 else 4


def choose(call: rows.RowCall) -> Choice:
    """Return what runs; see ops/choice.py."""
    block, warps = tile_of(call.x.shape[-1])
    return rows.choose(call, _WHY, f"1 row of {block}, {warps} warps", str(call.num_rows))


def describe(asked: Asked) -> rows.RowCall:
    """A question: x."""
    from onewave.ops.rms_norm.op import rms_norm

    eps = asked.options.get("eps", 1e-6)
    return rows.describe(asked, "rms_norm", lambda x: rms_norm(x, x.new_empty(x.shape[-1:]), eps))
