"""Options of the `onewave tiles` commands that build a program and choose its machine."""

from __future__ import annotations

from typing import Annotated

import typer

from onewave.base.errors import InvalidArgumentError

Program = Annotated[
    str,
    typer.Argument(
        metavar="PROGRAM",
        help="gemm, chain, ffn, attention, block, conv, decode MODEL or notation FILE. Sizes: elements.",
    ),
]
Sizes = Annotated[list[str] | None, typer.Argument(metavar="SIZES...", help="gemm: M N K; the others say when asked.")]
Tile = Annotated[str | None, typer.Option("--tile", help="Rows x columns x K step of a tile, as 128x128x64.")]
Dtype = Annotated[
    str, typer.Option("--dtype", help="Of all tensors: bf16, fp16, fp32, fp8, int8, int4; decode: bf16, fp16.")
]
Order = Annotated[
    str | None,
    typer.Option("--order", help="As row, snake, grouped:8, hilbert, bpt, explicit:FILE; a wrong one lists all."),
]
Cache = Annotated[
    str | None, typer.Option("--cache", help="Of the shared cache: 50MB, 48MiB, or 64tiles (of the largest tile).")
]
CachePanels = Annotated[
    int | None, typer.Option("--cache-panels", help="gemm only: count whole panels of A and B with room for so many.")
]
Policy = Annotated[str, typer.Option("--policy", help="lru, fifo or belady (also called opt).")]
Level = Annotated[
    list[str] | None,
    typer.Option(
        "--level", help="NAME=SIZE[:POLICY][:private]; from the workers outwards, inside --cache. Repeatable."
    ),
]
Workers = Annotated[int, typer.Option("--workers", help="SMs that share what the machine has.")]
CoResident = Annotated[int, typer.Option("--co-resident", help="Thread blocks that share an SM.")]
Queues = Annotated[
    str | None,
    typer.Option(
        "--queues",
        help="ticket: a free worker takes the next task; static: dealt out. Default: ticket; decode: as it runs.",
    ),
]
Mode = Annotated[str, typer.Option("--mode", help="wave: tasks of a wave advance together; serial: one by one.")]
Skew = Annotated[float, typer.Option("--skew", help="Accesses by which each lane of a wave lags behind the last.")]
Sync = Annotated[
    str | None,
    typer.Option(
        "--sync", help="Wait by none (a whole stage), row, tile, strided, conv2d-tile, consecutive. Default: exactly."
    ),
]
Splits = Annotated[int, typer.Option("--splits", help="chain, ffn, block: K splits of the last GEMM.")]
Fused = Annotated[bool, typer.Option("--fused", help="ffn: gate, up and SiLU in one task; attention: flash attention.")]
Causal = Annotated[bool, typer.Option("--causal", help="attention, block: the last query sees the last key.")]
KvHeads = Annotated[int | None, typer.Option("--kv-heads", help="attention, block. Default: as many as heads.")]
Context = Annotated[int, typer.Option("--context", help="decode: tokens in the cache.")]
Batch = Annotated[int, typer.Option("--batch", help="decode: sequences.")]
WeightFormat = Annotated[
    str, typer.Option("--weight-format", help="decode: of the weight stream: 16-bit, compact, int8 or fp8.")
]


def weight_bytes_of(weight_format: str) -> float:
    """Bytes of a weight in the stream of that format. Raises InvalidArgumentError."""
    from onewave.base.weight_formats import WEIGHT_BYTES

    if weight_format not in WEIGHT_BYTES:
        raise InvalidArgumentError("weight format", got=repr(weight_format[:40]), allowed=", ".join(WEIGHT_BYTES))
    return WEIGHT_BYTES[weight_format]
