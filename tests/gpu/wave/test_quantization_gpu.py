"""One-byte weights on a card that the wave runs on: the same bits whoever runs them, half the memory, the same text."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from onewave import LLM, SamplingParams
from onewave.base.settings import Settings
from onewave.engine.load.loading import open_parts
from onewave.engine.load.streamed import StreamedModel, stream_model
from onewave.engine.wave_decode import self_check
from onewave.models.config.model_config import ModelConfig
from onewave.models.config.read import load_config
from onewave.models.decode_wave import DecodeWave
from onewave.models.llama_plan import plan_decode
from onewave.wave.launch.launch import co_resident, runs_here
from onewave.wave.weights.formats import ROUNDINGS
from onewave.weights.fetch.sources import resolve

CARD = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not runs_here(CARD), reason="needs a card of compute capability 9.0"),
]
BOTH = pytest.mark.parametrize("name", ROUNDINGS)
CAPACITY = 600
LENGTHS = (299, 1, 40, 512, 17, 128, 3, 300, 5, 6, 7, 8, 9, 10, 11, 12)
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, detokenize=False)
PROMPTS = [{"prompt_token_ids": [7 * i % 1000 + 3 for i in range(n)]} for n in (1, 5, 40, 300)]


def two_layers(**changes: Any) -> ModelConfig:
    location = resolve("llama-3.2-1b", Settings.from_env(), load_format="dummy")
    config = load_config(location)
    return replace(config, num_layers=2, layer_windows=config.layer_windows[:2], **changes)


def streamed(name: str, batch: int, workers: int, config: ModelConfig, dtype: torch.dtype) -> StreamedModel:
    location = resolve("llama-3.2-1b", Settings.from_env(), load_format="dummy")
    program = plan_decode(config, batch=batch, workers=workers, weight_bytes=1).program
    with open_parts(location, config, dtype=dtype, device=CARD, load_format="dummy") as parts:
        return stream_model(
            parts, config, program, dtype=dtype, device=CARD, max_model_len=CAPACITY, weight_format=ROUNDINGS[name]
        )


@torch.inference_mode()
def step(made: StreamedModel, batch: int, rows: range) -> torch.Tensor:
    """A step of some of `batch` sequences on random caches, 20 times the same."""
    wave = DecodeWave(made.model, batch=batch, stream=made.stream)
    kv = made.model.new_cache(num_slots=batch, capacity=CAPACITY)
    dice = torch.Generator(CARD).manual_seed(0)
    kv.k.normal_(generator=dice)
    kv.v.normal_(generator=dice)
    wave.bind_cache(kv)
    slots = torch.tensor(rows, device=CARD)
    positions = torch.tensor([LENGTHS[row] for row in rows], device=CARD)
    found = [wave(slots + 5, positions, slots) for _ in range(20)]
    wave.wave.check()
    assert all(torch.equal(each, found[0]) for each in found)
    return found[0]


@BOTH
@pytest.mark.parametrize("batch", [1, 4, 16])
def test_neither_workers_nor_company_nor_time_changes_a_bit(name: str, batch: int) -> None:
    config = two_layers()
    first = step(streamed(name, batch, co_resident(CARD), config, torch.bfloat16), batch, range(batch))
    for workers in (co_resident(CARD) - 1, 64, 17):
        made = streamed(name, batch, workers, config, torch.bfloat16)
        assert torch.equal(step(made, batch, range(batch)), first)
        assert torch.equal(step(made, batch, range(batch - 1, batch))[0], first[-1])


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("intermediate_size", [8192, 3072])
def test_a_step_agrees_with_the_plain_operators_on_the_same_rounded_weights(
    name: str, dtype: torch.dtype, intermediate_size: int
) -> None:
    for batch in (1, 2, 8, 16):
        made = streamed(name, batch, co_resident(CARD), two_layers(intermediate_size=intermediate_size), dtype)
        assert self_check(made.model, DecodeWave(made.model, batch=batch, stream=made.stream), batch) < 0.03


@BOTH
def test_the_cards_kernel_unpacks_as_plain_indexing_does(name: str) -> None:
    stream = streamed(name, 8, co_resident(CARD), two_layers(), torch.bfloat16).stream
    for matrix, (height, cols, count) in {
        "qkv0": (3072, 2048, 1),
        "gate_up1": (8192, 2048, 2),
        "down0": (2048, 8192, 1),
    }.items():
        found = stream.unpack(stream.matrix(matrix, height, cols, count), 0, height).view(count, height, cols)
        blocks = -(-height * count // stream.shape.rows)
        rows = stream.read_blocks(matrix, cols, 0, blocks)[: height * count].view(height, count, cols)
        assert torch.equal(found, rows.transpose(0, 1))


def held_and_tokens(name: str | None, **more: object) -> tuple[int, list[list[int]]]:
    given = {"load_format": "dummy", "device": "cuda", "max_model_len": 512, "max_num_seqs": 4, "keep_unpacked": False}
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with LLM("llama-3.2-1b", quantization=name, decode="wave", **given, **more) as model:  # type: ignore[arg-type] # LLM's own
        gc.collect()
        held = torch.cuda.memory_allocated() - before
        together = [list(output.outputs[0].token_ids) for output in model.generate(PROMPTS, GREEDY)]  # type: ignore[arg-type] # prompts
        for prompt, expected in zip(PROMPTS, together, strict=True):
            assert list(model.generate(prompt, GREEDY)[0].outputs[0].token_ids) == expected  # type: ignore[arg-type] # a prompt
    return held, together


@BOTH
def test_the_engine_holds_half_and_company_changes_no_token(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONEWAVE_CACHE", str(tmp_path))
    whole, _ = held_and_tokens(None, compact=False)
    held, _ = held_and_tokens(name)
    embedding = 2 * 128256 * 2048  # keeps its 16 bits
    assert held - embedding < 0.6 * (whole - embedding)


@triton.jit
def _products(a, b, out, K: tl.constexpr):
    row, column, k = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :], tl.arange(0, 16)
    sums = tl.zeros([16, 16], tl.float32)
    for first in range(0, K, 16):
        left = tl.load(a + row * K + first + k[None, :])
        sums = tl.dot(left, tl.load(b + (first + k[:, None]) * 16 + column), sums)
    tl.store(out + row * 16 + column, sums)


def test_the_tensor_cores_multiply_subnormal_numbers_as_they_are() -> None:
    """What byte_values.py makes of int8, beside the same integers as normal numbers."""
    dice = torch.Generator(CARD).manual_seed(1)
    integers = torch.randint(-127, 128, (16, 4096), generator=dice, device=CARD)
    x = torch.randn(4096, 16, generator=dice, device=CARD).bfloat16()
    subnormal = (integers.abs() | (integers < 0) << 15).to(torch.uint16).view(torch.bfloat16)
    assert torch.equal(subnormal.double() * 2.0**133, integers.double())
    exact = integers.double() @ x.double()
    size = integers.abs().double() @ x.abs().double()
    off: list[float] = []
    for left, right, factor in ((integers.bfloat16(), x, 1.0), (subnormal, x * 2.0**64, 2.0**69)):
        found = torch.empty(16, 16, device=CARD)
        _products[(1,)](left, right, found, K=4096, num_warps=1)
        off.append(float(((found.double() * factor - exact).abs() / size).max()))
    print("largest difference over the sum of magnitudes:", off)
    assert off[1] < max(4 * off[0], 2.0**-20)
