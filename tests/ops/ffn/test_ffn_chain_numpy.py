"""The kernel for many rows, its own source executed in NumPy: numbers, odd sizes, orders, policies, delays."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kit.numpy_gpu.gluon_in_numpy import Matrix, Memory, Pointer, launch
from kit.operands.random import randn
from onewave.ops.ffn.chain import kernel as chain_kernel_impl
from onewave.ops.ffn.chain.plan import ChainPlan, ChainTile, plan_chain
from onewave.ops.ffn.reference import ffn as in_torch
from onewave.ops.ffn.sizes import FFNSizes
from onewave.wave.kernel import finish

ACTIVATIONS = {None: 0, "silu": 1, "gelu": 2}
NAN = np.float16(np.nan)


class Chain:
    """A plan's buffers on the simulated device, kept from launch to launch."""

    def __init__(self, plan: ChainPlan, activation: str | None = "silu", **constants: Any):
        self.plan, self.activation, self.memory = plan, activation, Memory(1 << 23)
        sizes, tile = plan.sizes, plan.tile
        self.up, self.gate = (
            (randn(sizes.intermediate, sizes.hidden, seed=s) / sizes.hidden**0.5).half() for s in (1, 2)
        )
        self.down = (randn(sizes.out, sizes.intermediate, seed=3) / sizes.intermediate**0.5).half()
        put = self.memory.put

        def ints(values: np.ndarray) -> Pointer:
            return put(np.ascontiguousarray(values, dtype=np.int32) if values.size else np.zeros(2, dtype=np.int32))

        half = tile.columns // 2
        weights = {
            name: Matrix(self.memory, put(t.numpy()), tuple(t.shape), (half, 64))
            for name, t in (("gate", self.gate), ("up", self.up), ("down", self.down))
        }
        rows, columns = -(-sizes.rows // tile.rows) * tile.rows, -(-sizes.out // tile.columns) * tile.columns
        self.counters = ints(np.zeros(max(1, len(plan.totals))))
        self.arguments: dict[str, Any] = (
            weights
            | {
                "records": ints(plan.records),
                "waits": ints(plan.waits),
                "totals": ints(plan.totals),
                "counters": self.counters,
                "watch": ints(np.zeros(16 + 8 * plan.workers)),
                "started": ints(np.zeros(2)),
                "trace": ints(np.zeros(4)),
                "partials": put(np.full((max(1, plan.tile.splits - 1), rows, columns), np.nan, dtype=np.float32)),
                "partial_stride": columns,
                "partial_slab": rows * columns,
                "skipped": -1,
                "DTYPE": np.float16,
                "BN": tile.columns,
                "W": tile.warpgroups,
                "S": tile.stages,
                "OB": tile.buffers,
                "ACT": ACTIVATIONS[activation],
                "GATED": sizes.gated,
                "SPLIT": bool((plan.records[:, 5] != 0).any()),
                "MARK": False,
                "TEST": False,
                "TRACE": False,
            }
            | constants
        )
        self.epochs = [ints(np.zeros(len(lanes))) for lanes in plan.lanes]
        self.lanes = [ints(lanes) for lanes in plan.lanes]
        self.x = put(np.zeros((sizes.rows, sizes.hidden), dtype=np.float16))
        self.hidden = put(np.zeros((sizes.rows, sizes.intermediate), dtype=np.float16))
        self.y = put(np.zeros((sizes.rows, sizes.out), dtype=np.float16))

    def __call__(self, x: Tensor, delays: Callable[[], None] = lambda: None) -> Tensor:
        sizes, half, memory = self.plan.sizes, self.plan.tile.columns // 2, self.memory
        memory.set(self.x, x.numpy())
        # What nobody has written yet must not be read.
        for pointer, columns in ((self.hidden, sizes.intermediate), (self.y, sizes.out)):
            memory.set(pointer, np.full((sizes.rows, columns), NAN))
        inner = (sizes.rows, sizes.intermediate)
        given = self.arguments | {
            "x": Matrix(memory, self.x, (sizes.rows, sizes.hidden), (64, 64)),
            "hidden": Matrix(memory, self.hidden, inner, (64, 64)),
            "hidden_out": Matrix(memory, self.hidden, inner, (64, half)),
            "y_out": Matrix(memory, self.y, (sizes.rows, sizes.out), (64, half)),
        }
        modules = (finish, chain_kernel_impl)
        # Two launches run one after the other here; what they wait for is the same.
        for lanes, epochs, table in zip(self.lanes, self.epochs, self.plan.lanes, strict=True):
            more = {"lanes": lanes, "epochs": epochs}
            launch(memory, len(table), given | more, delays, modules=modules, name="chain_kernel")
        return torch.from_numpy(memory.get(self.y, (sizes.rows, sizes.out)))

    def expected(self, x: Tensor) -> Tensor:
        gate = self.gate.double() if self.plan.sizes.gated else None
        return in_torch(x.double(), self.up.double(), self.down.double(), gate, self.activation)

    def assert_right(self, x: Tensor, found: Tensor) -> None:
        expected = self.expected(x)
        assert (found.double() - expected).abs().max() < 3e-3 * expected.abs().max()


SMALL, WIDE = ChainTile(1, 128, 3, 2), ChainTile(2, 256, 2, 1)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(
    ("rows", "tile", "order", "policy", "workers"),
    [
        (1, SMALL, "auto", "auto", 3),
        (63, SMALL, "row", "row", 2),
        (65, ChainTile(1, 128, 2, 1), "rows:2", "tile", 4),
        (131, ChainTile(2, 128, 3, 2), "skewed:1", "row", 3),
        (257, WIDE, "sequential", "none", 5),
        (129, WIDE, "hilbert", "consecutive", 1),
    ],
)
def test_the_kernels_source_computes_the_block_launch_after_launch(
    rows: int, tile: ChainTile, order: str, policy: str, workers: int, gated: bool
) -> None:
    sizes = FFNSizes(rows, 128, 448, 320, gated)
    chain = Chain(plan_chain(sizes, workers=workers, order=order, policy=policy, tile=tile))
    for seed in (10, 11):
        x = randn(rows, 128, seed=seed).half()
        chain.assert_right(x, chain(x))


@pytest.mark.parametrize(("order", "splits"), [("half_row", 2), ("rows:2", 3), ("accumulate-first-column", 7)])
@pytest.mark.parametrize("workers", [1, 4])
def test_slices_of_the_second_product_are_added_up_in_their_order(order: str, splits: int, workers: int) -> None:
    sizes = FFNSizes(70, 64, 448, 192, True)
    plan = plan_chain(sizes, workers=workers, order=order, tile=ChainTile(1, 128, 3, 1, splits))
    chain = Chain(plan)
    assert chain.arguments["SPLIT"]
    x = randn(70, 64).half()
    first = chain(x)
    chain.assert_right(x, first)
    assert torch.equal(chain(x), first)


@pytest.mark.parametrize("activation", ["gelu", None])
def test_every_activation(activation: str | None) -> None:
    plan = plan_chain(FFNSizes(66, 64, 192, 64, False), workers=2, tile=SMALL)
    chain = Chain(plan, activation)
    x = randn(66, 64).half()
    chain.assert_right(x, chain(x))


def test_the_two_launches_of_the_streams_give_the_same_bits_as_one() -> None:
    sizes, tile = FFNSizes(130, 128, 320, 192, True), ChainTile(1, 128, 3, 1)
    x = randn(130, 128).half()
    one = Chain(plan_chain(sizes, workers=3, tile=tile))
    two = Chain(plan_chain(sizes, workers=3, tile=tile, streams=True))
    assert [len(lanes) for lanes in two.plan.lanes] == [2, 3]
    assert torch.equal(one(x), two(x))
    assert torch.equal(one(x), two(x))


def test_delays_at_random_places_orders_and_workers_change_no_bit() -> None:
    dice = random.Random(5)
    sizes, tile = FFNSizes(130, 64, 320, 128, True), ChainTile(1, 128, 2, 1, 2)
    x = randn(130, 64).half()
    right = Chain(plan_chain(sizes, workers=1, tile=tile))(x)
    for workers, order, policy in ((3, "rows:2", "row"), (5, "skewed:1", "tile"), (4, "sequential", "none")):
        chain = Chain(plan_chain(sizes, workers=workers, order=order, policy=policy, tile=tile), TEST=True)
        for _ in range(2):
            assert torch.equal(chain(x, lambda: time.sleep(dice.random() * 0.01)), right)


def test_a_post_before_the_stores_have_landed_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulated device itself: without the wait for the writes, the second product reads what is not there yet."""
    chain = Chain(plan_chain(FFNSizes(64, 64, 128, 64, False), workers=2, tile=SMALL))
    x = randn(64, 64).half()
    chain.assert_right(x, chain(x))
    monkeypatch.setattr("kit.numpy_gpu.gluon_in_numpy.Stores.wait_until_written", lambda self: self.wait_until_read())
    assert chain(x).isnan().any()
