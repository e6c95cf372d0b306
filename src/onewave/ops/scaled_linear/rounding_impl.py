"""How sums become results, in Triton: what the portable kernel and Hopper's have in common."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def to_int8(y, factor, LOW: tl.constexpr, HIGH: tl.constexpr, HALF_AWAY: tl.constexpr):
    """clip(round(factor * y), LOW, HIGH), half to even or away from zero; int8."""
    y = y * factor
    if HALF_AWAY:
        magnitude = tl.floor(tl.abs(y))
        # The fraction decides: y + 0.5 would round 0.49999997 up.
        magnitude = tl.where(tl.abs(y) - magnitude >= 0.5, magnitude + 1.0, magnitude)
        y = tl.where(y < 0, -magnitude, magnitude)
    else:
        # Adding and taking away 1.5 * 2^23 leaves no fraction; larger values have none.
        y = tl.where(tl.abs(y) < 4194304.0, (y + 12582912.0) - 12582912.0, y)
    return tl.minimum(tl.maximum(y, LOW), HIGH).to(tl.int8)
