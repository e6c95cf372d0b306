"""Chooses the implementation of append_kv: the Triton kernel on a GPU, compiled loops or PyTorch on a CPU."""

import math
from dataclasses import dataclass

import torch

from onewave.base.errors import UnsupportedError
from onewave.ops.append_kv.call import AppendCall, check
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
# 120 us, where memory would take 11. In halves: 8 bytes a thread of four warps and four heads, the fastest of six tiles
# at 64 to 8,192 tokens.
_MANY_TOKENS, _BLOCK_TOKENS = 64, 8
_THREADS, _ELEMENTS_A_THREAD = 128, 4
_MAX_HEADS, _LEAST_HEAD_DIM = 4, 16


@dataclass(frozen=True)
class AppendChoice(Choice):
    """A launch: a program a block of tokens and block of heads of q, k and v. in_halves: which of the two kernels."""

    num_tokens: int
    num_heads: int
    head_dim: int
    block_tokens: int = 1
    block_heads: int = 1
    in_halves: bool = False

    @property
    def num_warps(self) -> int:
        """Warps of a program."""
        return 1 if self.block_tokens == 1 else 4

    @property
    def tile(self) -> str:
        heads = "1 head" if self.block_heads == 1 else f"{self.block_heads} heads"
        return f"{self.block_tokens} x {heads} of {self.head_dim}, {self.num_warps} warps"

    @property
    def programs(self) -> str:
        blocks = -(-self.num_tokens // self.block_tokens)
        return f"{blocks} blocks of tokens x {self.num_heads // self.block_heads} blocks of heads of q, k and v"


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
        tokens, normed = call.qkv.shape[0], call.q_norm is not None or call.k_norm is not None
        whole = call.rotary is not None and call.rotary.shape[1] == head_dim and head_dim.bit_count() == 1
        in_halves = (
            whole and head_dim >= _LEAST_HEAD_DIM and not (call.interleaved or normed) and tokens >= _MANY_TOKENS
        )
        block_tokens = _BLOCK_TOKENS
        if in_halves:
            block_tokens = max(1, _THREADS * _ELEMENTS_A_THREAD * 2 // head_dim)
        elif normed or tokens < _MANY_TOKENS:
            block_tokens = 1
        heads = math.gcd(num_kv_heads, _MAX_HEADS) if in_halves else 1
        kernel = f"append_kv/triton_impl.py: {'append_halves_kernel' if in_halves else 'append_kv_kernel'}"
        sizes = (tokens, call.num_heads + 2 * num_kv_heads, head_dim, block_tokens, heads)
        return AppendChoice("triton", "triton_impl", kernel, _ONE_PASS, *sizes, in_halves=in_halves)
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
