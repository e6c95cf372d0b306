"""Edges come from reads and writes alone; tiles at the edges have their exact size."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onewave.base.errors import InvalidArgumentError
from onewave.tiles.graph.graph import EdgeKind, Task, Tensor, TileGraph


def tiny(*accesses, tiles=4):
    """A graph of one tensor whose tasks are (reads, writes) of tile numbers."""
    tensor = Tensor("x", (tiles,), (1,), 2)
    tasks = tuple(
        Task(i, "t", tuple(("x", (r,)) for r in reads), tuple(("x", (w,)) for w in writes), 1)
        for i, (reads, writes) in enumerate(accesses)
    )
    return TileGraph({"x": tensor}, tasks)


def edge_set(graph):
    edges = graph.edges
    return {(int(p), int(c), EdgeKind(int(k)).name, int(t)) for p, c, k, t in zip(*edges, strict=True)}


def scanned(graph):
    """The same edges by the definition, one access at a time."""
    found, writer, readers = set(), {}, {}
    for task in graph.tasks:
        for tile in task.reads:
            number = graph.tile_number(tile)
            if number in writer:
                found.add((writer[number], task.id, "RAW", number))
        for tile in task.writes:
            number = graph.tile_number(tile)
            if number in writer and writer[number] != task.id:
                found.add((writer[number], task.id, "WAW", number))
            found |= {(r, task.id, "WAR", number) for r in readers.get(number, ()) if r != task.id}
        for tile in task.writes:
            writer[graph.tile_number(tile)] = task.id
            readers[graph.tile_number(tile)] = set()
        for tile in task.reads:
            if tile not in task.writes:
                readers.setdefault(graph.tile_number(tile), set()).add(task.id)
    return found


def test_a_reader_waits_for_the_last_writer_and_the_next_writer_for_the_reader():
    graph = tiny(((), (0,)), ((0,), (1,)), ((), (0,)))
    assert edge_set(graph) == {(0, 1, "RAW", 0), (1, 2, "WAR", 0), (0, 2, "WAW", 0)}


def test_an_accumulating_task_depends_on_the_one_before_and_not_on_itself():
    graph = tiny(((), (0,)), ((0,), (0,)), ((0,), (0,)))
    assert edge_set(graph) == {(0, 1, "RAW", 0), (0, 1, "WAW", 0), (1, 2, "RAW", 0), (1, 2, "WAW", 0)}


def test_a_tile_listed_twice_makes_one_edge():
    graph = tiny(((), (0,)), ((0, 0), (1, 1)))
    assert edge_set(graph) == {(0, 1, "RAW", 0)}
    assert len(graph.edges.producer) == 1


@settings(max_examples=80)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 3), max_size=3, unique=True), st.lists(st.integers(0, 3), max_size=2, unique=True)
        ),
        max_size=12,
    )
)
def test_edges_equal_a_scan_by_definition(accesses):
    graph = tiny(*accesses)
    assert edge_set(graph) == scanned(graph)
    assert len(graph.edges.producer) == len(edge_set(graph))
    assert (graph.edges.producer < graph.edges.consumer).all()


def test_tiles_at_the_edges_have_their_exact_bytes():
    tensor = Tensor("w", (10, 7), (4, 3), 2)
    assert tensor.grid == (3, 3)
    assert tensor.tile_bytes((0, 0)) == 24
    assert tensor.tile_bytes((2, 2)) == 2 * 1 * 2
    assert sum(tensor.tile_bytes((i, j)) for i in range(3) for j in range(3)) == tensor.nbytes == 140
    graph = TileGraph({"w": tensor}, ())
    numbers = np.arange(9)
    assert graph.bytes_of_numbers(numbers).tolist() == [tensor.tile_bytes(graph.tile_at(int(n))[1]) for n in numbers]


def test_half_byte_elements_are_counted_in_whole_bytes():
    assert Tensor("w", (3,), (3,), 0.5).tile_bytes((0,)) == 2


def test_tile_numbers_go_there_and_back():
    graph = TileGraph({"a": Tensor("a", (4, 6), (2, 2), 2), "b": Tensor("b", (5,), (2,), 2)}, ())
    assert [graph.tile_number(graph.tile_at(n)) for n in range(graph.num_tiles)] == list(range(9))
    with pytest.raises(InvalidArgumentError, match="0 to 8"):
        graph.tile_at(9)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: Tensor("w", (4, 4), (2,), 2), "tile rank"),
        (lambda: Tensor("w", (4,), (0,), 2), "sizes of 1 or more"),
        (lambda: Tensor("w", (4,), (2,), float("nan")), "itemsize"),
        (lambda: tiny(((9,), ())), "inside the grid"),
        (lambda: TileGraph({}, (Task(0, "t", (("y", (0,)),), (), 1),)), "tiles of the graph's tensors"),
        (lambda: TileGraph({}, (Task(1, "t", (), (), 1),)), "0..n-1"),
    ],
)
def test_what_cannot_be_a_graph_is_refused_by_name(build, words):
    with pytest.raises(InvalidArgumentError, match=words):
        build()


def test_no_tasks_have_no_edges():
    assert len(tiny().edges.producer) == 0
