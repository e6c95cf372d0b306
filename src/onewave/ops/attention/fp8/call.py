"""A call of attention in float8, and what it accepts."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from onewave.base.errors import UnsupportedError
from onewave.ops import checks
from onewave.ops.attention.call import AttentionCall, Extras, Packed, empty_lse, like
from onewave.ops.attention.checks import check_operands
from onewave.ops.attention.masks import Options

SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor q_scale, Tensor k_scale, Tensor v_scale, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, Tensor? sinks, float scale, SymInt? left, "
    "SymInt? right, bool top_left, float? softcap, ScalarType out_dtype, str backend, bool with_lse"
)
_NAME = "attention_fp8"
_BACKENDS = ("auto", "gluon", "reference")
_MAX_HEAD_DIM, _STEP = 128, 16

Scales = tuple[Tensor | None, Tensor | None, Tensor | None]


@dataclass(frozen=True, eq=False)
class Fp8Call(AttentionCall):
    """An AttentionCall of float8_e4m3fn. scales: of q [heads], k and v [kv_heads], float32; None for 1.

    with_lse: whether the LSE is asked for; lse is None until the call runs.
    """

    scales: Scales = field(default=(None, None, None), kw_only=True)
    out_dtype: torch.dtype = field(default=torch.bfloat16, kw_only=True)
    with_lse: bool = field(default=False, kw_only=True)

    @property
    def name(self) -> str:
        """The operator, for errors."""
        return _NAME

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """All inputs."""
        return self.q, self.k, self.v, *self.scales, *self.starts, self.extras.sinks

    @property
    def flat(self) -> tuple[Any, ...]:
        """The registered operator's arguments, in SCHEMA's order; fp8_call goes back."""
        packed = self.packed
        lengths = (0, 0) if packed is None else (packed.max_seqlen_q, packed.max_seqlen_k)
        rest = (*self.options.flat, self.out_dtype, self.backend, self.with_lse)
        return self.q, self.k, self.v, *self.filled_scales(), *self.starts, *lengths, self.extras.sinks, *rest

    def filled_scales(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the scales as the kernel reads them: contiguous, ones where none are given."""
        heads = (self.q.shape[1], self.k.shape[1], self.k.shape[1])
        q, k, v = (
            torch.ones(n, dtype=torch.float32, device=self.q.device) if scale is None else scale.contiguous()
            for scale, n in zip(self.scales, heads, strict=True)
        )
        return q, k, v

    def output(self) -> Tensor:
        """Return a new tensor of out_dtype."""
        return like(self.q, self.out_dtype)


def fp8_call(*flat: Any, lse: Tensor | None = None) -> Fp8Call:
    """Return the call that SCHEMA's arguments make."""
    q, k, v, q_scale, k_scale, v_scale, starts_q, starts_k, longest_q, longest_k, sinks, *options = flat
    *options, out_dtype, backend, with_lse = options
    packed = None if starts_q is None else Packed(starts_q, starts_k, longest_q, longest_k)
    return Fp8Call(
        q, k, v, Extras(sinks), Options(*options), backend, packed, None, lse, scales=(q_scale, k_scale, v_scale),
        out_dtype=out_dtype, with_lse=with_lse,
    )  # fmt: skip


def lse_of(q: Tensor, *, with_lse: bool) -> Tensor:
    """Return an unwritten LSE, of no elements unless it is asked for."""
    return empty_lse(q) if with_lse else torch.empty(0, dtype=torch.float32, device=q.device)


def check(call: Fp8Call) -> None:
    """Check a call whose ranks, packing and options are right. Raises ShapeError, UnsupportedError,
    InvalidArgumentError."""
    q, head_dim = call.q, call.q.shape[-1]
    checks.optional(_NAME, dict(zip(("q_scale", "k_scale", "v_scale"), call.scales, strict=True)))
    checks.one_of(_NAME, "backend", call.backend, _BACKENDS)
    checks.dtype(_NAME, "out_dtype", call.out_dtype, checks.HALVES)
    check_operands(call)
    if head_dim % _STEP or not 0 < head_dim <= _MAX_HEAD_DIM:
        allowed = f"multiples of {_STEP} up to {_MAX_HEAD_DIM}"
        raise UnsupportedError(f"{_NAME}: head_dim", got=str(head_dim), allowed=allowed, next="Use bfloat16.")
    heads = (q.shape[1], call.k.shape[1], call.k.shape[1])
    for label, tensor, scale, n in zip("qkv", (q, call.k, call.v), call.scales, heads, strict=True):
        checks.dtype(_NAME, f"dtype of {label}", tensor.dtype, (torch.float8_e4m3fn,))
        if scale is not None:
            checks.form(_NAME, f"{label}_scale", scale, (torch.float32,), (n,))
    checks.finite(_NAME, "scale", call.options.scale, positive=True)
