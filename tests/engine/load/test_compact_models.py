"""`compact=`: what it is taken for, the same tokens as of plain weights, and weights that it can't hold."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kit.models import plain_wave
from kit.models.plain_wave import LOCATION, PlainWave, how, tokens_of
from kit.models.tiny_decoders import BASE
from onewave.base.errors import InvalidArgumentError, OutOfReachError, UnsupportedError
from onewave.base.weight_formats import COMPACT, ROUNDINGS
from onewave.engine.llm import LLM
from onewave.engine.load.choices import choose_weight_format
from onewave.engine.load.load import load
from onewave.engine.load.wave import load_wave
from onewave.weights.dummy import DummyStore

BF16 = {"dtype": torch.bfloat16}
planned = plain_wave.planned  # a fixture


def kept(name: str | None = None, compact: bool | None = None, dtype: torch.dtype = torch.bfloat16, **more: Any) -> Any:
    return choose_weight_format(name, compact, dtype=dtype, **{"decode": "auto", **more})


def test_bfloat16_weights_are_compact_wherever_the_wave_may_read_them() -> None:
    assert kept() is kept(decode="wave") is kept(compact=True) is COMPACT
    assert kept(compact=False) is None
    assert kept(dtype=torch.float16) is kept(dtype=torch.float32) is None
    assert kept(decode="graph") is kept(decode="eager") is None
    assert kept("int8") is kept("int8", compact=False) is ROUNDINGS["int8"]


@pytest.mark.parametrize(
    "given", [{"name": "fp8"}, {"dtype": torch.float16}, {"decode": "graph"}, {"decode": "eager"}], ids=str
)
def test_what_can_not_be_compact_is_refused_where_that_was_asked_for(given: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match=r"compact: .*; allowed: bfloat16 ones that the wave decodes with"):
        kept(compact=True, **given)


def test_whether_to_be_compact_is_a_yes_or_a_no() -> None:
    with pytest.raises(InvalidArgumentError, match="compact: 'yes'; allowed: True, False or None"):
        LLM("no-such-model", compact="yes")


def test_a_compact_model_and_a_plain_one_generate_the_same(planned: list[Any], tmp_path: Path) -> None:
    model, wave = load_wave(LOCATION, BASE, how(tmp_path, None, weight_format=COMPACT, **BF16))
    assert planned == [COMPACT]
    (made,) = PlainWave.made
    assert made.stream.weight_format is COMPACT
    assert made.stream.images.nbytes == made.stream.program.stream_tiles * made.stream.shape.tile_bytes
    assert isinstance(model.weights.head, Tensor) == BASE.tie_word_embeddings
    plain, none = load_wave(LOCATION, BASE, how(tmp_path, None, **BF16))
    assert tokens_of(model, wave) == tokens_of(plain, none)
    for layer, expected in zip(model.weights.layers, plain.weights.layers, strict=True):
        for name in ("qkv", "o", "gate_up", "down"):
            assert torch.equal(getattr(layer, name).dense(), getattr(expected, name).dense()), name


@pytest.fixture
def far_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights some of which are 2^-90 of their rows' largest."""
    load = DummyStore.load

    def planted(self: DummyStore, name: str) -> Tensor:
        found = load(self, name)
        if "down_proj" in name:
            found[0, ::2] *= 2.0**-90
        return found

    monkeypatch.setattr(DummyStore, "load", planted)


def test_weights_too_far_apart_stay_as_they_are_and_a_line_says_so(
    planned: list[Any], far_apart: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = how(tmp_path, None, weight_format=COMPACT, **BF16)
    model, wave = load("auto", LOCATION, BASE, given)
    assert wave.stream.weight_format is None
    (record,) = caplog.records
    assert record.getMessage() == (
        "weights are not compact: weights: not finite, above 2^95, or too far below the largest of their rows"
    )
    assert tokens_of(model, wave) == tokens_of(*load_wave(LOCATION, BASE, replace(given, weight_format=None)))


def test_asked_for_they_are_an_error(planned: list[Any], far_apart: None, tmp_path: Path) -> None:
    given = how(tmp_path, None, weight_format=COMPACT, insists=True, **BF16)
    for each in (partial(load, "auto"), load_wave):
        with pytest.raises(OutOfReachError, match=r"not finite, above 2\^95, or too far below .*\. Use compact=False"):
            each(LOCATION, BASE, given)


def test_asked_for_they_are_not_left_to_another_path(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"decode wave: cpu has not compute capability 9\.0"):
        load("auto", LOCATION, BASE, how(tmp_path, None, weight_format=COMPACT, insists=True, **BF16))


def test_the_bytes_that_a_step_reads_are_thirteen_bits_a_weight(planned: list[Any], tmp_path: Path) -> None:
    from onewave.bench.engine.latency import decode_weight_bytes

    model, wave = load_wave(LOCATION, BASE, how(tmp_path, None, weight_format=COMPACT, **BF16))
    plain, _ = load("eager", LOCATION, BASE, how(tmp_path, None, **BF16))
    whole = decode_weight_bytes(plain.weights)
    found = decode_weight_bytes(model.weights, stream=wave.stream)
    matrices = 2 * 128 * (256 + 128 + 2 * 192 + 192) + 131 * 128
    rows = 2 * (256 + 128 + 2 * 192 + 128) + 131
    assert 0 < found - (whole - 2 * matrices + 13 / 8 * matrices + 4 * rows) < 0.016 * matrices  # lists
    assert decode_weight_bytes(model.weights, unpacked=True, stream=wave.stream) == whole
