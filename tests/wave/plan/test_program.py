"""Programs, packing, refusals and the reports of stalled launches, without a GPU."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from kit.models.tiny_decoders import BASE
from onewave.base.errors import (
    InvalidArgumentError,
    ShapeError,
    UnsupportedError,
    VerificationError,
    WaveStalled,
)
from onewave.base.weight_formats import COMPACT_BYTES, NESTED, NIBBLES, ROUNDINGS, WeightFormat
from onewave.models.llama_plan import DecodeStep, plan_decode
from onewave.ops.ffn.sizes import FFNSizes
from onewave.ops.ffn.wave.plan import plan_ffn
from onewave.tiles.order.policies import plan
from onewave.tiles.order.schedule import Mode
from onewave.tiles.proof.table import TaskTable, lower
from onewave.tiles.proof.verify import verify
from onewave.wave.launch.launch import Wave
from onewave.wave.launch.watch import HEADER_WORDS, RECORD_WORDS, stalls, watch_words
from onewave.wave.plan.deal import Deal
from onewave.wave.plan.layout import SHARED_BYTES, STEP_WORDS, TILE_BYTES, shared_bytes, tile_shape
from onewave.wave.plan.operations import INPUT, AnyOperation, HeadGroups, Operation
from onewave.wave.plan.pace import sooner
from onewave.wave.plan.program import build_program
from onewave.wave.plan.slices import slice_bounds
from onewave.wave.plan.steps import Kind, Word
from onewave.wave.weights.formats.plain import tile_images
from onewave.wave.weights.pack import Weight, WeightStream, pack_stream

INT8 = ROUNDINGS["int8"]

CPU = torch.device("cpu")
WEIGHT_BYTES = sorted({2, 1, COMPACT_BYTES, NESTED.weight_bytes, *(each.weight_bytes for each in NIBBLES.values())})


def lowered(deal: Deal, workers: int, *, mode: Mode = Mode.STATIC) -> TaskTable:
    graph = deal.build.graph()
    order = np.arange(len(graph.tasks))
    queues = deal.queues if mode is Mode.STATIC else None
    return lower(verify(plan(graph, order, "tile", workers=workers, co_resident=workers, queues=queues, mode=mode)))


@pytest.mark.parametrize(("batch", "head_dim"), [(b, d) for d in (0, 32, 64, 128) for b in range(1, 17 if d else 65)])
def test_every_shape_fits_shared_memory_with_a_ring_of_seven_tiles_or_more(batch: int, head_dim: int) -> None:
    shape = tile_shape(batch, head_dim=head_dim)
    assert shape.ring >= 7
    assert batch <= shape.batch
    assert shape.width in (8, 16, 32, 64)
    assert shape.rows * shape.cols * 2 == TILE_BYTES


@pytest.mark.parametrize(
    "weight_bytes", {2, 1, COMPACT_BYTES, NESTED.weight_bytes, *(found.weight_bytes for found in NIBBLES.values())}
)
@pytest.mark.parametrize("batch", [1, 2, 4, 8, 16, 32])
def test_the_ring_takes_what_is_left_of_shared_memory_and_no_more(batch: int, weight_bytes: float) -> None:
    for images in (1, 2, 4)[: 1 if weight_bytes == 2 else 2 if weight_bytes >= 1 or batch > 8 else 3]:
        for head_dim in (0, 32, 64, 128):
            for columns in range(64, 16385, 704):
                shape = tile_shape(batch, head_dim=head_dim, columns=columns, weight_bytes=weight_bytes, images=images)
                more = replace(shape, ring=shape.ring + 1)
                assert shared_bytes(shape, head_dim) <= SHARED_BYTES < shared_bytes(more, head_dim)


@pytest.mark.parametrize("head_dim", [0, 64, 128])
def test_activations_take_the_shared_memory_that_the_longest_need_and_the_ring_the_rest(head_dim: int) -> None:
    for batch in (1, 2, 4):
        shapes = [tile_shape(batch, head_dim=head_dim, columns=columns) for columns in (64, 2048, 8192)]
        assert all(s.max_tiles * s.cols >= c for s, c in zip(shapes, (64, 2048, 8192), strict=True))
        # Where attention leaves its warps' float32 values, eight heads a warp.
        assert all(s.slots * s.chunk_bytes >= 8 * 8 * head_dim * 4 for s in shapes)
        rings = [shape.ring for shape in shapes]
        assert rings == sorted(rings, reverse=True)
    assert tile_shape(1, head_dim=64, columns=8192).ring > tile_shape(1, head_dim=64, columns=16384).ring


def test_slices_of_k_are_whole_tiles_that_cover_it() -> None:
    shape = tile_shape(8)
    for cols, slices in ((64, 1), (4096, 1), (4672, 3), (14336, 4), (14336, 28)):
        bounds = slice_bounds(cols, slices, shape)
        assert bounds[0] == 0
        assert bounds[-1] == cols
        assert all(a < b for a, b in pairwise(bounds))
        assert all(bound % shape.cols == 0 for bound in bounds[:-1])
    with pytest.raises(UnsupportedError, match="1 to 2"):
        slice_bounds(1024, 3, shape)


def test_a_tiles_image_holds_row_r_of_column_group_q_at_row_q_times_rows_plus_r() -> None:
    shape = tile_shape(2)
    matrix = torch.arange(32 * 600).view(32, 600)
    images = tile_images(matrix, shape).view(2, 2, 2, 64, 64)  # row blocks, tiles, halves, 64, 64
    for block, tile, half, q, r, k in ((0, 0, 0, 0, 0, 0), (1, 0, 1, 3, 15, 63), (1, 1, 0, 0, 7, 5)):
        column = tile * 512 + q * 128 + half * 64 + k
        assert images[block, tile, half, q * 16 + r, k] == matrix[block * 16 + r, column]
    assert (images[:, 1, :, 16:] == 0).all()  # columns 640 to 1023 are padding


def test_the_stream_holds_every_weight_once_and_takes_turns_and_gains() -> None:
    sizes = FFNSizes(2, 128, 576, 64, True)
    program = plan_ffn(sizes, workers=5).programs[0]
    gate, up, gain = torch.randn(576, 128).half(), torch.randn(576, 128).half(), torch.rand(128)
    down = torch.randn(64, 576).half()
    weights = {"up": Weight((gate, up), gain), "down": Weight((down,))}
    stream = pack_stream(program, weights, CPU).tensor
    folded = [(matrix.float() * gain).half() for matrix in (gate, up)]
    assert stream.double().sum() == pytest.approx(sum(m.double().sum().item() for m in (*folded, down)))
    places = np.concatenate([entries[:, 2] for entries in program.stream.values()])
    assert len(np.unique(places)) == len(places)
    with pytest.raises(ShapeError, match="one shape"):
        pack_stream(program, {"up": Weight((gate, up[:8])), "down": Weight((down,))}, CPU)


def test_a_residual_stream_that_changes_its_worker_is_refused() -> None:
    shape = tile_shape(1)
    operations: dict[str, AnyOperation] = {
        "a": Operation("a", 64, 64, 1, INPUT, "x", residual=True, embedded=True),
        "b": Operation("b", 64, 64, 1, "x", "y", residual=True),
    }

    def program(shares: list[int]) -> None:
        deal = Deal(operations, shape, 2, 1, by_writer=True)
        deal.add("a", shares=[4, 4])
        deal.add("b", shares=shares)
        # A worker adds to what it owns alone: another share reads its neighbour's rows.
        graph = deal.build.graph()
        build_program(graph, lowered(deal, 2), operations, shape)

    program([4, 4])
    with pytest.raises(VerificationError, match=r"hand-off: .* of residual"):
        program([5, 3])


def test_a_ticket_table_and_a_missing_operation_are_refused() -> None:
    made = plan_ffn(FFNSizes(1, 64, 128, 64, False), workers=2)
    with pytest.raises(UnsupportedError, match="opcode"):
        build_program(made.graphs[0], made.tables[0], {}, tile_shape(1))
    deal = Deal({"up": Operation("up", 64, 64, 1, INPUT, "h")}, tile_shape(1), 2, 1)
    deal.add("up")
    with pytest.raises(UnsupportedError, match="ticket"):
        build_program(deal.build.graph(), lowered(deal, 2, mode=Mode.TICKET), deal.operations, tile_shape(1))


def test_reading_what_nobody_makes_is_a_mistake_of_the_plan() -> None:
    operations: dict[str, AnyOperation] = {
        "up": Operation("up", 128, 64, 1, INPUT, "h"),
        "down": Operation("down", 64, 128, 1, "h", "output"),
    }
    deal = Deal(operations, tile_shape(1), 2, 1)
    deal.add("up", first=0, last=64)
    with pytest.raises(AssertionError, match="before anything makes them"):
        deal.add("down")


@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (14, 2), (7, 1), (9, 3), (4, 4), (16, 1)])
def test_groups_of_heads_cover_every_head_once(heads: int, kv_heads: int) -> None:
    groups = HeadGroups(heads, kv_heads, 64, 4)
    covered = [
        head
        for group in range(groups.count)
        for head in range(groups.first_head(group), groups.first_head(group) + groups.heads_of(group))
    ]
    assert covered == list(range(heads))
    assert all(1 <= groups.heads_of(group) <= groups.size for group in range(groups.count))


def test_a_launch_needs_a_gpu_of_the_right_kind() -> None:
    program = plan_ffn(FFNSizes(1, 64, 128, 64, False), workers=2).programs[0]
    with pytest.raises(UnsupportedError, match="compute capability"):
        Wave(WeightStream(program, torch.float16, CPU))


def test_a_stalled_launch_is_told_as_task_counter_expected_and_got() -> None:
    made = plan_ffn(FFNSizes(1, 64, 1088, 64, False), workers=3)
    program = made.programs[0]
    assert program.steps.shape[1] == STEP_WORDS
    words = watch_words(3, 1000, 0x7F0012345678)
    assert int(words[1]) == 1000
    assert int(words[2:4].view(np.uint64)[0]) == 0x7F0012345678
    exchange, counters = 0x10000, 0x90000
    step = int(program.lanes[2, 2]) + 1

    def record(worker: int, state: int, address: int, expected: int, got: int) -> None:
        at = HEADER_WORDS + worker * RECORD_WORDS
        words[at : at + 2] = (state, step)
        words[at + 2 : at + 4] = np.array([address], dtype=np.uint64).view(np.int32)
        words[at + 4 : at + 6] = (expected, got)

    record(1, 2, exchange + 4 * (program.set_words + 3), 0, -1)
    record(2, 1, counters + 4 * 5, 7, 6)
    found = stalls(program, words, exchange, counters)
    assert found[0] == {
        "worker": 1,
        "task": program.names[step],
        "counter": "h word 3 (of up)",
        "expected": "data",
        "got": "none",
    }
    assert found[1] == {"worker": 2, "task": program.names[step], "counter": "counter 5", "expected": 7, "got": 6}
    error = WaveStalled("wave of 3 workers stalled", found, next="Try again.")
    assert "counter 5: expected 7, got 6" in str(error)
    assert "\n" not in str(error)
    assert len(error.stalls) == 2


@pytest.mark.parametrize("workers", [1, 3, 7])
def test_an_attention_step_is_announced_once_by_an_earlier_product_of_its_worker(workers: int) -> None:
    program = plan_decode(DecodeStep(BASE, 2), workers=workers).program
    for first, count in program.lanes[:, 2:].tolist():
        steps = program.steps[first : first + count]
        kinds = steps[:, Word.KIND]
        announced = [at + int(step[Word.PREFETCH]) for at, step in enumerate(steps) if step[Word.PREFETCH]]
        assert len(set(announced)) == len(announced)
        assert (kinds[announced] == Kind.ATTEND).all()
        marked = steps[:, Word.PREFETCH] != 0
        assert (kinds[marked] < Kind.REDUCE_HIDDEN).all()
        attends = np.flatnonzero(kinds == Kind.ATTEND)
        assert set(attends[:1]) <= set(announced), "the first is announced at any rate"


@pytest.mark.parametrize("workers", [1, 3, 7])
@pytest.mark.parametrize("batch", [1, 4, 8, 16])
def test_keys_come_behind_the_products_that_an_attention_task_waits_for(workers: int, batch: int) -> None:
    """Each lane's attention tasks, in turn: before which of its tiles, and whose keys; once for each task."""
    program = plan_decode(DecodeStep(BASE, batch), workers=workers).program
    for worker, row in enumerate(program.key_tasks.tolist()):
        pairs = [(stop, task) for stop, task in zip(row[0::2], row[1::2], strict=True) if stop != 2**31 - 1]
        assert row[2 * len(pairs) :] == [2**31 - 1] * (len(row) - 2 * len(pairs))
        assert len(row) - 2 * len(pairs) >= 4, "the loader reads two pairs ahead"
        first_step, count = program.lanes[worker, 2:].tolist()
        steps = program.steps[first_step : first_step + count]
        products = steps[:, Word.KIND] < Kind.REDUCE_HIDDEN
        ends = np.cumsum(np.where(products, steps[:, Word.TILES] * steps[:, Word.BLOCKS], 0))
        attends = np.flatnonzero(steps[:, Word.KIND] == Kind.ATTEND).tolist()
        assert len(pairs) == len(attends)
        before: np.ndarray | None = None
        for at, (stop, task) in zip(attends, pairs, strict=True):
            step = steps[at]
            assert stop == step[Word.COMES]
            assert ends[at] <= stop <= ends[at] + program.shape.held, "behind what was made before, and what is held"
            if task < 0:
                assert (-1 - task, step[Word.FURTHER]) == (first_step + at, 0)
            else:
                assert task == step[Word.FURTHER] == step[Word.LAYER] - before[Word.LAYER]
                same = [Word.SEQUENCE, Word.SLICE, Word.WINDOW, Word.SPLITS, Word.KV_HEAD]
                assert (step[same] == before[same]).all()
            before = step
        assert [stop for stop, _ in pairs] == sorted(stop for stop, _ in pairs)


@pytest.mark.parametrize("workers", [1, 3, 7])
@pytest.mark.parametrize(
    ("batch", "held", "form", "earlier"),
    [
        (1, 4, None, 0),
        (2, 4, None, 0),
        (4, 2, None, 1),
        (8, 2, None, 2),
        (16, 0, None, 0),
        (1, 0, INT8, 99),
        (8, 0, INT8, 99),
    ],
)
def test_tiles_that_have_time_follow_each_other_and_end_before_the_ring_is_free_again(
    workers: int, batch: int, held: int, form: WeightFormat | None, earlier: int
) -> None:
    """earlier: of the product that attention waits for, as far as it is short and everybody has them."""
    program = plan_decode(DecodeStep(BASE, batch, form), workers=workers).program
    assert program.shape.held == program.constants["HELD"] == held
    never = 2**31 - 1
    short = 8 * TILE_BYTES // program.shape.tile_bytes
    products = np.where(program.steps[:, Word.KIND] < Kind.REDUCE_HIDDEN, program.steps[:, Word.TILES], 0)
    lanes = [slice(first, first + count) for first, count in program.lanes[:, 2:].tolist()]
    everybodys = min(
        int((products * program.steps[:, Word.BLOCKS] * [phase == "qkv0" for phase in program.phases])[lane].sum())
        for lane in lanes
    )
    for worker, row in enumerate(program.slack.tolist()):
        runs = [(a, b) for a, b in zip(row[0::2], row[1::2], strict=True) if a != never]
        assert row[-2:] == [never, never]
        assert all(first <= last for first, last in runs)
        assert [last for _, last in runs] == sorted({last for _, last in runs}), (
            "a loader meets every last tile in turn"
        )
        first_step, count = program.lanes[worker, 2:].tolist()
        phases = program.phases[first_step : first_step + count]
        assert len(runs) == sum(phase.startswith("o") for phase in phases)
        before = 0
        for phase, step in zip(phases, program.steps[first_step:], strict=False):
            if phase.startswith("o"):
                first, last = runs.pop(0)
                own = int(step[Word.TILES] * step[Word.BLOCKS])
                assert first == before - (min(earlier, everybodys) if everybodys <= short else 0)
                full = before + min(held, own) + program.shape.ring + (own if own <= short else 0)
                assert last + 1 == full - sooner(program.shape, merges=program.merge_words > 0)
            before += int(step[Word.TILES] * step[Word.BLOCKS]) if step[Word.KIND] < Kind.REDUCE_HIDDEN else 0


@pytest.mark.parametrize(
    ("sizes", "workers", "several"),
    [
        (FFNSizes(1, 4096, 7168, 1024, gated=False), 100, False),
        # Activations pass through shared memory, so that a worker's share of `down` is several tasks.
        (FFNSizes(16, 2048, 8192, 2048, gated=False), 30, True),
    ],
)
def test_whoever_streams_more_of_a_product_than_most_has_the_difference_brought_nearer(
    sizes: FFNSizes, workers: int, several: bool
) -> None:
    program = plan_ffn(sizes, workers=workers).programs[0]
    share = np.zeros((2, len(program.lanes)), dtype=np.int64)
    marks = np.zeros((len(program.lanes), 2), dtype=np.int64)
    tasks = 0
    for worker, (first, count) in enumerate(program.lanes[:, 2:].tolist()):
        steps = program.steps[first : first + count]
        tiles = np.where(steps[:, Word.KIND] < Kind.REDUCE_HIDDEN, steps[:, Word.BLOCKS] * steps[:, Word.TILES], 0)
        second = np.array(program.phases[first : first + count]) == "down"
        share[:, worker] = tiles[~second].sum(), tiles[second].sum()
        tasks = max(tasks, int((tiles[second] > 0).sum()))
        for at, step in enumerate(steps):
            if step[Word.AHEAD_TILES]:
                assert at == 0, "while the first product is being made"
                marks[worker] = step[Word.AHEAD], step[Word.AHEAD_TILES]
    assert (tasks > 1) == several
    usual = np.sort(share[1])[len(program.lanes) // 2]
    more = np.maximum(np.minimum(share[1] - usual, share[1] - program.shape.ring), 0)
    assert more.any()
    assert not more.all()
    assert (marks[:, 1] == more).all()
    assert (marks[more > 0, 0] == share[0][more > 0] + program.shape.ring).all()


@pytest.mark.parametrize("workers", [0, -1])
def test_a_step_without_workers_is_refused(workers: int) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"workers.*{workers}.*1 to 4,096"):
        plan_decode(DecodeStep(BASE), workers=workers)
