"""A call of append_kv: its tensors and options, and torch.library's flat arguments."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onewave.ops.choice import Call

# What the registered operator takes, in the order of AppendCall's fields.
SCHEMA = (
    "(Tensor qkv, Tensor? rotary, Tensor(a2!) k_cache, Tensor(a3!) v_cache, Tensor slots, Tensor positions, "
    "SymInt num_heads, Tensor? bias=None, Tensor? q_norm=None, Tensor? k_norm=None, float eps=1e-6, "
    "bool interleaved=False, Tensor? block_table=None, Tensor? k_scale=None, Tensor? v_scale=None, "
    'str backend="auto") -> Tensor'
)


@dataclass(frozen=True, eq=False)
class AppendCall(Call):
    """One call; see op.append_kv."""

    qkv: Tensor
    rotary: Tensor | None
    k_cache: Tensor
    v_cache: Tensor
    slots: Tensor
    positions: Tensor
    num_heads: int
    bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 1e-6
    interleaved: bool = False
    block_table: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    backend: str = "auto"

    @property
    def first(self) -> Tensor:
        return self.qkv

    @property
    def flat(self) -> tuple[Any, ...]:
        """The registered operator's arguments, in SCHEMA's order; AppendCall(*flat) goes back."""
        return (
            self.qkv, self.rotary, self.k_cache, self.v_cache, self.slots, self.positions, int(self.num_heads),
            self.bias, self.q_norm, self.k_norm, float(self.eps), self.interleaved, self.block_table, self.k_scale,
            self.v_scale, self.backend,
        )  # fmt: skip

    @property
    def suits_loops(self) -> bool:
        """Whether the compiled CPU loops take it: float32, and no gaps inside a head of either cache."""
        strides, rotary = self.k_cache.stride(), self.rotary
        return (
            self.qkv.dtype is torch.float32
            and self.k_cache.dtype is torch.float32
            and self.on_cpu
            and rotary is not None
            and not self.interleaved
            and self.block_table is self.k_scale is self.v_scale is None
            and len(strides) == 4
            and strides == self.v_cache.stride()
            and strides[2] == self.k_cache.shape[3]
            and self.slots.dtype is torch.int64
            and self.positions.dtype is torch.int64
            and all(v is None or (v.dtype is torch.float32 and v.is_contiguous()) for v in self.vectors)
        )

    @property
    def vectors(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Bias, and the weights of the norms."""
        return self.bias, self.q_norm, self.k_norm
