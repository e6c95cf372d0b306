"""Report of each compiled kernel: its resources, and of one with partitions what these do to each other."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kit.analysers.endless_loops import endless_loops
from kit.analysers.lost_buffers import lost_buffers
from kit.analysers.ptx_arrivals import early_arrivals
from kit.build import Built

Report = dict[str, Any]


def resources(built: Built) -> Report:
    """Report registers of a thread, bytes of stack and shared memory, threads of a block, and accesses of the stack.

    ptx: a digest of the PTX, which a change of the source that means the same leaves as it is.
    """
    sizes = {"registers": built.registers, "stack": built.stack, "shared": built.shared, "threads": built.threads}
    return sizes | counted(built, ("STL", "LDL")) | {"ptx": built.ptx_digest}


def counted(built: Built, words: Iterable[str]) -> Report:
    """Report how many instructions begin with each word."""
    return {word: built.count(word) for word in words}


def partitions(built: Built) -> Report:
    """Report arrivals that come too early, buffers that nobody reads, and loops whose condition never changes."""
    return {
        "early": early_arrivals(built.ptx),
        "lost": lost_buffers(built.ttgir),
        "endless": endless_loops(built.ttgir),
    }
