"""Packed weights on a GPU that the wave runs on: the same bits in any batch, less memory, the same text."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from kit.lanes import slow
from kit.operands.on_gpu import GPU, ON_WAVE
from kit.operands.random import randn
from kit.operands.rounded_on_gpu import held_and_tokens, step, streamed, two_layers
from onewave.base.group_rounding import round_bytes, round_groups
from onewave.base.weight_formats import COMPACT, NIBBLES, ROUNDINGS
from onewave.engine.load.self_check import self_check
from onewave.models.decode_wave import DecodeWave
from onewave.wave.launch.launch import co_resident

pytestmark = ON_WAVE
BOTH = pytest.mark.parametrize("name", ROUNDINGS)


# Every pair is a kernel of its own.
@pytest.mark.parametrize(
    ("name", "batch"),
    [
        (name, batch) if (nth + at) % 2 == 0 else slow(name, batch)
        for nth, name in enumerate(["compact", *ROUNDINGS])
        for at, batch in enumerate([1, 2, 4, 8, 16])
    ],
)
def test_neither_workers_nor_batch_mates_nor_time_changes_a_bit(name: str, batch: int) -> None:
    weight_format = ROUNDINGS.get(name, COMPACT)
    config = two_layers()
    first = step(streamed(weight_format, batch, co_resident(GPU), config), batch, range(batch))
    for workers in (co_resident(GPU) - 1, 64, 17):
        made = streamed(weight_format, batch, workers, config)
        assert torch.equal(step(made, batch, range(batch)), first)
        assert torch.equal(step(made, batch, range(batch - 1, batch))[0], first[-1])


@pytest.mark.pairs
@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("intermediate_size", [3072, 8192])
@pytest.mark.parametrize("batch", [1, 2, 8, 16])
def test_a_step_agrees_with_the_plain_operators_on_the_same_rounded_weights(
    batch: int, name: str, dtype: torch.dtype, intermediate_size: int
) -> None:
    config = two_layers(intermediate_size=intermediate_size)
    made = streamed(ROUNDINGS[name], batch, co_resident(GPU), config, dtype)
    assert self_check(made.model, DecodeWave(made.model, batch=batch, stream=made.stream), batch) < 0.03


@pytest.mark.parametrize(("name", "batch"), [("int8", 1), *((name, 8) for name in ROUNDINGS)])
def test_the_gpus_kernel_unpacks_as_plain_indexing_does(name: str, batch: int) -> None:
    stream = streamed(ROUNDINGS[name], batch, co_resident(GPU), two_layers()).stream
    for matrix, (height, cols, count) in {
        "qkv0": (3072, 2048, 1),
        "gate_up1": (8192, 2048, 2),
        "down0": (2048, 8192, 1),
    }.items():
        found = stream.unpack(stream.matrix(matrix, height, cols, count), 0, height).view(count, height, cols)
        blocks = -(-height * count // stream.shape.rows)
        rows = stream.read_blocks(matrix, cols, 0, blocks)[: height * count].view(height, count, cols)
        assert torch.equal(found, rows.transpose(0, 1))


@pytest.fixture(scope="module")
def held_whole(tmp_path_factory: pytest.TempPathFactory) -> int:
    """Bytes that an engine holds with every weight in 16 bits."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("ONEWAVE_CACHE", str(tmp_path_factory.mktemp("cache")))
        return held_and_tokens(None, compact=False)[0]


@pytest.mark.parametrize(("name", "share"), [(None, 0.84), *((name, 0.6) for name in ROUNDINGS)])
def test_the_engine_holds_less_and_batch_mates_change_no_token(
    name: str | None, share: float, held_whole: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None: compact weights, which a GPU that runs the wave takes by default."""
    monkeypatch.setenv("ONEWAVE_CACHE", str(tmp_path))
    held, _ = held_and_tokens(name)
    embedding = 2 * 128256 * 2048  # keeps its 16 bits
    assert held - embedding < share * (held_whole - embedding)


def test_pytorch_rounds_groups_on_a_gpu_as_on_a_cpu() -> None:
    rows = randn(64, 512, seed=2) * torch.logspace(-3, 3, 64)[:, None]
    for rounded in (
        partial(round_groups, rounding=NIBBLES[64, False]),
        partial(round_groups, rounding=NIBBLES[64, True]),
        partial(round_bytes, group=32, number=torch.float16),
    ):
        right, found = rounded(rows), rounded(rows.to(GPU))
        assert torch.equal(found.codes.cpu(), right.codes)
        assert torch.equal(found.scales.cpu(), right.scales)


@triton.jit
def _products(a, b, out, K: tl.constexpr):
    row, column, k = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :], tl.arange(0, 16)
    sums = tl.zeros([16, 16], tl.float32)
    for first in range(0, K, 16):
        left = tl.load(a + row * K + first + k[None, :])
        sums = tl.dot(left, tl.load(b + (first + k[:, None]) * 16 + column), sums)
    tl.store(out + row * 16 + column, sums)


def test_the_tensor_cores_multiply_subnormal_numbers_as_they_are() -> None:
    """Products of byte_values.py's numbers of int8, beside the same integers as normal numbers."""
    dice = torch.Generator(GPU).manual_seed(1)
    integers = torch.randint(-127, 128, (16, 4096), generator=dice, device=GPU)
    x = torch.randn(4096, 16, generator=dice, device=GPU).bfloat16()
    subnormal = (integers.abs() | (integers < 0) << 15).to(torch.uint16).view(torch.bfloat16)
    assert torch.equal(subnormal.double() * 2.0**133, integers.double())
    exact = integers.double() @ x.double()
    size = integers.abs().double() @ x.abs().double()
    off: list[float] = []
    for left, right, factor in ((integers.bfloat16(), x, 1.0), (subnormal, x * 2.0**64, 2.0**69)):
        found = torch.empty(16, 16, device=GPU)
        _products[(1,)](left, right, found, K=4096, num_warps=1)
        off.append(float(((found.double() * factor - exact).abs() / size).max()))
    print("largest difference over the sum of magnitudes:", off)
    assert off[1] < max(4 * off[0], 2.0**-20)
