"""A call of decode attention: its tensors and options, what is checked, and torch.library's flat arguments."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onewave.base.device import Device
from onewave.base.errors import ShapeError, UnsupportedError
from onewave.ops import checks
from onewave.ops.choice import Call
from onewave.ops.decode_attention.caches import CacheShape, cache_shape

CPU_TAKES = "one query a row, float32, an unpacked cache, no extras"
MAX_QUERIES = 8
# Arguments of the registered operators, in the order of DecodeCall.flat.
SCHEMA = (
    "Tensor q, Tensor k_cache, Tensor v_cache, Tensor seq_lens, Tensor? block_table=None, Tensor? k_scale=None, "
    "Tensor? v_scale=None, Tensor? sinks=None, float? scale=None, SymInt? window=None, float? softcap=None, "
    'SymInt? split_size=None, str backend="auto"'
)

_NAME = "decode_attention"
_BACKENDS = ("auto", "gluon", "triton", "cpu", "reference")
# Beyond any row.
_MAX_KEYS = 1 << 30


class Projection(NamedTuple):
    """Prologue and epilogue of masked multi-head attention; see op.masked_multihead_attention for the shapes.

    A row of length t has its new token appended at t; rows of negative length and finished ones are skipped.
    """

    bias: Tensor | None = None
    src_mask: Tensor | None = None
    finished: Tensor | None = None
    rotary: Tensor | None = None
    qkv_out_scale: Tensor | None = None
    out_shift: Tensor | None = None
    out_smooth: Tensor | None = None
    interleaved: bool = False
    out_scale: float | None = None
    half_away: bool = False
    max_bound: float = 127.0
    min_bound: float = -127.0


@dataclass(frozen=True, eq=False)
class DecodeCall(Call):
    """One call; see op.decode_attention for the shapes.

    q: [rows, heads, queries, head_dim]. With fused it is the projection [rows, heads + 2 kv_heads, head_dim], seq_lens
    do not count the new token, and smallest_split is the number of keys of a short row's split.
    out, lse: to be written; out None: a new tensor; wants_lse: also a new LSE. row_keys: the length that explain tells
    about; None: the capacity.
    """

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    seq_lens: Tensor
    block_table: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    sinks: Tensor | None = None
    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    split_size: int | None = None
    backend: str = "auto"
    out: Tensor | None = None
    lse: Tensor | None = None
    wants_lse: bool = False
    fused: Projection | None = None
    smallest_split: int | None = None
    row_keys: int | None = None
    described: Device | None = None

    @property
    def first(self) -> Tensor:
        return self.q

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """All inputs."""
        return (
            self.q, self.k_cache, self.v_cache, self.seq_lens, self.block_table, self.k_scale, self.v_scale, self.sinks
        )  # fmt: skip

    @property
    def flat(self) -> tuple[Any, ...]:
        """The registered operator's arguments, in SCHEMA's order; DecodeCall(*flat) goes back."""
        return (*self.tensors, self.scale, self.window, self.softcap, self.split_size, self.backend)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """[rows, query heads, queries, head_dim]: the output's."""
        if self.fused is None:
            rows, heads, queries, head_dim = self.q.shape
            return rows, heads, queries, head_dim
        rows, heads, head_dim = self.q.shape
        return rows, heads - 2 * self.v_cache.shape[1], 1, head_dim

    @property
    def capacity(self) -> int:
        """Keys that a row can have."""
        return self.v_cache.shape[2] * (1 if self.block_table is None else self.block_table.shape[1])

    @property
    def is_plain(self) -> bool:
        """Whether scores are not capped, sinks and scales not given, the LSE not wanted."""
        scaled = self.k_scale is not None or self.v_scale is not None
        return not (scaled or self.wants_lse) and self.softcap is self.sinks is self.lse is None

    @property
    def suits_loops(self) -> bool:
        """Whether the compiled CPU loops take it: CPU_TAKES, and no gaps inside a head of the cache."""
        k, v = self.k_cache, self.v_cache
        return (
            self.on_cpu
            and self.is_plain
            and self.q.dtype is torch.float32
            and self.q.shape[2] == 1
            and k.dtype is torch.float32
            and k.ndim == 4
            and k.stride() == v.stride()
            and k.stride(2) == k.shape[3]
        )

    @property
    def visible(self) -> int | None:
        """How many of a row's last keys some query sees; None: all."""
        return None if self.window is None else self.window + self.q.shape[2] - 1

    def output(self) -> Tensor:
        """Return out, or a new tensor."""
        return torch.empty(self.q.shape, dtype=self.q.dtype, device=self.q.device) if self.out is None else self.out

    def new_lse(self) -> Tensor:
        """Return an unwritten LSE."""
        return torch.empty(self.q.shape[:3], dtype=torch.float32, device=self.q.device)

    def with_plain_numbers(self) -> "DecodeCall":
        """Return the same call with Python's numbers: options may be NumPy's, and whole ones of any size."""
        floats, wholes = (self.scale, self.softcap), (self.window, self.split_size)
        plain = all(x is None or type(x) is float for x in floats)
        if plain and all(n is None or (type(n) is int and n <= _MAX_KEYS) for n in wholes):
            return self
        scale, softcap = (x if x is None else float(x) for x in floats)
        window, split_size = (n if n is None else checks.as_whole(n, _MAX_KEYS) for n in wholes)
        return replace(self, scale=scale, softcap=softcap, window=window, split_size=split_size)


def check(call: DecodeCall, q: Tensor, out: Tensor | None) -> CacheShape:
    """Return the cache's shape. q, out: as the caller gave them, with three axes or four.

    Raises ShapeError, UnsupportedError, InvalidArgumentError for a call that no implementation takes.
    """
    shape = _check_operands(call)
    for name, value in (("window", call.window), ("split_size", call.split_size)):
        if value is not None:
            checks.whole(_NAME, name, value, 1)
    checks.softcap(_NAME, call.softcap)
    checks.finite(_NAME, "scale", call.scale)
    check_backend(call)
    checks.together(_NAME, "k_scale, v_scale", call.k_scale, call.v_scale)
    for name, scale in (("k_scale", call.k_scale), ("v_scale", call.v_scale)):
        if scale is not None:
            checks.form(_NAME, name, scale, (torch.float32,), (shape.num_kv_heads,))
    sinks, heads = call.sinks, call.q.shape[1]
    if sinks is not None and (sinks.shape != (heads,) or not sinks.dtype.is_floating_point):
        raise ShapeError(f"{_NAME}: sinks", got=checks.words_of(sinks), allowed=f"a float tensor [{heads}]")
    if out is not None:
        checks.out(_NAME, out, q.dtype, q.shape)
    checks.one_device(_NAME, q, (*call.tensors, out))
    return shape


def _check_operands(call: DecodeCall) -> CacheShape:
    q, k_cache = call.q, call.k_cache
    rows, num_heads, num_queries, head_dim = q.shape
    shape = cache_shape(_NAME, k_cache, call.v_cache, call.block_table, rows)
    if num_heads % shape.num_kv_heads or head_dim != shape.head_dim or not 1 <= num_queries <= MAX_QUERIES:
        raise ShapeError(
            f"{_NAME}: q",
            got=f"{num_heads} heads, {num_queries} queries, head_dim {head_dim}",
            allowed=f"a multiple of {shape.num_kv_heads} heads, 1 to {MAX_QUERIES} queries, head_dim {shape.head_dim}",
        )
    checks.head_dim(_NAME, head_dim, on_cpu=not call.on_gpu, least=8)
    checks.last_axis(_NAME, "q", q)
    checks.dtype(_NAME, "dtype of q", q.dtype, checks.HALVES if call.on_gpu else checks.FLOATS, call)
    checks.dtype(_NAME, "cache dtype", k_cache.dtype, (q.dtype, torch.int8, torch.float8_e4m3fn))
    checks.form(_NAME, "seq_lens", call.seq_lens, checks.WHOLE, (rows,))
    return shape


def check_backend(call: DecodeCall) -> None:
    """Raise InvalidArgumentError, or UnsupportedError where the named backend does not take the call."""
    backend, q = call.backend, call.q
    checks.one_of(_NAME, "backend", backend, _BACKENDS)
    what = f"{q.dtype} on {call.where}"
    if backend == "cpu" and not call.suits_loops:
        what += f", {q.shape[2]} queries a row, a {call.k_cache.dtype} cache"
        what += "" if call.is_plain else ", softcap, sinks, scales or the LSE"
        raise UnsupportedError(f"{_NAME} (backend=cpu)", got=what, allowed=CPU_TAKES, next='Use backend="auto".')
    if backend in ("gluon", "triton") and not call.on_gpu:
        raise UnsupportedError(f"{_NAME} (backend={backend})", got=what, next='Use backend="auto".')
