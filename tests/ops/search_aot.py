"""Compiles the search for a token's logit (ops/sampling/search_impl.py) for sm_90; prints what came out as JSON.

A script, as kernels under test run in Triton's interpreter, which compiles nothing. Argument: "there", to compile polls
as loads of words that are there already, and to print the PTX too.
"""

from __future__ import annotations

import json
import sys

import triton
from machine_code import machine_code
from triton.backends.compiler import GPUTarget
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from onewave.ops.sampling import draw_impl, rounds_impl
from onewave.ops.sampling.search_impl import draw_limited_kernel
from onewave.wave.kernel.spin import load_words


@gluon.jit
def there(pointers, watch, block, step, WORDS: gl.constexpr):
    """poll_words of words that are there already."""
    return load_words(pointers, WORDS)


TYPES = {
    "sets": "*i64",
    "epochs": "*i32",
    "draws": "*fp64",
    "uniform": "*fp64",
    "logits": "*fp32",
    "most": "*fp32",
    "tokens": "*i64",
    "watch": "*i32",
    "vocabulary": "i32",
    "stride": "i32",
    "share": "i32",
    "set_words": "i32",
    "pieces": "i32",
    "MOST": "constexpr",
    "XW": "constexpr",
}

if __name__ == "__main__":
    polls_not = sys.argv[1:] == ["there"]
    if polls_not:
        draw_impl.poll_words = rounds_impl.poll_words = there
    names = draw_limited_kernel.arg_names
    constants = {(names.index("MOST"),): 256, (names.index("XW"),): 8}
    pointers = [i for i, name in enumerate(names) if TYPES[name].startswith("*") and name != "uniform"]
    aligned = {(i,): [["tt.divisibility", 16]] for i in pointers}
    source = GluonASTSource(draw_limited_kernel, TYPES, constants, aligned)
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    registers, stack, _ = machine_code(kernel)
    report = {"registers": registers, "stack": stack, "shared": kernel.metadata.shared}
    print(json.dumps(report | ({"ptx": kernel.asm["ptx"]} if polls_not else {})))
