"""top_k and top_p inside a launch: the kernel's own source in NumPy, on logits of every kind, against the sampler."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from onewave.ops.sampling import RowParameters, sample
from onewave.wave.layout import STEP_WORDS, Word, draw_words, several_words

sys.path.insert(0, str(Path(__file__).parent))
import draw_aot
from gluon_in_numpy import WAVE, Memory, launch

ROWS, TOKENS = 16, 3
# What draw_aot's kernel calls by its module's name.
MODULES = (*WAVE, draw_aot)


def drawn(logits: np.ndarray, draws: list[list[float]], uniform: list[float], workers: int) -> list[int]:
    """The tokens that as many workers come to by their own rows of logits, float32 [batch, vocabulary]."""
    batch, vocabulary = logits.shape
    padded = 1 << (batch - 1).bit_length()
    blocks = -(-vocabulary // ROWS)
    cuts = np.linspace(0, blocks, workers + 1).astype(int)
    heads = np.zeros((workers, STEP_WORDS), dtype=np.int32)
    heads[:, Word.FIRST_BLOCK], heads[:, Word.BLOCKS] = cuts[:-1], np.diff(cuts)
    memory = Memory(1 << 22)
    several = memory.put(np.full(several_words(TOKENS, padded, workers)[1], -1, dtype=np.int64))
    behind = memory.put(np.full(64, 77, dtype=np.int64))
    found = memory.put(np.zeros((workers, padded), dtype=np.int64))
    numbers = [[*row, number, 0.5, 0.5] for row, number in zip(draws, uniform, strict=True)]
    arguments = {
        "several": several,
        "draws": memory.put(np.array(numbers)),
        "heads": memory.put(heads),
        "out": memory.put(logits.view(np.int32)),
        "best": memory.put(logits.max(axis=1)),
        "drawn": found,
        "out_stride": vocabulary,
        "batch": batch,
        "NB": padded,
        "R": ROWS,
        "TOKENS": TOKENS,
    }
    launch(memory, workers, arguments, modules=MODULES, name="draw_alone")
    assert (memory.get(behind, (64,)) == 77).all()
    rows = memory.get(found, (workers, padded))[:, :batch].tolist()
    assert all(row == rows[0] for row in rows), "workers that come to different tokens"
    return rows[0]


def expected(logits: np.ndarray, draws: list[list[float]], uniform: list[float]) -> list[int]:
    temperature, min_p, top_k, top_p = zip(*draws, strict=True)
    rows = RowParameters.build(
        temperature=temperature, top_k=[int(k) for k in top_k], top_p=top_p, min_p=min_p, device=torch.device("cpu")
    )
    return sample(torch.from_numpy(logits), torch.tensor(uniform, dtype=torch.float64), rows).tolist()
