"""Sampling on a CPU: row by row, in NumPy, on the calling thread alone.

PyTorch's operators share a row among its threads, and each waits for all of them, some twenty times a token. Where
other processes keep the cores busy, each wait is a time slice. Numbers are op.py's: whole weights, exact sums.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onewave.ops.sampling.limits import LARGEST_LOGIT, NO_LIMIT, UNIT, RowLimits

_Floats = NDArray[np.float32]
_Whole = NDArray[np.int64]


def sample(logits: _Floats, uniform: NDArray[np.float64], rows: tuple[RowLimits | None, ...]) -> _Whole:
    """Choose one token a row [vocab] as op.sample does; None: the first of the most likely."""
    with np.errstate(over="ignore"):  # of a tiny temperature
        tokens = [
            int(row.argmax()) if limits is None else _draw(row, float(number), limits)
            for row, number, limits in zip(logits, uniform, rows, strict=True)
        ]
    return np.array(tokens, dtype=np.int64)


def _draw(row: _Floats, uniform: float, limits: RowLimits) -> int:
    scaled = row / np.float32(limits.temperature)
    best = scaled.max()
    if not np.isfinite(best):
        return int(scaled.argmax())
    # A whole number, to compare whole numbers with.
    least = math.ceil(limits.min_p * UNIT)
    if not limits.ordered:
        weights = _weights(scaled, best)
        if least > 0:
            weights[weights < least] = 0
        return _pick(weights.cumsum(), uniform)
    return _draw_ordered(scaled, best, uniform, limits, least)


def _draw_ordered(scaled: _Floats, best: np.float32, uniform: float, limits: RowLimits, least: int) -> int:
    """Draw as op._draw_sorted does, sorting only as many tokens as can be drawn: a stable sort of 49,152 floats takes 4
    ms."""
    weights = None if least == 0 and limits.top_k < len(scaled) else _weights(scaled, best)
    kept = len(scaled) if weights is None or least == 0 else int(np.count_nonzero(weights >= least))
    total: int | None = None
    if limits.top_k < kept:
        kept = limits.top_k
        # All that tie with the last one come along, so that the stable sort orders them by id.
        candidates = np.flatnonzero(scaled >= np.partition(scaled, len(scaled) - kept)[len(scaled) - kept])
    else:
        assert weights is not None
        total = int(weights[weights >= least].sum())
        # Tokens below (1 - top_p) / vocab of the total sum to less than 1 - top_p, so top_p keeps none of them. The
        # factor of a half is far more than rounding needs.
        too_small = max(least, int(0.5 * max(0.0, 1 - limits.top_p) * total / len(scaled)))
        candidates = np.flatnonzero(weights >= too_small)
    order = np.argsort(-scaled[candidates], kind="stable")
    candidates = candidates[order]
    weights = _weights(scaled[candidates], best)
    cumulative = weights.cumsum()
    if total is None:
        total = int(cumulative[kept - 1])
    limit = math.ceil(limits.top_p * float(total)) if limits.top_p < 1 else NO_LIMIT
    kept = min(kept, int(np.count_nonzero(cumulative - weights < limit)))
    return int(candidates[_pick(cumulative[:kept], uniform)])


def _weights(scaled: _Floats, best: np.float32) -> _Whole:
    """Probabilities relative to the best one's, in whole units of 1 / UNIT."""
    return np.rint(np.exp((scaled - best).astype(np.float64)) * UNIT).astype(np.int64)


def _pick(cumulative: _Whole, uniform: float) -> int:
    """The first index whose cumulative weight passes uniform * the last one."""
    total = int(cumulative[-1])
    # Rounding may carry the product up to the total itself, which no index passes.
    return int(np.searchsorted(cumulative, min(int(uniform * float(total)), total - 1), side="right"))


def penalise(
    logits: _Floats,
    in_prompt: NDArray[np.bool_],
    counts: NDArray[np.int32],
    *,
    repetition: _Floats,
    presence: _Floats,
    frequency: _Floats,
) -> _Floats:
    """op.penalise, which looks at tokens that were seen alone."""
    result = logits.copy()
    for row, factor, once, each in zip(range(len(logits)), repetition, presence, frequency, strict=True):
        seen = np.flatnonzero(in_prompt[row] | (counts[row] > 0))
        values, count = logits[row, seen], counts[row, seen].astype(np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            penalised = np.where(values > 0, values / factor, values * factor).clip(-LARGEST_LOGIT, LARGEST_LOGIT)
            values = np.where(np.isinf(values), values, penalised)
            result[row, seen] = values - each * count - once * (count > 0)
    return result


def most_likely(logprobs: _Floats, k: int) -> _Whole:
    """Ids of the k highest of each row [rows, vocab], best first, the lowest id first of equals."""
    found: list[NDArray[Any]] = []
    for row in logprobs:
        ids = np.arange(len(row))
        if 0 < k < len(row):
            # Not >=, which nothing is to NaN: then all are looked at.
            ids = np.flatnonzero(~(row < np.partition(row, len(row) - k)[len(row) - k]))
        found.append(ids[np.argsort(-row[ids], kind="stable")[:k]])
    return np.array(found, dtype=np.int64).reshape(len(logprobs), min(k, logprobs.shape[1]))
