"""An engine's current load, and the host time of its decode steps."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

HOST_PARTS: tuple[str, ...] = ("scheduler", "launch", "sampling", "detokenising", "readers")
"""Parts of the host's work on a decode step: its plan; the model's launches, and copies of what they read and give;
sampling's launches; tokens handed to their samples, and made text where that has stop strings; readers told."""


@dataclass(frozen=True)
class HostTime:
    """The host's time by part: by the clock, and what the engine's thread computed meanwhile. The rest is waits: for
    Python's lock, which another thread held, or for a core."""

    wall: Mapping[str, float] = field(default_factory=dict[str, float])
    cpu: Mapping[str, float] = field(default_factory=dict[str, float])

    def __bool__(self) -> bool:
        """Whether there is any."""
        return bool(self.wall)

    @property
    def facts(self) -> dict[str, dict[str, float] | None]:
        """A step's microseconds, as the ledger keeps them."""
        return {"host_us_per_step": dict(self.wall) or None, "host_cpu_us_per_step": dict(self.cpu) or None}


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
    host_seconds: HostTime = HostTime()

    def host_us_since(self, before: "EngineLoad") -> HostTime:
        """Microseconds of the host that a decode step has taken since; none without a step."""
        steps = self.decode_steps - before.decode_steps

        def mean(now: Mapping[str, float], then: Mapping[str, float]) -> dict[str, float]:
            return {part: (s - then.get(part, 0.0)) / steps * 1e6 for part, s in now.items() if steps > 0}

        now, then = self.host_seconds, before.host_seconds
        return HostTime(mean(now.wall, then.wall), mean(now.cpu, then.cpu))


class HostTimes:
    """The host time of decode steps, whether or not it overlaps the device's; counted in the engine's thread. steps:
    how many."""

    def __init__(self) -> None:
        self.steps = 0
        self._wall, self._cpu = dict.fromkeys(HOST_PARTS, 0.0), dict.fromkeys(HOST_PARTS, 0.0)
        self._last = self._last_cpu = 0.0

    @property
    def seconds(self) -> HostTime:
        """So far."""
        return HostTime(self._wall.copy(), self._cpu.copy())

    def begin(self) -> None:
        """Leave out what was before: a wait, or work of another kind."""
        self._last, self._last_cpu = time.perf_counter(), time.thread_time()

    def end(self, part: str) -> None:
        """Add what has passed since the last beginning or end to a part."""
        now, now_cpu = time.perf_counter(), time.thread_time()
        self._wall[part] += now - self._last
        self._cpu[part] += now_cpu - self._last_cpu
        self._last, self._last_cpu = now, now_cpu
