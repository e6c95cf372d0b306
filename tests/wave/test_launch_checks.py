"""What launches of several tokens refuse before anything runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from onewave.base.errors import ShapeError, UnsupportedError
from onewave.models.llama_plan import plan_decode
from onewave.wave.launch.checks import check_cache, check_rows, check_sequences, check_tokens
from onewave.wave.plan.operations import HeadGroups

sys.path.insert(0, str(Path(__file__).parent))
from tiny_decoders import BASE


def test_every_worker_must_make_logits_in_its_last_step() -> None:
    few = plan_decode(BASE, batch=1, workers=3).program
    check_tokens(few, 64, decodes=True, threads=256)
    many = plan_decode(BASE, batch=1, workers=30).program
    check_tokens(many, 1, decodes=True, threads=256)
    with pytest.raises(UnsupportedError, match=r"30 workers, 17 of which make logits.*all of which do"):
        check_tokens(many, 2, decodes=True, threads=256)
    with pytest.raises(UnsupportedError, match="up to 2, all"):
        check_tokens(few, 2, decodes=True, threads=2)


@pytest.mark.parametrize(("tokens", "decodes"), [(0, True), (65, True), (2, False)])
def test_a_launch_makes_1_to_64_tokens_and_one_that_does_not_decode_none_more(tokens: int, decodes: bool) -> None:
    program = plan_decode(BASE, batch=1, workers=3).program
    with pytest.raises(UnsupportedError, match="tokens of a launch"):
        check_tokens(program, tokens, decodes=decodes, threads=256)


CPU = torch.device("cpu")


def test_limits_and_draws_of_another_shape_dtype_or_device_are_refused() -> None:
    limits, draws = torch.zeros(3, 8, dtype=torch.int64), torch.zeros(3, 8, dtype=torch.float64)
    check_rows(None, None, 3, 4, device=CPU)
    check_rows(limits, draws, 3, 4, device=CPU)
    for wrong in (limits[:2], limits[:, :7], limits.int(), limits.to("meta")):
        with pytest.raises(ShapeError, match="limits"):
            check_rows(wrong, draws, 3, 4, device=CPU)
    for wrong in (draws[:2], draws[:, :7], draws.float(), draws.to("meta")):
        with pytest.raises(ShapeError, match="draws"):
            check_rows(limits, wrong, 3, 4, device=CPU)


@pytest.mark.parametrize(
    "changed",
    [
        {"dtype": torch.float32},
        {"size": (2, 3, 4, 16, 32)},
        {"size": (3, 3, 2, 16, 32)},
        {"size": (2, 3, 2, 16, 64)},
        {"size": (2, 3, 2, 32)},
    ],
)
def test_a_cache_of_another_model_is_refused(changed: dict) -> None:
    size, groups = (2, 3, 2, 16, 32), HeadGroups(heads=4, kv_heads=2, head_dim=32, splits=1)
    right = torch.zeros(size, dtype=torch.bfloat16)
    check_cache(right, right.clone(), 2, groups, dtype=torch.bfloat16, device=CPU)
    wrong = torch.zeros(**{"size": size, "dtype": torch.bfloat16} | changed)
    for k, v in ((wrong, wrong), (right, wrong), (right.mT.contiguous().mT, right)):
        with pytest.raises(ShapeError, match=r"wave: caches.*both torch.bfloat16 \[2, slots or pages, 2, keys, 32\]"):
            check_cache(k, v, 2, groups, dtype=torch.bfloat16, device=CPU)


def test_a_step_takes_as_many_rows_as_it_was_packed_for_and_no_more() -> None:
    row, logits = torch.zeros(3, dtype=torch.int64), torch.zeros(3, 8)
    check_sequences(row, row, row, logits, most=4, vocab=8, device=CPU)
    five = torch.zeros(5, dtype=torch.int64)
    for name, given in (
        ("tokens", (five, five, five, torch.zeros(5, 8))),
        ("tokens", (row[:0], row[:0], row[:0], logits[:0])),
        ("tokens", (row.int(), row, row, logits)),
        ("positions", (row, row[:2], row, logits)),
        ("slots", (row, row, torch.zeros(6, dtype=torch.int64)[::2], logits)),
        ("slots", (row, row, row.to("meta"), logits)),
        ("logits", (row, row, row, logits.bfloat16())),
        ("logits", (row, row, row, logits[:2])),
        ("logits", (row, row, row, torch.zeros(3, 9))),
        ("logits", (row, row, row, logits.to("meta"))),
    ):
        with pytest.raises(ShapeError, match=f"wave: {name}"):
            check_sequences(*given, most=4, vocab=8, device=CPU)
