"""What a launch of several tokens asks of its program and of its arguments."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from onewave.base.errors import ShapeError, UnsupportedError
from onewave.wave.plan.layout import DRAW_WORDS, LIMIT_WORDS, MOST_TOKENS, Flag, Word
from onewave.wave.plan.operations import HeadGroups
from onewave.wave.plan.program import WaveProgram

__all__ = ["check_cache", "check_rows", "check_sequences", "check_tokens"]


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


def check_rows(limits: Tensor | None, draws: Tensor | None, batch: int, tokens: int, *, device: torch.device) -> None:
    """Check what says how each sequence of a launch ends and draws (Wave.decode_several). Raises ShapeError."""
    for name, rows, dtype, words in (
        ("limits", limits, torch.int64, LIMIT_WORDS),
        ("draws", draws, torch.float64, DRAW_WORDS + tokens),
    ):
        if rows is not None and (rows.shape, rows.dtype, rows.device) != ((batch, words), dtype, device):
            got = f"{rows.dtype} {tuple(rows.shape)} on {rows.device}"
            raise ShapeError(f"wave: {name}", got=got, allowed=f"{dtype} ({batch}, {words}) on {device}")


def check_cache(
    k: Tensor, v: Tensor, layers: int, groups: HeadGroups, *, dtype: torch.dtype, device: torch.device
) -> None:
    """Check the caches of a decode step: a model's layers and heads, slots or pages. Raises ShapeError."""
    kinds = {(tensor.dtype, tensor.device) for tensor in (k, v)}
    fits = k.ndim == 5 and (k.shape[0], k.shape[2], k.shape[4]) == (layers, groups.kv_heads, groups.head_dim)
    if not fits or k.shape != v.shape or kinds != {(dtype, device)} or not (k.is_contiguous() and v.is_contiguous()):
        got = " and ".join(f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}" for tensor in (k, v))
        shape = f"[{layers}, slots or pages, {groups.kv_heads}, keys, {groups.head_dim}]"
        raise ShapeError("wave: caches", got=got, allowed=f"both {dtype} {shape} on {device}, contiguous")


def check_sequences(
    tokens: Tensor, positions: Tensor, slots: Tensor, logits: Tensor, *, most: int, vocab: int, device: torch.device
) -> None:
    """Check what a decode step is given: int64 [rows] each, up to `most` rows, and float32 logits [rows, vocab], all
    contiguous on the device. Raises ShapeError."""
    rows = len(tokens)
    for name, tensor in (("tokens", tokens), ("positions", positions), ("slots", slots)):
        whole = tensor.dtype is torch.int64 and tensor.shape == (rows,) and tensor.is_contiguous()
        if not (whole and 1 <= rows <= most and tensor.device == device):
            got = f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
            allowed = f"int64 [rows], contiguous, the same 1 to {most} rows for all, on {device}"
            raise ShapeError(f"wave: {name}", got=got, allowed=allowed)
    fits = logits.shape == (rows, vocab) and logits.device == device
    if logits.dtype is not torch.float32 or not fits or not logits.is_contiguous():
        got = f"{logits.dtype} {tuple(logits.shape)} on {logits.device}"
        raise ShapeError("wave: logits", got=got, allowed=f"float32 [{rows}, {vocab}], contiguous, on {device}")
