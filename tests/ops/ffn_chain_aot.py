"""Compile the kernel for many rows without a card: `python ffn_chain_aot.py`, one JSON line a case.

Each line: name, registers, stack and shared (bytes), threads, and how often instructions occur. Not under Triton's
interpreter: TRITON_INTERPRET must be unset.
"""

from __future__ import annotations

import json
import re
from typing import Any

import triton
from endless_loops import endless_loops
from lost_buffers import lost_buffers
from machine_code import machine_code
from ptx_arrivals import early_arrivals
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from onewave.ops.ffn.chain.kernel import chain_kernel, started_kernel
from onewave.ops.ffn.chain.plan import ChainSizes, ChainTile, default_tile

INSTRUCTIONS = ("HGMMA", "UTMALDG", "UTMASTG", "USETMAXREG", "STL", "LDL")
# The tiles that default_tile takes for 16 and for 8,192 rows, and one between.
FEW, MANY = (default_tile(ChainSizes(rows, 4096, 14336, 4096, True), 132) for rows in (16, 8192))
SOME = ChainTile(2, 128, 6, 2)
CASES: dict[str, tuple[ChainTile, dict[str, Any]]] = {
    "few rows, slices": (FEW, {"SPLIT": True}),
    "some rows, ungated, gelu": (SOME, {"GATED": False, "ACT": 2}),
    "many rows": (MANY, {}),
    "many rows, ungated, marked": (MANY, {"GATED": False, "MARK": True}),
    "many rows, slices, float16": (MANY, {"SPLIT": True, "dtype": "fp16"}),
    "many rows, delays and trace": (MANY, {"SPLIT": True, "TEST": True, "TRACE": True}),
}


def source_of(tile: ChainTile, dtype: str = "bf16", **changes: Any) -> GluonASTSource:
    constants: dict[str, Any] = {
        "DTYPE": gl.bfloat16 if dtype == "bf16" else gl.float16,
        "BN": tile.columns,
        "W": tile.warpgroups,
        "S": tile.stages,
        "OB": tile.buffers,
        "ACT": 1,
        "GATED": True,
        "SPLIT": False,
        "MARK": False,
        "TEST": False,
        "TRACE": False,
    } | changes
    names, half, layout = chain_kernel.arg_names, tile.columns // 2, repr(gl.NVMMASharedLayout(128, 16, 2))
    types = dict.fromkeys(names, "*i32") | {"partials": "*fp32", "skipped": "i32"}
    types |= {"partial_stride": "i32", "partial_slab": "i32"}
    boxes = {"x": (64, 64), "hidden": (64, 64), "gate": (half, 64), "up": (half, 64), "down": (half, 64)}
    for name, box in (boxes | {"hidden_out": (64, half), "y_out": (64, half)}).items():
        types[name] = f"tensordesc<{dtype}[{box[0]}, {box[1]}],{layout}>"
    types |= dict.fromkeys(constants, "constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if types[name].startswith("*")}
    return GluonASTSource(chain_kernel, types, {(names.index(n),): v for n, v in constants.items()}, aligned)


def report(name: str, source: GluonASTSource, num_warps: int) -> dict[str, Any]:
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps})
    registers, stack, code = machine_code(kernel)
    order = re.findall(r"UTMASTG|DEPBAR\.LE SB0|CCTL\.IVALL|FENCE\.VIEW\.ASYNC|MEMBAR\.ALL\.GPU|ATOMG", code)
    found = {"name": name, "registers": registers, "stack": stack, "shared": kernel.metadata.shared}
    found |= {"threads": 32 * kernel.metadata.num_warps, "order": order}
    found |= {"early": early_arrivals(kernel.asm["ptx"]), "lost": lost_buffers(kernel.asm["ttgir"])}
    found |= {"endless": endless_loops(kernel.asm["ttgir"])}
    return found | {word: len(re.findall(word, code)) for word in INSTRUCTIONS}


if __name__ == "__main__":
    for case, (tile, changes) in CASES.items():
        print(json.dumps(report(case, source_of(tile, **changes), 4)), flush=True)
    pointers = {"started": "*i32", "epochs": "*i32", "watch": "*i32", "blocks": "i32"}
    print(json.dumps(report("watcher", GluonASTSource(started_kernel, pointers, {}, {}), 1)), flush=True)
