"""Operands of products of weights with a scale a group, and scales, as threads hold them. Constexprs: kernel.py."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def activations(x, acc):
    """Load activations, [PARTS, N / PARTS, 64] in shared memory, as operand B of acc's product."""
    return x.permute((0, 2, 1)).load(gl.DotOperandLayout(1, acc.type.layout, 2))


@gluon.jit
def operand(values, OPERAND: gl.constexpr, PARTS: gl.constexpr, DTYPE: gl.constexpr):
    """Build one operand A of four values a word, int16 bits."""
    PASSES: gl.constexpr = values[0].shape[0] // 16
    EIGHTS: gl.constexpr = 2 if len(values[0].shape) == 3 else 4  # of columns, in a thread's words
    # [columns, 16 rows, row in 8, pair of columns in 8, 8 columns, half of 16 rows, column of a pair]
    a = gl.join(gl.join(values[0], values[1]), gl.join(values[2], values[3])).to(DTYPE, bitcast=True)
    a = gl.reshape(a, [PASSES, 4, 8, 4, EIGHTS, 2, 2])
    a = gl.reshape(gl.permute(a, (1, 5, 2, 0, 4, 3, 6)), [PARTS, 64 // PARTS, 8 * EIGHTS * PASSES])
    return gl.convert_layout(a, OPERAND, assert_trivial=True)


@gluon.jit
def scales_of(scales, acc):
    """Load a scale for each row of A: float32 [PARTS, 64 / PARTS, 1], beside acc.

    scales: float16 or float32 [4, 8, 2] in shared memory: 16 rows, row in 8, half of 16 rows.
    """
    return beside_rows(rows_loaded(scales).to(gl.float32), acc)


@gluon.jit
def rows_loaded(numbers):
    """Load a number for each row of A, [4, 8, 2], each by the threads that have the row's sums."""
    return numbers.load(gl.SliceLayout(3, gl.BlockedLayout([1, 1, 2, 1], [1, 8, 1, 4], [4, 1, 1, 1], [3, 2, 1, 0])))


@gluon.jit
def beside_rows(numbers, acc):
    """Put a number for each row of A, as scales_of loads them, beside acc: [PARTS, 64 / PARTS, 1]."""
    PARTS: gl.constexpr = acc.shape[0]
    rows = gl.reshape(gl.permute(numbers, (0, 2, 1)), [PARTS, 64 // PARTS])
    return gl.expand_dims(gl.convert_layout(rows, gl.SliceLayout(2, acc.type.layout), assert_trivial=True), 2)


@gluon.jit
def steps_of(steps, acc):
    """Load two integers for each row of A as scales_of loads scales. steps: int16, of two signed bytes each."""
    words = rows_loaded(steps).to(gl.int32)
    return beside_rows(small_integer(words), acc), beside_rows(small_integer(words >> 8), acc)


@gluon.jit
def small_integer(words):
    """Convert the signed lowest byte of each word to float32; an addition is faster than the conversion."""
    return (((words & 255) ^ 0x4B000080).to(gl.float32, bitcast=True)) - 8388736.0  # 2^23 + 128
