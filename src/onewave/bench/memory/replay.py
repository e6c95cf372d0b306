"""Replay a trace of allocations through several allocators."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch

from onewave.base.device import current_device
from onewave.bench.clock import Summary, summarize
from onewave.bench.ledger import Measurement
from onewave.bench.memory.peers import Peer, peers_of
from onewave.memory.plan import plan_offsets
from onewave.memory.trace import Trace

_LOOKS = 256
"""Events between two looks at what is reserved, besides those at which most blocks live."""


@dataclass(frozen=True)
class Replayed:
    """A trace through one allocator. reserved_bytes: the most of the device's memory. calls_first, calls_again: to the
    device, of a first and of a second replay. us_first, us_again: a block's beginning or end, its caller's loop in
    Python included; None of a static plan, which costs nothing then."""

    allocator: str
    peak_bytes: int
    reserved_bytes: int | None
    calls_first: int | None
    calls_again: int | None
    us_first: Summary | None
    us_again: Summary | None

    @property
    def fragmentation(self) -> float | None:
        """Share of what is reserved that no block ever needs at once."""
        return None if not self.reserved_bytes else 1 - self.peak_bytes / self.reserved_bytes

    def measurement(self, trace: Trace) -> Measurement | None:
        if self.us_again is None or self.us_first is None:
            return None
        extra = {
            "allocator": self.allocator,
            "trace": trace.source,
            "trace_device": trace.device,
            "allocations": trace.num_allocations,
            "peak_bytes": self.peak_bytes,
            "reserved_bytes": self.reserved_bytes,
            "fragmentation": self.fragmentation,
            "calls_first": self.calls_first,
            "calls_again": self.calls_again,
            "us_first": self.us_first.p50,
        }
        return Measurement(trace.source.split(",")[0] or "trace", "allocation", "us", self.us_again, None, extra)


def replay_all(
    trace: Trace, device: torch.device, *, reps: int, show: Callable[[str], None] = lambda text: None
) -> list[Replayed]:
    """Replay a trace through each allocator `reps` times, in turns, begun anew and twice each time; and plan it."""
    # PyTorch's allocator wants the number.
    if device.type == "cuda" and device.index is None:  # pyright: ignore[reportUnnecessaryComparison] (stubs say int)
        device = torch.device("cuda", current_device())
    peak = trace.peak_bytes
    makers = peers_of(device)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in makers}
    held: dict[str, tuple[int | None, int | None, int | None]] = {}
    for repetition in range(reps):
        show(f"replaying through {', '.join(makers)}: {repetition + 1} of {reps}")
        for name, make in makers.items():
            peer = make()
            calls = [peer.raw_calls()]
            seconds: list[float] = []
            for _ in range(2):
                seconds.append(_timed(trace, peer, device))
                calls.append(peer.raw_calls())
            first, again = (
                None if before is None or after is None else after - before for before, after in pairwise(calls)
            )
            peer.close()
            times[name].append((seconds[0], seconds[1]))
            if repetition == 0:
                peer = make()
                held[name] = (_peak_reserved(trace, peer), first, again)
                peer.close()
    results = [
        Replayed(name, peak, *held[name], *(summarize([each[turn] * 1e6 for each in times[name]]) for turn in (0, 1)))
        for name in makers
    ]
    show("static plan")
    total = plan_offsets(trace.lifetimes()).total_bytes
    return [*results, Replayed("static plan", peak, total, 1, 0, None, None)]


def _timed(trace: Trace, peer: Peer, device: torch.device) -> float:
    """Seconds an event, all blocks freed at the end."""
    allocate, free = peer.allocate, peer.free
    live: dict[int, object] = {}
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    for block, num_bytes, _ in trace.events:
        if num_bytes is None:
            free(live.pop(block))
        else:
            live[block] = allocate(num_bytes)
    count = len(trace.events) + len(live)
    while live:
        free(live.popitem()[1])
    return (time.perf_counter() - began) / max(count, 1)


def _peak_reserved(trace: Trace, peer: Peer) -> int | None:
    live: dict[int, object] = {}
    sizes: dict[int, int] = {}
    now = highest = most = 0
    for step, (block, num_bytes, _) in enumerate(trace.events):
        if num_bytes is None:
            peer.free(live.pop(block))
            now -= sizes.pop(block)
            continue
        live[block], sizes[block] = peer.allocate(num_bytes), num_bytes
        now += num_bytes
        if now > highest or step % _LOOKS == 0:
            highest = max(now, highest)
            reserved = peer.reserved_bytes()
            if reserved is None:
                return None
            most = max(most, reserved)
    while live:
        peer.free(live.popitem()[1])
    return most
