"""Keep some rows to the tokens that a bitmask allows, as grammars give it."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def restrict(logits: Tensor, rows: Tensor | None, words: Tensor) -> None:
    """Make the logits of all tokens that are not allowed -inf, in place.

    logits: float32 [rows, vocab]. rows: int64 indices of the rows to restrict, each once; None: all of them. words:
    int32 [restricted rows, at least vocab / 32], on the logits' device; bit i % 32 of word i // 32 is token i's.
    """
    octets = words.view(torch.uint8).unsqueeze(-1)
    bits = octets & (1 << torch.arange(8, dtype=torch.uint8, device=words.device))
    banned = (bits == 0).view(len(words), -1)[:, : logits.shape[1]]
    if rows is None:
        logits.masked_fill_(banned, -torch.inf)
    else:
        logits[rows] = logits[rows].masked_fill_(banned, -torch.inf)


def restrict_numpy(logits: NDArray[np.float32], rows: NDArray[Any] | None, words: NDArray[np.int32]) -> None:
    """As restrict, on a CPU, on the calling thread alone."""
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little", count=logits.shape[1])
    for row, allowed in zip(range(len(logits)) if rows is None else rows, bits, strict=True):
        logits[row, allowed == 0] = -np.inf
