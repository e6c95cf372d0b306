"""Bitmasks on logits, of PyTorch and of NumPy alike."""

import numpy as np
import pytest
import torch

from onewave.ops.sampling import restrict, restrict_numpy


@pytest.mark.parametrize(("vocab", "rows"), [(1, None), (32, [1]), (61, [0, 2]), (257, None), (257, [2, 0])])
def test_tokens_whose_bit_is_not_set_become_impossible_and_nothing_else_changes(
    vocab: int, rows: list[int] | None
) -> None:
    rng = np.random.default_rng(vocab)
    chosen = list(range(3)) if rows is None else rows
    logits = rng.standard_normal((3, vocab)).astype(np.float32)
    bits = rng.integers(0, 2, (len(chosen), -(-(vocab + 3) // 32) * 32), dtype=np.uint8)
    expected = logits.copy()
    for row, allowed in zip(chosen, bits, strict=True):
        expected[row][allowed[:vocab] == 0] = -np.inf
    words = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    tensor = torch.from_numpy(logits.copy())
    restrict(tensor, None if rows is None else torch.tensor(rows), torch.from_numpy(words))
    restrict_numpy(logits, None if rows is None else np.array(rows), words)
    assert np.array_equal(tensor.numpy(), expected)
    assert np.array_equal(logits, expected)
