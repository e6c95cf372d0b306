"""Calls of prefill attention: of each kernel, all that it is compiled for and the options that change it most."""

from functools import partial
from itertools import product
from typing import Any

import torch

from kit.calls.call import Call, empty
from onewave.ops.attention.fp8.op import attention_fp8
from onewave.ops.attention.op import attention, attention_varlen


def dense(
    head_dim: int, *, batch: int = 4, heads: tuple[int, int] = (16, 16), length: int = 4096, keys: int | None = None,
    bias: torch.dtype | None = None, sinks: bool = False, odd: bool = False, **options: Any,
) -> None:  # fmt: skip
    """keys: of `length` those there are. odd: K's rows lie at multiples of 2 bytes, V's with them."""
    q = empty(batch, heads[0], length, head_dim)
    k = empty(batch, heads[1], length, head_dim + odd)[:, :, :keys, :head_dim]
    if bias is not None:
        options["bias"] = empty(1, 1, length, length, dtype=bias)[..., :keys]
    if sinks:
        options["sinks"] = empty(heads[0])
    attention(q, k, k, **options)


def packed(
    head_dim: int, *, sequences: int = 16, heads: tuple[int, int] = (32, 8), length: int = 1024, sinks: bool = False,
    page: int = 0, **options: Any,
) -> None:  # fmt: skip
    """Launch packed attention of sequences of one length; page: keys of a page, where they lie in pages."""
    q = empty(sequences * length, heads[0], head_dim)
    k = empty(sequences * length, heads[1], head_dim)
    starts = torch.arange(sequences + 1, dtype=torch.int32, device="cuda") * length
    if page:
        pages = -(-length // page)
        k = empty(sequences * pages, page, heads[1], head_dim)
        table = torch.arange(sequences * pages, dtype=torch.int32, device="cuda")
        options["block_table"] = table.view(sequences, pages)
    if sinks:
        options["sinks"] = empty(heads[0])
    attention_varlen(q, k, k, starts, starts, length, length, **options)


def short_chunk() -> None:
    """Launch attention of 32 tokens of one sequence behind 4,096 in pages of 128."""
    q, k = empty(32, 32, 128), empty(40, 128, 8, 128)
    starts, table = (torch.zeros(shape, dtype=torch.int32, device="cuda") for shape in ((2,), (1, 40)))
    attention_varlen(q, k, k, starts, starts, 32, 5120, causal=True, block_table=table)


def float8(*, packs: bool = False, **options: Any) -> None:
    """head_dim 128; packs: 16 sequences of 1,024 tokens."""
    if packs:
        q, k = (empty(16 << 10, heads, 128, dtype=torch.float8_e4m3fn) for heads in (16, 4))
        starts = torch.arange(17, dtype=torch.int32, device="cuda") * 1024
        options |= {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 1024, "max_seqlen_k": 1024}
    else:
        q, k = (empty(1, heads, 4096, 128, dtype=torch.float8_e4m3fn) for heads in (16, 4))
    attention_fp8(q, k, k, backend="gluon", **options)


def _call(make: Any, head_dim: int, capability: tuple[int, int] = (9, 0), **options: Any) -> Call:
    return Call(partial(make, head_dim, **options), capability, kernels=("attention_kernel",))


_triton, _triton_packed = partial(_call, dense, backend="triton"), partial(_call, packed, backend="triton")
_hopper, _hopper_packed = partial(_call, dense, backend="gluon"), partial(_call, packed, backend="gluon")

PORTABLE = {
    "D128": _triton(128),
    "D128 causal": _triton(128, causal=True),
    "D64 causal": _triton(64, causal=True),
    "D80 causal packed lse": _triton_packed(80, causal=True, return_lse=True),
    "D64 bool mask": _triton(64, keys=4095, bias=torch.bool),
    "D256 bool mask": _triton(256, keys=4095, bias=torch.bool),
    "D256 bf16 bias": _triton(256, keys=4095, bias=torch.bfloat16),
    "D256 fp32 bias": _triton(256, keys=4095, bias=torch.float32),
    "D256 fp32 bias odd": _triton(256, keys=4095, bias=torch.float32, odd=True),
    "D128 causal sm_80": _triton(128, (8, 0), causal=True),
    "D64 fp32 bias sm_89": _triton(64, (8, 9), keys=4095, bias=torch.float32),
    "D128 causal softcap": _triton(128, causal=True, softcap=30.0),
    "D128 causal scale below 0": _triton(128, causal=True, scale=-0.1),
}
HOPPER = {
    "D128": _hopper(128),
    "D128 causal": _hopper(128, causal=True),
    "D128 causal few tiles": _hopper(128, causal=True, batch=1, heads=(1, 1), length=512),
    "D128 softcap": _hopper(128, softcap=30.0),
    "D128 packed lse": _hopper_packed(128, return_lse=True),
    "D128 causal packed pages of 16 few tiles lse": _hopper_packed(
        128, causal=True, sequences=1, heads=(1, 1), length=512, page=16, return_lse=True
    ),
    "D64": _hopper(64),
    "D64 causal lse": _hopper(64, causal=True, return_lse=True),
    "D64 packed": _hopper_packed(64),
    "D64 causal packed lse": _hopper_packed(64, causal=True, return_lse=True),
    "D128 causal window packed lse": _hopper_packed(128, causal=True, window=300, return_lse=True),
    "D64 causal window packed pages of 16 lse": _hopper_packed(64, causal=True, window=300, page=16, return_lse=True),
    "D64 causal window packed pages of 16 few tiles lse": _hopper_packed(
        64, causal=True, window=300, sequences=1, heads=(1, 1), length=512, page=16, return_lse=True
    ),
    "D128 causal packed pages of 64 lse": _hopper_packed(128, causal=True, page=64, return_lse=True),
    "D64 causal softcap": _hopper(64, causal=True, softcap=30.0),
    "D256": _hopper(256),
    "D256 causal": _hopper(256, causal=True),
    "D256 causal packed": _hopper_packed(256, causal=True),
}
FLOAT8 = {
    "D128 causal": Call(partial(float8, causal=True), kernels=("fp8_kernel",)),
    "D128 causal window packed softcap lse": Call(
        partial(float8, packs=True, causal=True, window=300, softcap=30.0, return_lse=True), kernels=("fp8_kernel",)
    ),
}
_CAUSAL = partial(dense, causal=True)
_ALL = partial(packed, causal=True, window=300, softcap=30.0, sinks=True, return_lse=True)
MMA = {
    f"D{head_dim} {width} {options} sm_{sm}": Call(
        partial(make, head_dim, backend="mma"), (sm // 10, sm % 10),
        sms=10_000 if width == "narrow" else 1, kernels=("mma_kernel",),
    )
    for head_dim, width, (options, make), sm in [
        *product((128,), ("narrow", "wide"), (("causal", _CAUSAL), ("everything", _ALL)), (80, 90)),
        *product((64,), ("narrow", "wide"), (("everything", _ALL),), (90,)),
        (256, "narrow", ("everything", _ALL), 80),
        (32, "wide", ("everything", _ALL), 80),
        (16, "wide", ("causal", _CAUSAL), 90),
    ]
}  # fmt: skip
ATTENTION: dict[str, Call] = {
    f"attention {kernel} {name}": call
    for kernel, calls in (("triton", PORTABLE), ("gluon", HOPPER), ("fp8", FLOAT8), ("mma", MMA))
    for name, call in calls.items()
} | {
    "attention order of packed tiles": Call(partial(packed, 64, backend="gluon"), kernels=("sort_slots",)),
    "attention values of float8": Call(float8, kernels=("turn_values",)),
    "attention split": Call(short_chunk, kernels=("weigh_kernel", "combine_kernel")),
}
