"""Layers of the CPU that run as one list of jobs: the operators' bits, whoever decodes beside whom."""

from pathlib import Path
from typing import Any

import pytest
import torch

from kit.models.tiny_models import config_of, ours, save_checkpoint
from onewave.engine.prompt.passes import PromptChunk
from onewave.engine.runner import ModelRunner
from onewave.models.batch import Batch, StepRows

# Rows and columns that need no padding.
SIZES = {
    "vocab_size": 144, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 64,
}  # fmt: skip


def runner_of(path: Path, family: str = "llama", *, packed: bool = True, **options: Any) -> ModelRunner:
    save_checkpoint(path, config_of(family, **SIZES | options), dtype=torch.bfloat16)
    made = ModelRunner(ours(path, packed=packed), max_num_seqs=4, max_model_len=64)
    for slot in range(4):
        made.set_blocks([(slot, place, 4 * slot + place) for place in range(4)])
    made.prefill([PromptChunk(slot, prompt_of(slot)) for slot in range(4)])
    return made


def prompt_of(slot: int) -> list[int]:
    return [(5 * slot + i) % 131 for i in range(7 + 10 * slot)]


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"rope": "dynamic", "vocab_size": 131}),
        ("mistral", {"sliding_window": 20}),
        ("qwen2", {}),
        ("qwen3", {"rope": "yarn"}),
    ],
)
def test_a_listed_pass_has_the_bits_of_the_operators(tmp_path: Path, family: str, options: dict[str, Any]) -> None:
    runner = runner_of(tmp_path, family, **options)
    assert runner._layers is not None
    chunks = [(slot, prompt_of(slot)[slot:], slot) for slot in (2, 0, 3)]
    expected = runner.model.forward(Batch.prefill(chunks, torch.device("cpu")), runner._narrowed)
    assert torch.equal(runner.prefill([PromptChunk(slot, ids, start) for slot, ids, start in chunks]), expected)
    positions = [7 + 10 * slot for slot in range(4)]
    for number, slots in enumerate([[0], [3], [2, 0, 1], [1], [3, 2, 1, 0], [0]]):
        given = [[11 * number + slot for slot in slots], [positions[slot] for slot in slots], slots]
        rows = StepRows(*(torch.tensor(each) for each in given))
        expected = runner.model.forward(Batch.decode(*rows), runner._narrowed).clone()
        assert torch.equal(runner.decode(rows), expected)
        for slot in slots:
            positions[slot] += 1


def test_layers_that_pytorch_has_a_part_in_are_not_listed(tmp_path: Path) -> None:
    for number, options in enumerate([{"mlp_bias": True}, {"attention_bias": True}, {"hidden_size": 72}]):
        assert runner_of(tmp_path / str(number), **options)._layers is None
    assert runner_of(tmp_path / "dense", packed=False)._layers is None


def test_lists_of_many_forms_are_dropped(tmp_path: Path) -> None:
    runner = runner_of(tmp_path)
    one = torch.ones(1, dtype=torch.int64)
    first = runner.decode(StepRows(one, one * 7, one * 0)).clone()
    for rows in range(2, 18):
        runner.decode(StepRows(one.repeat(rows), 7 * one.repeat(rows), 0 * one.repeat(rows)))
    assert len(runner._layers._kept) == 8
    assert torch.equal(runner.decode(StepRows(one, one * 7, one * 0)), first)
