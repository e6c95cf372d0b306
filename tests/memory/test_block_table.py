"""Entries of a block table, written in runs or all at once."""

import pytest
import torch

from onewave.memory.kv_cache import CacheSizes, KVCache, KVFormat


@pytest.mark.parametrize(
    "entries",
    [
        [(2, 1, 9), (2, 2, 4), (2, 3, 7)],
        [(0, 0, 5), (1, 1, 6), (1, 2, 3), (0, 1, 8)],
        [(row, place, 10 * row + place) for row in range(4) for place in (0, 2, 3)],
    ],
    ids=["a run", "several", "more than are copied one by one"],
)
def test_a_table_has_its_entries_and_no_other(entries: list[tuple[int, int, int]]) -> None:
    made = KVCache.reserve(CacheSizes(1, 1, 1, 1, 1, 4, 4), KVFormat(torch.float32), device=torch.device("cpu"))
    made.block_table.fill_(-1)
    made.set_blocks(entries)
    expected = torch.full((4, 4), -1, dtype=torch.int32)
    for row, place, block in entries:
        expected[row, place] = block
    assert torch.equal(made.block_table, expected)
