"""What runs a call of append_kv: the Triton kernel on a GPU, compiled loops or PyTorch on a CPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from onewave.base.errors import UnsupportedError
from onewave.ops.append_kv.call import AppendCall
from onewave.ops.append_kv.checks import check
from onewave.ops.choice import Asked, Choice, because, empty_on_meta
from onewave.ops.decode_attention.choose import caches_of, table_of

_LOOPS_TAKE = "float32, plain caches, neox rotation"
_LOOPS = Choice("cpu", "numba_impl", "append_kv/numba_impl.py", (because(f"compiled loops take it: {_LOOPS_TAKE}"),))
_REFERENCE, _ASKED = (
    Choice("reference", "reference", "append_kv/reference.py", (because(why),))
    for why in (f"compiled loops take only {_LOOPS_TAKE}", "asked for")
)
_ONE_PASS = (
    because("bias, norms, rotation and both stores in one pass over qkv; a head's rotary partners come from L1"),
)

# From so many tokens on, a program takes a block of them: 98,000 programs of one warp for 2,048 tokens of an 8B took
# 120 us, where memory would take 11.
_MANY_TOKENS, _BLOCK_TOKENS = 64, 8


@dataclass(frozen=True)
class AppendChoice(Choice):
    """A launch: a program a block of tokens and head of q, k and v."""

    num_tokens: int
    num_heads: int
    head_dim: int
    block_tokens: int = 1

    @property
    def tile(self) -> str:
        return f"{self.block_tokens} x 1 head of {self.head_dim}, {1 if self.block_tokens == 1 else 4} warps"

    @property
    def programs(self) -> str:
        return f"{-(-self.num_tokens // self.block_tokens)} blocks of tokens x {self.num_heads} heads of q, k and v"


def choose(call: AppendCall) -> Choice:
    """Return what runs; see ops/choice.py."""
    if call.backend == "reference":
        return _ASKED
    if call.on_gpu:
        capability = call.device.capability
        assert capability is not None
        if call.k_cache.dtype is torch.float8_e4m3fn and capability < (8, 9):
            raise UnsupportedError("append_kv: float8 cache", got="a GPU before sm_89", next="Use an int8 cache.")
        num_kv_heads, head_dim = call.v_cache.shape[1], call.v_cache.shape[3]
        sizes = (call.qkv.shape[0], call.num_heads + 2 * num_kv_heads, head_dim)
        normed = call.q_norm is not None or call.k_norm is not None
        sizes = (*sizes, 1 if normed or sizes[0] < _MANY_TOKENS else _BLOCK_TOKENS)
        return AppendChoice("triton", "triton_impl", "append_kv/triton_impl.py: append_kv_kernel", _ONE_PASS, *sizes)
    if call.suits_loops:
        return _LOOPS
    if call.backend == "cpu":
        raise UnsupportedError("append_kv (backend=cpu)", allowed=_LOOPS_TAKE, next='Use backend="auto".')
    return _REFERENCE


def describe(asked: Asked) -> AppendCall:
    """A question: qkv, k_cache."""
    qkv, cache = asked.take((2,), (4, 5))
    options, tokens = asked.options, qkv[:1]
    keys, values = caches_of(cache, asked.dtype_of("kv_dtype", asked.dtype))
    head_dim = values.shape[3]
    scales = {name: empty_on_meta(cache[1:2], torch.float32) for name in ("k_scale", "v_scale") if asked.has(name)}
    # Most calls rotate: an explicit None is a call without rotation.
    rotary = empty_on_meta((*tokens, head_dim), torch.float32) if options.get("rotary", True) is not None else None
    places = empty_on_meta(tokens, torch.int64)
    style = options.get("rotary_style", "neox")
    call = AppendCall(
        empty_on_meta(qkv, asked.dtype), rotary, keys, values, places, places,
        options.get("num_heads", qkv[1] // max(head_dim, 1) - 2 * cache[1]), interleaved=style == "interleaved",
        block_table=table_of(asked), **scales, **asked.given("eps", "backend"), described=asked.device,
    )  # fmt: skip
    check(call, style)
    return call
