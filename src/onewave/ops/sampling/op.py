"""From logits to tokens, for many rows at once, each with parameters of its own.

A row's token depends on its own logits, parameters and uniform number, and on nothing else in the batch. Floating-point
sums would break that: their order, hence their rounding, changes with the shape of the batch and with the device. So a
probability is turned into a whole number of 2**-44ths of the row's largest one and everything that must be summed is
summed in int64, which is exact in any order. Elementwise operations, maxima and stable sorts are the same in any batch.

Tokens are sampled by inverting the cumulative sum at one uniform number a row. The other way, one Gumbel number for
every entry of the vocabulary, hashes 10^5 numbers a row where this needs one.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from onewave.base.device import capability
from onewave.base.errors import ShapeError
from onewave.ops import checks
from onewave.ops.backends import load
from onewave.ops.library import is_watched, register
from onewave.ops.sampling import numpy_impl
from onewave.ops.sampling.limits import LARGEST_LOGIT, MAX_VOCAB, NO_LIMIT, UNIT, RowLimits

# Bounds of Chosen.highest of finite logits, in int64, by float32's bits of infinity.
_BEYOND_FINITE = (-0x7F800000 << 32) - 1, 0x7F800000 << 32


def draw_words(temperature: float, min_p: float = 0.0, top_k: int = 0, top_p: float = 1.0) -> list[float]:
    """A row's parameters as search_impl takes them, float64 [4]."""
    return [temperature, min_p, max(top_k, 0), top_p]


@dataclass(frozen=True)
class _Group:
    """Rows that take the same path. rows: their int64 indices, or None when it is all rows. words: float64 [group rows,
    4], draw_words of each. The rest: [group rows]."""

    rows: Tensor | None
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    any_min_p: bool
    words: Tensor


@dataclass(frozen=True)
class RowParameters:
    """Sampling parameters of a batch's rows, on the device and grouped by what they need.

    num_rows: rows of the logits. plain: rows sampled from the whole vocabulary (min_p needs no order). ordered: rows
    with top_k or top_p. Rows in neither are greedy. host: the same for each row, None for a greedy one.
    """

    num_rows: int
    host: tuple[RowLimits | None, ...]
    plain: _Group | None
    ordered: _Group | None

    @classmethod
    def build(
        cls,
        *,
        temperature: Sequence[float],
        top_k: Sequence[int],
        top_p: Sequence[float],
        min_p: Sequence[float],
        device: torch.device,
    ) -> "RowParameters":
        """One entry a row; temperature 0: greedy; top_k below 1, top_p 1 and min_p 0: off."""
        host = tuple(
            RowLimits(temperature[row], top_k[row] if top_k[row] > 0 else NO_LIMIT, top_p[row], min_p[row])
            if temperature[row] > 0
            else None
            for row in range(len(temperature))
        )

        def group(rows: list[int]) -> _Group | None:
            if not rows:
                return None

            def send(values: Sequence[object], dtype: torch.dtype) -> Tensor:
                # From pageable memory the driver copies before it returns: nothing waits for what the GPU runs.
                return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)

            def column(values: Sequence[float], dtype: torch.dtype) -> Tensor:
                return send([values[row] for row in rows], dtype)

            words = [draw_words(temperature[row], min_p[row], top_k[row], top_p[row]) for row in rows]
            limits = [top_k[row] if top_k[row] > 0 else NO_LIMIT for row in range(len(temperature))]
            return _Group(
                rows=None if len(rows) == len(temperature) else send(rows, torch.int64),
                temperature=column(temperature, torch.float32),
                top_k=column(limits, torch.int64),
                top_p=column(top_p, torch.float64),
                min_p=column(min_p, torch.float64),
                any_min_p=any(min_p[row] > 0 for row in rows),
                words=send(words, torch.float64),
            )

        plain, ordered = (
            [row for row, limits in enumerate(host) if limits is not None and limits.ordered is kind]
            for kind in (False, True)
        )
        return cls(len(host), host, group(plain), group(ordered))


class TokenLogprobs(NamedTuple):
    """Log-probabilities of one position each.

    sampled: float32 [rows], of the given token. rank: int64 [rows], its rank from 1. top, top_ids: float32 and int64
    [rows, k], the most likely tokens, best first, the lowest id first of equals.
    """

    sampled: Tensor
    rank: Tensor
    top: Tensor
    top_ids: Tensor


def greedy(logits: Tensor) -> Tensor:
    """The most likely token of each row, the lowest id of equals. logits: floats [.., vocab]. Returns int64 [..]."""
    checks.tensors("greedy", logits=logits)
    if logits.ndim == 0 or logits.shape[-1] == 0 or not logits.dtype.is_floating_point:
        raise ShapeError("greedy: logits", got=checks.words_of(logits), allowed="floats [.., vocab], vocab at least 1")
    return torch.ops.onewave.greedy(logits) if is_watched(logits) else _greedy(logits)


def _greedy(logits: Tensor) -> Tensor:
    if logits.is_cpu and logits.dtype is torch.float32 and not logits.is_neg():
        # NumPy's argmax is vectorised: 5 us against torch's 42 us for 49,152 entries. Both return the first maximum.
        return torch.from_numpy(np.asarray(np.argmax(logits.numpy(), axis=-1)))  # pyright: ignore[reportUnknownMemberType]
    if _suits_kernels(logits):
        return load("sampling", "triton_impl").greedy(logits)
    if logits.dtype.itemsize == 1:  # float8, which has no order in PyTorch
        logits = logits.float()
    return torch.argmax(logits, dim=-1)


def _suits_kernels(logits: Tensor) -> bool:
    """Whether triton_impl takes these logits; otherwise PyTorch's operators are used."""
    rows = logits.device.type == "cuda" and logits.dtype is torch.float32 and logits.ndim == 2
    return rows and logits.stride(1) == 1 and logits.shape[1] > 0


def _suits_search(logits: Tensor) -> bool:
    """Whether search_impl takes these logits; otherwise they are sorted. Not while a CUDA graph is recorded: what its
    launches leave to each other is one stream's."""
    if not _suits_kernels(logits) or capability(logits.device) != (9, 0):
        return False
    return len(logits) <= load("sampling", "search_impl").MAX_ROWS and not torch.cuda.is_current_stream_capturing()


def penalise(
    logits: Tensor, in_prompt: Tensor, counts: Tensor, *, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> Tensor:
    """Make tokens that were seen less likely, as vLLM does.

    logits: float32 [rows, vocab]. in_prompt: bool, counts: int32 (occurrences in the output), both [rows, vocab].
    repetition, presence, frequency: float32 [rows]. Returns a new float32 [rows, vocab]: logits of tokens of the prompt
    or the output are divided by `repetition` where positive and multiplied where not, up to 1e30 either way; then
    `frequency` times the count and, once a token is in the output, `presence` are subtracted.
    """
    if logits.is_cpu and not is_watched(logits):
        arrays = (tensor.numpy() for tensor in (logits, in_prompt, counts))
        factors = {"repetition": repetition.numpy(), "presence": presence.numpy(), "frequency": frequency.numpy()}
        return torch.from_numpy(numpy_impl.penalise(*arrays, **factors))  # pyright: ignore[reportUnknownMemberType]
    generated = counts > 0
    factor = torch.where(in_prompt | generated, repetition[:, None], 1.0)
    penalised = torch.where(logits > 0, logits / factor, logits * factor).clamp(-LARGEST_LOGIT, LARGEST_LOGIT)
    logits = torch.where(logits.isinf(), logits, penalised)
    return logits - frequency[:, None] * counts - presence[:, None] * generated


def sample(logits: Tensor, uniform: Tensor, rows: RowParameters, *, search: bool = True) -> Tensor:
    """Choose one token a row.

    logits: float32 [rows, vocab], vocab at most 2**18. uniform: float64 [rows] in [0, 1), ignored by greedy rows.
    Returns int64 [rows]. Each row: divide by the temperature; drop tokens below min_p times the best one's probability;
    keep the top_k most likely; keep the fewest tokens whose renormalised probabilities reach top_p; draw. Equal logits
    are ordered by token id. Of a row whose largest logit over the temperature is no finite number, some token of the
    vocabulary. search: find the tokens of top_k and top_p without a sort where a kernel can; False: sort, which gives
    the same tokens, to check what searches as that kernel does. Raises ShapeError, WaveStalled (search_impl).
    """
    if logits.ndim != 2 or logits.shape[0] != rows.num_rows or uniform.shape != logits.shape[:1]:
        shapes = f"logits {list(logits.shape)}, uniform {list(uniform.shape)}"
        raise ShapeError("sample", got=shapes, allowed=f"[{rows.num_rows}, vocab] and [{rows.num_rows}]")
    if logits.shape[1] > MAX_VOCAB:
        raise ShapeError("sample: vocabulary", got=str(logits.shape[1]), allowed=f"up to {MAX_VOCAB}")
    return _sample(logits, uniform, rows, search).tokens


class Chosen(NamedTuple):
    """A token a row, and what tells whether its logits are numbers.

    tokens: int64 [rows]. highest: [rows, parts], of each part of a row the highest logit, NaN where all are: float32,
    or int64 whose high word is ordered as logits are (triton_impl.greedy).
    """

    tokens: Tensor
    highest: Tensor


def choose(logits: Tensor, uniform: Tensor | None, rows: RowParameters | None) -> Chosen:
    """Choose one token a row as `sample` does, or as `greedy` without rows, on the way looking for what is no number.
    Raises as `sample`."""
    if rows is not None and uniform is not None:
        return _sample(logits, uniform, rows, search=True)
    if _suits_kernels(logits) and not is_watched(logits):
        return Chosen(*load("sampling", "triton_impl").greedy_of_pieces(logits))
    return Chosen(greedy(logits), highest_of(logits))


def bound_greedy(logits: Tensor) -> tuple[Callable[[], None], Chosen] | None:
    """Return what chooses greedily from whatever numbers lie where these logits do, in launches alone, and where it
    puts what it chose. None where no kernel does."""
    if not _suits_kernels(logits):
        return None
    found = load("sampling", "triton_impl").greedy_of_pieces.bound(logits)
    return None if found is None else (found[0], Chosen(*found[1]))


def highest_of(logits: Tensor) -> Tensor:
    """Chosen.highest of float32 [rows, vocab]."""
    if is_watched(logits):
        return logits.amax(dim=-1, keepdim=True)
    if _suits_kernels(logits):
        return load("sampling", "triton_impl").max_of_pieces(logits)
    if logits.is_cpu:
        return torch.from_numpy(logits.numpy().max(axis=-1, keepdims=True))  # pyright: ignore[reportUnknownMemberType]
    return logits.amax(dim=-1, keepdim=True)


def rows_without_numbers(highest: memoryview) -> list[int]:
    """Rows that have a logit of NaN or infinity, or none that is finite, by Chosen.highest on the host. Of a row that
    was sampled on a GPU a single NaN among numbers passes: what a model makes of one is all NaN."""
    of_words, size = highest.itemsize == 8, highest.itemsize
    # Nearly always all are numbers, as their highest bytes tell. That of infinity, of NaN and of some numbers from
    # 2**127 on is 0x7F, below zero 0xFF, or 0x80 in an ordered word; no other number's is.
    tops = highest.tobytes()[size - 1 :: size]
    if 0x7F not in tops and (0x80 if of_words else 0xFF) not in tops:
        return []
    below, above = _BEYOND_FINITE if of_words else (-math.inf, math.inf)
    found = np.asarray(highest).max(axis=1)
    return [row for row, value in enumerate(found.tolist()) if not below < value < above]


def _sample(logits: Tensor, uniform: Tensor, rows: RowParameters, search: bool) -> Chosen:
    if logits.is_cpu and not is_watched(logits, uniform):
        tokens = numpy_impl.sample(logits.numpy(), uniform.numpy(), rows.host)
        return Chosen(torch.from_numpy(tokens), highest_of(logits))  # pyright: ignore[reportUnknownMemberType]
    for group, draw in ((rows.plain, _draw), (rows.ordered, partial(_draw_ordered, search=search))):
        if group is not None and group.rows is None:
            highest = highest_of(logits)
            return Chosen(draw(logits, uniform, group, highest=highest), highest)
    chosen = choose(logits, None, None)
    for group, draw in ((rows.plain, _draw), (rows.ordered, partial(_draw_ordered, search=search))):
        if group is not None:
            some = logits[group.rows]
            chosen.tokens[group.rows] = draw(some, uniform[group.rows], group, highest=highest_of(some))
    return chosen


def token_logprobs(logits: Tensor, tokens: Tensor, k: int) -> TokenLogprobs:
    """Log-softmax in float32 at `tokens` and at the k most likely entries of each row.

    logits: float32 [rows, vocab]. tokens: int64 [rows].
    """
    on_cpu = logits.is_cpu and not is_watched(logits)
    if on_cpu and len(logits):  # rows would be shared among threads
        found = np.stack([torch.log_softmax(row, dim=-1).numpy() for row in logits])
        logprobs = torch.from_numpy(found)  # pyright: ignore[reportUnknownMemberType]
    else:
        logprobs = torch.log_softmax(logits, dim=-1)
    sampled = logprobs.gather(1, tokens[:, None])
    if on_cpu:
        rank = torch.from_numpy((logprobs.numpy() > sampled.numpy()).sum(axis=1) + 1)  # pyright: ignore[reportUnknownMemberType]
        top_ids = torch.from_numpy(numpy_impl.most_likely(logprobs.numpy(), k))  # pyright: ignore[reportUnknownMemberType]
        return TokenLogprobs(sampled[:, 0], rank, logprobs.gather(1, top_ids), top_ids)
    # Which of equals topk takes, and in which order, depends on k, the most that any row of the batch asks for. So it
    # gets numbers of which no two are equal: how far below 0, whose bits as a whole number are in the floats' order,
    # then the id. (An exact 0 becomes -0, the least of these numbers; no row has two.)
    rank = (logprobs > sampled).sum(dim=-1) + 1
    below = torch.neg(logprobs).view(torch.int32).to(torch.int64)
    keys = below.bitwise_left_shift_(32).bitwise_or_(torch.arange(logits.shape[1], device=logits.device))
    top_ids = torch.topk(keys, min(k, logits.shape[1]), dim=-1, largest=False).values & (2**32 - 1)
    return TokenLogprobs(sampled[:, 0], rank, logprobs.gather(1, top_ids), top_ids)


def _weights(scaled: Tensor, best: Tensor) -> Tensor:
    """Probabilities relative to the best one's, in whole units of 2**-44 (int64)."""
    return torch.exp((scaled - best).double()).mul_(UNIT).round_().to(torch.int64)


def _pick(cumulative: Tensor, total: Tensor, uniform: Tensor) -> Tensor:
    """The first index whose cumulative weight passes uniform * total. [rows, n], [rows, 1], [rows] -> [rows, 1]."""
    # Rounding may carry the product up to the total itself, which no index passes.
    target = torch.minimum((uniform[:, None] * total.double()).to(torch.int64), total - 1)
    # Weights of logits that are no numbers are anything, their sums too.
    return torch.searchsorted(cumulative, target, right=True).clamp_(max=cumulative.shape[1] - 1)


def _draw(logits: Tensor, uniform: Tensor, group: _Group, highest: Tensor | None = None) -> Tensor:
    if _suits_kernels(logits) and not is_watched(logits, uniform):
        draw = load("sampling", "triton_impl").draw
        return draw(logits, uniform.contiguous(), group.temperature, group.min_p, UNIT, highest)
    scaled = logits / group.temperature[:, None]
    weights = _weights(scaled, scaled.amax(dim=-1, keepdim=True))
    if group.any_min_p:
        weights = weights.masked_fill_(weights < (group.min_p * UNIT)[:, None], 0)
    cumulative = weights.cumsum(dim=-1)
    return _pick(cumulative, cumulative[:, -1:], uniform)[:, 0]


def _draw_ordered(
    logits: Tensor, uniform: Tensor, group: _Group, search: bool, highest: Tensor | None = None
) -> Tensor:
    if search and _suits_search(logits) and not is_watched(logits, uniform):
        return load("sampling", "search_impl").draw_limited(logits, uniform.contiguous(), group.words, highest)
    return _draw_sorted(logits / group.temperature[:, None], uniform, group)


def _draw_sorted(scaled: Tensor, uniform: Tensor, group: _Group) -> Tensor:
    """Sort everything; no value is read on the host. Every limit keeps a prefix of the sorted row."""
    scaled, ids = torch.sort(scaled, dim=-1, descending=True, stable=True)
    weights = _weights(scaled, scaled[:, :1])
    cumulative = weights.cumsum(dim=-1)
    kept = (weights >= (group.min_p * UNIT)[:, None]).sum(dim=-1)
    # At least the best one, but where its logit is no number: an index below 0 would end all work on a GPU.
    kept = torch.minimum(kept, group.top_k).clamp_(min=1)
    total = cumulative.gather(1, kept[:, None] - 1)
    limit = torch.ceil(group.top_p[:, None] * total.double()).to(torch.int64)
    limit = torch.where(group.top_p[:, None] < 1, limit, NO_LIMIT)
    kept = torch.minimum(kept, (cumulative - weights < limit).sum(dim=-1)).clamp_(min=1)
    total = cumulative.gather(1, kept[:, None] - 1)
    return ids.gather(1, _pick(cumulative, total, uniform))[:, 0]


def _fake_greedy(logits: Tensor) -> Tensor:
    return torch.empty(logits.shape[:-1], dtype=torch.int64, device=logits.device)


register("greedy", _greedy, _fake_greedy)
