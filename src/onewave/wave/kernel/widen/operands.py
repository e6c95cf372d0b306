"""Operands of products of weights with a scale a group, and scales, as threads hold them. Constexprs: kernel.py."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


def _steps(first: str) -> str:
    """PTX of four signed bytes' numbers. A byte, 128 more, in the lowest bits of a float32 with an exponent of 23 is
    added to 2^23, and taken away is 2^23 + 128: faster than a conversion. first: the exponent's byte of the first and
    third number."""
    magic = (first, "4B") * 2
    lines = [
        line
        for at, top in enumerate(magic)
        for line in (
            f"prmt.b32 x, y, 0x{top}000000, 0x765{at};",
            f"add.rn.f32 ${at}, x, 0f{int(top, 16) | 128:X}000080;",
        )
    ]
    return "\n".join(["{", ".reg .b32 x, y;", "xor.b32 y, $4, 0x80808080;", *lines, "}"])


_STEPS, _SIXTEENTHS = gl.constexpr(_steps("4B")), gl.constexpr(_steps("49"))
_FLOATS = gl.constexpr((gl.float32,) * 4)


@gluon.constexpr_function
def parts_of(R, NB) -> int:
    """Parts of a product: each one's rows need no other part's columns.

    A warp's rows are those of few column groups (layout.py), and it need not multiply by the others' activations. A
    part has eight columns at least.
    """
    return max(1, min(4, 64 // R, 64 // R * NB // 8))


@gluon.constexpr_function
def byte_products(PARTS):
    """The layout of a product of one-byte or compact weights, [PARTS, 64 / PARTS, N / PARTS]."""
    warps = [PARTS, 4 // PARTS, 1]
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=warps, instr_shape=[1, 16, 8])


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


@gluon.constexpr_function
def rows_in_threads():
    """The layout of a word for 8 rows of A and the ones 8 below, [4, 8], in each thread that has these rows' sums."""
    return gl.DistributedLinearLayout(
        reg_bases=[],
        lane_bases=[[0, 0], [0, 0], [0, 1], [0, 2], [0, 4]],
        warp_bases=[[1, 0], [2, 0]],
        block_bases=[],
        shape=[4, 8],
    )


@gluon.jit
def steps_of(steps, acc, SIXTEENTHS: gl.constexpr = False):
    """Load two integers for each row of A as scales_of loads scales. steps: int32 [4, 8], of step_numbers' words."""
    return steps_beside(steps.load(rows_in_threads()), acc, SIXTEENTHS)


@gluon.jit
def steps_beside(words, acc, SIXTEENTHS: gl.constexpr = False):
    """Put two integers for each row of A, of words for 8 rows and the ones 8 below, beside acc."""
    first, second, first_below, second_below = step_numbers(words, SIXTEENTHS)
    return beside_rows(gl.join(first, first_below), acc), beside_rows(gl.join(second, second_below), acc)


@gluon.jit
def step_numbers(words, SIXTEENTHS: gl.constexpr):
    """Convert each word's four signed bytes to float32: two of a row, then of the row 8 below. SIXTEENTHS: the
    first of either are a sixteenth, as numbers of nibbles in the upper bits want it."""
    TEXT: gl.constexpr = _SIXTEENTHS if SIXTEENTHS else _STEPS
    return gl.inline_asm_elementwise(TEXT, "=f,=f,=f,=f,r", [words], dtype=_FLOATS, is_pure=True, pack=1)
