"""The feed-forward block as one wave on a GPU: numbers, bits, streams, graphs, stalls."""

import time

import pytest
import torch
from torch import Tensor

from kit.operands.ffn_on_gpu import assert_close, operands
from kit.operands.on_gpu import ON_WAVE
from onewave.base.errors import UnsupportedError, WaveStalled
from onewave.ops.ffn import ffn, pack_ffn
from onewave.ops.ffn.wave.launch import PackedFFN, Packing
from onewave.wave.launch.launch import co_resident

pytestmark = ON_WAVE


def finished(packed: PackedFFN, x: Tensor) -> Tensor:
    out = packed(x)
    torch.cuda.synchronize()
    packed.check()
    return out


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 13, 16, 31, 32, 33, 64])
@pytest.mark.parametrize(("hidden", "inner", "out"), [(64, 64, 64), (576, 1536, 576), (2048, 8192, 2048)])
def test_any_rows_and_sizes(rows: int, hidden: int, inner: int, out: int) -> None:
    given = operands(rows, hidden, inner, out)
    x, up, down, gate = given
    assert_close(finished(pack_ffn(up, down, w_gate=gate, batch=rows), x), given, "silu")


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", ["silu", "gelu", None])
@pytest.mark.parametrize("gated", [True, False])
def test_every_activation_and_dtype(activation: str | None, gated: bool, dtype: torch.dtype) -> None:
    given = operands(4, 512, 1088, 320, gated=gated, dtype=dtype)
    x, up, down, gate = given
    out = ffn(x.view(2, 2, -1), up, down, w_gate=gate, activation=activation, backend="wave")
    torch.cuda.synchronize()
    assert_close(out.view(4, -1), given, activation)


@pytest.mark.parametrize("order", ["row", "half_row", "sm_local", "sequential"])
@pytest.mark.parametrize("policy", ["data", "none", "row", "tile", "strided", "conv2d-tile", "consecutive"])
def test_every_order_and_policy(order: str, policy: str) -> None:
    given = operands(6, 1024, 4096, 1024)
    x, up, down, gate = given
    packed = pack_ffn(up, down, w_gate=gate, batch=6, order=order, policy=policy)
    first = finished(packed, x)
    assert_close(first, given, "silu")
    for _ in range(20):
        assert torch.equal(finished(packed, x), first)


@pytest.mark.parametrize("rows", [1, 8, 16, 32])
@pytest.mark.parametrize(("hidden", "inner"), [(2048, 8192), (1536, 4608)])
def test_any_number_of_workers_gives_the_same_bits(rows: int, hidden: int, inner: int) -> None:
    x, up, down, gate = operands(rows, hidden, inner, hidden)
    most = co_resident(up.device)
    outs = [
        finished(pack_ffn(up, down, w_gate=gate, batch=rows, workers=workers), x)
        for workers in sorted({1, 17, 64, most - 1, most})
    ]
    assert all(torch.equal(out, outs[0]) for out in outs)
    with pytest.raises(UnsupportedError, match="holds at once"):
        pack_ffn(up, down, w_gate=gate, batch=rows, workers=most + 1)


@pytest.mark.parametrize("rows", [8, 16, 32])
def test_a_thousand_runs_give_the_same_bits(rows: int) -> None:
    x, up, down, gate = operands(rows, 4096, 14336, 4096)
    packed = pack_ffn(up, down, w_gate=gate, batch=rows)
    first = finished(packed, x)
    assert_close(first, (x, up, down, gate), "silu")
    different = sum(not torch.equal(packed(x), first) for _ in range(1000))
    packed.check()
    assert different == 0


@pytest.mark.parametrize(("rows", "order", "inner"), [(4, "half_row", 1088), (32, "row", 1280)])
def test_ten_thousand_launches_under_random_delays_give_the_right_bits(rows: int, order: str, inner: int) -> None:
    x, up, down, gate = operands(rows, 256, inner, 128)
    right = finished(pack_ffn(up, down, w_gate=gate, batch=rows), x)
    packing = Packing(rows, "silu", order, "data", workers=16)
    packed = PackedFFN(up, down, gate, packing, delays=True)
    plain = finished(PackedFFN(up, down, gate, packing), x)
    assert_close(right, (x, up, down, gate), "silu")
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(10_000):
        wrong += (packed(x) != plain).any()
    packed.check()
    assert int(wrong) == 0


@pytest.mark.parametrize(("rows", "policy"), [(8, "data"), (8, "tile"), (8, "none"), (32, "data")])
def test_a_missing_post_ends_in_wave_stalled_and_the_next_launch_works(rows: int, policy: str) -> None:
    x, up, down, gate = operands(rows, 2048, 8192, 2048)
    packed = pack_ffn(up, down, w_gate=gate, batch=rows, policy=policy)
    right = finished(packed, x)
    victim = next(name for name in packed.waves[0].program.names if name.startswith("up"))
    began = time.perf_counter()
    packed(x, keep_back=victim)
    torch.cuda.synchronize()
    with pytest.raises(WaveStalled) as caught:
        packed.check()
    assert time.perf_counter() - began < 5
    stall = caught.value.stalls[0]
    assert {"worker", "task", "counter", "expected", "got"} <= stall.keys()
    assert torch.equal(finished(packed, x), right)


def test_a_stall_that_nobody_asked_about_is_raised_at_the_next_launch() -> None:
    x, up, down, _ = operands(1, 512, 1088, 512)
    packed = pack_ffn(up, down, batch=1)
    packed(x, keep_back=packed.waves[0].program.names[0])
    torch.cuda.synchronize()
    with pytest.raises(WaveStalled):
        packed(x)
    finished(packed, x)


def test_graphs_and_other_streams_give_the_same_bits() -> None:
    x, up, down, gate = operands(8, 1024, 4096, 1024)
    packed = pack_ffn(up, down, w_gate=gate, batch=8)
    right = finished(packed, x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = packed(x)
    streams = [torch.cuda.Stream() for _ in range(3)]
    outs: list[Tensor] = []
    for _ in range(20):
        graph.replay()
        for stream in streams:
            with torch.cuda.stream(stream):
                outs.append(packed(x))
    torch.cuda.synchronize()
    packed.check()
    assert torch.equal(recorded, right)
    assert all(torch.equal(out, right) for out in outs)


def test_launches_that_follow_each_other_on_several_streams_give_each_its_bits() -> None:
    """Each begins while the one before it on its stream ends, and others want its SMs."""
    _, up, down, gate = operands(1, 1024, 4096, 1024)
    packed = pack_ffn(up, down, w_gate=gate, batch=1)
    assert packed.waves[0].program.workers == co_resident(up.device)
    xs = [torch.randn(1, 1024, device="cuda").bfloat16() for _ in range(3)]
    right = [finished(packed, x).clone() for x in xs]
    streams = [torch.cuda.Stream() for _ in xs]
    wrong = torch.zeros(len(xs), dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    for _ in range(200):
        for number, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                last = packed(xs[number])
                for _ in range(3):
                    last = packed(xs[number])
                wrong[number] += (last != right[number]).any()
    torch.cuda.synchronize()
    packed.check()
    assert wrong.tolist() == [0, 0, 0]


@pytest.mark.parametrize("policy", ["data", "tile"])
def test_fewer_rows_and_then_more_find_nothing_of_an_earlier_call(policy: str) -> None:
    x, up, down, gate = operands(16, 1024, 4096, 1024)
    packed = pack_ffn(up, down, w_gate=gate, batch=16, policy=policy)
    for rows in (16, 1, 16, 3, 2, 16, 16, 1, 1, 16):
        x = torch.randn_like(x)
        assert_close(finished(packed, x[:rows].contiguous()), (x[:rows], up, down, gate), "silu")


def test_weights_that_change_are_packed_again_and_strides_are_honoured() -> None:
    given = operands(3, 256, 512, 256)
    x, up, down, gate = given
    wide = torch.randn(3, 300, device="cuda").bfloat16()
    wide[:, :256] = x
    first = ffn(wide[:, :256], up, down, w_gate=gate, backend="wave")
    assert torch.equal(first, ffn(x, up, down, w_gate=gate, backend="wave"))
    up.mul_(2)
    torch.cuda.synchronize()
    assert_close(ffn(x, up, down, w_gate=gate, backend="wave"), given, "silu")


def test_the_trace_holds_every_task_in_order() -> None:
    x, up, down, gate = operands(8, 2048, 8192, 2048)
    packed = pack_ffn(up, down, w_gate=gate, batch=8)
    finished(packed, x)
    wave = packed.waves[0]
    trace = wave.trace(x, torch.empty(8, 2048, dtype=x.dtype, device="cuda"))
    assert len(trace) == len(wave.program.steps)
    assert 0 < trace.makespan < 1e9
    assert {phase.phase for phase in trace.phases()} == {"up", "down"}


def test_a_stall_in_inference_mode_is_told_outside_of_it_and_the_next_launch_works() -> None:
    x, up, down, gate = operands(2, 256, 512, 256)
    packed = pack_ffn(up, down, w_gate=gate, batch=2)
    with torch.inference_mode():
        packed(x, keep_back=next(name for name in packed.waves[0].program.names if name.startswith("up")))
    torch.cuda.synchronize()
    with pytest.raises(WaveStalled):
        packed.check()
    assert_close(finished(packed, x), (x, up, down, gate), "silu")


def test_a_recorded_call_keeps_its_packed_weights() -> None:
    x, up, down, gate = operands(1, 256, 512, 256)
    right = ffn(x, up, down, w_gate=gate, backend="wave").clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ffn(x, up, down, w_gate=gate, backend="wave")
    for i in range(6):
        _, *others = operands(1, 256, 512, 256)
        ffn(x, others[0] * i, others[1], w_gate=others[2], backend="wave")
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    rest = [torch.full((1 << 20,), 7.0, device="cuda") for _ in range(8)]
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, right)
    assert len(rest) == 8


@pytest.mark.parametrize("backend", ["wave", "chain", "streams"])
def test_rows_that_begin_anywhere(backend: str) -> None:
    x, up, down, gate = operands(4, 256, 512, 256)
    wide, flat = x.new_zeros(4, 260), x.new_zeros(4 * 256 + 1)
    wide[:, :256], flat[1:] = x, x.flatten()
    for given in (wide[:1, :256], wide[:, :256], flat[1:].view(4, 256)):
        out = ffn(given, up, down, w_gate=gate, backend=backend)
        assert torch.equal(out, ffn(given.clone(), up, down, w_gate=gate, backend=backend))
