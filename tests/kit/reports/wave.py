"""Reports of the wave's kernel and of those that pack its weights."""

from __future__ import annotations

from kit.analysers.torn_reductions import torn_reductions
from kit.analysers.wave_source import places_of, unwaited_for, unwritten_barriers
from kit.build import Built
from kit.reports.common import Report, counted

_INSTRUCTIONS = ("HGMMA", "HMMA", "IMMA", "LDSM", "UTMALDG", "USETMAXREG")


def wave(built: Built) -> Report:
    """Report torn reductions, what comes before the wait for the launch before, and which functions copy and store.

    marked, unmarked: functions that copy by TMA, with a mark for L2 and without. alone: those that store single words.
    """
    return counted(built, _INSTRUCTIONS) | {
        "torn": torn_reductions(built.ttgir),
        "unwaited": unwaited_for(built.ttgir),
        "unwritten": unwritten_barriers(built.ptx),
        "marked": places_of(built.ptx, r"cp\.async\.bulk\.tensor\S*L2::cache_hint"),
        "unmarked": places_of(built.ptx, r"cp\.async\.bulk\.tensor\S*bytes \["),
        "alone": places_of(built.ptx, r"st\.global\.b32"),
    }


def packing(built: Built) -> Report:
    """Report loads and stores of 16 bytes, operations that flush subnormal numbers, and torn reductions."""
    found = {"flushed": built.ptx.count(".ftz"), "torn": torn_reductions(built.ttgir)}
    return counted(built, ("LDG.E.128", "STG.E.128")) | found
