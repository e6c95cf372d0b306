"""The feed-forward block for many rows on a GPU: numbers, bits, orders, streams, graphs, delays, stalls."""

import time

import pytest
import torch
from torch import Tensor

from kit.operands.ffn_on_gpu import Operands, assert_close, operands
from kit.operands.on_gpu import GPU, ON_WAVE
from onewave.base.errors import UnsupportedError, WaveStalled
from onewave.ops.ffn import ffn
from onewave.ops.ffn.chain.plan import BANDS, ChainTile, plan_chain
from onewave.ops.ffn.sizes import FFNSizes
from onewave.tiles.order.policies import POLICIES
from onewave.wave.launch.launch import co_resident

pytestmark = ON_WAVE
TILES = (ChainTile(1, 128, 8, 2), ChainTile(1, 256, 4, 1), ChainTile(2, 128, 6, 2), ChainTile(2, 256, 4, 1))


def made(given: Operands, *, workers: int | None = None, test: bool = False, **choices: object) -> object:
    from onewave.ops.ffn.chain.launch import Chain

    x, up, down, gate = given
    sizes = FFNSizes(-(-len(x) // 128) * 128, x.shape[1], len(up), len(down), gate is not None)
    count = co_resident(x.device) if workers is None else workers
    plan = plan_chain(sizes, workers=count, **choices)
    return Chain(plan, x.device, x.dtype, test=test)


def finished(chain: object, given: Operands) -> Tensor:
    out = chain(*given)
    torch.cuda.synchronize()
    chain.check()
    return out


@pytest.mark.parametrize("backend", ["chain", "streams"])
@pytest.mark.parametrize("rows", [1, 16, 63, 64, 65, 127, 129, 257, 1000, 2047])
@pytest.mark.parametrize(("hidden", "inner", "out"), [(64, 64, 64), (576, 1536, 576), (1024, 2752, 960)])
def test_any_rows_and_sizes(rows: int, hidden: int, inner: int, out: int, backend: str) -> None:
    given = operands(rows, hidden, inner, out)
    x, up, down, gate = given
    found = ffn(x, up, down, w_gate=gate, backend=backend)
    torch.cuda.synchronize()
    assert_close(found, given, "silu")


@pytest.mark.parametrize("rows", [128, 512, 4096, 32768])
@pytest.mark.parametrize("gated", [True, False])
def test_a_real_layer(rows: int, gated: bool) -> None:
    given = operands(rows, 4096, 14336, 4096, gated=gated)
    x, up, down, gate = given
    found = ffn(x, up, down, w_gate=gate, backend="chain")
    assert torch.equal(found, ffn(x, up, down, w_gate=gate, backend="chain"))
    assert_close(found, given, "silu")


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", ["silu", "gelu", None])
@pytest.mark.parametrize("gated", [True, False])
def test_every_activation_and_dtype(activation: str | None, gated: bool, dtype: torch.dtype) -> None:
    given = operands(300, 512, 1088, 320, gated=gated, dtype=dtype)
    x, up, down, gate = given
    out = ffn(x.view(3, 100, -1), up, down, w_gate=gate, activation=activation, backend="chain")
    torch.cuda.synchronize()
    assert_close(out.view(300, -1), given, activation)


@pytest.mark.parametrize("order", [*BANDS, "rows:3", "half_row", "hilbert", "accumulate-first-column"])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_order_and_policy(order: str, policy: str) -> None:
    given = operands(900, 512, 1088, 512)
    chain = made(given, order=order, policy=policy, tile=ChainTile(2, 128, 6, 2, 2))
    first = finished(chain, given)
    assert_close(first, given, "silu")
    for _ in range(10):
        assert torch.equal(finished(chain, given), first)


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: f"{tile.rows}x{tile.columns}")
@pytest.mark.parametrize("splits", [1, 3])
def test_every_tile(tile: ChainTile, splits: int) -> None:
    given = operands(413, 320, 1984, 704)
    cut = ChainTile(tile.warpgroups, tile.columns, tile.stages, tile.buffers, splits)
    assert_close(finished(made(given, tile=cut), given), given, "silu")


def test_orders_workers_streams_and_a_thousand_runs_change_no_bit() -> None:
    given = operands(1000, 1024, 4096, 1024)
    tile = ChainTile(2, 128, 6, 2)
    most = co_resident(GPU)
    right = finished(made(given, tile=tile), given)
    for workers in (1, 17, 64, most - 1, most):
        for order in ("row", "skewed:2", "sequential"):
            assert torch.equal(finished(made(given, workers=workers, order=order, tile=tile), given), right)
    assert torch.equal(finished(made(given, streams=True, tile=tile), given), right)
    chain = made(given, tile=tile)
    different = sum(not torch.equal(chain(*given), right) for _ in range(1000))
    assert different == 0
    with pytest.raises(UnsupportedError, match="holds at once"):
        made(given, workers=most + 1)


@pytest.mark.parametrize("choices", [{"tile": ChainTile(1, 128, 4, 1, 3)}, {"order": "row"}, {"streams": True}])
def test_random_delays_change_no_bit(choices: dict[str, object]) -> None:
    given = operands(300, 256, 1088, 128)
    right = finished(made(given, **choices), given)
    chain = made(given, test=True, **choices)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(2000):
        wrong += (chain(*given) != right).any()
    finished(chain, given)
    assert int(wrong) == 0


@pytest.mark.parametrize("choices", [{}, {"policy": "tile"}, {"streams": True}])
def test_a_missing_post_ends_in_wave_stalled_and_the_next_launch_works(choices: dict[str, object]) -> None:
    given = operands(1000, 1024, 4096, 1024)
    chain = made(given, **choices)
    right = finished(chain, given)
    began = time.perf_counter()
    chain(*given, keep_back=0)
    torch.cuda.synchronize()
    with pytest.raises(WaveStalled) as caught:
        chain.check()
    assert time.perf_counter() - began < 10
    assert {"worker", "task", "counter", "expected", "got"} <= caught.value.stalls[0].keys()
    assert torch.equal(finished(chain, given), right)


@pytest.mark.parametrize("backend", ["chain", "streams"])
def test_graphs_and_other_streams_give_the_same_bits(backend: str) -> None:
    x, up, down, gate = operands(600, 1024, 4096, 1024)
    right = ffn(x, up, down, w_gate=gate, backend=backend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = ffn(x, up, down, w_gate=gate, backend=backend)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    for _ in range(20):
        recorded.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(recorded, right)
        for stream in streams:
            with torch.cuda.stream(stream):
                out = ffn(x, up, down, w_gate=gate, backend=backend)
            torch.cuda.synchronize()
            assert torch.equal(out, right)
    with pytest.raises(UnsupportedError, match="before recording"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        ffn(x[:100], up, down, w_gate=gate, backend=backend)


def test_rows_next_to_the_result_are_left_alone_and_strides_are_honoured() -> None:
    given = operands(130, 256, 512, 256)
    x, up, down, gate = given
    wide = torch.full((130, 300), float("nan"), device="cuda", dtype=x.dtype)
    wide[:, 8:264] = x
    first = ffn(wide[:, 8:264], up, down, w_gate=gate, backend="chain")
    assert torch.equal(first, ffn(x, up, down, w_gate=gate, backend="chain"))
    alone = ffn(x[:1], up, down, w_gate=gate, backend="chain")
    assert alone.shape == (1, 256)
    assert_close(alone, (x[:1], up, down, gate), "silu")


def test_the_trace_holds_every_task() -> None:
    given = operands(1000, 1024, 4096, 1024)
    chain = made(given)
    finished(chain, given)
    trace = chain.trace(*given)
    assert sorted(trace.task.tolist()) == list(range(len(trace)))
    assert 0 < trace.makespan < 1e9
    assert {phase.phase for phase in trace.phases()} == {"up", "down"}
