"""A call of masked multi-head attention: its tensors and options, and torch.library's flat arguments."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from onewave.ops.choice import Call
from onewave.ops.decode_attention.call import DecodeCall, Projection

_TENSORS = "Tensor? bias, Tensor? src_mask, Tensor? finished, Tensor? rotary, Tensor? qkv_out_scale, "
# What the registered operators take behind seq_lens, in the order of MaskedCall.flat.
SCHEMA = (
    f"{_TENSORS}Tensor? out_shift, Tensor? out_smooth, bool interleaved=False, float? out_scale=None, "
    "bool half_away=False, float max_bound=127.0, float min_bound=-127.0, SymInt steps_per_block=128, "
    'float? scale=None, str backend="auto"'
)


@dataclass(frozen=True, eq=False)
class MaskedCall(Call):
    """One call; see op.masked_multihead_attention. qkv: [rows, W, head_dim]; out: [rows, heads, head_dim].

    row_keys: the length that explain tells about; None: the capacity.
    """

    qkv: Tensor
    cache_k: Tensor
    cache_v: Tensor
    seq_lens: Tensor
    fused: Projection
    steps_per_block: int = 128
    scale: float | None = None
    backend: str = "auto"
    out: Tensor | None = None
    row_keys: int | None = None

    @property
    def first(self) -> Tensor:
        return self.qkv

    @property
    def num_heads(self) -> int:
        """Query heads."""
        return self.qkv.shape[1] - 2 * self.cache_v.shape[1]

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """All inputs."""
        return self.qkv, self.cache_k, self.cache_v, self.seq_lens, *self.fused[:7]

    @property
    def flat(self) -> tuple[Any, ...]:
        """The registered operator's arguments behind seq_lens, in SCHEMA's order; masked_call goes back."""
        return (*self.fused, self.steps_per_block, self.scale, self.backend)

    @cached_property
    def decode(self) -> DecodeCall:
        """The same as a call of decode attention, with this call's prologue and epilogue."""
        cache_k, cache_v, mask = self.cache_k, self.cache_v, self.fused.src_mask
        if mask is not None and mask.shape[3] < cache_v.shape[2]:
            # The kernel holds lengths below the capacity that it is told: it never reads past the mask.
            keys = mask.shape[3]
            cache_k, cache_v = cache_k.narrow(-2, 0, keys), cache_v[:, :, :keys]
        return DecodeCall(
            self.qkv, cache_k, cache_v, self.seq_lens, scale=self.scale, backend=self.backend,
            out=None if self.out is None else self.out[:, :, None], fused=self.fused,
            smallest_split=self.steps_per_block, row_keys=self.row_keys, described=self.described,
        )  # fmt: skip


def masked_call(qkv: Tensor, cache_k: Tensor, cache_v: Tensor, seq_lens: Tensor, *flat: Any, out: Tensor) -> MaskedCall:
    """Return the call that the registered operator's arguments make; those at the end that have defaults may lack."""
    fused = Projection(*flat[:12])
    rest = dict(zip(("steps_per_block", "scale", "backend"), flat[12:], strict=False))
    return MaskedCall(qkv, cache_k, cache_v, seq_lens, fused, **rest, out=out)
