"""All of a layer behind attention in one launch, the kernel's own source executed in NumPy."""

import random
import time

import pytest
import torch
from torch import Tensor

from kit.numpy_gpu.chain_device import ChainDevice
from kit.operands.random import randn
from onewave.ops.ffn.chain.plan import ChainTile
from onewave.ops.post_attention.call import PostAttentionWeights
from onewave.ops.post_attention.chain.launch import PostAttentionChain
from onewave.ops.post_attention.chain.plan import LayerSizes, plan_layer
from onewave.ops.post_attention.reference import post_attention as in_torch

SMALL, WIDE = ChainTile(1, 128, 2, 2), ChainTile(2, 256, 2, 1)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> ChainDevice:
    return ChainDevice(monkeypatch, workers=5)


class Layer:
    """Weights of these sizes, and one launch for them."""

    def __init__(self, sizes: LayerSizes, workers: int, *, test: bool = False, **choices: object):
        hidden, inner = sizes.hidden, sizes.intermediate
        shapes = ((hidden, sizes.attended), (2 * inner, hidden), (hidden, inner))
        o, gate_up, down = ((randn(*shape, seed=seed) / shape[1] ** 0.5).half() for seed, shape in enumerate(shapes, 1))
        gains = (1 + 0.1 * randn(hidden, seed=seed) for seed in (4, 5))
        post_norm, next_norm = (gain.half() for gain in gains)
        self.weights = PostAttentionWeights(o, post_norm, gate_up, down, next_norm)
        plan = plan_layer(sizes, workers=workers, **choices)
        self.chain = PostAttentionChain(plan, torch.device("cpu"), torch.float16, test=test)
        self.given = randn(sizes.rows, sizes.attended, seed=6).half(), randn(sizes.rows, hidden, seed=7)

    def __call__(self) -> tuple[Tensor, Tensor]:
        return self.chain(*self.given, self.weights, 1e-5)

    def assert_right(self) -> None:
        attended, residual = self.given
        wide = PostAttentionWeights(*(each.double() for each in list(vars(self.weights).values())[:5]))
        expected = in_torch(attended.double(), residual.double(), wide, 1e-5)
        for found, right in zip(self(), expected, strict=True):
            assert (found.double() - right).abs().max() < 3e-3 * right.abs().max()


@pytest.mark.parametrize(
    ("rows", "attended", "hidden", "inner", "tile", "order", "policy", "workers"),
    [
        (1, 64, 576, 128, SMALL, "auto", "auto", 1),
        (70, 128, 640, 192, SMALL, "rows:1", "tile", 3),
        (131, 64, 1024, 128, WIDE, "skewed:1", "row", 4),
        (129, 64, 1088, 64, WIDE, "sequential", "none", 5),
    ],
)
def test_the_kernels_source_computes_the_layer_launch_after_launch(
    device: ChainDevice, rows: int, attended: int, hidden: int, inner: int, tile: ChainTile, order: str, policy: str,
    workers: int,
) -> None:  # fmt: skip
    sizes = LayerSizes(rows, hidden, inner, hidden, True, attended)
    layer = Layer(sizes, workers, tile=tile, order=order, policy=policy)
    layer.assert_right()
    layer.assert_right()
    assert [blocks for _, blocks, _ in device.launches] == [workers] * 2


def test_delays_orders_and_workers_change_no_bit(device: ChainDevice) -> None:
    dice = random.Random(5)
    sizes = LayerSizes(130, 576, 192, 576, True, 64)
    right = Layer(sizes, 1, tile=SMALL)()
    for workers, order, policy in (
        (4, "rows:1", "row"),
        (3, "half_row", "tile"),
        (2, "accumulate-first-column", "row"),
    ):
        layer = Layer(sizes, workers, tile=SMALL, order=order, policy=policy, test=True)
        device.delays = lambda: time.sleep(dice.random() * 0.01)
        assert all(map(torch.equal, layer(), right))
