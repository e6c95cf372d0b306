"""Builders: every element is computed once, from what it should be, with the FLOPs that the mathematics says."""

from __future__ import annotations

import pytest

from onewave.base.errors import ConfigError, InvalidArgumentError
from onewave.tiles.graph.builders import conv2d, ffn, gemm, gemm_chain, gemm_stream_k
from onewave.tiles.graph.builders_attention import attention, attention_block
from onewave.tiles.graph.builders_llama import DecodeShape, built_in_models, decode_shape, decode_step
from onewave.tiles.sim.traffic import compulsory

TINY = (16, 16, 16)


def flops(graph):
    return sum(task.flops for task in graph.tasks)


def depends(graph):
    edges = graph.edges()
    return {(graph.tasks[p].name, graph.tasks[c].name) for p, c in zip(edges.producer, edges.consumer, strict=True)}


def test_a_gemm_has_a_task_a_tile_and_no_dependencies():
    graph = gemm(40, 33, 50, TINY)
    assert [task.index for task in graph.tasks] == [(r, c) for r in range(3) for c in range(3)]
    assert flops(graph) == 2 * 40 * 33 * 50
    assert graph.tasks[4].reads[:3] == (("A", (1, 0)), ("B", (0, 1)), ("A", (1, 1)))
    assert len(graph.edges().producer) == 0
    assert compulsory(graph) == (2 * (40 * 50 + 50 * 33), 2 * 40 * 33)


@pytest.mark.parametrize("workers", [1, 3, 7, 40])
def test_stream_k_gives_every_worker_its_share_of_steps_and_computes_each_once(workers):
    split = gemm_stream_k(48, 48, 64, TINY, workers=workers)
    steps = [sum(sum(tile[0] == "A" for tile in split.graph.tasks[i].reads) for i in queue) for queue in split.queues]
    assert sum(steps) == 9 * 4
    assert max(steps) - min(steps) <= 1
    assert sorted(i for queue in split.queues for i in queue) == list(range(len(split.graph.tasks)))
    done = [(task.index[:2], tile[1][1]) for task in split.graph.tasks for tile in task.reads if tile[0] == "A"]
    assert len(done) == len(set(done)) == 36
    owners = [task for task in split.graph.tasks if task.name == "stream-k"]
    assert len({task.writes for task in owners}) == 9
    helped = sum(sum(tile[0] == "partial" for tile in task.reads) for task in owners)
    assert helped == len(split.graph.tasks) - 9


def test_the_second_product_of_a_chain_waits_for_the_rows_of_the_first_that_it_reads():
    graph = gemm_chain(32, 32, 64, 32, TINY, splits=2)
    edges = graph.edges()
    for producer, consumer, tile in zip(edges.producer, edges.consumer, edges.tile, strict=True):
        name = graph.tile_at(int(tile))[0]
        assert graph.tasks[producer].index[0] == graph.tasks[consumer].index[0]
        assert name in ("H", "Y")
    assert flops(graph) == 2 * 32 * 32 * 64 + 2 * 32 * 64 * 32
    later = [task for task in graph.tasks if task.name == "gemm1" and task.index[2] == 1]
    assert all(task.accumulates for task in later)


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
    edges = graph.edges()
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


def small(**changes):
    numbers = {"hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "intermediate": 128, "layers": 2, "vocab": 96}
    return DecodeShape(**(numbers | {"context": 70, "batch": 2} | changes))


@pytest.mark.parametrize("kernel", [(1, 1), (3, 3), (3, 1), (1, 5), (2, 2), (4, 3), (1, 2)])
def test_a_convolution_keeps_the_size_by_default_whatever_its_kernel(kernel):
    graph = conv2d((1, 8, 6, 4), 8, kernel, tile=(6, 8, 16))
    assert graph.tensors["out"].shape == (8 * 6, 8)
    rows = [sorted(tile[1][1] for tile in task.reads if tile[0] == "image") for task in graph.tasks]
    above, below = (kernel[0] - 1) // 2, kernel[0] // 2
    assert rows == [[y for y in range(row - above, row + below + 1) if 0 <= y < 8] for row in range(8)]


def test_a_decode_step_has_the_phases_of_a_layer_in_a_row():
    graph = decode_step(small(), workers=4)
    phases = list(dict.fromkeys(task.phase for task in graph.tasks))
    assert phases == ["norm", "qkv", "rope+append", "attention", "combine", "o-proj", "ffn", "head"]
    assert {("norm", "qkv"), ("qkv", "rope_append"), ("rope_append", "attention"), ("attention", "combine")} < depends(
        graph
    )
    assert {
        ("combine", "o_proj"),
        ("o_proj", "norm"),
        ("gate_up", "silu"),
        ("silu", "down"),
        ("norm", "head"),
    } < depends(graph)


def test_a_decode_step_reads_each_weight_and_each_cached_key_once():
    shape = small()
    graph = decode_step(shape, workers=4, split=64)
    loads, _ = compulsory(graph)
    norms = (2 * shape.layers + 1) * shape.hidden
    cache = shape.layers * 2 * shape.batch * shape.kv_heads * shape.context * shape.head_dim
    embedded = shape.batch * shape.hidden
    assert loads == 2 * (shape.weight_elements + norms + cache + embedded)


def test_a_task_of_attention_streams_a_bounded_part_of_a_long_context():
    graph = decode_step(small(context=1_000_000, layers=1, batch=1), workers=1)
    tiles = [tile for task in graph.tasks if task.name == "attention" for tile in task.reads]
    assert max(graph.bytes_of(tile) for tile in tiles) <= 8 * 1024 * 1024
    whole = {tile: graph.bytes_of(tile) for tile in tiles if tile[0] in ("K0", "V0")}
    assert sum(whole.values()) == graph.tensors["K0"].nbytes + graph.tensors["V0"].nbytes


def test_the_appended_row_is_attended_to_with_the_last_split():
    graph = decode_step(small(), workers=4, split=64)
    made = {(graph.tasks[p].name, graph.tile_at(int(t))) for p, _, _, t in zip(*graph.edges(), strict=True)}
    assert ("rope_append", ("new_K0", (1, 1, 0))) in made
    last = [task for task in graph.tasks if task.phase == "attention" and ("new_V0", (1, 1, 0)) in task.reads]
    assert [task.reads[1] for task in last] == [("K0", (1, 1, 1, 0))]
    alone = decode_step(small(context=0), workers=4)
    assert "K0" not in alone.tensors
    assert sum(task.name == "attention" for task in alone.tasks) == 2 * 2 * 2


@pytest.mark.parametrize("batch", [1, 7, 8, 9, 33, 70])
def test_every_sequence_of_a_batch_is_computed_once(batch):
    shape = small(batch=batch, layers=1)
    graph = decode_step(shape, workers=4)
    written = [tile for task in graph.tasks for tile in task.writes]
    assert len(written) == len(set(written))
    for name in ("q0", "attended0", "h0", "act0", "x1", "logits", "partial0", "new_K0"):
        tensor = graph.tensors[name]
        assert sum(tile[0] == name for tile in written) == tensor.num_tiles
        assert tensor.shape[0] == batch
    attended = sum(task.flops for task in graph.tasks if task.phase == "attention")
    assert attended == batch * shape.heads * (shape.context + 1) * (4 * shape.head_dim + 5)


def test_the_multiplications_of_a_step_are_those_of_its_matrices():
    shape = small()
    graph = decode_step(shape, workers=4)
    matrices = sum(task.flops for task in graph.tasks if task.name in ("qkv", "o_proj", "gate_up", "down", "head"))
    assert matrices == 2 * shape.batch * shape.weight_elements


def test_the_built_in_models_are_read_without_their_weights():
    assert "llama-3.1-8b" in built_in_models()
    shape = decode_shape("llama-3.1-8b")
    assert (shape.hidden, shape.heads, shape.kv_heads, shape.head_dim, shape.layers) == (4096, 32, 8, 128, 32)
    for model in built_in_models():
        assert decode_shape(model).vocab > 1000


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
        (lambda: small(kv_heads=3), InvalidArgumentError, "divisors"),
        (lambda: decode_step(small(layers=10**9)), InvalidArgumentError, "tasks"),
        (lambda: decode_shape("llama-99"), InvalidArgumentError, "llama-3.1-8b"),
        (lambda: decode_shape("/no/such.json"), ConfigError, "config.json"),
    ],
)
def test_sizes_that_cannot_be_built_are_refused_by_name(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_a_broken_config_is_refused_by_name(tmp_path):
    path = tmp_path / "config.json"
    path.write_text("[1, 2")
    with pytest.raises(ConfigError, match="malformed"):
        decode_shape(str(path))
    path.write_text('{"num_attention_heads": 4, "hidden_size": "x"}')
    with pytest.raises(ConfigError, match="hidden_size"):
        decode_shape(str(path))
