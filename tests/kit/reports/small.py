"""Reports of the feed-forward chain and of the smaller operators."""

from __future__ import annotations

import re

from kit.build import Built
from kit.reports.common import Report, counted

_OPCODE = re.compile(r"\*/\s+(?:@!?U?P\w+ )?([A-Z]+)")


def chain(built: Built) -> Report:
    """Report products, copies, and the order of fences from the last store to the last post."""
    order = re.findall(r"UTMASTG|DEPBAR\.LE SB0|CCTL\.IVALL|FENCE\.VIEW\.ASYNC|MEMBAR\.ALL\.GPU|ATOMG", built.sass)
    post = len(order) - 1 - order[::-1].index("ATOMG") if "ATOMG" in order else 0
    stored = len(order) - 1 - order[::-1].index("UTMASTG") if "UTMASTG" in order else 0
    counts = counted(built, ("HGMMA", "UTMALDG", "UTMASTG", "USETMAXREG"))
    return counts | {"order": order[stored : post + 1]}


def dependent(built: Built) -> Report:
    """Report what touches memory or orders launches, each run of it once, in the order of the code."""
    watched = {"LD", "LDG", "LDGSTS", "ST", "STG", "ATOM", "ATOMG", "RED", "UBLKPF", "ACQBULK", "PREEXIT"}
    found = [opcode for opcode in _OPCODE.findall(built.sass) if opcode in watched]
    return {"memory": [word for at, word in enumerate(found) if at == 0 or found[at - 1] != word]}


def conversions(built: Built) -> Report:
    """Report how numbers are bounded and converted to float8."""
    return {"conversions": sorted(set(re.findall(r"\t(m(?:ax|in)\.\S*f32|cvt\S*e4m3x2\S*)", built.ptx)))}
