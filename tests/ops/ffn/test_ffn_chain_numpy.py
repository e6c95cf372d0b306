"""The kernel for many rows, its own source executed in NumPy: numbers, odd sizes, orders, policies, delays."""

import random
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from kit.numpy_gpu.chain_device import ChainDevice
from kit.operands.random import randn
from onewave.ops.ffn.chain.launch import Chain
from onewave.ops.ffn.chain.plan import ChainPlan, ChainTile, plan_chain
from onewave.ops.ffn.reference import ffn as in_torch
from onewave.ops.ffn.sizes import FFNSizes

pytestmark = pytest.mark.usefixtures("device")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> ChainDevice:
    return ChainDevice(monkeypatch, workers=5)


class Block:
    """A plan with weights of its sizes."""

    def __init__(self, plan: ChainPlan, activation: str | None = "silu", **more: Any):
        sizes, self.plan, self.activation = plan.sizes, plan, activation
        up, gate = ((randn(sizes.intermediate, sizes.hidden, seed=s) / sizes.hidden**0.5).half() for s in (1, 2))
        down = (randn(sizes.out, sizes.intermediate, seed=3) / sizes.intermediate**0.5).half()
        self.weights = up, down, gate if sizes.gated else None
        self.chain = Chain(plan, torch.device("cpu"), torch.float16, activation=activation, **more)

    def __call__(self, x: Tensor) -> Tensor:
        return self.chain(x, *self.weights)

    def assert_right(self, x: Tensor, found: Tensor) -> None:
        wide = (None if weight is None else weight.double() for weight in self.weights)
        expected = in_torch(x.double(), *wide, self.activation)
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
    chain = Block(plan_chain(sizes, workers=workers, order=order, policy=policy, tile=tile))
    for seed in (10, 11):
        x = randn(rows, 128, seed=seed).half()
        chain.assert_right(x, chain(x))


@pytest.mark.parametrize(("order", "splits"), [("half_row", 2), ("rows:2", 3), ("accumulate-first-column", 7)])
@pytest.mark.parametrize("workers", [1, 4])
def test_slices_of_the_second_product_are_added_up_in_their_order(order: str, splits: int, workers: int) -> None:
    sizes = FFNSizes(70, 64, 448, 192, True)
    plan = plan_chain(sizes, workers=workers, order=order, tile=ChainTile(1, 128, 3, 1, splits))
    chain = Block(plan)
    assert chain.chain._splits == splits - 1
    x = randn(70, 64).half()
    first = chain(x)
    chain.assert_right(x, first)
    assert torch.equal(chain(x), first)


@pytest.mark.parametrize("activation", ["gelu", None])
def test_every_activation(activation: str | None) -> None:
    plan = plan_chain(FFNSizes(66, 64, 192, 64, False), workers=2, tile=SMALL)
    chain = Block(plan, activation)
    x = randn(66, 64).half()
    chain.assert_right(x, chain(x))


def test_the_two_launches_of_the_streams_give_the_same_bits_as_one() -> None:
    sizes, tile = FFNSizes(130, 128, 320, 192, True), ChainTile(1, 128, 3, 1)
    x = randn(130, 128).half()
    one = Block(plan_chain(sizes, workers=3, tile=tile))
    two = Block(plan_chain(sizes, workers=3, tile=tile, streams=True))
    assert [len(lanes) for lanes in two.plan.lanes] == [2, 3]
    assert torch.equal(one(x), two(x))
    assert torch.equal(one(x), two(x))


def test_delays_at_random_places_orders_and_workers_change_no_bit(device: ChainDevice) -> None:
    dice = random.Random(5)
    sizes, tile = FFNSizes(130, 64, 320, 128, True), ChainTile(1, 128, 2, 1, 2)
    x = randn(130, 64).half()
    right = Block(plan_chain(sizes, workers=1, tile=tile))(x)
    for workers, order, policy in ((3, "rows:2", "row"), (5, "skewed:1", "tile"), (4, "sequential", "none")):
        chain = Block(plan_chain(sizes, workers=workers, order=order, policy=policy, tile=tile), test=True)
        device.delays = lambda: time.sleep(dice.random() * 0.01)
        for _ in range(2):
            assert torch.equal(chain(x), right)


def test_a_post_before_the_stores_have_landed_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulated device itself: without the wait for the writes, the second product reads what is not there yet."""
    chain = Block(plan_chain(FFNSizes(64, 64, 128, 64, False), workers=2, tile=SMALL))
    x = randn(64, 64).half()
    chain.assert_right(x, chain(x))
    monkeypatch.setattr("kit.numpy_gpu.gluon_in_numpy.Stores.wait_until_written", lambda self: self.wait_until_read())
    assert chain(x).isnan().any()
