"""A call of append_kv: its tensors and options, what it accepts, and torch.library's flat arguments."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onewave.base.device import Device
from onewave.base.errors import InvalidArgumentError, ShapeError, UnsupportedError
from onewave.ops import checks
from onewave.ops.choice import Call
from onewave.ops.decode_attention.caches import cache_shape

# Schema of the registered operator, its arguments in the order of AppendCall's fields.
SCHEMA = (
    "(Tensor qkv, Tensor? rotary, Tensor(a2!) k_cache, Tensor(a3!) v_cache, Tensor slots, Tensor positions, "
    "SymInt num_heads, Tensor? bias=None, Tensor? q_norm=None, Tensor? k_norm=None, float eps=1e-6, "
    "bool interleaved=False, Tensor? block_table=None, Tensor? k_scale=None, Tensor? v_scale=None, "
    'str backend="auto") -> Tensor'
)
_NAME = "append_kv"
_BACKENDS = ("auto", "triton", "cpu", "reference")
_QUANTISED = (torch.int8, torch.float8_e4m3fn)


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
    described: Device | None = None

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


def check(call: AppendCall, rotary_style: str) -> None:
    """Raises ShapeError, UnsupportedError, InvalidArgumentError. rotary_style: as the caller gave it."""
    qkv, rotary, k_cache, v_cache, slots, positions = (
        call.qkv, call.rotary, call.k_cache, call.v_cache, call.slots, call.positions
    )  # fmt: skip
    bias, q_norm, k_norm = call.vectors
    num_heads, eps, block_table, k_scale, v_scale = (
        call.num_heads, call.eps, call.block_table, call.k_scale, call.v_scale
    )  # fmt: skip
    vectors = {"bias": bias, "q_norm": q_norm, "k_norm": k_norm, "k_scale": k_scale, "v_scale": v_scale}
    checks.optional(_NAME, vectors | {"rotary": rotary, "block_table": block_table})
    checks.tensors(_NAME, qkv=qkv, k_cache=k_cache, v_cache=v_cache, slots=slots, positions=positions)
    checks.whole(_NAME, "num_heads", num_heads, 1)
    checks.eps(_NAME, eps)
    checks.one_of(_NAME, "rotary_style", rotary_style, ("neox", "interleaved"))
    checks.backend(_NAME, call, call.backend, _BACKENDS)
    if call.backend == "cpu" and call.on_gpu:
        raise UnsupportedError(f"{_NAME} (backend=cpu)", got=call.where, next='Use backend="auto".')
    if qkv.ndim != 2 or v_cache.ndim != 4:
        raise ShapeError(
            f"{_NAME}: qkv, v_cache",
            got=f"{tuple(qkv.shape)}, {tuple(v_cache.shape)}",
            allowed="[tokens, (heads + 2 * kv_heads) * head_dim], [slots, kv_heads, capacity, head_dim]",
        )
    tokens, width = qkv.shape
    num_blocks, num_kv_heads, block_size, head_dim = v_cache.shape
    is_usual = (
        k_cache.shape == v_cache.shape
        and k_cache.dtype is v_cache.dtype is qkv.dtype
        and k_cache.stride(3) == v_cache.stride(3) == 1
        and block_table is None
    )
    checks.apart(_NAME, "k_cache", k_cache)
    checks.apart(_NAME, "v_cache", v_cache)
    if not is_usual:
        rows = num_blocks if block_table is None else block_table.shape[0] if block_table.ndim else 0
        cache_shape(_NAME, k_cache, v_cache, block_table, rows)
        if block_table is not None and block_size == 0 and tokens:
            raise ShapeError(f"{_NAME}: block_size", got="0", allowed="at least 1, with block_table")
    _check_heads(call)
    for name, places in (("slots", slots), ("positions", positions)):
        checks.shape(_NAME, name, places, (tokens,))
        checks.dtype(_NAME, f"dtype of {name}", places.dtype, checks.WHOLE)
    if rotary is not None:
        checks.rotary(_NAME, rotary, tokens, head_dim)
    for (name, tensor), length in zip(vectors.items(), (width, *(head_dim,) * 2, *(num_kv_heads,) * 2), strict=True):
        if tensor is not None:
            _check_vector(name, tensor, length, k_cache)
    checks.one_device(
        _NAME, qkv, (rotary, k_cache, v_cache, slots, positions, bias, q_norm, k_norm, block_table, k_scale, v_scale)
    )


def _check_heads(call: AppendCall) -> None:
    qkv, k_cache, num_heads = call.qkv, call.k_cache, call.num_heads
    num_kv_heads, head_dim = call.v_cache.shape[1], call.v_cache.shape[3]
    width = (num_heads + 2 * num_kv_heads) * head_dim
    if qkv.shape[1] != width or num_heads <= 0 or not num_kv_heads or num_heads % num_kv_heads:
        raise ShapeError(
            f"{_NAME}: qkv",
            got=f"{tuple(qkv.shape)} with {num_heads} query heads",
            allowed=f"[tokens, {width}], query heads a multiple of {num_kv_heads}",
        )
    checks.head_dim(_NAME, head_dim, on_cpu=not call.on_gpu, least=8)
    checks.dtype(_NAME, "dtype of qkv", qkv.dtype, checks.HALVES if call.on_gpu else checks.FLOATS, call)
    checks.dtype(_NAME, "cache dtype", k_cache.dtype, (qkv.dtype, *_QUANTISED))


def _check_vector(name: str, tensor: Tensor, length: int, k_cache: Tensor) -> None:
    checks.shape(_NAME, name, tensor, (length,))
    is_scale = name.endswith("scale")
    checks.dtype(_NAME, f"dtype of {name}", tensor.dtype, (torch.float32,) if is_scale else checks.FLOATS)
    if is_scale and k_cache.dtype not in _QUANTISED:
        got = f"with a {k_cache.dtype} cache"
        raise InvalidArgumentError(f"{_NAME}: {name}", got=got, allowed="int8, float8_e4m3fn")


def check_contents(call: AppendCall) -> None:
    """Read slots, positions and blocks back and check them. Raises InvalidArgumentError. Waits for the device."""
    slots, positions, v_cache, block_table = call.slots, call.positions, call.v_cache, call.block_table
    taken = positions >= 0
    rows, places = slots[taken].long(), positions[taken].long()
    num_blocks, block_size = v_cache.shape[0], v_cache.shape[2]
    num_rows, per_row = (num_blocks, 1) if block_table is None else block_table.shape
    checks.indices(_NAME, "slots", rows, num_rows)
    checks.indices(_NAME, "positions", places, per_row * block_size)
    if block_table is not None and len(rows):
        checks.indices(_NAME, "block_table", block_table[rows, places // block_size], num_blocks)
