"""Compile the split-KV kernel for cards that are not here: `python decode_attention_aot.py`, one JSON line a case.

Each line: name, seconds (of the processor, for compiling), registers, stack (bytes), shared (bytes), products (tensor
core instructions), copies (asynchronous ones), asked_first (loads before the first barrier), asked_ahead (requests of
L2 for the next row), merged_at_once (loads of a merge before its first maximum), unset (reads of registers or spilt
ones that may come before their writes), sums (the layouts in which keys are compared and summed), unwaited (what
touches memory before the wait for the launch before; None without one). Not under Triton's interpreter:
TRITON_INTERPRET must be unset.
"""

from __future__ import annotations

import json
import re
import time
from typing import Any

import triton
from machine_code import machine_code
from sass_registers import reads_before_writes
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from onewave.ops.decode_attention.triton.launch import MAX_REGISTERS
from onewave.ops.decode_attention.triton.plan import DecodeSizes, plan_decode
from onewave.ops.decode_attention.triton.split_kv import split_kv_kernel

FUSED = {"FUSED": True, "HAS_MASK": True, "HAS_BIAS": True, "HAS_SHIFT": True, "HAS_SMOOTH": True}
EXTRAS = {"HAS_SOFTCAP": True, "HAS_SINKS": True, "HAS_LSE": True}
CASES: dict[str, dict[str, Any]] = {
    "sm_90 one row": {"rows": 1},
    "sm_90 one row, mmha": {"rows": 1, "FUSED": True},
    "sm_90 batch": {"rows": 16},
    "sm_90 D64": {"rows": 16, "head_dim": 64},
    "sm_90 D256": {"rows": 16, "head_dim": 256},
    "sm_90 eight queries": {"rows": 16, "num_queries": 8},
    "sm_90 eight queries, int8": {"rows": 16, "num_queries": 8, "cache": "i8", "KV_SCALES": True},
    "sm_90 five queries, D40": {"rows": 16, "num_queries": 5, "head_dim": 40, "aligned": 8},
    "sm_90 eight queries, D120, pages": {"rows": 16, "num_queries": 8, "head_dim": 120, "aligned": 8, "PAGING": 3},
    "sm_90 rows anywhere": {"rows": 16, "head_dim": 64, "aligned": 1},
    "sm_90 rows anywhere, five queries": {"rows": 16, "num_queries": 5, "head_dim": 64, "aligned": 1},
    "sm_90 rows anywhere, eight queries, pages": {"rows": 16, "num_queries": 8, "aligned": 1, "PAGING": 3} | EXTRAS,
    "sm_90 many rows": {"rows": 300, "MANY": True},
    "sm_90 one head, D64": {"rows": 1, "num_heads": 1, "num_kv_heads": 1, "head_dim": 64, "capacity": 131072},
    "sm_90 pages": {"rows": 16, "PAGING": 3},
    "sm_90 int8": {"rows": 16, "cache": "i8", "KV_SCALES": True},
    "sm_90 float8": {"rows": 16, "cache": "fp8e4nv", "KV_SCALES": True},
    "sm_90 softcap, sinks, lse": {"rows": 16} | EXTRAS,
    "sm_90 mmha": {"rows": 16} | FUSED,
    "sm_90 mmha, bfloat16 mask": {"rows": 16, "mask": "bf16"} | FUSED,
    "sm_90 mmha D64, float16 mask": {"rows": 16, "head_dim": 64, "mask": "fp16"} | FUSED,
    "sm_90 one row, mmha, bfloat16 mask": {"rows": 1, "mask": "bf16"} | FUSED,
    "sm_90 mmha int8": {"rows": 16, "QUANTISED": True, "HALF_AWAY": True, "INTERLEAVED": True} | FUSED,
    "sm_80 batch": {"rows": 16, "capability": 80},
}


def report(
    name: str,
    rows: int,
    head_dim: int = 128,
    num_queries: int = 1,
    cache: str = "bf16",
    capability: int = 90,
    aligned: int = 16,
    mask: str = "fp32",
    num_heads: int = 32,
    num_kv_heads: int = 8,
    capacity: int = 4096,
    **given: Any,
) -> dict[str, Any]:
    """aligned: what head_dim and all strides of the cache are multiples of: 16, 8 or 1. mask: its dtype."""
    item = 2 if cache == "bf16" else 1
    sizes = DecodeSizes(num_heads, num_kv_heads, num_queries, head_dim, capacity, item, in_pieces=aligned > 1)
    plan = plan_decode(sizes)
    # As launch has it: of a program that may have several rows, found without pages.
    several = capability >= 90 and rows > 1 and not given.get("MANY") and given.get("PAGING", 0) < 2
    flags = (
        "MANY", "KV_SCALES", "HAS_SOFTCAP", "HAS_SINKS", "HAS_MASK", "HAS_LSE", "FUSED", "HAS_FINISHED", "HAS_BIAS",
        "HAS_QKV_SCALE", "INTERLEAVED", "HAS_SHIFT", "HAS_SMOOTH", "QUANTISED", "HALF_AWAY",
    )  # fmt: skip
    constants: dict[str, Any] = dict.fromkeys(flags, False) | {
        "GROUP": num_heads // num_kv_heads, "TILES": plan.tiles, "SPLIT": plan.split, "DOUBLINGS": plan.doublings,
        "LOG_SMALLEST": plan.smallest.bit_length() - 1,
        "BLOCK_M": plan.block_m, "BLOCK_N": plan.block_n, "BLOCK_D": plan.block_d, "BLOCK_H": plan.block_h,
        "NUM_STAGES": plan.num_stages, "CHUNK": head_dim, "PAGING": 0, "ONE_QUERY": num_queries == 1,
        "ROWS": plan.rows_looked_at(rows),
        "PDL": capability >= 90, "AHEAD": plan.ahead if several else 0, "AT_ONCE": 8,
        "WIDE": False, "NARROW": True, "TRIGGER": plan.trigger, "UNROLL": plan.unroll_by_triton,
        "UNIT": 8 if aligned == 8 else 1, "IN_EIGHTS": not given.get("INTERLEAVED", False),
    } | given  # fmt: skip
    pointers = {
        "lengths_ptr": "*i64",
        "table_ptr": "*i64",
        "counters_ptr": "*i32",
        "k_ptr": f"*{cache}",
        "v_ptr": f"*{cache}",
        "mask_ptr": f"*{mask}",
    }
    pointers |= dict.fromkeys(("q_ptr", "qkv_ptr", "bias_ptr"), "*bf16")
    pointers["out_ptr"] = "*i8" if constants["QUANTISED"] else "*bf16"
    floats = ("scale_log2", "softcap", "out_scale", "max_bound", "min_bound")
    signature: dict[str, str] = {}
    for argument in split_kv_kernel.arg_names:
        kind = "constexpr" if argument in constants else "fp32" if argument in floats else "i32"
        signature[argument] = pointers.get(argument, "*fp32") if argument.endswith("_ptr") else kind
    names = split_kv_kernel.arg_names
    fixed = {(names.index(argument),): value for argument, value in constants.items()}
    whole = ["capacity", *[argument for argument in names if argument.endswith("_ptr")]]
    if aligned == 16:
        whole += ["head_dim", *[argument for argument in names if argument.startswith("stride_")]]
    hints = {(names.index(argument),): [["tt.divisibility", 16]] for argument in whole}
    begin = time.process_time()
    compiled = triton.compile(
        ASTSource(split_kv_kernel, signature, fixed, hints),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": plan.num_warps, "maxnreg": MAX_REGISTERS, "enable_fp_fusion": False},
    )
    seconds = time.process_time() - begin
    registers, stack, code = machine_code(compiled)
    opcodes = re.findall(r"\*/\s+(?:@!?U?P\w+ )?([A-Z]+)", code)
    before = opcodes[: opcodes.index("ACQBULK")] if "ACQBULK" in opcodes else None
    over_keys = r"\(tensor<\d+x\d+xf32, #(\w+)>\) -> tensor<\d+xf32, #ttg.slice<\{dim = 0"
    return {
        "name": name, "seconds": seconds, "registers": registers, "stack": stack, "shared": compiled.metadata.shared,
        "products": len(re.findall(r"HGMMA|HMMA", code)), "copies": code.count("LDGSTS"),
        "asked_first": len(re.findall(r"LDG\.", code.split("BAR.SYNC", 1)[0])), "asked_ahead": code.count("UBLKPF"),
        "unset": reads_before_writes(code), "sums": sorted(set(re.findall(over_keys, compiled.asm["ttgir"]))),
        "merged_at_once": len(re.findall(r"LDG\.", code.partition("ATOM")[2].partition("FMNMX")[0])),
        "unwaited": before and [opcode for opcode in before if re.match(r"LD[^C]|ST|ATOM|RED|UTMA|UBLK", opcode)],
    }  # fmt: skip


if __name__ == "__main__":
    for case, arguments in CASES.items():
        print(json.dumps(report(case, **arguments)), flush=True)
