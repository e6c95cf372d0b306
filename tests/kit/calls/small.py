"""Calls of the smaller operators and of the feed-forward chain."""

from collections.abc import Callable
from functools import partial
from itertools import product

import torch

from kit.calls.call import Call, empty
from onewave.base.group_rounding import GroupedRows
from onewave.bench.profile.dispatch_impl import launch_probe
from onewave.ops.append_kv.op import append_kv
from onewave.ops.dequantise_pages import dequantise_pages
from onewave.ops.ffn.chain.launch import Chain
from onewave.ops.ffn.chain.plan import ChainTile, plan_chain
from onewave.ops.ffn.op import ffn
from onewave.ops.ffn.sizes import FFNSizes
from onewave.ops.linear.op import linear
from onewave.ops.merge_attention.op import merge_attention
from onewave.ops.post_attention import PostAttentionWeights, post_attention
from onewave.ops.post_attention.chain.launch import PostAttentionChain
from onewave.ops.post_attention.chain.plan import LayerSizes, plan_layer
from onewave.ops.rms_norm.op import add_rms_norm, rms_norm
from onewave.ops.sampling.op import RowParameters, sample
from onewave.ops.stream_read.op import stream_read
from onewave.ops.swiglu.op import swiglu
from onewave.wave.weights.row_table import RowTable

_WIDE, _INNER = 4096, 14336


def append(rows: int = 4, *, cache: torch.dtype = torch.bfloat16, everything: bool = False) -> None:
    """everything: bias, norms, pages, and scales of an int8 cache."""
    heads, kv_heads, head_dim = 32, 8, 128
    width = heads + 2 * kv_heads
    cache = torch.int8 if everything else cache
    k, v = (empty(64, kv_heads, 16, head_dim, dtype=cache) for _ in range(2))
    numbers = torch.zeros(rows, dtype=torch.int64, device="cuda")
    rotary = empty(rows, head_dim, dtype=torch.float32)
    options = {}
    if everything:
        options = {"bias": empty(width * head_dim), "q_norm": empty(head_dim), "k_norm": empty(head_dim)}
        options |= {name: empty(kv_heads, dtype=torch.float32) for name in ("k_scale", "v_scale")}
        options["block_table"] = torch.zeros(rows, 16, dtype=torch.int32, device="cuda")
    append_kv(empty(rows, width * head_dim), rotary, k, v, numbers, numbers, num_heads=heads, **options)


def dequantise() -> None:
    """Pages of a cache in 8 bits, for attention that reads 16."""
    k, v = (empty(64, 8, 128, 128, dtype=torch.float8_e4m3fn) for _ in range(2))
    scales = [empty(8, dtype=torch.float32)] * 2
    table, starts = (torch.zeros(*shape, dtype=torch.int32, device="cuda") for shape in ((4, 16), (5,)))
    dequantise_pages(k, v, *scales, table, starts, out=(empty(*k.shape), empty(*k.shape)))


def look_up(bits: int) -> None:
    """Rows of an embedding in nested groups."""
    rows, cols, group = 64, 4096, 128 if bits == 4 else 32
    number = torch.float16 if bits == 4 else torch.float32
    codes, scales = empty(rows, cols, dtype=torch.uint8), [empty(rows, cols // group, dtype=number)] * 2
    steps = empty(rows, cols // 32, 2, dtype=torch.int8)
    grouped = GroupedRows(codes, *scales, empty(rows, dtype=torch.float32), steps)
    RowTable(grouped, bits, torch.bfloat16).look_up(torch.zeros(4, dtype=torch.int64, device="cuda"))


def draw(*, top_k: int = 0, top_p: float = 1.0, temperature: float = 0.8) -> None:
    """A token of Llama 3's vocabulary."""
    rows = RowParameters.build(
        temperature=[temperature], top_k=[top_k], top_p=[top_p], min_p=[0.0], device=torch.device("cuda")
    )
    sample(empty(1, 128_256, dtype=torch.float32), empty(1, dtype=torch.float64), rows)


def merge() -> None:
    """Two partial results of attention."""
    outs, lses = [empty(4, 32, 1, 128)] * 2, [empty(4, 32, 1, dtype=torch.float32)] * 2
    merge_attention(outs, lses)


def block(
    rows: int, *, backend: str = "chain", gated: bool = True, activation: str = "silu", tile: ChainTile | None = None,
    dtype: torch.dtype = torch.bfloat16, test: bool = False,
) -> None:  # fmt: skip
    """A feed-forward block of Llama 3.1 8B in the kernel for many rows. tile: where the plan is not to choose it. test:
    the build with delays, traced."""
    x, up, down = (empty(*shape, dtype=dtype) for shape in ((rows, _WIDE), (_INNER, _WIDE), (_WIDE, _INNER)))
    gate = up if gated else None
    if test or tile is not None:
        plan = plan_chain(FFNSizes(rows, _WIDE, _INNER, _WIDE, gated), workers=132, tile=tile)
        made = Chain(plan, torch.device("cuda", 0), dtype, activation=activation, test=test)
        (made.trace if test else made)(x, up, down, gate)
    else:
        ffn(x, up, down, w_gate=gate, activation=activation, backend=backend)


def behind(rows: int, hidden: int, inner: int, *, dtype: torch.dtype = torch.bfloat16, test: bool = False) -> None:
    """Launch all of a layer behind attention, at once. test: the build with delays, traced."""
    x, o, up, down, gain = (
        empty(*shape, dtype=dtype)
        for shape in ((rows, hidden), (hidden, hidden), (2 * inner, hidden), (hidden, inner), (hidden,))
    )
    given = x, empty(rows, hidden, dtype=torch.float32), PostAttentionWeights(o, gain, up, down, gain), 1e-5
    if test:
        plan = plan_layer(LayerSizes(rows, hidden, inner, hidden, True, hidden), workers=132)
        PostAttentionChain(plan, torch.device("cuda", 0), dtype, test=True).trace(*given)
    else:
        post_attention(*given, backend="chain")


def project(
    rows: int, width: int, cols: int, *, dtype: torch.dtype = torch.bfloat16, bias: bool = False, wide: bool = False
) -> None:
    """A projection of several rows. wide: whose result is float32."""
    added = empty(width, dtype=dtype) if bias else None
    linear(empty(rows, cols, dtype=dtype), empty(width, cols, dtype=dtype), added, torch.float32 if wide else None)


def _row(rows: int = 1, cols: int = 2048) -> None:
    """A projection whose result is float32, with a bias."""
    linear(empty(rows, cols), empty(8192, cols), empty(8192), torch.float32)


# Each for a device that lets a kernel begin beside the one before, and for one that does not.
_EARLY: dict[str, Callable[[], object]] = {
    "rms_norm": lambda: rms_norm(empty(4, 2048), empty(2048), 1e-6),
    "add_rms_norm": lambda: add_rms_norm(empty(4, 2048), empty(4, 2048), empty(2048), 1e-6),
    "swiglu": lambda: swiglu(empty(4, 16384)),
    "append_kv int8 bias norms pages scales": partial(append, everything=True),
    "append_kv 2048 rows": partial(append, 2048),
    "linear 1 row": _row,
    # Rows that TMA can't address.
    "linear 16 rows": partial(_row, 16, 2052),
}


def _blocks() -> None:
    """The probe of where thread blocks run, two a cluster."""
    launch_probe(empty(8, 3, dtype=torch.int64), empty(4 * 256, dtype=torch.int32), cluster=2)


DEPENDENT = {
    f"{name} sm_{sm}": Call(make, (sm // 10, sm % 10)) for (name, make), sm in product(_EARLY.items(), (80, 90))
}
_PRODUCTS = {
    "8 rows": (8, 4096, 4096),
    "64 rows wide": (64, 28672, 4096),
    "128 rows": (128, 4096, 14336),
    "512 rows": (512, 6144, 4096),
    "8192 rows": (8192, 4096, 4096),
}
PRODUCT = {
    f"linear {name}{' bias' if bias else ''}{' float32' if wide else ''}": Call(
        partial(project, *sizes, dtype=dtype, bias=bias, wide=wide)
    )
    for (name, sizes), (dtype, bias, wide) in [
        *product(_PRODUCTS.items(), [(torch.bfloat16, False, False)]),
        (("512 rows", _PRODUCTS["512 rows"]), (torch.float16, True, False)),
        (("128 rows", _PRODUCTS["128 rows"]), (torch.bfloat16, True, True)),
    ]
} | {"probe of thread blocks": Call(_blocks)}
CHAIN = {
    f"ffn chain {name}": Call(make)
    for name, make in {
        "16 rows": partial(block, 16),
        "256 rows ungated gelu": partial(block, 256, gated=False, activation="gelu", tile=ChainTile(2, 128, 6, 2)),
        "8192 rows": partial(block, 8192),
        "8192 rows ungated streams": partial(block, 8192, gated=False, backend="streams"),
        "256 rows fp16": partial(block, 256, dtype=torch.float16),
        "256 rows delays trace": partial(block, 256, test=True),
    }.items()
}
BEHIND = {
    f"post attention {name}": Call(make)
    for name, make in {
        "8192 rows 4096": partial(behind, 8192, _WIDE, _INNER),
        "1024 rows 2048": partial(behind, 1024, 2048, 8192),
        "300 rows 3072": partial(behind, 300, 3072, 8192, dtype=torch.float16),
        "300 rows 3008": partial(behind, 300, 3008, 1024),
        "200 rows 576": partial(behind, 200, 576, 1536),
        "60 rows 1024": partial(behind, 60, 1024, 2816),
        "300 rows delays trace": partial(behind, 300, 1024, 2816, test=True),
    }.items()
}
SMALL = {
    "append_kv float8": Call(partial(append, cache=torch.float8_e4m3fn)),
    "sample top_k top_p": Call(partial(draw, top_k=50, top_p=0.9)),
    "sample": Call(draw),
    "sample greedy": Call(partial(draw, temperature=0.0)),
    "merge_attention": Call(merge),
    "dequantise_pages": Call(dequantise),
    "look up rows of 4 bits": Call(partial(look_up, 4)),
    "look up rows of 8 bits": Call(partial(look_up, 8)),
    "stream_read": Call(lambda: stream_read(empty(1 << 20, dtype=torch.int32))),
    **DEPENDENT,
    **CHAIN,
    **BEHIND,
    **PRODUCT,
}
