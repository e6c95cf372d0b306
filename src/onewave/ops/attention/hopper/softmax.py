"""Steps of the attention kernels of Hopper: masks, and the softmax that is lazy."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Exponents of two from a row's highest score to its reference, when that is set, where P has the range of float32: P
# begins at 2^-24 and may reach 2^HEADROOM. |v| from 2^-90 on keeps its precision.
_LIFT = gl.constexpr(24)


@gluon.jit
def partial_sums(p, BN: gl.constexpr):
    """[64, BN] -> [64, 4]; every sum stays in its thread."""
    return gl.sum(gl.sum(p.reshape([64, BN // 8, 4, 2]), 3), 1)


@gluon.jit
def capped(problem, s):
    """Scores whose product with the softmax's unit is the exponent of 2: problem.outer where they are capped.

    Multiplied here, the product would be rounded, or not, as the compiler finds a loop: bits would depend on the loop.
    """
    if problem.SOFTCAP:
        # tanh(x) = 1 - 2 / (1 + e^2x), right for every x: e^2x may be 0 or inf.
        s = 1.0 - 2.0 / (1.0 + gl.exp2(s * problem.inner))
    return s


@gluon.jit
def hidden(problem, s, row_place, key, num_keys):
    """-inf where a row does not see a key. row_place [64, 1], key [1, BN]."""
    last = num_keys - 1
    if problem.RIGHT:
        last = gl.minimum(row_place + problem.right, last)
    seen = key <= last
    if problem.LEFT:
        seen = seen & (key >= row_place - problem.left)
    return gl.where(seen, s, -float("inf"))


@gluon.jit
def lazy_softmax(problem, s, m, total, unit, BN: gl.constexpr):
    """One step that moves m where a row's scores exceed it by more than HEADROOM: to the highest of them or, with bf16,
    LIFT above it, which leaves later scores HEADROOM + LIFT.

    Returns (p, m, total, factor of what was accumulated before: exactly 1 for a row whose m stays).
    """
    LIFT: gl.constexpr = _LIFT if problem.q.dtype == gl.bfloat16 else 0
    # Pairs first: one chain over all would wait for each maximum in turn.
    top = gl.max(gl.max(gl.max(s.reshape([64, BN // 8, 4, 2]), 3), 1), 1)
    top = gl.convert_layout(top, m.type.layout, assert_trivial=True) * unit + LIFT
    moved = gl.where(top > m + (problem.HEADROOM + LIFT), top, m)
    reference = gl.where(moved == -float("inf"), 0.0, moved)
    kept = gl.exp2(m - reference)
    p = gl.exp2(s * unit - reference[:, None])
    kept_in_total = gl.convert_layout(kept, gl.SliceLayout(1, total.type.layout))
    return p, moved, total * kept_in_total[:, None] + gl.convert_layout(partial_sums(p, BN), total.type.layout), kept
