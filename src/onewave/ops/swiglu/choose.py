"""What runs swiglu, and the tile of its kernel."""

from onewave.ops.choice import Asked, Choice, because, empty_on_meta
from onewave.ops.rows import RowCall, check_on_gpu, choose_module, on_gpu, shape_of

BLOCK = 512
"""Elements of a program."""
NUM_WARPS = 4
_WHY = because("elementwise, memory bound")


def choose(call: RowCall) -> Choice:
    """Return what runs; see ops/choice.py."""
    pieces = -(-(call.x.shape[-1] // 2) // BLOCK)
    tile = f"{BLOCK} elements, {NUM_WARPS} warps"
    return choose_module(call) or on_gpu(call, _WHY, tile, f"{call.num_rows} x {pieces}")


def describe(asked: Asked) -> RowCall:
    """A question: gate_up."""
    from onewave.ops.swiglu.op import swiglu

    x = empty_on_meta(shape_of(asked), asked.dtype)
    swiglu(x)
    check_on_gpu(asked)
    return RowCall(x, "swiglu", described=asked.device)
