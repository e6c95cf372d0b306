"""A call of prefill attention: its tensors, how they are packed, its options; and torch.library's flat arguments."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onewave.base.device import Device
from onewave.ops.attention.masks import Options
from onewave.ops.choice import Call

_EXTRAS = "Tensor? sinks, Tensor? alibi_slopes, Tensor? bias"
_OPTIONS = "float scale, SymInt? left, SymInt? right, bool top_left, float? softcap"
# Arguments of the registered operators, in the order of AttentionCall.flat.
DENSE_SCHEMA = f"Tensor q, Tensor k, Tensor v, {_EXTRAS}, {_OPTIONS}, str backend"
PACKED_SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, "
    f"SymInt max_seqlen_k, {_EXTRAS}, {_OPTIONS}, str backend, Tensor? block_table=None"
)
# Options, backend and block_table.
_NUM_REST = 7


class Extras(NamedTuple):
    """Tensors that a call may have beside q, k and v; see op.attention."""

    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None
    bias: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Packed:
    """Sequences that lie one after another; see op.attention_varlen.

    block_table: then k and v are [pages, page_size, kv_heads, head_dim].
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    block_table: Tensor | None = None

    @property
    def num_sequences(self) -> int:
        """How many sequences there are, empty ones included."""
        return self.cu_seqlens_q.shape[0] - 1


@dataclass(frozen=True, eq=False)
class AttentionCall(Call):
    """One call. q, k, v: [batch, heads, rows, head_dim]; packed: [tokens, heads, head_dim].

    out: None for a new tensor. lse: to be written; None where it is not asked for.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    extras: Extras
    options: Options
    backend: str = "auto"
    packed: Packed | None = None
    out: Tensor | None = None
    lse: Tensor | None = None
    described: Device | None = None

    @property
    def name(self) -> str:
        """The operator, for errors."""
        return "attention" if self.packed is None else "attention_varlen"

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """All inputs."""
        packed = self.packed
        if packed is None:
            return self.q, self.k, self.v, *self.extras
        return self.q, self.k, self.v, packed.cu_seqlens_q, packed.cu_seqlens_k, *self.extras, packed.block_table

    @property
    def flat(self) -> tuple[Any, ...]:
        """The registered operator's arguments; dense_call and packed_call go back."""
        rest = (*self.extras, *self.options.flat, self.backend)
        packed = self.packed
        if packed is None:
            return self.q, self.k, self.v, *rest
        lengths = (packed.cu_seqlens_q, packed.cu_seqlens_k, packed.max_seqlen_q, packed.max_seqlen_k)
        return self.q, self.k, self.v, *lengths, *rest, packed.block_table

    @property
    def dense_sinks(self) -> Tensor | None:
        """Sinks as all kernels read them: contiguous."""
        return None if self.extras.sinks is None else self.extras.sinks.contiguous()

    @property
    def starts(self) -> tuple[Tensor | None, Tensor | None]:
        """cu_seqlens_q and cu_seqlens_k; None where there are none."""
        return (None, None) if self.packed is None else (self.packed.cu_seqlens_q, self.packed.cu_seqlens_k)

    @property
    def flags(self) -> dict[str, bool]:
        """Constants that all kernels have, by name."""
        wanted = self.options
        return {
            "RAGGED": self.packed is not None, "TOP_LEFT": wanted.top_left, "LEFT": wanted.left is not None,
            "RIGHT": wanted.right is not None, "SOFTCAP": wanted.softcap is not None,
            "SINKS": self.extras.sinks is not None, "LSE": self.lse is not None,
        }  # fmt: skip

    def output(self) -> Tensor:
        """Return out, or a new tensor like q. Tokens outside every packed sequence are 0 on a CPU."""
        if self.out is not None:
            return self.out
        made = like(self.q)
        return made if self.packed is None or not self.q.is_cpu else made.zero_()

    def rows(self, out: Tensor) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor]:
        """Return out, lse, q, k, v as [batch, heads, rows, head_dim]: packed sequences as one batch row; pages stay."""
        if self.packed is None:
            return out, self.lse, self.q, self.k, self.v
        lse = None if self.lse is None else self.lse[None]
        out, q = (tensor.transpose(0, 1)[None] for tensor in (out, self.q))
        if self.packed.block_table is not None:
            return out, lse, q, self.k, self.v
        return out, lse, q, self.k.transpose(0, 1)[None], self.v.transpose(0, 1)[None]


def dense_call(*flat: Any, out: Tensor | None = None, lse: Tensor | None = None) -> AttentionCall:
    """Return the call that DENSE_SCHEMA's arguments make."""
    q, k, v, sinks, slopes, bias, *options, backend = flat
    return AttentionCall(q, k, v, Extras(sinks, slopes, bias), Options(*options), backend, None, out, lse)


def packed_call(*flat: Any, out: Tensor | None = None, lse: Tensor | None = None) -> AttentionCall:
    """Return the call that PACKED_SCHEMA's arguments make."""
    # PyTorch leaves out a last argument that is the schema's default.
    q, k, v, starts_q, starts_k, longest_q, longest_k, sinks, slopes, bias, *rest = flat
    *options, backend, table = rest if len(rest) == _NUM_REST else (*rest, None)
    packed = Packed(starts_q, starts_k, longest_q, longest_k, table)
    extras = Extras(sinks, slopes, bias)
    return AttentionCall(q, k, v, extras, Options(*options), backend, packed, out, lse)


def empty_lse(q: Tensor) -> Tensor:
    """Return an unwritten LSE: [batch, heads, Sq], or [heads, tokens] of packed queries."""
    shape = q.shape[:3] if q.ndim == 4 else (q.shape[1], q.shape[0])
    return torch.empty(shape, dtype=torch.float32, device=q.device)


def like(q: Tensor, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> Tensor:
    """Return an unwritten result of q's shape and order of axes in memory; its last axis is contiguous whatever q's is.

    By default of q's dtype, on q's device.
    """
    made = torch.empty_like(q, dtype=dtype, device=device)
    # Where another axis of q, as of overlapping windows, steps by one element too, PyTorch may put that one last.
    return made if made.stride(-1) == 1 else torch.empty(q.shape, dtype=made.dtype, device=made.device)
