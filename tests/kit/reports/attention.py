"""Reports of prefill attention's kernels."""

from __future__ import annotations

import re
from collections import Counter

from kit.analysers.ptx_arrivals import Code
from kit.analysers.sass_registers import reads_before_writes
from kit.build import Built
from kit.reports.common import Report, counted

_SHARED_CODE = "$L__BB_shared"
_OF_HOPPER = (
    "HGMMA", "QGMMA", "WARPGROUP.DEPBAR", "PRMT", "UTMALDG", "UTMASTG", "USETMAXREG", "BAR.RED", "MUFU.EX2", "HADD2",
)  # fmt: skip
_OF_MMA = ("HMMA.16816.F32", "LDSM.16.M88.4", "LDSM.16.MT88.4", "LDGSTS", "MOVM")


def hopper(built: Built) -> Report:
    """Report reads of unset registers, what all warpgroups run, and what the loops over keys wait for.

    own: barriers of one warpgroup, by constants, in code that all run.
    """
    own = len(re.findall(r"\tbar\.sync \t[456], 128;", built.ptx)) if _SHARED_CODE in built.ptx else 0
    return counted(built, _OF_HOPPER) | {
        "unset": reads_before_writes(built.sass),
        "exponents_of_sums": _exponents_of_sums(built.sass),
        "own": own,
        "scratch": _scratch_of_all(built.ptx),
        "barriers": _barriers_of_whole_steps(built.sass),
    }


def portable(built: Built) -> Report:
    """Report products, copies by TMA, and the layouts in which rows are summed."""
    rows = r'"tt.reduce"\(%\w+\) <\{axis = 1 .*?\}\) : \(tensor<[^>]*, #(\w+)>'
    return counted(built, ("HGMMA", "HMMA", "UTMALDG", "MUFU.EX2")) | {
        "exponents_of_sums": _exponents_of_sums(built.sass),
        "sums": sorted(set(re.findall(rows, built.ttgir, re.S))),
    }


def _exponents_of_sums(code: str) -> int:
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


def _barriers_of_whole_steps(code: str) -> list[int]:
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


def _scratch_of_all(ptx: str) -> list[str]:
    """Stores to shared memory in code that several warpgroups run, but those of matrices and the last word to others.

    What Triton would keep there for a partition is one place, whoever runs it.
    """
    code = Code(ptx)
    if _SHARED_CODE not in code.lines:
        return []
    last = re.compile(r"st\.shared\S*\s+\[global_smem\+\d+\], \{?[\d, ]+\}?;")
    lines = [line for block in code.reached(_SHARED_CODE) for line in code.lines[block]]
    return [line for line in lines if re.search(r"\bst\.shared", line) and not last.search(line)]


def mma(built: Built) -> Report:
    """Report products, shuffles by distance, and words that a thread stores in shared memory."""
    distances = re.findall(r"shfl\.sync\.\w+\.b32\s+%r\d+, %r\d+, (\d+),", built.ptx)
    return counted(built, _OF_MMA) | {
        "products": built.ptx.count("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"),
        "shuffles": dict(sorted(Counter(distances).items())),
        "stored_words": built.ptx.count("stmatrix") * 4 + built.ptx.count("st.shared.b32"),
    }
