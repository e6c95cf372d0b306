"""Chooses the implementation of swiglu, and the tile of its kernel."""

from onewave.ops import rows
from onewave.ops.choice import Asked, Choice, because

BLOCK = 512
"""Elements of a program."""
NUM_WARPS = 4
_WHY = because("elementwise, memory bound")


def choose(call: rows.RowCall) -> Choice:
    """Return what runs; see ops/choice.py."""
    pieces = -(-(call.x.shape[-1] // 2) // BLOCK)
    return rows.choose(call, _WHY, f"{BLOCK} elements, {NUM_WARPS} warps", f"{call.num_rows} x {pieces}")


def describe(asked: Asked) -> rows.RowCall:
    """A question: gate_up."""
    from onewave.ops.swiglu.op import swiglu

    return rows.describe(asked, "swiglu", swiglu)
