"""The time half of a simulation: lanes take tasks, wait for producers, share the memory's bandwidth."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from onewave.base.errors import InvalidArgumentError
from onewave.tiles.graph.graph import TileGraph
from onewave.tiles.order.chain import successors
from onewave.tiles.order.policies import plan
from onewave.tiles.order.schedule import Mode, Syncs
from onewave.tiles.sim.machine import Machine

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Timeline:
    """Per task id: its lane, and in ns when a lane took it, when it started, when it ended."""

    lane: Ints
    taken: Floats
    start: Floats
    end: Floats


class Successors(NamedTuple):
    """Successors: node i's are after[start[i]:start[i + 1]]. Nodes from the number of tasks on are counters."""

    start: Ints
    after: Ints


def by_counters(tasks: int, syncs: Syncs) -> Successors:
    """Waits through a policy's counters: from each task to what it posts to, from each counter to its waiting tasks."""
    source = np.concatenate((syncs.posts.row, tasks + syncs.waits.first))
    target = np.concatenate((tasks + syncs.posts.first, syncs.waits.row))
    start = np.zeros(tasks + syncs.num_counters + 1, dtype=np.int64)
    np.cumsum(np.bincount(source, minlength=tasks + syncs.num_counters), out=start[1:])
    return Successors(start, target[np.argsort(source, kind="stable")])


class Lanes:
    """The launch while it runs.

    A task lasts until its fixed part (start-up, then arithmetic or cache traffic, whichever is longer) and its memory
    traffic are both over. Memory is shared by the tasks that use it, by the speeds of their lanes, none faster than
    max_a_lane of a lane of speed 1: all move at one rate times their lane's speed, so a single "bytes moved so far at
    speed 1" clock orders their ends. A lane whose memory traffic is over reads ahead at its share, as far as the
    machine lets it.
    """

    def __init__(
        self,
        after: Successors,
        fixed: Floats,
        memory: Ints,
        machine: Machine,
        queues: list[list[int]],
        hand_off: Floats,
    ):
        n = len(fixed)
        self.begin: list[int] = after.start.tolist()
        self.after: list[int] = after.after.tolist()
        # Nodes from n on are counters: they take no time, and end with the last task that posts to them.
        self.missing: list[int] = np.bincount(after.after, minlength=len(after.start) - 1).tolist()
        self.fixed: list[float] = fixed.tolist()
        self.memory: list[float] = memory.tolist()
        self.hand_off: list[float] = hand_off.tolist()
        self.handed_at = [0.0] * n
        self.handed: list[tuple[float, int]] = []
        self.max_ahead, self.share = machine.ahead_bytes, machine.memory_bandwidth / machine.lanes
        self.ahead, self.streamed = [0.0] * machine.lanes, [0.0] * machine.lanes  # bytes, and until when
        self.bandwidth, self.most, self.speeds = machine.memory_bandwidth, machine.max_a_lane, machine.speeds()
        self.queues = queues  # one a lane, or a single one that all share
        self.lane_of = [-1] * n  # whose queue a task is in; -1 where all share one
        if len(queues) >= machine.lanes:
            for lane, queue in enumerate(queues):
                for task in queue:
                    self.lane_of[task] = lane
        self.next = [0] * len(queues)
        self.lane, self.taken, self.start, self.end = [-1] * n, [0.0] * n, [0.0] * n, [0.0] * n
        self.parts = [0] * n
        self.now, self.moved = 0.0, 0.0
        self.fixed_ends: list[tuple[float, int]] = []
        self.memory_ends: list[tuple[float, int]] = []
        self.done = 0
        self.ended = [False] * n

    def take(self, lane: int) -> None:
        """Give a free lane its next task, if there is one."""
        queue = lane if len(self.queues) > 1 else 0
        place = self.next[queue]
        if place < len(self.queues[queue]):
            self.next[queue] = place + 1
            task = self.queues[queue][place]
            self.lane[task], self.taken[task] = lane, self.now
            if not self.missing[task]:
                self.ready(task)

    def ready(self, task: int) -> None:
        """Start a task whose producers are done, once their results are handed over."""
        if self.handed_at[task] > self.now:
            heapq.heappush(self.handed, (self.handed_at[task], task))
        else:
            self.launch(task)

    def launch(self, task: int) -> None:
        """Start a task."""
        self.start[task] = self.now
        self.parts[task] = 1
        heapq.heappush(self.fixed_ends, (self.now + self.fixed[task], task))
        need = self.memory[task]
        if need and self.max_ahead:
            need -= self.take_ahead(self.lane[task], need)
        if need:
            self.parts[task] = 2
            heapq.heappush(self.memory_ends, (self.moved + need / self.speeds[self.lane[task]], task))

    def take_ahead(self, lane: int, need: float) -> float:
        """Take the bytes of a task that its lane has read already."""
        waited = (self.now - self.streamed[lane]) * self.share * self.speeds[lane]
        self.streamed[lane] = self.now
        found = min(self.max_ahead, self.ahead[lane] + waited)
        used = min(need, found)
        self.ahead[lane] = found - used
        return used

    def finish(self, task: int) -> None:
        """End a task, start the tasks it held up, and free its lane."""
        self.end[task] = self.now
        self.ended[task] = True
        self.done += 1
        self.release(task)
        self.take(self.lane[task])

    def release(self, node: int) -> None:
        """Let what waits for a task or a counter know that it is done. A task hands nothing over to its own lane."""
        tasks = len(self.lane)
        lane = self.lane_of[node] if node < tasks else -1
        for at in range(self.begin[node], self.begin[node + 1]):
            waiting = self.after[at]
            self.missing[waiting] -= 1
            if waiting >= tasks:
                if not self.missing[waiting]:
                    self.release(waiting)
                continue
            if lane < 0 or self.lane_of[waiting] != lane:  # the last of these is the latest, as time goes on
                self.handed_at[waiting] = self.now + self.hand_off[waiting]
            if not self.missing[waiting] and self.lane[waiting] >= 0:
                self.ready(waiting)

    def run(self, lanes: int) -> None:
        """Run until nothing moves."""
        for lane in range(lanes):
            self.take(lane)
        fixed_ends, memory_ends, handed = self.fixed_ends, self.memory_ends, self.handed
        while fixed_ends or memory_ends or handed:
            rate = min(self.most, self.bandwidth / max(len(memory_ends), 1))
            by_memory = self.now + (memory_ends[0][0] - self.moved) / rate if memory_ends else np.inf
            starts = bool(handed) and not (fixed_ends and fixed_ends[0][0] <= handed[0][0])
            clocked = handed if starts else fixed_ends
            if clocked and clocked[0][0] <= by_memory:
                when, task = heapq.heappop(clocked)
                self.moved += max(when - self.now, 0.0) * rate
                self.now = max(when, self.now)
                if starts:
                    self.launch(task)
                    continue
            else:
                self.moved, task = heapq.heappop(memory_ends)
                self.now = max(by_memory, self.now)
                self.streamed[self.lane[task]] = self.now
            self.parts[task] -= 1
            if not self.parts[task]:
                self.finish(task)


def run_lanes(
    graph: TileGraph,
    order: Ints,
    requested: Ints,
    from_memory: Ints,
    machine: Machine,
    queues: Sequence[Sequence[int]] | None = None,
    sync: str | None = None,
) -> Timeline:
    """Play the launch. requested: bytes per level and task id; from_memory: bytes per task id.

    queues: each lane's tasks, None for what machine.queues says. sync: a name in POLICIES, None to wait for exactly the
    tasks that the edges name. Raises InvalidArgumentError when the lanes come to
    wait for each other for ever, naming a task that waits and one that it waits for.
    """
    n, lanes = len(graph.tasks), machine.lanes
    flops = np.array([task.flops for task in graph.tasks], dtype=np.float64)
    work = flops * lanes / machine.flops_per_ns
    for place, level in enumerate(machine.levels):
        work = np.maximum(work, requested[place] * lanes / level.bandwidth)
    start_up = np.full(n, machine.task_ns)
    if machine.task_costs:
        start_up = np.array([machine.task_costs.get(task.name, machine.task_ns) for task in graph.tasks], dtype=float)
    if queues is not None:
        given = [list(queue) for queue in queues]
        _check_queues(given, n, lanes)
        given += [[] for _ in range(max(2, lanes) - len(given))]
    elif machine.queues == "static":
        ids: list[int] = order.tolist()
        given = [ids[lane::lanes] for lane in range(lanes)]
    else:
        given = [order.tolist()]
    if sync is None:
        after = Successors(*successors(graph))
    else:
        syncs = plan(graph, order, sync, mode=Mode.TICKET).syncs
        after = by_counters(n, syncs)
    hand_off = np.array([machine.hand_offs.get(task.name, 0.0) for task in graph.tasks], dtype=np.float64)
    running = Lanes(after, start_up + work, from_memory, machine, given, hand_off)
    running.run(min(lanes, max(n, 1)) if len(given) == 1 else lanes)
    if running.done < n:
        raise _stuck(graph, running)
    return Timeline(
        np.array(running.lane, dtype=np.int64), np.array(running.taken), np.array(running.start), np.array(running.end)
    )


def longest_chain(graph: TileGraph, lasted: Floats) -> float:
    """The longest chain of dependent tasks, each as long as it lasted."""
    edges = graph.edges
    at = [0.0] * len(graph.tasks)  # when a task could start at the earliest
    length: list[float] = lasted.tolist()
    # Program order is a linear extension and the edges come ordered by consumer, so one pass is enough.
    producers: list[int] = edges.producer.tolist()
    consumers: list[int] = edges.consumer.tolist()
    for producer, consumer in zip(producers, consumers, strict=True):
        ready = at[producer] + length[producer]
        at[consumer] = max(at[consumer], ready)
    return max((begin + own for begin, own in zip(at, length, strict=True)), default=0.0)


def _check_queues(queues: list[list[int]], tasks: int, lanes: int) -> None:
    if len(queues) > lanes:
        raise InvalidArgumentError("queues", got=f"{len(queues)} workers", allowed=f"the machine's {lanes}")
    flat = sorted(task for queue in queues for task in queue)
    if flat != list(range(tasks)):
        raise InvalidArgumentError(
            "queues", got=f"{len(flat)} tasks", allowed=f"each of the {tasks} tasks exactly once"
        )


def _stuck(graph: TileGraph, running: Lanes) -> InvalidArgumentError:
    waiting = next(task for task in range(len(graph.tasks)) if running.lane[task] >= 0 and running.missing[task])
    edges = graph.edges
    needs: list[int] = edges.producer[edges.consumer == waiting].tolist()
    # A coarser policy may hold a task up although all that it reads is there: then any task that has not ended.
    ended = running.ended
    blocked = next((task for task in needs if not ended[task]), next(t for t in range(len(ended)) if not ended[t]))
    return InvalidArgumentError(
        "deadlock",
        got=f"task {waiting} ({graph.tasks[waiting].name}) on lane {running.lane[waiting]} waits for task {blocked}",
        next="Use an order with every producer before its consumers; `onewave tiles verify` names the cycle.",
    )
