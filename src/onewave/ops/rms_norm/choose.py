"""What runs rms_norm and add_rms_norm, and the tile of their kernel."""

from onewave.ops.choice import Asked, Choice, because, empty_on_meta
from onewave.ops.rows import RowCall, check_on_gpu, choose_module, on_gpu, shape_of

_WHY = because("a row is read once and stays in registers between its sum of squares and its scaling")


def tile_of(hidden: int) -> tuple[int, int]:
    """Return (columns, warps) of a program, which owns a row."""
    block = 1 << (hidden - 1).bit_length()
    return block, 8 if block >= 2048 else 4


def choose(call: RowCall) -> Choice:
    """Return what runs; see ops/choice.py."""
    block, warps = tile_of(call.x.shape[-1])
    return choose_module(call) or on_gpu(call, _WHY, f"1 row of {block}, {warps} warps", str(call.num_rows))


def describe(asked: Asked) -> RowCall:
    """A question: x."""
    from onewave.ops.rms_norm.op import rms_norm

    shape = shape_of(asked)
    x = empty_on_meta(shape, asked.dtype)
    rms_norm(x, empty_on_meta(shape[-1:], asked.dtype), asked.options.get("eps", 1e-6))
    check_on_gpu(asked)
    return RowCall(x, "rms_norm", described=asked.device)
