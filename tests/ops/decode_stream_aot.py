"""Compile Hopper's decode kernel without a card: `python decode_stream_aot.py`, one JSON line a case.

Each line: name, registers, stack and shared (bytes), products (tensor core instructions), copies (of TMA), barriers (a
tile's: between its first product and its last), early (ptx_arrivals), lost (lost_buffers), endless (endless_loops),
unwaited (of the workers and of the loader, what touches memory before the wait for the launch before: loads past the
first-level cache, requests of the second-level one, and anything else), carried (values that the loader takes from one
row to the next), prompt (the loader's instructions from that wait to its first copy). Not under Triton's interpreter:
TRITON_INTERPRET must be unset.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

import triton
from endless_loops import endless_loops
from lost_buffers import lost_buffers
from machine_code import machine_code
from ptx_arrivals import early_arrivals
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from onewave.ops.decode_attention.hopper.kernel import stream_kernel
from onewave.ops.decode_attention.hopper.plan import stream_tile
from onewave.ops.decode_attention.triton.plan import DecodeSizes, plan_decode

FUSED = {"FUSED": True, "HAS_MASK": True, "HAS_BIAS": True, "HAS_SHIFT": True, "HAS_SMOOTH": True, "HAS_FINISHED": True}
CASES: dict[str, dict[str, Any]] = {
    "one row": {"rows": 1},
    "batch": {"rows": 16},
    "D64": {"rows": 16, "head_dim": 64},
    "128 rows, pages of 16": {"rows": 128, "WIDE": True, "PAGING": 3, "PAGE": 16},
    "128 rows": {"rows": 128, "WIDE": True},
    "256 rows": {"rows": 256, "WIDE": True},
    "256 rows, pages of 256": {"rows": 256, "WIDE": True, "PAGING": 2},
    "one row, pages of 16": {"rows": 1, "PAGING": 3, "PAGE": 16},
    "pages of 16": {"rows": 16, "PAGING": 3, "PAGE": 16},
    "two queries, softcap, sinks, lse": {"num_queries": 2, "HAS_SOFTCAP": True, "HAS_SINKS": True, "HAS_LSE": True},
    "mmha": FUSED,
    "mmha, one row": {"rows": 1, "FUSED": True},
    "mmha, one row that may be finished": FUSED | {"rows": 1},
    "mmha, 128 rows": FUSED | {"rows": 128, "WIDE": True},
    "mmha int8": {"QUANTISED": True, "HALF_AWAY": True, "INTERLEAVED": True} | FUSED,
}


def report(name: str, rows: int = 16, head_dim: int = 128, num_queries: int = 1, **given: Any) -> dict[str, Any]:
    plan = plan_decode(DecodeSizes(32, 8, num_queries, head_dim, capacity=4096, kv_itemsize=2))
    tile = stream_tile(rows, 4096, 16)
    flags = (
        "HAS_SOFTCAP", "HAS_SINKS", "HAS_MASK", "HAS_LSE", "FUSED", "HAS_FINISHED", "HAS_BIAS", "HAS_QKV_SCALE",
        "INTERLEAVED", "HAS_SHIFT", "HAS_SMOOTH", "QUANTISED", "HALF_AWAY", "WIDE",
    )  # fmt: skip
    constants: dict[str, Any] = dict.fromkeys(flags, False) | {
        "GROUP": 4, "SPLIT": plan.split, "LOG_SMALLEST": plan.smallest.bit_length() - 1,
        "DOUBLINGS": plan.doublings, "BLOCK_M": plan.block_m, "BLOCK_N": plan.block_n, "BLOCK_D": plan.block_d,
        "BLOCK_H": plan.block_h, "STAGES": tile.stages, "FLIGHT": tile.flight, "LOADER": tile.loader, "PAGING": 0,
        "PAGE": 0, "ONE_QUERY": num_queries == 1, "ROWS": plan.rows_looked_at(rows), "UNROLL": plan.unroll,
        "IN_EIGHTS": not given.get("INTERLEAVED", False),
    } | given  # fmt: skip
    page = constants["PAGE"]
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    box = [1, 1, page or plan.block_n, 64 if page else plan.block_d]
    types = dict.fromkeys(("k_tiles", "v_tiles"), f"tensordesc<bf16{box},{layout!r}>")
    types |= dict.fromkeys(("lengths", "table"), "*i64") | {"finished": "*i8", "counters": "*i32"}
    types |= dict.fromkeys(("q", "k", "v", "qkv", "bias", "out"), "*bf16")
    types |= {"out": "*i8"} if constants["QUANTISED"] else {}
    types |= dict.fromkeys(
        ("sinks", "mask", "qkv_scale", "rotary", "shift", "smooth", "lse", "part", "stats"), "*fp32"
    ) | dict.fromkeys(("scale_log2", "softcap", "out_scale", "max_bound", "min_bound"), "fp32")
    names = stream_kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    aligned = [n for n in names if signature[n].startswith("*") or (n.startswith("stride_") and n != "stride_table")]
    hints = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    fixed = {(names.index(name),): value for name, value in constants.items()}
    compiled = triton.compile(
        GluonASTSource(stream_kernel, signature, fixed, hints),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": 4, "maxnreg": tile.registers, "enable_fp_fusion": False},
    )
    registers, stack, code = machine_code(compiled)
    worker, _, loader = compiled.asm["ttgir"].partition("partition0(")
    before = [part[: part.index("griddepcontrol.wait")] for part in (worker, loader)]
    found = [re.findall(r"tt\.load.*|prefetch|async_tma_copy|tt\.store|tt\.atomic", part) for part in before]
    unwaited = [Counter("cg" if "cacheModifier = cg" in each else each for each in part) for part in found]
    rows_loop = re.search(r"scf\.for %row\S* .*? iter_args\((.*?)\) ->", loader)
    steps = re.findall(r"ACQBULK|UTMALDG|^\s*/\*[0-9a-f]{4,}\*/", code, re.MULTILINE)
    prompt = min(
        steps[at:].index("UTMALDG") for at, step in enumerate(steps) if step == "ACQBULK" and "UTMALDG" in steps[at:]
    )
    products = [match.start() for match in re.finditer("HMMA", code)]
    return {
        "name": name, "registers": registers, "stack": stack, "shared": compiled.metadata.shared,
        "products": len(products), "copies": compiled.asm["ptx"].count("cp.async.bulk.tensor"),
        "marked": len(re.findall(r"cp\.async\.bulk\.tensor\S*L2::cache_hint", compiled.asm["ptx"])),
        "barriers": code[products[0] : products[-1]].count("BAR.SYNC"), "early": early_arrivals(compiled.asm["ptx"]),
        "lost": lost_buffers(compiled.asm["ttgir"]), "endless": endless_loops(compiled.asm["ttgir"]),
        "unwaited": unwaited,
        "prompt": prompt, "carried": 0 if rows_loop is None else rows_loop[1].count("="),
    }  # fmt: skip


if __name__ == "__main__":
    for case, arguments in CASES.items():
        print(json.dumps(report(case, **arguments)), flush=True)
