"""The bound of shared memory that a plan keeps to, beside what the compiler takes."""

import json
from functools import partial
from typing import Any, cast

import pytest

from kit.alone import shared_alone
from kit.calls import wave
from kit.compiled import reports_of
from kit.processes import python
from onewave.base.weight_formats import COMPACT_BYTES
from onewave.models.llama_plan import DecodeStep, step_parts
from onewave.wave.plan.layout import SHARED_BYTES, shared_bytes, tile_shape

# Bytes by which the bound may pass what a kernel takes: a gap that need not be, and what some kernels lack.
MAX_SLACK = 1280
BLOCKS = {
    "1 row ungated": tile_shape(1),
    "8 rows": tile_shape(8),
    "64 rows 512x14336 half_row": tile_shape(64),
    "8 rows compact": tile_shape(8, weight_bytes=COMPACT_BYTES, images=2),
    "32 rows 2048x8192 compact": tile_shape(32, rows=64, weight_bytes=COMPACT_BYTES, images=2),
}


@pytest.mark.parametrize("name", wave.STEPS)
def test_a_compiled_step_takes_what_its_plan_says_or_little_less(name: str) -> None:
    made = cast("partial[Any]", wave.STEPS[name].make)
    (model, batch), weights = made.args, made.keywords.get("weights", "")
    config, taken = wave.MODELS[model], reports_of("wave step ")[name]["shared"]
    shape = step_parts(DecodeStep(config, batch, wave.FORMATS[weights]))[1]
    assert taken <= shared_bytes(shape, config.head_dim) <= taken + MAX_SLACK


@pytest.mark.parametrize("name", BLOCKS)
def test_a_compiled_block_takes_what_its_plan_says_or_little_less(name: str) -> None:
    taken = reports_of("wave block ")[name]["shared"]
    assert taken <= shared_bytes(BLOCKS[name], 0) <= taken + MAX_SLACK


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_the_compiler_finds_room_for_every_format_batch_and_head_dim() -> None:
    steps = [json.loads(line) for line in python(shared_alone.__file__).splitlines()]
    assert len(steps) == 50
    for name, batch, taken, bound in steps:
        assert taken <= bound <= min(taken + MAX_SLACK, SHARED_BYTES), (name, batch)
