"""Frequencies and rotary rows against transformers' own functions."""

from typing import Any

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from kit.models.tiny_models import CPU, ROPES, config_of
from onewave.base.errors import CapacityError
from onewave.models import rope as module
from onewave.models.config.hf import from_hf
from onewave.models.config.model_config import ModelConfig
from onewave.models.rope import RotaryTable, inv_freq

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


def rope(kind: str, factor: float | None, theta: float = 1e4, original: int | None = None, **more: Any) -> Any:
    """As configs have it."""
    found = {"rope_type": kind, "factor": factor, "rope_theta": theta} | more
    return found if original is None else found | {"original_max_position_embeddings": original}


# Real models' parameters and corners of each kind: (rope_parameters, max_position_embeddings, head_dim).
CASES: dict[str, tuple[dict[str, Any], int, int]] = {
    "linear": (rope("linear", 4.0), 8192, 128),
    "dynamic": (rope("dynamic", 2.0), 64, 80),
    "llama-3.1": (rope("llama3", 8.0, 5e5, 8192, **LLAMA3), 131072, 128),
    "llama-3.2": (rope("llama3", 32.0, 5e5, 8192, **LLAMA3), 131072, 64),
    "llama3 without original length": (rope("llama3", 8.0, **LLAMA3), 512, 64),
    "qwen yarn": (rope("yarn", 4.0, 1e6, 32768), 131072, 128),
    "yarn without original length": (rope("yarn", 2.0), 4096, 80),
    "yarn, factor from the lengths": (rope("yarn", None, original=1024), 4096, 64),
    "yarn, narrow ramp": (rope("yarn", 3.0, beta_fast=2.0, beta_slow=2.0, truncate=False), 4096, 64),
    "yarn, deepseek scales": (rope("yarn", 40.0, mscale=1.0, mscale_all_dim=0.7), 4096, 64),
    "yarn, attention factor": (rope("yarn", 2.0, attention_factor=0.9), 64, 64),
    "yarn, factor below one": (rope("yarn", 0.5), 4096, 64),
    "partial": (rope("linear", 2.0, partial_rotary_factor=0.5), 64, 80),
}


def both(given: dict[str, Any], max_position: int, head_dim: int) -> tuple[Any, ModelConfig]:
    theirs = config_of("llama", rope_parameters=dict(given), max_position_embeddings=max_position, head_dim=head_dim)
    return theirs, from_hf(theirs.to_dict() | {"architectures": ["LlamaForCausalLM"]})


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("stretch", [0.5, 1.0, 1.5, 7.0])
def test_frequencies_equal_those_of_transformers(case: str, stretch: float) -> None:
    theirs, ours = both(*CASES[case])
    seq_len = int(ours.max_position * stretch)
    expected, expected_scaling = ROPE_INIT_FUNCTIONS[ours.rope.kind](theirs, CPU, seq_len=seq_len)
    frequencies, scaling = inv_freq(ours.rope, seq_len=seq_len, max_position=ours.max_position)
    assert frequencies.dtype is torch.float32
    torch.testing.assert_close(frequencies, expected, rtol=1e-6, atol=0)
    assert scaling == pytest.approx(expected_scaling, rel=1e-6)


@pytest.mark.parametrize("kind", ROPES)
def test_rows_equal_those_of_transformers_at_every_position(kind: str) -> None:
    theirs = config_of("llama", kind, max_position_embeddings=24)
    table = RotaryTable(from_hf(theirs.to_dict() | {"architectures": ["LlamaForCausalLM"]}), 64, CPU)
    assert table.rows(64).shape == (64, 80)

    def rows(start: int, end: int) -> torch.Tensor:
        cos, sin = LlamaRotaryEmbedding(config=theirs)(torch.zeros(1), torch.arange(start, end)[None])
        return torch.cat((cos[0, :, :40], sin[0, :, :40]), dim=-1)

    for start, end in ((0, 1), (0, 24), (0, 25), (3, 50), (23, 64), (40, 41)):
        torch.testing.assert_close(table.prefill(start, end), rows(start, end), rtol=0, atol=1e-6)
    for position in (0, 22, 23, 24, 25, 63):
        torch.testing.assert_close(table.rows(64)[position], rows(position, position + 1)[0], rtol=0, atol=1e-6)


def test_rows_at_long_context_turn_by_the_same_angle_as_transformers() -> None:
    theirs, ours = both(*CASES["llama-3.1"])
    cos, _ = LlamaRotaryEmbedding(config=theirs)(torch.zeros(1), torch.arange(131000, 131072)[None])
    rows = RotaryTable(ours, 131072, CPU).rows(131072)[131000:]
    torch.testing.assert_close(rows[:, :64], cos[0, :, :64], rtol=0, atol=1e-6)


def test_a_short_table_of_a_dynamic_model_is_the_plain_one() -> None:
    plain, dynamic = (both(each, 64, 80)[1] for each in ({"rope_theta": 1e4}, CASES["dynamic"][0]))
    assert torch.equal(RotaryTable(dynamic, 64, CPU).rows(64), RotaryTable(plain, 64, CPU).rows(64))


def test_positions_that_no_memory_holds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that promised a context of 2^31 tokens had the system end the process."""
    monkeypatch.setattr(module, "available_bytes", lambda: 2 << 20)
    table = RotaryTable(both(*CASES["linear"])[1], 2**31 - 1, CPU)
    kept = table.rows(800)
    with pytest.raises(CapacityError, match=r"rotary angles of 2147483647 positions.*Lower max_model_len"):
        table.rows(2**31 - 1)
    assert table.rows(800) is kept


@pytest.mark.parametrize("kind", ROPES)
def test_a_table_that_grows_has_the_rows_of_one_made_at_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All positions of a model were made when it loaded: 29 seconds and 13 GB for ten million."""
    monkeypatch.setattr(module, "_FEWEST_POSITIONS", 8)
    config = both(ROPES[kind] | {"rope_theta": 1e4}, 24, 80)[1]
    at_once, grown = RotaryTable(config, 100, CPU), RotaryTable(config, 100, CPU)
    lengths = [len(grown.rows(length)) for length in (0, 1, 8, 9, 17, 33, 64, 65, 1000)]
    assert lengths == [0, 8, 8, 16, 32, 64, 64, 100, 100]
    assert torch.equal(grown.rows(100), at_once.rows(100))
    assert grown.rows(20) is grown.rows(100)
