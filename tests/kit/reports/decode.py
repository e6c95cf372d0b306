"""Reports of decode attention's kernels."""

from __future__ import annotations

import re
from collections import Counter

from kit.analysers.sass_registers import reads_before_writes
from kit.build import Built
from kit.reports.common import Report, counted

_OPCODE = re.compile(r"\*/\s+(?:@!?U?P\w+ )?([A-Z]+)")
_TOUCHES = re.compile(r"LD[^C]|ST|ATOM|RED|UTMA|UBLK")


def split_kv(built: Built) -> Report:
    """Report what Triton's kernel asks memory for, and when.

    asked_first: loads before the first barrier. merged_at_once: loads of a merge before its first maximum. sums: the
    layouts in which keys are summed. unwaited: what touches memory before the wait for the launch before; None: none
    waits.
    """
    opcodes = _OPCODE.findall(built.sass)
    before = opcodes[: opcodes.index("ACQBULK")] if "ACQBULK" in opcodes else None
    over_keys = r"\(tensor<\d+x\d+xf32, #(\w+)>\) -> tensor<\d+xf32, #ttg.slice<\{dim = 0"
    return counted(built, ("HGMMA", "HMMA", "LDGSTS", "UBLKPF")) | {
        "unset": reads_before_writes(built.sass),
        "asked_first": len(re.findall(r"LDG\.", built.sass.split("BAR.SYNC", 1)[0])),
        "merged_at_once": len(re.findall(r"LDG\.", built.sass.partition("ATOM")[2].partition("FMNMX")[0])),
        "sums": sorted(set(re.findall(over_keys, built.ttgir))),
        "unwaited": before and [opcode for opcode in before if _TOUCHES.match(opcode)],
    }


def stream(built: Built) -> Report:
    """Report what the workers and the loading warp of Hopper's kernel do, and when.

    barriers: of a tile, between its first product and its last. unwaited: of the workers and of the loader, what
    touches memory before the wait for the launch before. prompt: the loader's instructions from that wait to its first
    copy. carried: values that the loader takes from one row to the next.
    """
    worker, _, loader = built.ttgir.partition("partition0(")
    before = [part[: part.index("griddepcontrol.wait")] for part in (worker, loader)]
    found = [re.findall(r"tt\.load.*|prefetch|async_tma_copy|tt\.store|tt\.atomic", part) for part in before]
    unwaited = [Counter("cg" if "cacheModifier = cg" in each else each for each in part) for part in found]
    rows_loop = re.search(r"scf\.for %row\S* .*? iter_args\((.*?)\) ->", loader)
    steps = re.findall(r"ACQBULK|UTMALDG|^\s*/\*[0-9a-f]{4,}\*/", built.sass, re.MULTILINE)
    prompt = min(
        steps[at:].index("UTMALDG") for at, step in enumerate(steps) if step == "ACQBULK" and "UTMALDG" in steps[at:]
    )
    products = [match.start() for match in re.finditer("HMMA", built.sass)]
    return counted(built, ("HMMA",)) | {
        "copies": built.ptx.count("cp.async.bulk.tensor"),
        "marked": len(re.findall(r"cp\.async\.bulk\.tensor\S*L2::cache_hint", built.ptx)),
        "barriers": built.sass[products[0] : products[-1]].count("BAR.SYNC"),
        "unwaited": [dict(sorted(each.items())) for each in unwaited],
        "prompt": prompt,
        "carried": 0 if rows_loop is None else rows_loop[1].count("="),
    }
