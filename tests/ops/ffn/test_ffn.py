"""The feed-forward block: planned, proved, packed and emulated without a GPU; refusals; registration."""

import numpy as np
import pytest
import torch
from torch import Tensor

from kit.task_tables.execute import execute
from kit.task_tables.verify_table import verify_table
from onewave.base.errors import InvalidArgumentError, ShapeError, UnsupportedError
from onewave.ops.explain import explain
from onewave.ops.ffn import ffn, measured, pack_ffn
from onewave.ops.ffn.reference import ffn as in_torch
from onewave.ops.ffn.sizes import FFNSizes
from onewave.ops.ffn.wave.launch import PackedFFN
from onewave.ops.ffn.wave.plan import DATA, ORDERS, plan_ffn, workers_for
from onewave.wave.plan.operations import INPUT, OUTPUT
from onewave.wave.plan.slices import slice_bounds


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def silu(y: np.ndarray) -> np.ndarray:
    return y / (1 + np.exp(-y))


def operands(sizes: FFNSizes, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    x, up = randn(rows, sizes.hidden), randn(sizes.intermediate, sizes.hidden, seed=1) / sizes.hidden**0.5
    down = randn(sizes.out, sizes.intermediate, seed=2) / sizes.intermediate**0.5
    return x, up, down, randn(*up.shape, seed=3) / sizes.hidden**0.5 if sizes.gated else None


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("policy", [DATA, "none", "row", "tile", "strided", "consecutive"])
def test_every_order_and_policy_is_proved_again_from_its_table(order: str, policy: str) -> None:
    plan = plan_ffn(FFNSizes(4, 256, 1024, 128, True), workers=6, order=order, policy=policy)
    assert len(plan.tables) == (2 if order == "sequential" else 1)
    for table, program in zip(plan.tables, plan.programs, strict=True):
        verify_table(table)
        assert program.workers == 6
        assert len(program.steps) == table.num_tasks


@pytest.mark.parametrize("order", ["row", "half_row"])
def test_the_table_runs_in_random_interleavings_and_gives_the_references_numbers(order: str) -> None:
    sizes = FFNSizes(8, 512, 1536, 192, True)
    x, up, down, gate = operands(sizes, 8)
    assert gate is not None
    plan = plan_ffn(sizes, workers=5, order=order)
    graph, table, shape = plan.graphs[0], plan.tables[0], plan.programs[0].shape
    both = torch.stack((gate, up), 1).reshape(-1, sizes.hidden)
    memory: dict[int, np.ndarray] = {graph.tile_number((INPUT, (0, 0))): x.numpy()}
    for name, matrix in (("W_up", both), ("W_down", down)):
        tensor = graph.tensors[name]
        bounds = [*range(0, matrix.shape[1], tensor.tile[1]), matrix.shape[1]]
        if name == "W_down":
            bounds = list(slice_bounds(matrix.shape[1], plan.splits[1], shape))
        for i, j in np.ndindex(*tensor.grid):
            rows = matrix[i * tensor.tile[0] : (i + 1) * tensor.tile[0]]
            memory[graph.tile_number((name, (i, j)))] = rows[:, bounds[j] : bounds[j + 1]].numpy()

    def product(reads: list[np.ndarray]) -> list[np.ndarray]:
        weights = [tile for tile in reads if tile.shape[0] == shape.rows]
        values = np.concatenate([tile for tile in reads if tile.shape[0] == 8], axis=1)
        return [values @ tile.T for tile in weights]

    def up_product(reads: list[np.ndarray]) -> list[np.ndarray]:
        return [silu(y[:, 0::2]) * y[:, 1::2] for y in product(reads)]

    def down_sum(reads: list[np.ndarray]) -> list[np.ndarray]:
        slices = plan.splits[1]
        per = len(reads) // slices
        whole = [sum(reads[k * per + i] for k in range(slices)) for i in range(per)]
        joined = np.concatenate(whole, axis=1)
        return [joined[:, at : at + shape.piece] for at in range(0, joined.shape[1], shape.piece)]

    operators = {"up": up_product, "down": product, "down_sum": down_sum}
    found = execute(table, memory, operators, seed=7)
    tiles = [found[graph.tile_number((OUTPUT, (0, i)))] for i in range(graph.tensors[OUTPUT].grid[1])]
    expected = in_torch(x, up, down, gate, "silu")
    torch.testing.assert_close(torch.from_numpy(np.concatenate(tiles, axis=1)), expected, rtol=1e-10, atol=1e-10)


def test_what_decides_about_rounding_does_not_depend_on_the_number_of_workers() -> None:
    sizes = FFNSizes(8, 1024, 4096, 512, False)
    plans = [plan_ffn(sizes, workers=workers) for workers in (1, 17, 64, 131, 132, 500)]
    assert len({plan.splits for plan in plans}) == 1
    assert len({plan.programs[0].shape for plan in plans}) == 1
    covered = []
    for plan in plans:
        products = [
            (task.name, task.index[2], block)
            for task in plan.graphs[0].tasks
            for block in range(task.index[0], task.index[0] + task.index[1])
        ]
        assert len(set(products)) == len(products)
        covered.append(sorted(products))
    assert all(each == covered[0] for each in covered)


@pytest.mark.parametrize(("batch", "above"), [(1, 1 / 30), (2, 1 / 30), (4, 0), (8, 0), (16, 1 / 14), (32, 1 / 14)])
def test_how_much_more_than_the_mean_the_busiest_worker_streams(batch: int, above: float) -> None:
    sizes = FFNSizes(batch, 4096, 14336, 4096, False)
    workers = workers_for(sizes, order="row", available=132)
    assert workers == (132 if batch <= 2 else 128)
    tiles = plan_ffn(sizes, workers=workers).programs[0].lanes[:, 0]
    assert tiles.max() <= tiles.mean() * (1 + above)
    assert tiles.sum() * 8192 == 2 * 4096 * 14336


@pytest.mark.parametrize(
    ("rows", "hidden", "intermediate", "gated", "splits"),
    [
        *((rows, 4096, 14336, gated, (1, 1)) for rows in (1, 2, 4, 8, 16) for gated in (False, True)),
        *((rows, 4096, 14336, gated, (1, 2)) for rows in (32, 64) for gated in (False, True)),
        (8, 8192, 28672, False, (1, 1)),
        (16, 2048, 8192, False, (1, 2)),
        (32, 2048, 8192, False, (1, 4)),
    ],
)
def test_long_sums_are_cut_only_where_the_work_is_dealt_more_evenly_by_more_than_adding_up_costs(
    rows: int, hidden: int, intermediate: int, gated: bool, splits: tuple[int, int]
) -> None:
    assert plan_ffn(FFNSizes(rows, hidden, intermediate, hidden, gated), workers=128).splits == splits


@pytest.mark.parametrize(
    ("rows", "hidden", "intermediate", "splits", "tile"),
    [
        (8, 4096, 14336, (1, 1), (16, 1024)),
        (16, 4096, 14336, (1, 2), (64, 256)),
        (16, 2048, 8192, (1, 4), (64, 256)),
        (16, 5120, 13824, (1, 3), (64, 256)),
        (16, 8192, 28672, (1, 1), (64, 256)),
        (16, 3072, 8192, (1, 1), (32, 512)),  # 48 tall row blocks: some workers would have twice the mean
        (16, 1024, 4096, (1, 1), (32, 512)),
        (32, 4096, 14336, (1, 4), (64, 256)),
        (32, 8192, 28672, (1, 2), (64, 256)),
    ],
)
@pytest.mark.parametrize("gated", [False, True])
def test_compact_blocks_of_many_rows_read_their_activations_less_often(
    rows: int, hidden: int, intermediate: int, splits: tuple[int, int], tile: tuple[int, int], gated: bool
) -> None:
    sizes = FFNSizes(rows, hidden, intermediate, hidden, gated)
    plan = plan_ffn(sizes, workers=128, compact=True)
    shape = plan.programs[0].shape
    assert (plan.splits, (shape.rows, shape.cols)) == (splits, tile)
    assert plan_ffn(sizes, workers=17, compact=True).programs[0].shape == shape


def test_by_default_all_workers_or_the_fewest_that_leave_nobody_with_more() -> None:
    sizes = FFNSizes(16, 4096, 14336, 4096, False)
    assert [workers_for(sizes, order="row", available=count) for count in (1, 17, 64, 114, 132)] == [
        1,
        17,
        64,
        112,
        128,
    ]
    for order in ("half_row", "sm_local", "sequential"):
        assert workers_for(sizes, order=order, available=132) == 132
    few = FFNSizes(4, 64, 64, 64, False)
    assert workers_for(few, order="row", available=132) == 123  # never less than 15 sixteenths


def test_on_a_cpu_it_is_torchs_products() -> None:
    x, up, down, gate = (None if t is None else t.float() for t in operands(FFNSizes(3, 128, 192, 64, True), 3))
    assert up is not None
    assert down is not None
    for activation in ("silu", "gelu", None):
        for g in (gate, None):
            out = ffn(x.view(3, 1, 128), up, down, w_gate=g, activation=activation)
            assert torch.equal(out, in_torch(x.view(3, 1, 128), up, down, g, activation))
            for backend in ("torch", "reference"):
                again = ffn(x.view(3, 1, 128), up, down, w_gate=g, activation=activation, backend=backend)
                assert torch.equal(again, out)
    assert ffn(x[:0], up, down).shape == (0, 64)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"activation": "relu"}, InvalidArgumentError, "silu, gelu, None"),
        ({"order": "diagonal"}, InvalidArgumentError, "sm_local"),
        ({"order": "diagonal", "backend": "chain"}, InvalidArgumentError, "skewed"),
        ({"order": "rows:2", "backend": "wave"}, InvalidArgumentError, "half_row"),
        ({"order": "sm_local", "backend": "chain"}, InvalidArgumentError, "half_row"),
        ({"policy": "data", "backend": "chain"}, InvalidArgumentError, "conv2d-tile"),
        ({"backend": "chain"}, UnsupportedError, "compute capability 9.0"),
        ({"backend": "streams"}, UnsupportedError, "compute capability 9.0"),
        ({"policy": "cell"}, InvalidArgumentError, "conv2d-tile"),
        ({"backend": "cudnn"}, InvalidArgumentError, "wave, chain"),
        ({"backend": "wave"}, UnsupportedError, "compute capability 9.0"),
        ({"order": "rows:abc"}, InvalidArgumentError, "rows:ROWS"),
        ({"order": "row:2"}, InvalidArgumentError, "allowed: row"),
        ({"order": "rows:0", "backend": "chain"}, InvalidArgumentError, "rows:ROWS"),
        ({"order": None}, InvalidArgumentError, "sm_local"),
        ({"order": 3, "backend": "chain"}, InvalidArgumentError, "skewed"),
        ({"w_gate": 3}, InvalidArgumentError, "w_gate: 3; allowed: a torch.Tensor"),
        ({"w_gate": torch.zeros(64, 128)}, ShapeError, "w_gate"),
        ({"w_down": torch.zeros(60, 192)}, ShapeError, "multiples of 64"),
        ({"w_down": torch.zeros(64, 192, dtype=torch.float16)}, UnsupportedError, "one dtype"),
        ({"x": torch.zeros(3, 64)}, ShapeError, "hidden"),
    ],
)
def test_bad_input_is_refused_with_what_is_allowed(change: dict, error: type[Exception], says: str) -> None:
    arguments = {"x": torch.zeros(3, 128), "w_up": torch.zeros(192, 128), "w_down": torch.zeros(64, 192)} | change
    if "x" in change and change["x"].shape[1] == 64:
        arguments["x"] = change["x"]
    with pytest.raises(error, match=says):
        ffn(**arguments)


@pytest.mark.parametrize("batch", [0, -5, 65, 2.5, True])
def test_packing_is_for_1_to_64_rows(batch: int) -> None:
    with pytest.raises(InvalidArgumentError, match=r"pack_ffn: batch: .*a whole number from 1 to 64"):
        pack_ffn(torch.zeros(64, 64), torch.zeros(64, 64), batch=batch)


@pytest.mark.parametrize("w_up", [None, torch.tensor(1.0)])
def test_packing_wants_matrices(w_up: Tensor) -> None:
    with pytest.raises(InvalidArgumentError, match="w_up"):
        pack_ffn(w_up, torch.zeros(64, 64))


def test_a_packed_block_takes_rows_that_begin_anywhere_and_no_others() -> None:
    launched: list[Tensor] = []

    def launch(x: Tensor, out: Tensor, *, keep_back: str | None) -> Tensor:
        assert (x.stride(0) % 8, x.data_ptr() % 16, x.stride(1)) == (0, 0, 1)
        launched.append(x)
        return out

    packed = PackedFFN.__new__(PackedFFN)
    packed.batch, packed.waves = 4, (launch,)
    packed._hidden, packed._inner, packed._out = 64, 192, 128
    packed._kind = (torch.bfloat16, torch.device("cpu"))
    flat = torch.arange(5 * 68, dtype=torch.bfloat16)
    for x in (flat[:64].view(1, 64), flat.view(5, 68)[:1, :64], flat.view(5, 68)[:2, 4:], flat[1:257].view(4, 64)):
        assert packed(x).shape == (len(x), 128)
        assert torch.equal(launched[-1], x)
    for wrong, error in (
        (torch.zeros(4, 128, dtype=torch.bfloat16), ShapeError),
        (torch.zeros(64, dtype=torch.bfloat16), ShapeError),
        (torch.zeros(4, 64), UnsupportedError),
        (torch.zeros(4, 64, dtype=torch.bfloat16, device="meta"), UnsupportedError),
        (torch.zeros(5, 64, dtype=torch.bfloat16), InvalidArgumentError),
        (torch.zeros(0, 64, dtype=torch.bfloat16), InvalidArgumentError),
    ):
        with pytest.raises(error, match="ffn: "):
            packed(wrong)
    assert len(launched) == 4
    right = torch.zeros(4, 64, dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises(UnsupportedError, match="PackedFFN: tensors that require grad"):
        packed(right)
    with torch.no_grad():
        assert packed(right).shape == (4, 128)


def test_packing_needs_a_gpu_that_runs_the_wave() -> None:
    with pytest.raises(UnsupportedError, match="compute capability"):
        pack_ffn(torch.zeros(64, 64), torch.zeros(64, 64))


def test_the_registered_operator_agrees_with_itself() -> None:
    x, up, down, gate = (t.float() for t in operands(FFNSizes(2, 64, 128, 64, True), 2) if t is not None)
    arguments = (x, up, down, gate, "silu", "row", DATA, "auto")
    torch.library.opcheck(torch.ops.onewave.ffn, arguments, test_utils=("test_schema", "test_faketensor"))
    compiled = torch.compile(lambda *t: ffn(t[0], t[1], t[2], w_gate=t[3]), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, up, down, gate), ffn(x, up, down, w_gate=gate))


def test_explain_says_which_kernel_runs_and_how_even_its_plan_is() -> None:
    shapes = ((8, 4096), (14336, 4096), (4096, 14336))
    found = explain("ffn", *shapes, device="cuda:sm_90", backend="wave")
    assert found.backend == "wave"
    assert found.split == "K in 1 and 1"
    assert "256 tasks" in str(found)
    assert explain(ffn, (4096,), *shapes[1:], device="cuda:sm_90", dtype="fp16").backend == "torch"
    assert explain(ffn, (64, 4096), *shapes[1:], device="cuda:sm_90", backend="wave").tile == "64 rows x 128, ring of 8"
    assert explain(ffn, *shapes, device="cuda:sm_80").backend == "torch"
    with pytest.raises(UnsupportedError, match=r"GPU of compute capability 9.0"):
        explain(ffn, (65, 4096), *shapes[1:], device="cuda:sm_90", backend="wave")


def test_explain_shows_the_plan_for_many_rows_and_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = ((4096, 4096), (14336, 4096), (4096, 14336))
    one = explain("ffn", *shapes, device="cuda:sm_90", backend="chain", gated=True)
    assert (one.backend, one.programs) == ("chain", "132")
    assert one.tile == "128 rows x 256, ring of 4"
    assert "4096 tasks, proved" in str(one)
    assert "hidden tensor of 32 x 112 tiles" in str(one)
    two = explain("ffn", *shapes, device="cuda:sm_90", backend="streams", order="rows:8")
    assert two.programs == "131 + 132"
    assert "order rows:8, row" in str(two)
    with pytest.raises(UnsupportedError, match=r"GPU of compute capability 9.0"):
        explain("ffn", *shapes, device="cuda:sm_80", backend="chain")
    times = (2000.0, 1950.0, 2100.0, 1900.0, None)
    block = measured.Block(4096, 14336, 4096, True, "bfloat16", "a GPU")
    known = measured.Measured(block, 4096, *times, "ledger/x.jsonl:1-4")
    monkeypatch.setattr(measured, "MEASURED", (known,))
    fused = explain("ffn", *shapes, device="cuda:sm_90", gated=True)
    assert fused.backend == "chain"
    assert "gate and up in one 1950.0, streams 2100.0, chain 1900.0 us; one launch 1.026 x as fast as two" in str(fused)
    assert "chain (ledger/x.jsonl:1-4)" in str(fused)
    assert explain("ffn", *shapes, device="cuda:sm_90").backend == "torch"
    assert explain("ffn", *shapes, device="cuda:sm_90", gated=True, backend="torch").backend == "torch"
    assert explain("ffn", *shapes, device="cuda:sm_80", gated=True).backend == "torch"
