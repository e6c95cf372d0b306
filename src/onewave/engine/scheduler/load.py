"""An engine's current load, and the host time of its decode steps."""

import time
from collections.abc import Mapping
from typing import NamedTuple

HOST_PARTS: tuple[str, ...] = ("scheduler", "launch", "sampling", "detokenising", "readers")
"""Parts of the host's work on a decode step: its plan; the model's launches, and copies of what they give; sampling's
launches; tokens handed to their samples and made text; readers told."""


class EngineLoad(NamedTuple):
    """An engine's current load. used_blocks: the share of KV blocks that sequences hold. num_preempted: since it was
    made, sequences that gave up their blocks for others. steps: how many had so many tokens, of prompts or rows.
    decode_steps, host_seconds: of HostTimes."""

    num_running: int = 0
    num_waiting: int = 0
    used_blocks: float = 0.0
    num_preempted: int = 0
    steps: Mapping[int, int] = {}
    decode_steps: int = 0
    host_seconds: Mapping[str, float] = {}

    def host_us_since(self, before: "EngineLoad") -> dict[str, float]:
        """Microseconds of the host that a decode step has taken since, by part; empty without a step."""
        steps = self.decode_steps - before.decode_steps
        spent = before.host_seconds
        return {part: (s - spent.get(part, 0.0)) / steps * 1e6 for part, s in self.host_seconds.items() if steps > 0}


class HostTimes:
    """The host time of decode steps, whether or not it overlaps the device's. seconds: by part. steps: how many."""

    def __init__(self) -> None:
        self.steps, self.seconds = 0, dict.fromkeys(HOST_PARTS, 0.0)
        self._last = 0.0

    def begin(self) -> None:
        """Leave out what was before: a wait, or work of another kind."""
        self._last = time.perf_counter()

    def end(self, part: str) -> None:
        """Add what has passed since the last beginning or end to a part."""
        now = time.perf_counter()
        self.seconds[part] += now - self._last
        self._last = now
