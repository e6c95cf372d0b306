"""Compact weights on a card that the wave runs on: the same bits whoever runs them, every weight as it came, the same
text as of plain ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kit.operands.rounded_on_gpu import CAPACITY, held_and_tokens, step, two_layers
from onewave.base.settings import Settings
from onewave.base.weight_formats import COMPACT
from onewave.engine.load.loading import open_parts
from onewave.engine.load.options import LoadOptions
from onewave.engine.load.self_check import self_check
from onewave.engine.load.streamed import StreamedModel, stream_model
from onewave.models.config.model_config import ModelConfig, RopeConfig
from onewave.models.decode_wave import DecodeWave
from onewave.models.llama_plan import plan_decode
from onewave.ops.ffn import op
from onewave.wave.launch.launch import co_resident, runs_here
from onewave.weights.fetch.sources import resolve

CARD = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not runs_here(CARD), reason="needs a card of compute capability 9.0"),
]


def streamed(batch: int, workers: int, config: ModelConfig, *, compact: bool = True) -> StreamedModel:
    location = resolve("llama-3.2-1b", Settings.from_env(), load_format="dummy")
    size = COMPACT.weight_bytes if compact else 2
    program = plan_decode(config, batch=batch, workers=workers, weight_bytes=size).program
    options = LoadOptions(dtype=torch.bfloat16, device=CARD, load_format="dummy")
    with open_parts(location, config, options) as parts:
        return stream_model(
            parts, config, program, replace(options, max_model_len=CAPACITY, weight_format=COMPACT if compact else None)
        )  # fmt: skip


@pytest.mark.parametrize("batch", [1, 2, 4, 8, 16])
def test_neither_workers_nor_company_nor_time_changes_a_bit(batch: int) -> None:
    config = two_layers()
    first = step(streamed(batch, co_resident(CARD), config), batch, range(batch))
    for workers in (co_resident(CARD) - 1, 64, 17):
        made = streamed(batch, workers, config)
        assert torch.equal(step(made, batch, range(batch)), first)
        assert torch.equal(step(made, batch, range(batch - 1, batch))[0], first[-1])


@pytest.mark.parametrize("intermediate_size", [8192, 3072])
@pytest.mark.parametrize("heads", [(32, 8, 64), (16, 4, 128), (14, 2, 64)], ids=str)
def test_a_step_agrees_with_the_plain_operators(intermediate_size: int, heads: tuple[int, int, int]) -> None:
    sizes: dict[str, Any] = dict(zip(("num_heads", "num_kv_heads", "head_dim"), heads, strict=True))
    rope = RopeConfig("default", 500000.0, heads[2])
    config = two_layers(intermediate_size=intermediate_size, rope=rope, **sizes)
    for batch in (1, 2, 8, 16):
        made = streamed(batch, co_resident(CARD), config)
        assert self_check(made.model, DecodeWave(made.model, batch=batch, stream=made.stream), batch) < 0.03


@pytest.mark.parametrize("batch", [1, 8])
@torch.inference_mode()
def test_a_step_under_random_delays_has_its_bits(batch: int) -> None:
    made = streamed(batch, co_resident(CARD), two_layers())
    kv = made.model.new_cache(num_slots=batch, capacity=CAPACITY)
    dice = torch.Generator(CARD).manual_seed(0)
    kv.k.normal_(generator=dice)
    kv.v.normal_(generator=dice)
    slots = torch.arange(batch, device=CARD)
    found: list[torch.Tensor] = []
    for delays in (False, True):
        wave = DecodeWave(made.model, batch=batch, stream=made.stream, delays=delays)
        wave.bind_cache(kv)
        found += [wave(slots + 5, slots * 60 + 100, slots) for _ in range(50)]
        wave.wave.check()
    assert all(torch.equal(each, found[0]) for each in found)


@pytest.mark.parametrize("batch", [1, 2, 8, 16])
def test_every_weight_comes_back_as_it_was(batch: int) -> None:
    compact, plain = (streamed(batch, 17, two_layers(), compact=kind).stream for kind in (True, False))
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
    dice = torch.Generator(CARD).manual_seed(rows)
    up = torch.zeros(2048, 4096, device=CARD, dtype=torch.bfloat16)
    up[::16, 7] = 2.0**60
    for column in (100, 2500, 4095):
        up[::16, column] = torch.randn(128, generator=dice, device=CARD).bfloat16()
    down = torch.randn(1024, 2048, generator=dice, device=CARD).bfloat16()
    x = torch.randn(rows, 4096, generator=dice, device=CARD).bfloat16()
    x[:, 7] = 0
    packed = op.pack_ffn(up, down, batch=rows, activation=None)
    assert packed.compact
    assert all(int(stream.lists[:, 0].sum()) == lists for stream, lists in zip(packed.streams, (384,), strict=True))
    hidden = (x.double() @ up.double().T).bfloat16()
    exact = hidden.double() @ down.double().T
    assert (packed(x).double() - exact).norm() < 4e-3 * exact.norm()


def test_the_engine_holds_a_fifth_less_and_company_changes_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONEWAVE_CACHE", str(tmp_path))
    whole, _ = held_and_tokens(None, compact=False)
    held, _ = held_and_tokens(None)
    embedding = 2 * 128256 * 2048  # keeps its 16 bits
    assert held - embedding < 0.84 * (whole - embedding)
