"""Calls that a decode step refuses before anything runs."""

import pytest
import torch

from onewave.base.errors import ShapeError
from onewave.wave.launch.checks import check_bytes, check_cache, check_sequences
from onewave.wave.plan.operations import HeadGroups

CPU = torch.device("cpu")


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


def test_a_cache_in_8_bits_comes_with_pages_and_scales() -> None:
    size, groups = (2, 3, 2, 16, 64), HeadGroups(heads=4, kv_heads=2, head_dim=64, splits=1)
    table, scales = torch.zeros(1, 2, dtype=torch.int32), torch.ones(2, 2, 2)
    right, narrow = torch.zeros(size, dtype=torch.int8), torch.zeros(*size[:4], 32, dtype=torch.int8)
    for cache in (right, right.to(torch.float8_e4m3fn)):
        check_cache(cache, cache, 2, groups, dtype=torch.bfloat16, device=CPU)
        check_bytes(cache, table, scales)
    for k, pages, given in (
        (right, None, scales),
        (right, table, None),
        (right, table, scales[:1]),
        (narrow, table, scales),
    ):
        with pytest.raises(ShapeError, match=r"wave: (caches|scales)"):
            check_bytes(k, pages, given)
    with pytest.raises(ShapeError, match="bfloat16 cache"):
        check_bytes(right.bfloat16(), table, scales)


def test_a_step_takes_as_many_rows_as_it_was_packed_for_and_no_more() -> None:
    row, logits = torch.zeros(3, dtype=torch.int64), torch.zeros(3, 8)
    check_sequences(row, row, row, logits, max_rows=4, vocab=8, device=CPU)
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
            check_sequences(*given, max_rows=4, vocab=8, device=CPU)
