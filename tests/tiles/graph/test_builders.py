"""Builders: every element is computed once, from what it should be, with the FLOPs that the mathematics says."""

import pytest

from onewave.base.errors import InvalidArgumentError
from onewave.tiles.graph.builders import conv2d, ffn, gemm, gemm_chain, gemm_stream_k
from onewave.tiles.graph.builders_attention import attention, attention_block
from onewave.tiles.sim.traffic import compulsory

TINY = (16, 16, 16)


def flops(graph):
    return sum(task.flops for task in graph.tasks)


def depends(graph):
    edges = graph.edges
    return {(graph.tasks[p].name, graph.tasks[c].name) for p, c in zip(edges.producer, edges.consumer, strict=True)}


def test_a_gemm_has_a_task_a_tile_and_no_dependencies():
    graph = gemm(40, 33, 50, TINY)
    assert [task.index for task in graph.tasks] == [(r, c) for r in range(3) for c in range(3)]
    assert flops(graph) == 2 * 40 * 33 * 50
    assert graph.tasks[4].reads[:3] == (("A", (1, 0)), ("B", (0, 1)), ("A", (1, 1)))
    assert len(graph.edges.producer) == 0
    assert compulsory(graph) == (2 * (40 * 50 + 50 * 33), 2 * 40 * 33)


@pytest.mark.parametrize("workers", [1, 3, 7, 40])
def test_stream_k_gives_every_worker_its_share_of_steps_and_computes_each_once(workers):
    graph, queues = gemm_stream_k(48, 48, 64, TINY, workers=workers)
    steps = [sum(sum(tile[0] == "A" for tile in graph.tasks[i].reads) for i in queue) for queue in queues]
    assert sum(steps) == 9 * 4
    assert max(steps) - min(steps) <= 1
    assert sorted(i for queue in queues for i in queue) == list(range(len(graph.tasks)))
    done = [(task.index[:2], tile[1][1]) for task in graph.tasks for tile in task.reads if tile[0] == "A"]
    assert len(done) == len(set(done)) == 36
    owners = [task for task in graph.tasks if task.name == "stream-k"]
    assert len({task.writes for task in owners}) == 9
    helped = sum(sum(tile[0] == "partial" for tile in task.reads) for task in owners)
    assert helped == len(graph.tasks) - 9


def test_the_second_product_of_a_chain_waits_for_the_rows_of_the_first_that_it_reads():
    graph = gemm_chain(32, 32, 64, 32, TINY, splits=2)
    edges = graph.edges
    for producer, consumer, tile in zip(edges.producer, edges.consumer, edges.tile, strict=True):
        name = graph.tile_at(int(tile))[0]
        assert graph.tasks[producer].index[0] == graph.tasks[consumer].index[0]
        assert name in ("H", "Y")
    assert flops(graph) == 2 * 32 * 32 * 64 + 2 * 32 * 64 * 32
    later = [task for task in graph.tasks if task.name == "gemm1" and task.index[2] == 1]
    assert all({*task.reads} & {*task.writes} for task in later)


@pytest.mark.parametrize("fused", [False, True])
def test_the_ffn_runs_gate_up_silu_and_down(fused):
    graph = ffn(32, 32, 64, TINY, fused=fused)
    assert flops(graph) == 6 * 32 * 32 * 64 + 5 * 32 * 64
    expected = {("gate_up_silu", "down")} if fused else {("gate", "silu"), ("up", "silu"), ("silu", "down")}
    assert depends(graph) == expected


@pytest.mark.parametrize("fused", [False, True])
def test_attention_multiplies_only_what_the_mask_lets_through(fused):
    whole = attention(64, 64, 2, 16, (16, 16), fused=fused)
    assert flops(whole) == 2 * 64 * 64 * (4 * 16 + 5)
    masked = attention(64, 64, 2, 16, (16, 16), fused=fused, causal=True)
    assert flops(masked) == flops(whole) * 10 // 16
    if not fused:
        assert depends(whole) == {("qk", "softmax"), ("softmax", "pv")}
    assert compulsory(whole) == (2 * 3 * 64 * 32, 2 * 64 * 32)


def test_causal_attention_aligns_the_last_query_with_the_last_key():
    graph = attention(16, 64, 1, 16, (16, 16), fused=True, causal=True)
    assert len(graph.tasks[0].reads) == 1 + 2 * 4
    graph = attention(64, 16, 1, 16, (16, 16), fused=True, causal=True)
    assert [len(task.reads) for task in graph.tasks] == [1, 1, 1, 3]


def test_query_heads_share_their_kv_head():
    graph = attention(16, 16, 4, 16, (16, 16), kv_heads=2, fused=True)
    assert [task.reads[1] for task in graph.tasks] == [("K", (head // 2, 0, 0)) for head in range(4)]


def test_a_row_block_of_the_block_needs_its_own_rows_only():
    graph = attention_block(64, 2, 16, 64, TINY)
    edges = graph.edges
    rows = [
        (graph.tasks[p].index[0], graph.tasks[c].index[0]) for p, c in zip(edges.producer, edges.consumer, strict=True)
    ]
    assert all(a == b for a, b in rows)
    chain = {("attention", "projection"), ("projection", "gate_up_silu"), ("gate_up_silu", "down")}
    assert depends(graph) == chain


def test_a_convolution_reads_each_image_row_for_the_kernel_rows_around_it():
    graph = conv2d((1, 8, 16, 4), 8, tile=(16, 8, 16))
    assert [sum(tile[0] == "image" for tile in task.reads) for task in graph.tasks] == [2, 3, 3, 3, 3, 3, 3, 2]
    assert flops(graph) == 2 * 8 * 16 * 8 * 9 * 4
    strided = conv2d((2, 8, 8, 4), 8, (1, 1), stride=2, padding=0, tile=(16, 8, 16))
    assert flops(strided) == 2 * 2 * 4 * 4 * 8 * 4
    assert compulsory(strided)[0] == 2 * (2 * 4 * 8 * 4 + 8 * 4)  # every other image row, and the weights


@pytest.mark.parametrize("kernel", [(1, 1), (3, 3), (3, 1), (1, 5), (2, 2), (4, 3), (1, 2)])
def test_a_convolution_keeps_the_size_by_default_whatever_its_kernel(kernel):
    graph = conv2d((1, 8, 6, 4), 8, kernel, tile=(6, 8, 16))
    assert graph.tensors["out"].shape == (8 * 6, 8)
    rows = [sorted(tile[1][1] for tile in task.reads if tile[0] == "image") for task in graph.tasks]
    above, below = (kernel[0] - 1) // 2, kernel[0] // 2
    assert rows == [[y for y in range(row - above, row + below + 1) if 0 <= y < 8] for row in range(8)]


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: gemm(0, 1, 1), InvalidArgumentError, "M: 0"),
        (lambda: gemm(1, 1, 1, (0, 1, 1)), InvalidArgumentError, "three sizes"),
        (lambda: gemm(10**9, 10**9, 1, (1, 1, 1)), InvalidArgumentError, "larger tiles"),
        (lambda: gemm(1, 1, 10**9, (1, 1, 1)), InvalidArgumentError, "tile accesses"),
        (lambda: gemm(1, 1, 1, dtype="fp2"), InvalidArgumentError, "bf16"),
        (lambda: attention(1, 1, 3, 8, kv_heads=2), InvalidArgumentError, "divisors"),
        (lambda: attention(10**6, 10**6, 1, 8, (1, 1)), InvalidArgumentError, "larger tiles"),
        (lambda: attention(1, 1, tile=(1,)), InvalidArgumentError, "tile: 1 sizes; allowed: rows, keys"),
        (lambda: conv2d((1, 2, 2, 1), 1, (5, 5), padding=0), InvalidArgumentError, "output"),
        (lambda: conv2d((1, 4, 4), 1), InvalidArgumentError, "image: 3 sizes; allowed: images, height, width"),
        (lambda: conv2d((1, 4, 4, 1), 1, (3,)), InvalidArgumentError, "kernel: 1 sizes; allowed: height, width"),
    ],
)
def test_sizes_that_cannot_be_built_are_refused_by_name(call, error, words):
    with pytest.raises(error, match=words):
        call()
