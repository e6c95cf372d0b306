"""Which operators to fuse: the cut of a graph's operators into groups that moves the fewest bytes.

A group runs as one launch: what only its own operators read never leaves the chip, as long as it fits there; between
groups everything goes through memory. The idea is Optimus's (Cai et al. 2022, ACM TECS, doi 10.1145/3520142), which
searches groups over the operators' graph under the on-chip memory's capacity; here every group's cost is replayed on
its own tiles, and dynamic programming over the graph's downsets finds the least sum.
"""

from dataclasses import dataclass

import numpy as np

from onewave.base.errors import InvalidArgumentError
from onewave.tiles.graph.graph import TileGraph
from onewave.tiles.graph.stages import PartTraffic, part_traffic, stages_of
from onewave.tiles.sim.traffic import compulsory

MAX_STAGES = 12
MAX_ACCESSES = 200_000
"""Beyond it one group takes seconds to replay, and there are dozens."""


@dataclass(frozen=True)
class Group:
    """Operators that run as one launch, in an order of their tasks, and the bytes that they load and store."""

    operators: tuple[str, ...]
    traffic: PartTraffic


@dataclass(frozen=True)
class FusionPlan:
    """groups: the least-traffic cut, in order. moved: its bytes. unfused: with each operator on its own. fused: all in
    one group. compulsory: inputs once in, results once out. tried: groups whose traffic was replayed.
    """

    groups: tuple[Group, ...]
    moved: int
    unfused: int
    fused: int
    compulsory: int
    tried: int


def plan_fusion(graph: TileGraph, capacity: int, policy: str = "belady") -> FusionPlan:
    """Find the groups of operators that move the fewest bytes; of equals, the fewest groups.

    capacity: bytes on chip. policy: how that memory evicts, belady (planned ahead) or lru. Exact over all sequences of
    groups that respect the dependencies, with each group in the best of a handful of orders. Raises
    InvalidArgumentError for more than 12 operators or 200,000 accesses.
    """
    stages = stages_of(graph)
    count = len(stages.names)
    if count > MAX_STAGES:
        raise InvalidArgumentError("operators", got=str(count), allowed=f"up to {MAX_STAGES}")
    if len(graph.accesses.tile) > MAX_ACCESSES:
        got = f"{len(graph.accesses.tile):,}"
        raise InvalidArgumentError("tile accesses", got=got, allowed=f"up to {MAX_ACCESSES:,}", next="Larger tiles.")
    before = _predecessors(graph, count)
    costs: dict[int, PartTraffic] = {}

    def cost(group: int) -> PartTraffic:
        if group not in costs:
            costs[group] = part_traffic(graph, stages.tasks(_members(group)), capacity, policy)
        return costs[group]

    everything = (1 << count) - 1
    # best[done]: (bytes, groups, the done set before the last group)
    best: dict[int, tuple[int, int, int]] = {0: (0, 0, 0)}
    for done in range(everything + 1):
        if done not in best:
            continue
        moved, groups, _ = best[done]
        for group in _next_groups(done, count, before):
            offer = (moved + cost(group).moved, groups + 1, done)
            if offer < best.get(done | group, (1 << 62, 0, 0)):
                best[done | group] = offer
    cut: list[int] = []
    at = everything
    while at:
        cut.append(at & ~best[at][2])
        at = best[at][2]
    return FusionPlan(
        groups=tuple(Group(tuple(stages.names[i] for i in _members(g)), cost(g)) for g in reversed(cut)),
        moved=best[everything][0],
        unfused=sum(cost(1 << stage).moved for stage in range(count)),
        fused=cost(everything).moved,
        compulsory=sum(compulsory(graph)),
        tried=len(costs),
    )


def _members(group: int) -> list[int]:
    return [stage for stage in range(group.bit_length()) if group >> stage & 1]


def _predecessors(graph: TileGraph, count: int) -> list[int]:
    """For each stage, the set of stages that it directly depends on."""
    stages = stages_of(graph)
    edges = graph.edges
    pairs = np.unique(stages.of[edges.producer] * count + stages.of[edges.consumer])
    before = [0] * count
    for pair in pairs.tolist():
        producer, consumer = divmod(pair, count)
        if producer != consumer:
            before[consumer] |= 1 << producer
    return before


def _next_groups(done: int, count: int, before: list[int]) -> list[int]:
    """Every set of stages, not empty, that can come right after the done ones as one group."""
    found = {0}
    for stage in range(count):
        if not done >> stage & 1:
            # Stages are numbered in program order, so all that a stage needs has been considered before it.
            found |= {group | 1 << stage for group in found if before[stage] & ~(done | group) == 0}
    return sorted(found - {0})
