"""Compile Hopper's attention kernel without a card: `python attention_gluon_aot.py`, one JSON line a case.

Each line: name, registers, stack and shared (bytes), seconds, and how often instructions occur. Not under Triton's
interpreter: TRITON_INTERPRET must be unset.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from onewave.ops.attention.gluon_kernel_impl import attention_kernel
from onewave.ops.attention.gluon_plan import columns_of, config

__all__: list[str] = []

CASES: dict[str, dict[str, Any]] = {
    "128": {"head_dim": 128},
    "128 by barrier": {"head_dim": 128, "BARRIER_VOTE": True},
    "64 causal packed": {"head_dim": 64, "RIGHT": True, "RAGGED": True, "LSE": True},
    "256 causal": {"head_dim": 256, "RIGHT": True},
}
INSTRUCTIONS = ("HGMMA", "UTMALDG", "UTMASTG", "USETMAXREG", "BAR.RED", "STL", "LDL")


def source(head_dim: int, given: dict[str, Any]) -> GluonASTSource:
    columns = columns_of(head_dim)
    flags = dict.fromkeys(("RAGGED", "TOP_LEFT", "LEFT", "RIGHT", "SOFTCAP", "SINKS", "LSE"), False)
    constants = flags | config(columns) | {"D": columns, "HEADROOM": 40} | given
    rank = 5 if constants["RAGGED"] else 4
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=rank)
    types = dict.fromkeys(("scale_log2", "inner", "outer"), "fp32") | dict.fromkeys(("lse", "sinks"), "*fp32")
    types |= dict.fromkeys(("starts_q", "starts_k"), "*i32") | dict.fromkeys(("lse_batch", "lse_head"), "i64")
    for name, rows in (("q", 64), ("out", 64), ("k", constants["BN"]), ("v", constants["BN"])):
        types[name] = f"tensordesc<bf16{[1] * (rank - 2) + [rows, columns]},{layout!r}>"
    names = attention_kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    hints = {(at,): [["tt.divisibility", 16]] for at, name in enumerate(names) if signature[name].startswith("*")}
    return GluonASTSource(attention_kernel, signature, {(names.index(n),): v for n, v in constants.items()}, hints)


def report(name: str, head_dim: int, **given: Any) -> dict[str, Any]:
    begun = time.perf_counter()
    compiled = triton.compile(source(head_dim, given), target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    seconds = time.perf_counter() - begun
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        read = {"capture_output": True, "text": True, "check": True}
        usage = subprocess.run([tools / "cuobjdump", "-res-usage", file.name], **read).stdout
        code = subprocess.run([tools / "nvdisasm", "-c", file.name], **read).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None
    counts = {word: len(re.findall(rf"\b{word}", code)) for word in INSTRUCTIONS}
    resources = {"registers": int(found[1]), "stack": int(found[2]), "shared": compiled.metadata.shared}
    return {"name": name, "seconds": seconds} | resources | counts


if __name__ == "__main__":
    for case in sys.argv[1:] or CASES:
        print(json.dumps(report(case, **CASES[case])), flush=True)
