"""Which arrivals at an mbarrier one thread makes before all threads of its partition have done what they stand for.

One thread arrives for a whole partition, so between any access to shared memory by its threads (or the end of products
or copies that they wait for) and the arrival there must be a barrier of all of them. Triton puts most of these there;
this follows every path through compiled PTX and lists the arrivals that some path reaches without one. Between
partitions: tests/kit/numpy_gpu/happens_before.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

LABEL = re.compile(r"^(\$L__BB\w+):")
TARGET = re.compile(r"\$L__BB\w+")
ACCESS = re.compile(r"\b(ld\.shared|st\.shared|ldmatrix|stmatrix|wgmma\.wait_group|cp\.async\.bulk\.wait_group)")
OF_WARP = re.compile(r"\bbar\.warp\.sync")
OF_PARTITION = re.compile(r"\b(bar\.sync|barrier\.sync|barrier\.cta\.red|bar\.red)")
SEVERAL_WARPS = re.compile(r"\bbar\.sync\s+\w+, (64|128|256)\b")


class Code:
    """Basic blocks of a kernel's PTX, and where each may go on."""

    def __init__(self, ptx: str):
        self.lines: dict[str, list[str]] = {"entry": []}
        self.next: dict[str, list[str]] = {"entry": []}
        self.dispatch, table = set[str](), list[str]()
        name, falls = "entry", True
        for number, raw in enumerate(ptx.splitlines(), 1):
            line = raw.split("//")[0].strip()
            label = LABEL.match(line)
            if label:
                if falls:
                    self.next[name].append(label[1])
                name, falls = label[1], True
                self.lines[name], self.next[name] = [], []
            elif ".branchtargets" in line:
                table = []
            elif line.startswith("$L__BB"):
                table += TARGET.findall(line)
            elif line.startswith("brx.idx"):
                self.next[name] += table
                self.dispatch.add(name)
                falls = False
            elif "bra" in line and TARGET.search(line):
                self.next[name] += TARGET.findall(line)
                if line.startswith("@"):  # what follows is done only by those who stay
                    self.next[name].append(f"{number}")
                    name = f"{number}"
                    self.lines[name], self.next[name] = [], []
                else:
                    falls = False
            elif re.match(r"(ret|exit)\b", line):
                falls = False
            elif line:
                self.lines[name].append(f"{number}: {line}")

    def partitions(self) -> list[tuple[str, set[str]]]:
        """Their first blocks, and all blocks of each: the default one's from the entry on, one a place of the table."""
        firsts = ["entry", *(first for name in self.dispatch for first in self.next[name])]
        return [(first, self.reached(first)) for first in firsts]

    def reached(self, first: str) -> set[str]:
        """The blocks that a warp may come to from `first` on without being sent to another partition."""
        found, left = set[str](), [first]
        while left:
            name = left.pop()
            if name not in found and name not in self.dispatch:
                found.add(name)
                left += self.next[name]
        return found


def after(lines: Iterable[str], pending: bool, several: bool, early: set[str]) -> bool:
    """Whether some access has had no barrier since, after these lines; early: takes up arrivals that come too soon."""
    for line in lines:
        if "mbarrier.arrive" in line and pending:
            early.add(line)
        if OF_PARTITION.search(line) or (OF_WARP.search(line) and not several):
            pending = False
        elif ACCESS.search(line):
            pending = True
    return pending


def early_arrivals(ptx: str) -> list[str]:
    """Numbered lines of arrivals that a path reaches with accesses that no barrier has followed."""
    code = Code(ptx)
    early = set[str]()
    for first, blocks in code.partitions():
        several = any(SEVERAL_WARPS.search(line) for name in blocks for line in code.lines[name])
        seen = set[tuple[str, bool]]()
        left = [(first, False)]
        while left:
            name, pending = left.pop()
            if name in blocks and (name, pending) not in seen:
                seen.add((name, pending))
                pending = after(code.lines[name], pending, several, early)
                left += [(following, pending) for following in code.next[name]]
    return sorted(early)
