"""Compile Hopper's attention kernel without a card: `python attention_gluon_aot.py`, one JSON line a case.

Each line: name, registers, shared (bytes), how often instructions occur, reads of unset uniform registers, arrivals at
mbarriers that come too early (ptx_arrivals), scratch that warpgroups share, exponentials of sums, barriers in the
loops that vote. Not under Triton's interpreter: TRITON_INTERPRET must be unset.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

from endless_loops import endless_loops
from lost_buffers import lost_buffers
from ptx_arrivals import Code, early_arrivals
from sass_registers import reads_before_writes

from onewave.ops.attention.resources_impl import Resources, fp8, hopper, portable

SHARED = "$L__BB_shared"
CASES: dict[str, dict[str, Any]] = {
    "128": {"head_dim": 128},
    "128 causal": {"head_dim": 128, "RIGHT": True},
    "128 causal, few tiles": {"head_dim": 128, "RIGHT": True, "ORDER": 0},
    "128 softcap": {"head_dim": 128, "SOFTCAP": True},
    "128 packed": {"head_dim": 128, "RAGGED": True, "ORDER": 3, "LSE": True},
    "128 few pages": {"head_dim": 128, "RIGHT": True, "RAGGED": True, "LSE": True, "ORDER": 0, "PAGE": 16},
    "64": {"head_dim": 64},
    "64 causal": {"head_dim": 64, "RIGHT": True, "LSE": True},
    "64 packed": {"head_dim": 64, "RAGGED": True, "ORDER": 3},
    "64 causal packed": {"head_dim": 64, "RIGHT": True, "RAGGED": True, "LSE": True, "ORDER": 3},
    "128 window packed": {"head_dim": 128, "RIGHT": True, "LEFT": True, "RAGGED": True, "LSE": True, "ORDER": 3},
    "64 pages": {"head_dim": 64, "RIGHT": True, "LEFT": True, "RAGGED": True, "LSE": True, "PAGE": 16},
    "128 pages": {"head_dim": 128, "RIGHT": True, "RAGGED": True, "LSE": True, "ORDER": 3, "PAGE": 64},
    "64 softcap": {"head_dim": 64, "RIGHT": True, "SOFTCAP": True},
    "256": {"head_dim": 256},
    "256 causal": {"head_dim": 256, "RIGHT": True},
    "256 causal packed": {"head_dim": 256, "RIGHT": True, "RAGGED": True, "ORDER": 3},
}
INSTRUCTIONS = (
    "HGMMA", "QGMMA", "WARPGROUP.DEPBAR", "PRMT", "UTMALDG", "UTMASTG", "USETMAXREG", "BAR.RED", "STL", "LDL",
    "MUFU.EX2", "HADD2",
)  # fmt: skip


def sums_to_powers(code: str) -> int:
    """Exponentials whose exponent an addition has made, not a multiply-add."""
    writer: dict[str, str] = {}
    found = 0
    for line in code.splitlines():
        words = re.search(r"\*/\s+(?:@!?U?P\d+ )?([A-Z0-9_.]+) (R\d+), (\S+)", line)
        if words:
            operation, into, first = words[1], words[2], words[3].strip(" ,;").removesuffix(".reuse")
            found += operation == "MUFU.EX2" and writer.get(first) == "FADD"
            writer[into] = operation
    return found


def barriers_of_whole_steps(code: str) -> list[int]:
    """Barriers that wait, turns included, in each loop that votes with one instruction."""
    lines = code.splitlines()
    found: list[int] = []
    for vote in (at for at, line in enumerate(lines) if "BAR.RED" in line):
        for end in range(vote, len(lines)):
            target = re.search(r"BRA.*`\((\.L_x_\d+)\)", lines[end])
            begin = lines.index(f"{target[1]}:") if target else len(lines)
            if begin < vote:
                found.append(sum("BAR.SYNC" in line for line in lines[begin:end]))
                break
    return found


def scratch_of_all(ptx: str) -> list[str]:
    """Stores to shared memory in code that several warpgroups run, but those of matrices and the last word to others.

    What Triton would keep there for a partition is one place, whoever runs it.
    """
    code = Code(ptx)
    if SHARED not in code.lines:
        return []
    last = re.compile(r"st\.shared\S*\s+\[global_smem\+\d+\], \{?[\d, ]+\}?;")
    lines = [line for block in code.reached(SHARED) for line in code.lines[block]]
    return [line for line in lines if re.search(r"\bst\.shared", line) and not last.search(line)]


def report(name: str, found: Resources) -> dict[str, Any]:
    sizes = {"registers": found.registers, "shared": found.shared, "threads": found.threads}
    counts = {word: found.count(word) for word in INSTRUCTIONS}
    unset = reads_before_writes(found.code) if "HGMMA" in found.code or "QGMMA" in found.code else []
    faults = {"unset": unset, "early": early_arrivals(found.ptx), "sums": sums_to_powers(found.code)}
    faults |= {"lost": lost_buffers(found.ir), "endless": endless_loops(found.ir)}
    # Barriers of one warpgroup among what all run, by constants: those of one_code.
    faults |= {"own": len(re.findall(r"\tbar\.sync \t[456], 128;", found.ptx)) if SHARED in found.ptx else 0}
    faults |= {"scratch": scratch_of_all(found.ptx), "barriers": barriers_of_whole_steps(found.code)}
    return {"name": name, "programs": found.programs_an_sm} | faults | sizes | counts


CUT = {"RIGHT": True, "TAIL": True}
KERNELS: dict[str, Callable[[], Resources]] = {
    **{case: partial(hopper, **arguments) for case, arguments in CASES.items()},
    "fp8 causal": partial(fp8, RIGHT=True),
    "fp8 packed": partial(fp8, RIGHT=True, LEFT=True, RAGGED=True, LSE=True, SOFTCAP=True),
    "portable": partial(portable, 128),
    "portable, softcap": partial(portable, 128, SOFTCAP=True, POSITIVE=False, **CUT),
    "portable, scale below 0": partial(portable, 128, POSITIVE=False, **CUT),
}


def line(case: str) -> str:
    return json.dumps(report(case, KERNELS[case]()))


if __name__ == "__main__":
    with ProcessPoolExecutor(2) as pool:
        for each in pool.map(line, KERNELS):
            print(each, flush=True)
