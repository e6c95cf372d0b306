"""Compile the attention kernel for cards that are not here: `python attention_aot.py`, one JSON line a case.

Each line: name, registers, stack and shared (bytes), products (tensor core instructions), tma, and sums, the layouts in
which rows are summed. Not under Triton's interpreter: TRITON_INTERPRET must be unset.
"""

from __future__ import annotations

import json
import re
from typing import Any

import torch
import triton
from machine_code import machine_code
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from onewave.base.device import Device
from onewave.ops.attention.masks import Options
from onewave.ops.attention.plan import Facts
from onewave.ops.attention.triton.kernel import attention_kernel
from onewave.ops.attention.triton.plan import plan_portable

CAUSAL = {"RIGHT": True, "TAIL": True}
CASES: dict[str, dict[str, Any]] = {
    "sm_90 128": {"head_dim": 128},
    "sm_90 128 causal": {"head_dim": 128} | CAUSAL,
    "sm_90 64 causal": {"head_dim": 64} | CAUSAL,
    "sm_90 80 packed": {"head_dim": 80, "RAGGED": True, "LSE": True} | CAUSAL,
    "sm_90 64 bool mask": {"head_dim": 64, "BIAS": 1, "TAIL": True},
    "sm_90 256 bool mask": {"head_dim": 256, "BIAS": 1, "TAIL": True},
    "sm_90 256 bfloat16 bias": {"head_dim": 256, "BIAS": 2, "bias": "bf16", "TAIL": True},
    "sm_90 256 float bias": {"head_dim": 256, "BIAS": 2, "TAIL": True},
    "sm_90 256 float bias, pointers": {"head_dim": 256, "BIAS": 2, "TAIL": True, "descriptors": False},
    "sm_80 128 causal": {"head_dim": 128, "capability": 80} | CAUSAL,
    "sm_89 64 float bias": {"head_dim": 64, "capability": 89, "BIAS": 2, "TAIL": True},
}


def source(
    head_dim: int, capability: int, given: dict[str, Any], *, descriptors: bool = True, bias: str = "fp32"
) -> tuple[ASTSource, dict[str, int]]:
    """The kernel with a plan's tiles for bf16 and strides that are multiples of 16. bias: dtype of BIAS 2."""
    device = Device((capability // 10, capability % 10), 132)
    plan = plan_portable(
        Facts(
            "attention", "triton", device, torch.bfloat16, Options(1.0), 4, 16, 16, 4096, 4096, head_dim,
            bias=torch.float32 if given.get("BIAS") == 2 and bias == "fp32" else None, keys_by_tma=descriptors,
        )
    )  # fmt: skip
    flags = dict.fromkeys(("RAGGED", "TOP_LEFT", "LEFT", "RIGHT", "SOFTCAP", "SINKS", "ALIBI", "LSE", "TAIL"), False)
    constants = flags | {
        "PACK": 1, "HEAD_DIM": head_dim, "WIDTH": plan.width, "BLOCK_M": plan.block_m, "BLOCK_N": plan.block_n,
        "TMA": plan.descriptors, "BIAS": 0, "POSITIVE": True,
    } | given  # fmt: skip
    keys = f"tensordesc<bf16[1, 1, {plan.block_n}, {plan.width}]>" if plan.descriptors else "*bf16"
    three = ("i32",) * 3
    types: dict[str, Any] = {"q_ptr": "*bf16", "k": keys, "v": keys, "out_ptr": "*bf16"}
    types |= dict.fromkeys(("stride_q", "stride_k", "stride_v", "stride_out", "stride_lse"), three)
    types |= {"stride_slopes": ("i32",) * 2, "stride_bias": (*three, "constexpr")}
    types |= dict.fromkeys(("num_heads", "group", "num_queries", "num_keys", "tiles", "shift", "left", "right"), "i32")
    types |= dict.fromkeys(("scale_log2", "inner", "outer"), "fp32")
    types |= {"lse_ptr": "*fp32"} if constants["LSE"] else {}
    types |= {"bias_ptr": "*u8" if constants["BIAS"] == 1 else f"*{bias}"} if constants["BIAS"] else {}
    types |= dict.fromkeys(("starts_q_ptr", "starts_k_ptr"), "*i32") if constants["RAGGED"] else {}
    names = attention_kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    fixed = {(at,): constants.get(name) for at, name in enumerate(names) if name not in types}
    fixed[names.index("stride_bias"), 3] = 1
    aligned = [["tt.divisibility", 16]]
    hints: dict[tuple[int, ...], Any] = {}
    for at, name in enumerate(names):
        if name in ("stride_q", "stride_k", "stride_v", "stride_out", "stride_bias"):
            hints |= {(at, axis): aligned for axis in range(3)}
        elif str(types.get(name, "")).startswith("*"):
            hints[(at,)] = aligned
    return ASTSource(attention_kernel, signature, fixed, hints), {
        "num_warps": plan.num_warps,
        "num_stages": plan.num_stages,
    }


def report(
    name: str, head_dim: int, capability: int = 90, *, descriptors: bool = True, bias: str = "fp32", **given: Any
) -> dict[str, Any]:
    kernel, options = source(head_dim, capability, given, descriptors=descriptors, bias=bias)
    compiled = triton.compile(kernel, target=GPUTarget("cuda", capability, 32), options=options)
    registers, stack, code = machine_code(compiled)
    sums = re.findall(r'"tt.reduce"\(%\w+\) <\{axis = 1 .*?\}\) : \(tensor<[^>]*, #(\w+)>', compiled.asm["ttgir"], re.S)
    return {
        "name": name, "registers": registers, "stack": stack, "shared": compiled.metadata.shared,
        "products": len(re.findall(r"HGMMA|HMMA", code)), "tma": code.count("UTMALDG"), "sums": sorted(set(sums)),
    }  # fmt: skip


if __name__ == "__main__":
    for case, arguments in CASES.items():
        print(json.dumps(report(case, **arguments)), flush=True)
