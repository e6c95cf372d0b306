"""The machine that a graph is simulated on: workers, their queues, cache levels, and what things cost."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral

from onewave.base.errors import InvalidArgumentError, check_one_of, shown
from onewave.tiles.sim.caches import CACHES

MAX_WORKERS = 65536
MAX_SKEW = 1_000_000


def _positive(what: str, value: float) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise InvalidArgumentError(what, got=str(value), allowed="above 0")


@dataclass(frozen=True)
class CacheLevel:
    """One cache. capacity: bytes. bandwidth: bytes/ns that it serves, all workers together. policy: a name in CACHES.

    private: every worker has one of this capacity; else all share it. Raises InvalidArgumentError.
    """

    name: str
    capacity: int
    bandwidth: float = 5500.0
    policy: str = "lru"
    private: bool = False

    def __post_init__(self) -> None:
        check_one_of("cache policy", self.policy, CACHES)
        if self.capacity < 1:
            raise InvalidArgumentError(f"{self.name} capacity", got=f"{self.capacity} bytes", allowed="1 byte or more")
        _positive(f"{self.name} bandwidth", self.bandwidth)


H200_LEVELS: tuple[CacheLevel, ...] = (CacheLevel("L2", 50 * 1000 * 1000),)


@dataclass(frozen=True)
class Machine:
    """Workers and costs; the defaults are an H200's.

    workers: SMs. co_resident: thread blocks that share one, each a lane of its own in a trace, at
    1/co_resident of its speed. queues: "ticket" (a free worker takes the next task of the order) or "static" (task i
    of the order belongs to lane i mod lanes, unless simulate is given queues). levels: caches from the workers
    outwards; behind the last is the memory. flops_per_ns, memory_bandwidth (bytes/ns): of the whole machine.
    task_ns: what each task costs on top of its work; task_costs: the same by Task.name where it differs. skew: steps
    by which each lane of a wave lags behind the one before. hand_offs: ns from a producer's end to a task's first
    possible start, by Task.name; none between tasks of a lane's own queue, unless a sync policy's counter lies between
    them. ahead_bytes: what a lane may have read of its coming tasks while it waits, as a ring of weight tiles does.
    lane_speeds: the share of memory bandwidth that each lane gets; 1 for lanes beyond them. Their mean counts as 1.
    Raises InvalidArgumentError.

    Source of the defaults: NVIDIA's H200 data sheet (132 SMs, 989 dense bf16 TFLOPS, 50 MB L2), and the read bandwidth
    that the ledger has measured of the sheet's 4.8 TB/s (ledger/h200.jsonl:8). task_ns is an assumption.
    """

    workers: int = 132
    co_resident: int = 1
    queues: str = "ticket"
    levels: tuple[CacheLevel, ...] = H200_LEVELS
    flops_per_ns: float = 989_000.0
    memory_bandwidth: float = 4650.0
    task_ns: float = 500.0
    task_costs: Mapping[str, float] = field(default_factory=dict[str, float])
    skew: float = 0.0
    hand_offs: Mapping[str, float] = field(default_factory=dict[str, float])
    ahead_bytes: float = 0.0
    lane_speeds: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for what, value in (("workers", self.workers), ("co_resident", self.co_resident)):
            if not (isinstance(value, Integral) and 1 <= value <= MAX_WORKERS):
                raise InvalidArgumentError(what, got=shown(value), allowed=f"a whole number, 1 to {MAX_WORKERS}")
        if self.workers * self.co_resident > MAX_WORKERS:
            raise InvalidArgumentError("workers x co_resident", got=str(self.lanes), allowed=f"1 to {MAX_WORKERS}")
        check_one_of("queues", self.queues, ("ticket", "static"))
        _positive("flops_per_ns", self.flops_per_ns)
        _positive("memory_bandwidth", self.memory_bandwidth)
        _positive("memory_bandwidth of a lane", self.max_a_lane)
        for what, value in (
            ("task_ns", self.task_ns),
            ("skew", self.skew),
            ("ahead_bytes", self.ahead_bytes),
            *self.task_costs.items(),
            *self.hand_offs.items(),
        ):
            if not (value >= 0 and math.isfinite(value)):
                raise InvalidArgumentError(what, got=str(value), allowed="0 or more")
        for speed in self.lane_speeds:
            _positive("lane_speeds", speed)
        if self.skew > MAX_SKEW:
            raise InvalidArgumentError("skew", got=str(self.skew), allowed=f"0 to {MAX_SKEW:,}")
        if len({level.name for level in self.levels} | {"memory"}) != len(self.levels) + 1:
            raise InvalidArgumentError("levels", got=", ".join(x.name for x in self.levels), allowed="different names")

    @property
    def lanes(self) -> int:
        """Tasks that can run at once."""
        return self.workers * self.co_resident

    def speeds(self) -> list[float]:
        """Each lane's share of memory bandwidth, over an even one."""
        given = [*self.lane_speeds[: self.lanes], *[1.0] * (self.lanes - len(self.lane_speeds))]
        return [speed * self.lanes / sum(given) for speed in given]

    @property
    def max_a_lane(self) -> float:
        """The most memory bandwidth that one lane can draw, bytes/ns: four fair shares, or one where lanes that wait
        read ahead with theirs."""
        share = self.memory_bandwidth / self.lanes
        return share if self.ahead_bytes else min(self.memory_bandwidth, 4 * share)
