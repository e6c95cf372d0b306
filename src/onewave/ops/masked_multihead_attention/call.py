"""A call of masked multi-head attention: tensors and options, what it accepts, torch.library's flat arguments."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from onewave.base.device import Device
from onewave.base.errors import InvalidArgumentError, ShapeError, UnsupportedError
from onewave.ops import checks
from onewave.ops.choice import Call
from onewave.ops.decode_attention.caches import cache_shape
from onewave.ops.decode_attention.call import DecodeCall, Projection

_TENSORS = "Tensor? bias, Tensor? src_mask, Tensor? finished, Tensor? rotary, Tensor? qkv_out_scale, "
# Arguments of the registered operators behind seq_lens, in the order of MaskedCall.flat.
SCHEMA = (
    f"{_TENSORS}Tensor? out_shift, Tensor? out_smooth, bool interleaved=False, float? out_scale=None, "
    "bool half_away=False, float max_bound=127.0, float min_bound=-127.0, SymInt steps_per_block=128, "
    'float? scale=None, str backend="auto"'
)
_NAME = "masked_multihead_attention"
_BACKENDS = ("auto", "gluon", "triton", "reference")
_CPU_DTYPES = (*checks.HALVES, torch.float32)


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
    described: Device | None = None

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


def as_heads(qkv: Tensor, cache_k: Tensor, cache_v: Tensor) -> Tensor:
    """Return qkv as [rows, W, head_dim]. Raises ShapeError, UnsupportedError for a cache that it does not go with."""
    if qkv.ndim not in (2, 3, 4) or (qkv.ndim == 4 and qkv.shape[1] != 1):
        allowed = "[rows, W, head_dim], [rows, 1, W, head_dim] or [rows, W * head_dim]"
        raise ShapeError(f"{_NAME}: qkv", got=str(tuple(qkv.shape)), allowed=allowed)
    shape = cache_shape(_NAME, cache_k, cache_v, None, qkv.shape[0])
    checks.apart(_NAME, "cache_k", cache_k)
    checks.apart(_NAME, "cache_v", cache_v)
    width = _num_heads(qkv, shape.num_kv_heads, shape.head_dim) + 2 * shape.num_kv_heads
    return qkv[:, 0] if qkv.ndim == 4 else qkv.reshape(len(qkv), width, shape.head_dim) if qkv.ndim == 2 else qkv


def check(call: MaskedCall) -> None:
    """Check everything that needs no reading of tensors. Raises ShapeError, UnsupportedError, InvalidArgumentError."""
    rows, width, head_dim = call.qkv.shape
    fused, num_heads = call.fused, call.num_heads
    checks.head_dim(_NAME, head_dim, on_cpu=not call.on_gpu)
    _check_dtypes(call)
    checks.form(_NAME, "seq_lens", call.seq_lens, checks.WHOLE, (rows,))
    if fused.finished is not None:
        checks.form(_NAME, "finished", fused.finished, (torch.bool,), (rows,))
    for name, tensor, heads in (
        ("bias", fused.bias, width),
        ("qkv_out_scale", fused.qkv_out_scale, width),
        ("out_shift", fused.out_shift, num_heads),
        ("out_smooth", fused.out_smooth, num_heads),
    ):
        if tensor is not None:
            checks.shape(_NAME, name, tensor, (heads, head_dim))
            checks.dtype(_NAME, f"dtype of {name}", tensor.dtype, checks.FLOATS)
    if fused.src_mask is not None:
        _check_mask(fused.src_mask, rows, num_heads)
    if fused.rotary is not None:
        checks.rotary(_NAME, fused.rotary, rows, head_dim)
    checks.finite(_NAME, "scale", call.scale)
    checks.finite(_NAME, "out_scale", fused.out_scale, positive=True)
    checks.int8_bounds(_NAME, fused.min_bound, fused.max_bound)
    checks.whole(_NAME, "steps_per_block", call.steps_per_block, 1)
    checks.backend(_NAME, call, call.backend, _BACKENDS)


def _num_heads(qkv: Tensor, num_kv_heads: int, head_dim: int) -> int:
    """How many query heads qkv holds besides the cache's key and value heads."""
    width = qkv.shape[1] // max(head_dim, 1) if qkv.ndim == 2 else qkv.shape[-2]
    fits = qkv.shape[1] == width * head_dim if qkv.ndim == 2 else qkv.shape[-1] == head_dim
    num_heads = width - 2 * num_kv_heads
    if not fits or num_heads <= 0 or num_heads % num_kv_heads:
        raise ShapeError(
            f"{_NAME}: qkv",
            got=str(tuple(qkv.shape)),
            allowed=f"a multiple of {num_kv_heads} query heads + {2 * num_kv_heads} for k and v, each of {head_dim}",
        )
    return num_heads


def _check_dtypes(call: MaskedCall) -> None:
    qkv, cache_v, qkv_out_scale = call.qkv, call.cache_v, call.fused.qkv_out_scale
    checks.dtype(_NAME, "cache dtype", cache_v.dtype, checks.HALVES if call.on_gpu else _CPU_DTYPES, call)
    checks.dtype(_NAME, "dtype of qkv", qkv.dtype, (cache_v.dtype, torch.int32))
    if (qkv.dtype is torch.int32) != (qkv_out_scale is not None):
        raise InvalidArgumentError(
            f"{_NAME}: qkv_out_scale",
            got="None" if qkv_out_scale is None else f"a tensor, with {qkv.dtype} qkv",
            allowed="given with int32 qkv, None otherwise",
        )


def _check_mask(src_mask: Tensor, rows: int, num_heads: int) -> None:
    shapes = ((rows, 1, 1), (rows, num_heads, 1))
    if src_mask.ndim != 4 or not checks.is_one_of(src_mask.shape[:3], shapes) or src_mask.shape[3] == 0:
        allowed = f"[{rows}, 1 or {num_heads}, 1, keys]"
        raise ShapeError(f"{_NAME}: src_mask", got=str(tuple(src_mask.shape)), allowed=allowed)
    checks.dtype(_NAME, "dtype of src_mask", src_mask.dtype, checks.FLOATS)
    checks.last_axis(_NAME, "src_mask", src_mask)


def result_dtype(call: MaskedCall, given: Tensor, dtype: torch.dtype | None, out: Tensor | None) -> torch.dtype:
    """Return the result's dtype, and check out. given: qkv as the caller has it."""
    out_scale, head_dim = call.fused.out_scale, call.cache_v.shape[3]
    wanted = torch.int8 if out_scale is not None else dtype or (call.cache_v.dtype if out is None else out.dtype)
    if (out_scale is None and wanted not in _CPU_DTYPES) or dtype not in (None, wanted):
        got = f"{dtype or wanted} with out_scale {out_scale}"
        raise UnsupportedError(f"{_NAME}: dtype", got=got, allowed="int8 with out_scale, a float dtype without")
    if out is not None:
        heads = call.num_heads
        right = (*given.shape[:-2], heads, head_dim) if given.ndim > 2 else (given.shape[0], heads * head_dim)
        checks.out(_NAME, out, wanted, right)
    return wanted


def check_lengths(call: MaskedCall) -> None:
    """Read the lengths on the host: every row that takes part has room for its token and a mask that reaches it.

    Raises InvalidArgumentError. Waits for the device.
    """
    finished, src_mask, capacity = call.fused.finished, call.fused.src_mask, call.cache_v.shape[2]
    lengths = call.seq_lens if finished is None else call.seq_lens.masked_fill(finished, -1)
    longest = int(lengths.max()) if lengths.numel() else -1
    if longest >= capacity:
        allowed = f"less than {capacity}, the cache's capacity"
        raise InvalidArgumentError(f"{_NAME}: seq_lens", got=str(longest), allowed=allowed)
    if src_mask is not None and longest >= src_mask.shape[3]:
        raise InvalidArgumentError(
            f"{_NAME}: src_mask", got=f"{src_mask.shape[3]} keys", allowed=f"at least {longest + 1}, the longest row's"
        )
