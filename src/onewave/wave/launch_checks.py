"""What a launch of several tokens asks of its program and of its arguments."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from onewave.base.errors import ShapeError, UnsupportedError
from onewave.wave.layout import DRAW_WORDS, LIMIT_WORDS, MOST_TOKENS, Flag, Word
from onewave.wave.program import WaveProgram

__all__ = ["check_rows", "check_tokens"]


def check_tokens(program: WaveProgram, tokens: int, *, decodes: bool, threads: int) -> None:
    """Check that launches of a program can make so many tokens. decodes: whether it is a decode step. threads: of the
    exchange partition. Raises UnsupportedError."""
    if not (1 <= tokens <= MOST_TOKENS and (decodes or tokens == 1)):
        allowed = f"1 to {MOST_TOKENS}" if decodes else "1, as no decode step"
        raise UnsupportedError("wave: tokens of a launch", got=str(tokens), allowed=allowed)
    if tokens == 1:
        return
    worker = np.repeat(np.arange(program.workers), program.lanes[:, 3])
    logits = (program.steps[:, Word.FLAGS] & Flag.LOGITS) > 0
    heads = np.bincount(worker[logits], minlength=program.workers)
    # One poll reads a candidate of each; and whoever draws looks for its rows in its last step.
    if program.workers > threads or (heads != 1).any() or not logits[program.lanes[:, 2:].sum(1) - 1].all():
        got = f"{program.workers} workers, {int((heads > 0).sum())} of which make logits"
        raise UnsupportedError("wave: several tokens of a launch", got=got, allowed=f"up to {threads}, all of which do")


def check_rows(limits: Tensor | None, draws: Tensor | None, batch: int, tokens: int) -> None:
    """Check what says how each sequence of a launch ends and draws (Wave.decode_several). Raises ShapeError."""
    if limits is not None and (limits.shape != (batch, LIMIT_WORDS) or limits.dtype is not torch.int64):
        got = f"{limits.dtype} {tuple(limits.shape)}"
        raise ShapeError("wave: limits", got=got, allowed=f"int64 ({batch}, {LIMIT_WORDS})")
    if draws is not None and (draws.shape != (batch, DRAW_WORDS + tokens) or draws.dtype is not torch.float64):
        got = f"{draws.dtype} {tuple(draws.shape)}"
        raise ShapeError("wave: draws", got=got, allowed=f"float64 ({batch}, {DRAW_WORDS + tokens})")
