"""Which keys a query sees: windows, causality and alignment brought to one form, and the masks that follow."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from onewave.base.errors import InvalidArgumentError, shown
from onewave.ops import checks

ALIGNMENTS = ("bottom-right", "top-left")
# Nearer to 0 than this is 0 in float32.
_SMALLEST = 1.1754943508222875e-38
# Beyond any sequence: as good as no limit.
_MAX_KEYS = 1 << 40
MAX_KEYS = 1 << 30
"""Keys of a sequence, at most, on a GPU."""
_LOG2E = math.log2(math.e)

Window = int | Sequence[int | None]


@dataclass(frozen=True)
class Options:
    """The options of an attention call beside its tensors.

    A query at place p sees the keys p - left .. p + right; None means without end on that side. Query i stands at place
    i + Sk - Sq, or at place i where top_left is set.
    """

    scale: float
    left: int | None = None
    right: int | None = None
    top_left: bool = False
    softcap: float | None = None

    def shift(self, num_queries: int, num_keys: int) -> int:
        """Place of the first query."""
        return 0 if self.top_left else num_keys - num_queries

    @property
    def flat(self) -> tuple[float, int | None, int | None, bool, float | None]:
        """The fields in their order."""
        return self.scale, self.left, self.right, self.top_left, self.softcap

    @property
    def hides_keys(self) -> bool:
        return self.left is not None or self.right is not None

    @property
    def sides(self) -> tuple[int, int]:
        """left and right as kernels take them, 0 for None: a place plus a side stays inside 32 bits."""
        return min(self.left or 0, MAX_KEYS), min(self.right or 0, MAX_KEYS)

    @property
    def factors(self) -> tuple[float, float, float]:
        """A score's factor in units of log2; with a softcap its double inside tanh, and what tanh is multiplied by."""
        cap = self.softcap or 1.0
        return self.scale * _LOG2E, 2 * _LOG2E * self.scale / cap, _LOG2E * cap


def options(
    operator: str,
    *,
    head_dim: int,
    causal: bool = False,
    scale: float | None = None,
    window: Window | None = None,
    softcap: float | None = None,
    align: str = "bottom-right",
) -> Options:
    """Check and normalise; see op.attention for the meaning of each. Raises InvalidArgumentError."""
    checks.one_of(operator, "align", align, ALIGNMENTS)
    checks.switch(f"{operator}: causal", causal, next="A mask of your own is a bias.")
    checks.finite(operator, "scale", scale)
    checks.softcap(operator, softcap)
    left, right = _sides(operator, window)
    if causal:
        right = 0 if right is None else min(right, 0)
    factor = head_dim**-0.5 if scale is None else float(scale)
    factor = factor if abs(factor) >= _SMALLEST else 0.0
    return Options(factor, left, right, align == "top-left", None if softcap is None else float(softcap))


def _sides(operator: str, window: Window | None) -> tuple[int | None, int | None]:
    """Keys to the left and right of a query's own place that it sees; None for all of them."""
    if window is None:
        return None, None
    if checks.is_whole(window):
        keys = cast("int", window)
        if keys < 1:
            raise InvalidArgumentError(f"{operator}: window", got=str(keys), allowed="at least 1, or (left, right)")
        return checks.as_whole(keys, _MAX_KEYS) - 1, None
    sides = tuple(cast("Iterable[Any]", window)) if isinstance(window, (tuple, list)) else (window,)
    if len(sides) != 2 or any(side is not None and (not checks.is_whole(side) or side < -1) for side in sides):
        allowed = "a number of keys, or (left, right) with -1 for no limit"
        raise InvalidArgumentError(f"{operator}: window", got=shown(window), allowed=allowed)
    left, right = (None if side is None or side == -1 else checks.as_whole(side, _MAX_KEYS) for side in sides)
    return left, right


def visible_keys(
    wanted: Options, num_queries: int, num_keys: int, device: torch.device, shift: int | None = None
) -> Tensor | None:
    """True where query i sees key j, bool [Sq, Sk]; None where every query sees every key.

    shift: place of the first query, where it is not what the alignment says.
    """
    if not wanted.hides_keys:
        return None
    shift = wanted.shift(num_queries, num_keys) if shift is None else shift
    place = torch.arange(num_queries, device=device)[:, None] + shift
    key = torch.arange(num_keys, device=device)[None, :]
    visible = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
    if wanted.right is not None:
        visible &= key <= place + wanted.right
    if wanted.left is not None:
        visible &= key >= place - wanted.left
    return visible


def rows_of_sequences(starts: Tensor, rows: int, longest: int) -> Tensor:
    """True for rows that belong to a packed sequence, up to its row `longest`, bool [rows].

    starts: [sequences + 1], each sequence's first row and the end of the last.
    """
    row = torch.arange(rows, device=starts.device)
    sequence = torch.searchsorted(starts[1:].long(), row, right=True)
    first = starts.long()[sequence.clamp(max=max(len(starts) - 2, 0))]
    return (sequence < len(starts) - 1) & (row >= first) & (row - first < longest)
