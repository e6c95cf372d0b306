"""Compiles the search for a token's logit (ops/sampling/search_impl.py) for sm_90; prints what came out as JSON.

A script, as kernels under test run in Triton's interpreter, which compiles nothing.
"""

from __future__ import annotations

import json

import triton
from machine_code import machine_code
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from onewave.ops.sampling.search_impl import draw_limited_kernel

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
    names = draw_limited_kernel.arg_names
    constants = {(names.index("MOST"),): 256, (names.index("XW"),): 8}
    source = GluonASTSource(draw_limited_kernel, TYPES, constants, {})
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    registers, stack, _ = machine_code(kernel)
    print(json.dumps({"registers": registers, "stack": stack, "shared": kernel.metadata.shared}))
