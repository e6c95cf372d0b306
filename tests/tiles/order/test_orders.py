"""Orders: each a permutation on any grid, each interleaving a linear extension of any graph."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.task_tables.small_graphs import small_step
from onewave.base.errors import InvalidArgumentError
from onewave.tiles.graph.builders import conv2d, ffn, gemm, gemm_chain
from onewave.tiles.graph.builders_attention import attention, attention_block
from onewave.tiles.order.orders import GRID_ORDERS, INTERLEAVINGS, ORDERS, Order, grid_order, task_order
from onewave.tiles.search.panels import panel_loads

TINY = (16, 16, 16)
GRAPHS = {
    "gemm": gemm(40, 56, 33, TINY),
    "chain": gemm_chain(64, 32, 64, 48, TINY, splits=2),
    "chain by tile": gemm_chain(64, 32, 64, 48, TINY, splits=4),
    "ffn": ffn(48, 32, 64, TINY, splits=2),
    "attention": attention(64, 64, 2, 16, (16, 16), causal=True),
    "block": attention_block(64, 2, 16, 64, TINY),
    "conv": conv2d((1, 8, 8, 4), 8, tile=TINY),
    "decode": small_step(batch=2, workers=4, num_layers=2).graph,
}


def every_tile(rows, cols):
    return sorted((r, c) for r in range(rows) for c in range(cols))


@settings(max_examples=40)
@given(st.integers(1, 23), st.integers(1, 23), st.integers(1, 140))
@pytest.mark.parametrize("name", GRID_ORDERS)
def test_every_order_is_a_permutation_on_any_grid(name, rows, cols, number):
    takes = GRID_ORDERS[name].parameter is not None
    for text in (name, f"{name}:{number}") if takes else (name,):
        assert sorted(grid_order(text, rows, cols).to_list()) == every_tile(rows, cols)


@pytest.mark.parametrize(
    ("text", "tiles"),
    [
        ("row", [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2)]),
        ("column", [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (0, 2), (1, 2), (2, 2)]),
        ("snake", [(0, 0), (0, 1), (0, 2), (1, 2), (1, 1), (1, 0), (2, 0), (2, 1), (2, 2)]),
        ("grouped:2", [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2), (2, 0), (2, 1), (2, 2)]),
        ("swizzle:2", [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1), (0, 2), (1, 2), (2, 2)]),
        ("morton", [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (1, 2), (2, 0), (2, 1), (2, 2)]),
        ("near-square:4", [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (1, 2), (2, 2), (2, 0), (2, 1)]),
        ("stream-k:3", [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (0, 2), (1, 2), (2, 2)]),
    ],
)
def test_orders_on_three_by_three_are_what_their_sources_say(text, tiles):
    assert grid_order(text, 3, 3).to_list() == tiles


def test_grouped_is_tritons_formula():
    rows, cols, size = 11, 5, 4
    expected = []
    for pid in range(rows * cols):
        group = pid // (size * cols)
        height = min(rows - group * size, size)
        expected.append((group * size + pid % (size * cols) % height, pid % (size * cols) // height))
    assert grid_order("grouped:4", rows, cols).to_list() == expected


def test_swizzle_is_cutlass_launch_order():
    rows, cols, log = 5, 7, 2
    expected = []
    for y in range(-(-cols >> log) if cols >> log << log == cols else (cols >> log) + 1):
        for x in range(rows << log):
            row, col = x >> log, (y << log) + (x & ((1 << log) - 1))
            if col < cols:
                expected.append((row, col))
    assert grid_order("swizzle:4", rows, cols).to_list() == expected


@settings(max_examples=60)
@given(st.integers(1, 40), st.integers(1, 40))
def test_hilbert_steps_to_a_neighbour_and_is_diagonal_once_at_most(rows, cols):
    steps = np.abs(np.diff(grid_order("hilbert", rows, cols).tiles, axis=0))
    assert (steps.max(axis=1) == 1).all()
    assert (steps.sum(axis=1) == 2).sum() <= 1


def test_near_square_waves_need_fewer_panels_than_rows_do():
    rows = cols = 24
    wave = grid_order("near-square:36", rows, cols).tiles[:36]
    assert len(set(wave[:, 0].tolist())) + len(set(wave[:, 1].tolist())) == 12
    assert panel_loads(rows, cols, wave, 100) < panel_loads(rows, cols, grid_order("row", rows, cols).tiles[:36], 100)


def test_random_depends_on_its_seed_alone():
    assert grid_order("random:3", 5, 5).to_list() == grid_order("random:3", 5, 5).to_list()
    assert grid_order("random:3", 5, 5).to_list() != grid_order("random:4", 5, 5).to_list()


def test_an_exported_order_is_read_back(tmp_path):
    order = grid_order("hilbert", 4, 5)
    (tmp_path / "order.json").write_text(order.to_json())
    assert grid_order(f"explicit:{tmp_path / 'order.json'}", 4, 5).to_list() == order.to_list()
    assert grid_order("explicit:[[0,1],[0,0]]", 1, 2).to_list() == [(0, 1), (0, 0)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("zigzag", "row, column, snake"),
        ("bpt", "row, column, snake"),
        ("grouped:0", "from 1"),
        ("grouped:x", "rows a band"),
        ("snake:3", "none"),
        ("random:-1", "seed"),
        ("explicit", "FILE.json"),
        ("explicit:[[0,0]]", "each tile exactly once"),
        ("explicit:[[0,0],[0,9],[1,0],[1,1]]", "inside the 2 x 2 grid"),
        ("explicit:[[0,0],[0,0],[1,0],[1,1]]", "each tile exactly once"),
        ("explicit:[[0,0],[0,true]]", "whole numbers"),
        ("explicit:[1,2", "not valid JSON"),
        ("explicit:/no/such/file", "No such file"),
    ],
)
def test_an_order_that_is_none_is_refused_by_name(text, words):
    with pytest.raises(InvalidArgumentError, match=words):
        grid_order(text, 2, 2)


def test_a_grid_of_a_billion_tiles_is_refused():
    with pytest.raises(InvalidArgumentError, match="tiles in all"):
        grid_order("row", 10**5, 10**4)


@pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS)
@pytest.mark.parametrize("text", [name for name in ORDERS if name != "explicit"])
def test_every_order_of_every_graph_is_a_linear_extension(text, graph):
    order = task_order(graph, text, workers=4)
    assert sorted(order.tolist()) == list(range(len(graph.tasks)))
    place = np.argsort(order)
    edges = graph.edges
    assert (place[edges.producer] < place[edges.consumer]).all()


def names_in_order(graph, text):
    return [(graph.tasks[i].name, *graph.tasks[i].index) for i in task_order(graph, text)]


def test_row_by_row_takes_one_row_block_through_both_products():
    rows = [index[1] for index in names_in_order(GRAPHS["chain"], "row-by-row")]
    assert rows == sorted(rows)
    assert [index[1] // 2 for index in names_in_order(GRAPHS["chain"], "rows:2")] == [0] * 20 + [1] * 20


def test_half_a_row_of_the_first_product_is_followed_by_the_half_of_the_second_that_reads_it():
    first = [
        (name, col if name == "gemm0" else split) for name, _, col, split in names_in_order(GRAPHS["chain"], "half-row")
    ][:10]
    assert first == [("gemm0", 0), ("gemm0", 1), *[("gemm1", 0)] * 3, ("gemm0", 2), ("gemm0", 3), *[("gemm1", 1)] * 3]


def test_a_finished_tile_is_added_to_column_0_at_once_and_the_rest_follows():
    first = names_in_order(GRAPHS["chain by tile"], "accumulate-first-column")[:9]
    assert first[:8] == [step for i in range(4) for step in (("gemm0", 0, i, 0), ("gemm1", 0, 0, i))]
    assert first[8][:3] == ("gemm1", 0, 1)


def test_bpt_finishes_a_row_block_before_it_attends_for_the_next():
    order = [
        (task.phase, task.index[0]) for task in (GRAPHS["block"].tasks[i] for i in task_order(GRAPHS["block"], "bpt"))
    ]
    assert [row for _, row in order] == sorted(row for _, row in order)
    assert order[0][0] == "attention"
    assert order[len(order) // 4 - 1][0] == "down"


def test_the_critical_path_goes_first():
    graph = gemm_chain(32, 16, 64, 16, TINY)
    assert graph.tasks[task_order(graph, "critical-path")[-1]].name == "gemm1"


def test_an_order_shows_itself():
    picture = grid_order("hilbert", 4, 4).show()._repr_html_()
    assert picture.startswith("<svg")
    assert picture.count("<text") == 17
    assert "<script" not in Order("<script>", 1, 1, np.zeros((1, 2), dtype=np.int64)).show().svg


def test_an_order_is_plain_json():
    assert json.loads(grid_order("snake", 2, 2).to_json())["order"] == [[0, 0], [0, 1], [1, 1], [1, 0]]


def test_interleavings_and_grid_orders_share_no_name():
    assert not set(GRID_ORDERS) & set(INTERLEAVINGS)
