"""Hand-offs and reading ahead in the simulator, counted by hand, and hand-offs found again from a trace."""

from collections.abc import Mapping

import numpy as np
import pytest

from onewave.base.errors import InvalidArgumentError
from onewave.tiles.graph.builders import Builder
from onewave.tiles.graph.graph import TileGraph
from onewave.tiles.sim.fit import fit_hand_offs, stage_spans
from onewave.tiles.sim.machine import Machine
from onewave.tiles.sim.simulate import simulate
from onewave.tiles.sim.timeline import stage_of
from onewave.tiles.sim.trace import Trace

BYTES = 1000


def chain(layers: int, lanes: int) -> TileGraph:
    """A layer: on each lane `a` reads a tile of weights of its own and all of the `b` before; `b` likewise."""
    build = Builder("int8")
    before: tuple[tuple[str, tuple[int, ...]], ...] = ()
    for layer in range(layers):
        for stage in ("a", "b"):
            name = f"{stage}{layer}"
            build.tensor(f"W{name}", (lanes, BYTES), (1, BYTES))
            build.tensor(f"Y{name}", (lanes, 1), (1, 1))
            for lane in range(lanes):
                reads = (*before, (f"W{name}", (lane, 0)))
                build.task(name, reads, ((f"Y{name}", (lane, 0)),), 0.0, phase=name, index=(lane,))
            before = tuple((f"Y{name}", (lane, 0)) for lane in range(lanes))
    return build.graph()


def run(graph: TileGraph, lanes: int, **more: object) -> Trace:
    """At 1 byte/ns a lane; tasks dealt in turn."""
    machine = Machine(workers=lanes, queues="static", memory_bandwidth=float(lanes), task_ns=0.0, **more)
    return simulate(graph, np.arange(len(graph.tasks)), machine)


def test_a_hand_off_lies_between_the_last_producer_and_every_start() -> None:
    graph = chain(2, 3)
    plain, late = run(graph, 3), run(graph, 3, hand_offs={"b0": 70.0, "a1": 5.0})
    assert late.makespan == pytest.approx(plain.makespan + 75)
    phase = np.array(late.phase)
    assert late.start[phase == "b0"].min() - late.end[phase == "a0"].max() == pytest.approx(70)
    assert late.start[phase == "a1"].min() - late.end[phase == "b0"].max() == pytest.approx(5)


@pytest.mark.parametrize(("lanes", "late"), [(1, 0), (2, 70)])
def test_a_lane_hands_nothing_over_to_itself(lanes: int, late: int) -> None:
    build = Builder("int8")
    build.tensor("y", (2, 1), (1, 1))
    first = build.task("a", (), (("y", (0, 0)),), 1e6, phase="a", index=(0,))
    second = build.task("b", (("y", (0, 0)),), (("y", (1, 0)),), 1e6, phase="b", index=(0,))
    found = run(build.graph(), lanes, hand_offs={"b": 70.0})
    assert found.start[second.id] - found.end[first.id] == pytest.approx(late)
    machine = Machine(workers=lanes, queues="static", hand_offs={"b": 70.0})
    queues = [[first.id], [second.id]] if lanes == 2 else [[first.id, second.id]]
    found = simulate(build.graph(), np.arange(2), machine, queues=queues)
    assert found.start[second.id] - found.end[first.id] == pytest.approx(late)


@pytest.mark.parametrize(("hand_off", "start"), [(3.0, 10.0), (20.0, 22.0)])
def test_a_task_waits_for_the_later_of_its_own_producer_and_anothers_hand_off(hand_off: float, start: float) -> None:
    build = Builder("int8")
    build.tensor("y", (3, 1), (1, 1))
    own, other = (
        build.task(name, (), (("y", (at, 0)),), 0.0, phase=name, index=(at,))
        for at, name in enumerate(("own", "other"))
    )
    last = build.task("b", (("y", (0, 0)), ("y", (1, 0))), (("y", (2, 0)),), 0.0, phase="b", index=(2,))
    costs = {own.name: 10.0, other.name: 2.0}
    machine = Machine(
        workers=2, queues="static", task_ns=0.0, task_costs=costs, hand_offs={"b": hand_off}, memory_bandwidth=1e9
    )
    found = simulate(build.graph(), np.arange(3), machine, queues=[[own.id, last.id], [other.id]])
    assert found.start[last.id] == pytest.approx(start, abs=0.1)


@pytest.mark.parametrize(("ahead", "saved"), [(0, 0), (40, 40), (300, 300), (700, 700), (10_000, 700)])
def test_a_lane_that_waits_reads_ahead_as_far_as_there_is_room_and_time(ahead: int, saved: int) -> None:
    graph, hand_offs = chain(1, 3), {"b0": 700.0}
    assert run(graph, 3, hand_offs=hand_offs).makespan - run(
        graph, 3, hand_offs=hand_offs, ahead_bytes=ahead
    ).makespan == pytest.approx(saved, abs=1)


def test_bytes_read_ahead_are_not_read_twice() -> None:
    """Room for one and a half tasks: what the first does not take is there for the second, which did not wait."""
    graph = chain(2, 2)
    found = run(graph, 2, hand_offs={"b0": 1500.0}, ahead_bytes=1500.0)
    phase = np.array(found.phase)
    lasted = {name: (found.end - found.start)[phase == name].max() for name in ("a0", "b0", "a1", "b1")}
    assert lasted == pytest.approx({"a0": 1000, "b0": 0, "a1": 500, "b1": 1000}, abs=3)


def test_hand_offs_are_found_again() -> None:
    graph = chain(6, 4)
    given = {"a": 420.0, "b": 900.0}  # both longer than what reading ahead hides

    def simulated(hand_offs: Mapping[str, float]) -> Trace:
        named = {task.name: hand_offs[stage_of(task.phase)] for task in graph.tasks}
        return run(graph, 4, hand_offs=named, ahead_bytes=300.0)

    measured = simulated(given)
    found = fit_hand_offs(measured, simulated)
    assert found == pytest.approx(given, rel=1e-3)
    assert stage_spans(simulated(found)) == pytest.approx(stage_spans(measured), rel=1e-3)


@pytest.mark.parametrize("unknown", ["a", "b"])
def test_a_stage_that_the_machine_does_not_know_is_named(unknown: str) -> None:
    graph = chain(6, 4)

    def simulated(hand_offs: Mapping[str, float], *unknown: str) -> Trace:
        stages = {task.name: stage_of(task.phase) for task in graph.tasks}
        named = {name: hand_offs[stage] for name, stage in stages.items() if stage not in unknown}
        return run(graph, 4, hand_offs={**named, **hand_offs})

    measured = simulated({"a": 420.0, "b": 900.0})
    with pytest.raises(InvalidArgumentError, match=f"stage {unknown}: .* ns whatever its hand-off; allowed: "):
        fit_hand_offs(measured, lambda given: simulated(given, unknown))


def test_a_slow_stage_that_follows_none_has_no_hand_off() -> None:
    graph, slow = chain(1, 4), 3000.0

    def simulated(hand_offs: Mapping[str, float], start: float = 0.0) -> Trace:
        named = {task.name: hand_offs[stage_of(task.phase)] for task in graph.tasks}
        return run(graph, 4, hand_offs=named, task_costs={"a0": start})

    measured = simulated({"a": 0.0, "b": 900.0}, slow)
    assert fit_hand_offs(measured, simulated) == pytest.approx({"a": 0.0, "b": 900.0}, rel=1e-3)


def test_a_hand_off_that_others_hide_is_no_mistake() -> None:
    """`b` waits for its own lane's long task; what the other lane hands over is there long before."""
    build = Builder("int8")
    build.tensor("y", (3, 1), (1, 1))
    for at, name in enumerate(("own", "other")):
        build.task(name, (), (("y", (at, 0)),), 0.0, phase=name, index=(at,))
    build.task("b", (("y", (0, 0)), ("y", (1, 0))), (("y", (2, 0)),), 0.0, phase="b", index=(2,))
    graph = build.graph()

    def simulated(hand_offs: Mapping[str, float], last: float = 10.0) -> Trace:
        costs = {"own": 5000.0, "other": 2.0, "b": last}
        machine = Machine(workers=2, queues="static", task_ns=0.0, task_costs=costs, hand_offs=hand_offs)
        return simulate(graph, np.arange(3), machine, queues=[[0, 2], [1]])

    found = fit_hand_offs(simulated({}, 100.0), simulated)
    assert 0 < found["b"] < 5000


def test_traces_of_other_programs_and_units_are_refused() -> None:
    graph = chain(3, 2)
    measured = run(graph, 2)
    other = run(chain(1, 2), 2)
    with pytest.raises(InvalidArgumentError, match="simulated stages"):
        fit_hand_offs(run_of_stages("c", "d"), lambda given: measured)
    assert set(stage_spans(other)) == {"a", "b"}


def test_lanes_that_read_ahead_draw_no_more_than_there_is() -> None:
    graph = chain(16, 2)
    loaded = run(graph, 2, ahead_bytes=1e6)
    assert loaded.makespan >= loaded.report.memory_loaded / 2


@pytest.mark.parametrize(("ahead", "first"), [(150.0, 150.0), (1000.0, 222.2)])
def test_a_faster_lane_takes_less_time_and_reads_ahead_more_in_it(ahead: float, first: float) -> None:
    """Lanes end `a` after 909, 1,000 and 1,111 ns, and read ahead until the last one has."""
    found = run(chain(1, 3), 3, lane_speeds=(2.2, 2.0, 1.8), ahead_bytes=ahead)
    mine = np.array(found.phase) == "b0"
    lasted = [(found.end - found.start)[mine & (found.worker == lane)].item() for lane in range(3)]
    assert lasted == pytest.approx([(1000 - first) / 1.1, 1000 - 111.1, 1000 / 0.9], abs=1)


def run_of_stages(*stages: str) -> Trace:
    ends = np.arange(1.0, len(stages) + 1)
    return Trace(
        source="measured",
        unit="ns",
        workers=1,
        task=np.arange(len(stages)),
        worker=np.zeros(len(stages), dtype=np.int64),
        wait_start=ends - 1,
        start=ends - 1,
        end=ends,
        name=stages,
        phase=stages,
    )


@pytest.mark.parametrize("field", ["hand_offs", "ahead_bytes"])
def test_costs_below_zero_are_refused(field: str) -> None:
    value: object = {"a": -1.0} if field == "hand_offs" else -1.0
    with pytest.raises(InvalidArgumentError, match="allowed: 0 or more"):
        Machine(**{field: value})
