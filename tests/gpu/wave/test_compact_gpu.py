"""Compact weights on a GPU that the wave runs on: near the plain operators, and every weight as it came."""

from typing import Any

import pytest
import torch

from kit.operands.on_gpu import GPU, ON_WAVE
from kit.operands.rounded_on_gpu import CAPACITY, streamed, two_layers
from onewave.base.weight_formats import COMPACT
from onewave.engine.load.self_check import self_check
from onewave.models.config.model_config import RopeConfig
from onewave.models.decode_wave import DecodeWave
from onewave.ops.ffn import op
from onewave.wave.launch.launch import co_resident

pytestmark = ON_WAVE


@pytest.mark.values
@pytest.mark.parametrize("intermediate_size", [8192, 3072])
@pytest.mark.parametrize("heads", [(32, 8, 64), (16, 4, 128), (14, 2, 64)], ids=str)
@pytest.mark.parametrize("batch", [1, 2, 8, 16])
def test_a_step_agrees_with_the_plain_operators(
    batch: int, intermediate_size: int, heads: tuple[int, int, int]
) -> None:
    sizes: dict[str, Any] = dict(zip(("num_heads", "num_kv_heads", "head_dim"), heads, strict=True))
    rope = RopeConfig("default", 500000.0, heads[2])
    config = two_layers(intermediate_size=intermediate_size, rope=rope, **sizes)
    made = streamed(COMPACT, batch, co_resident(GPU), config)
    assert self_check(made.model, DecodeWave(made.model, batch=batch, stream=made.stream), batch) < 0.03


@pytest.mark.parametrize("batch", [1, 8])
@torch.inference_mode()
def test_a_step_under_random_delays_has_its_bits(batch: int) -> None:
    made = streamed(COMPACT, batch, co_resident(GPU), two_layers())
    kv = made.model.new_cache(num_slots=batch, capacity=CAPACITY)
    dice = torch.Generator(GPU).manual_seed(0)
    kv.k.normal_(generator=dice)
    kv.v.normal_(generator=dice)
    slots = torch.arange(batch, device=GPU)
    found: list[torch.Tensor] = []
    for delays in (False, True):
        wave = DecodeWave(made.model, batch=batch, stream=made.stream, delays=delays)
        wave.bind_cache(kv)
        found += [wave(slots + 5, slots * 60 + 100, slots) for _ in range(50)]
        wave.wave.check()
    assert all(torch.equal(each, found[0]) for each in found)


@pytest.mark.parametrize("batch", [1, 2, 8, 16])
def test_every_weight_comes_back_as_it_was(batch: int) -> None:
    compact, plain = (streamed(kind, batch, 17, two_layers()).stream for kind in (COMPACT, None))
    assert bool(compact.reached)
    for name, (height, cols, count) in {
        "qkv0": (3072, 2048, 1),
        "gate_up1": (8192, 2048, 2),
        "down0": (2048, 8192, 1),
        "head": (128256, 2048, 1),
    }.items():
        found, expected = (
            stream.unpack(stream.matrix(name, height, cols, count), 0, height) for stream in (compact, plain)
        )
        assert torch.equal(found.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("rows", [1, 2, 4, 8])
@torch.inference_mode()
def test_weights_that_thirteen_bits_do_not_reach_count(rows: int) -> None:
    """Products of nothing else: the largest weight of their row meets a zero."""
    dice = torch.Generator(GPU).manual_seed(rows)
    up = torch.zeros(2048, 4096, device=GPU, dtype=torch.bfloat16)
    up[::16, 7] = 2.0**60
    for column in (100, 2500, 4095):
        up[::16, column] = torch.randn(128, generator=dice, device=GPU).bfloat16()
    down = torch.randn(1024, 2048, generator=dice, device=GPU).bfloat16()
    x = torch.randn(rows, 4096, generator=dice, device=GPU).bfloat16()
    x[:, 7] = 0
    packed = op.pack_ffn(up, down, batch=rows, activation=None)
    assert packed.compact
    assert all(int(stream.lists[:, 0].sum()) == lists for stream, lists in zip(packed.streams, (384,), strict=True))
    hidden = (x.double() @ up.double().T).bfloat16()
    exact = hidden.double() @ down.double().T
    assert (packed(x).double() - exact).norm() < 4e-3 * exact.norm()
