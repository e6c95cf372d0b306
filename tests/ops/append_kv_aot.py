"""Compiles append_kv's kernel for a float8 cache on sm_90; prints how its PTX bounds numbers and converts them as JSON.

A script, as kernels under test run in Triton's interpreter, which compiles nothing and has no float8.
"""

from __future__ import annotations

import json
import re

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from onewave.ops.append_kv.triton_impl import append_kv_kernel

POINTERS = dict.fromkeys(("k_ptr", "v_ptr"), "*fp8e4nv") | dict.fromkeys(("slots_ptr", "positions_ptr"), "*i64")
POINTERS |= {"table_ptr": "*i64"} | dict.fromkeys(("rotary_ptr", "k_scale_ptr", "v_scale_ptr"), "*fp32")
CONSTANTS = dict.fromkeys(
    ("HAS_BIAS", "Q_NORM", "K_NORM", "INTERLEAVED", "PAGED", "HAS_K_SCALE", "HAS_V_SCALE", "PDL"), False
) | {"KIND": 2, "CHUNK": 128, "BLOCK": 128}

if __name__ == "__main__":
    names = append_kv_kernel.arg_names
    plain = {name: "*bf16" if name.endswith("_ptr") else "fp32" if name == "eps" else "i32" for name in names}
    types = plain | POINTERS | dict.fromkeys(CONSTANTS, "constexpr")
    source = ASTSource(append_kv_kernel, types, {(names.index(name),): value for name, value in CONSTANTS.items()})
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1}).asm["ptx"]
    print(json.dumps(sorted(set(re.findall(r"\t(m(?:ax|in)\.\S*f32|cvt\S*e4m3x2\S*)", ptx)))))
