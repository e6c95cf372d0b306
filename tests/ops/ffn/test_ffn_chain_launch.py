"""How the kernel for many rows is launched: in NumPy, with the very arguments that the GPU would get."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kit.numpy_gpu.chain_device import ChainDevice
from onewave.base.errors import InvalidArgumentError, UnsupportedError, WaveStalled
from onewave.ops.ffn.call import FFNCall
from onewave.ops.ffn.chain import launch as chain_impl
from onewave.ops.ffn.chain.launch import Chain
from onewave.ops.ffn.chain.plan import ChainTile, plan_chain
from onewave.ops.ffn.choose import ChainChoice
from onewave.ops.ffn.reference import ffn as in_torch
from onewave.ops.ffn.sizes import FFNSizes

TILE = ChainTile(1, 128, 3, 1)


def operands(rows: int, hidden: int = 128, inner: int = 320, out: int = 192) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dice = torch.Generator().manual_seed(rows)

    def randn(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=dice) * shape[1] ** -0.5).half()

    return randn(rows, hidden) * 8, randn(inner, hidden), randn(out, inner), randn(inner, hidden)


def assert_close(found: Tensor, given: tuple[Tensor, Tensor, Tensor, Tensor | None], activation: str | None) -> None:
    x, up, down, gate = (None if t is None else t.double() for t in given)
    assert x is not None
    assert up is not None
    assert down is not None
    expected = in_torch(x, up, down, gate, activation)
    assert (found.double() - expected).abs().max() < 3e-3 * expected.abs().max()


def asked_for(*operands: Any) -> tuple[FFNCall, ChainChoice]:
    """x, w_up, w_down, w_gate, activation, order, policy, streams as a call and what was chosen for it."""
    *given, order, policy, streams = operands
    name = "streams" if streams else "chain"
    call = FFNCall(*given, order, policy)
    return call, ChainChoice(name, "", "", (), FFNSizes(len(call.x), *call.block), order, policy, 4)


def run(*operands: Any) -> Tensor:
    return chain_impl.run(*asked_for(*operands))


def is_ready(*operands: Any) -> bool:
    return chain_impl.is_ready(*asked_for(*operands))


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("gated", [True, False])
def test_a_call_launches_what_computes_the_block(monkeypatch: pytest.MonkeyPatch, streams: bool, gated: bool) -> None:
    device = ChainDevice(monkeypatch)
    for rows in (130, 128, 1, 130):
        x, up, down, gate = operands(rows)
        given = (x, up, down, gate if gated else None)
        found = run(*given, "silu", "rows:1", "tile", streams)
        assert_close(found, given, "silu")
    ours = [(name, blocks) for name, blocks, _ in device.launches[:3]]
    if streams:
        assert ours == [("chain_kernel", 3), ("started_kernel", 1), ("chain_kernel", 4)]
        assert not any(options.get("launch_cooperative_grid") for _, _, options in device.launches)
    else:
        assert ours == [("chain_kernel", 4)] * 3
        assert all(options["launch_cooperative_grid"] for _, _, options in device.launches)


def test_two_streams_compute_the_block_in_half_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    ChainDevice(monkeypatch)
    for rows in (130, 1):
        given = operands(rows)
        assert_close(run(*given, "silu", "half_row", "auto", True), given, "silu")


def test_a_graph_may_be_recorded_once_plan_and_buffers_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    ChainDevice(monkeypatch)
    x, up, down, gate = operands(130)
    asked = ("silu", "rows:1", "tile", False)
    assert not is_ready(x, up, down, gate, *asked)
    run(x, up, down, gate, *asked)
    # As many blocks of rows: the same plan.
    assert is_ready(x[:129], up, down, gate, *asked)
    assert not is_ready(x[:128], up, down, gate, *asked)
    assert not is_ready(x, up, down, None, *asked)
    monkeypatch.setattr(chain_impl, "_MAX_KEPT", 1)
    run(x[:1], up, down, gate, *asked)
    assert not is_ready(x, up, down, gate, *asked)


def test_the_oldest_plan_goes_when_what_was_launched_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    ChainDevice(monkeypatch)
    x, up, down, gate = operands(130)
    asked = ("silu", "rows:1", "tile", False)
    run(x, up, down, gate, *asked)
    waited: list[tuple[object, int]] = []
    monkeypatch.setattr(chain_impl, "_MAX_KEPT", 1)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: waited.append((device, len(chain_impl._kept))))
    run(x[:128], up, down, gate, *asked)
    assert (x.device, 2) in waited  # while both were there
    assert is_ready(x[:128], up, down, gate, *asked)
    assert not is_ready(x, up, down, gate, *asked)


def test_slices_and_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    ChainDevice(monkeypatch)
    x, up, down, gate = operands(100)
    wide, odd = torch.zeros(100, 136).half(), torch.zeros(320, 131).half()
    wide[:, :128], odd[:, 1:129] = x, up
    plan = plan_chain(FFNSizes(128, 128, 320, 192, True), workers=4, tile=ChainTile(1, 128, 3, 1, 3))
    made = Chain(plan, torch.device("cpu"), torch.float16, activation="gelu")
    found = made(wide[:, :128], odd[:, 1:129], down, gate)
    assert_close(found, (x, up, down, gate), "gelu")
    # Rows that lie at odd places are copied first: TMA can't address them.
    assert torch.equal(found, made(x, up, down, gate))


def test_a_stall_says_who_waited_for_what_and_the_next_launch_works(monkeypatch: pytest.MonkeyPatch) -> None:
    ChainDevice(monkeypatch)
    given = operands(130)
    plan = plan_chain(FFNSizes(192, 128, 320, 192, True), workers=4, tile=TILE)
    made = Chain(plan, torch.device("cpu"), torch.float16)
    right = made(*given)
    made.check()
    (state,) = made._states.values()
    waiting = int(np.flatnonzero(plan.records[:, 7])[0])
    counter = int(plan.waits[plan.records[waiting, 6], 0])
    record = np.zeros(8, dtype=np.int32)
    record[0], record[1], record[4], record[5] = 1, waiting, 10, 9
    record[2:4] = np.array([state.counters.data_ptr() + 4 * counter], dtype=np.uint64).view(np.int32)
    state.watches[0][16 + 8 : 16 + 16] = torch.from_numpy(record)
    state.counters += 5
    state.host[0] = 1
    with pytest.raises(WaveStalled, match=rf"worker 1 at down\[.*counter {counter}: expected 10, got 9"):
        made(*given)
    assert torch.equal(made(*given), right)
    made.check()


def test_the_trace_holds_every_task(monkeypatch: pytest.MonkeyPatch) -> None:
    ChainDevice(monkeypatch)
    given = operands(130)
    plan = plan_chain(FFNSizes(192, 128, 320, 192, True), workers=4, tile=TILE)
    trace = Chain(plan, torch.device("cpu"), torch.float16).trace(*given)
    assert sorted(trace.task.tolist()) == list(range(len(plan.graph.tasks)))
    assert {phase.phase for phase in trace.phases()} == {"up", "down"}


def test_what_a_device_can_not_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_chain(FFNSizes(128, 128, 320, 192, True), workers=6)
    with pytest.raises(UnsupportedError, match=r"capability 9\.0"):
        Chain(plan, torch.device("cpu"), torch.float16)
    ChainDevice(monkeypatch, workers=4)
    with pytest.raises(UnsupportedError, match="holds at once"):
        Chain(plan, torch.device("cpu"), torch.float16)
    small = plan_chain(FFNSizes(128, 128, 320, 192, True), workers=4)
    with pytest.raises(InvalidArgumentError, match="gelu"):
        Chain(small, torch.device("cpu"), torch.float16, activation="relu")
