"""Calls of our operators that are compiled ahead of time, by what each is called."""

from kit.calls.attention import ATTENTION
from kit.calls.call import Call
from kit.calls.decode import DECODE
from kit.calls.scaled import SCALED
from kit.calls.small import SMALL
from kit.calls.wave import WAVE
from kit.runs.attend import ATTEND_RUNS
from kit.runs.mma import MMA_RUNS
from kit.runs.search import SEARCH_RUNS

__all__ = ["CALLS"]

CALLS: dict[str, Call] = {**ATTENTION, **DECODE, **SCALED, **SMALL, **WAVE, **MMA_RUNS, **ATTEND_RUNS, **SEARCH_RUNS}
