"""Compiles what draws a token, as a kernel of its own, for sm_90; prints its PTX and shared memory as JSON.

A script, as kernels under test run in Triton's interpreter, which compiles nothing.
"""

from __future__ import annotations

import json

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from onewave.wave.kernel.sample import draw, narrow
from onewave.wave.kernel.sample.draw import draw_row
from onewave.wave.kernel.spin import load_words


@gluon.jit
def there(pointers, watch, block, step, WORDS: gl.constexpr):
    """poll_words of words that are there already."""
    return load_words(pointers, WORDS)


@gluon.jit
def draw_alone(
    several, draws, heads, out, best, drawn, out_stride, begin, batch,
    NB: gl.constexpr, R: gl.constexpr, TOKENS: gl.constexpr,
):  # fmt: skip
    """Every block's part of a launch's first token of each sequence from `begin` on. heads: a record a block; drawn:
    [blocks, NB], and behind them the rounds of narrow.py of each."""
    block = gl.program_id(0)
    rounds = 0
    for b in range(begin, batch):
        none = b * 0
        row, rounds = draw_row(
            several, draws, heads + block * 32, out, out_stride, none, none, b, gl.load(best + b), rounds, several,
            block, none, NB, R, TOKENS, 8,
        )  # fmt: skip
        gl.store(drawn + block * NB + b, row)
        gl.store(drawn + (gl.num_programs(0) + block) * NB + b, rounds)


TYPES = {
    "several": "*i64",
    "draws": "*fp64",
    "heads": "*i32",
    "out": "*i32",
    "best": "*fp32",
    "drawn": "*i64",
    "out_stride": "i32",
    "begin": "i32",
    "batch": "i32",
} | dict.fromkeys(("NB", "R", "TOKENS"), "constexpr")

if __name__ == "__main__":
    draw.poll_words = narrow.poll_words = there
    names = draw_alone.arg_names
    constants = {(names.index(name),): value for name, value in (("NB", 2), ("R", 16), ("TOKENS", 4))}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if TYPES[name].startswith("*")}
    source = GluonASTSource(draw_alone, TYPES, constants, aligned)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    print(json.dumps({"ptx": made.asm["ptx"], "shared": made.metadata.shared}))
