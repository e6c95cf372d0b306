"""Graphs by name and sizes as text, as the command line and the lab take them: "gemm 4096 4096 4096"."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from onewave.base.errors import InvalidArgumentError
from onewave.base.json_files import in_file, read_bounded
from onewave.tiles.graph.builders import conv2d, ffn, gemm, gemm_chain, gemm_stream_k
from onewave.tiles.graph.builders_attention import attention, attention_block
from onewave.tiles.graph.graph import TileGraph

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from onewave.tiles.graph.notation import Notation


@dataclass(frozen=True)
class ProgramOptions:
    """The options of a program besides its sizes. tile: (rows, columns, K step); None for the program's own default."""

    tile: tuple[int, int, int] | None = None
    dtype: str = "bf16"
    splits: int = 1
    fused: bool = False
    causal: bool = False
    kv_heads: int | None = None
    workers: int = 132
    stream_k: bool = False

    @property
    def gemm_tile(self) -> tuple[int, int, int]:
        """The tile, by default 128x128x64."""
        return self.tile or (128, 128, 64)


@dataclass(frozen=True)
class ProgramRow:
    """One program: the names of its sizes, how many of them may be left out, and what builds it from their numbers.

    reads: the options that mean something to it, beside workers.
    """

    sizes: tuple[str, ...]
    optional: tuple[int, ...]
    build: Callable[[Sequence[int], ProgramOptions], TileGraph]
    summary: str
    reads: tuple[str, ...] = ("tile", "dtype")


def _gemm(s: Sequence[int], o: ProgramOptions) -> TileGraph:
    return gemm(s[0], s[1], s[2], o.gemm_tile, o.dtype)


def _chain(s: Sequence[int], o: ProgramOptions) -> TileGraph:
    return gemm_chain(s[0], s[1], s[2], s[3], o.gemm_tile, splits=o.splits, dtype=o.dtype)


def _ffn(s: Sequence[int], o: ProgramOptions) -> TileGraph:
    return ffn(s[0], s[1], s[2], o.gemm_tile, fused=o.fused, splits=o.splits, dtype=o.dtype)


def _attention(s: Sequence[int], o: ProgramOptions) -> TileGraph:
    tile = (128, 128) if o.tile is None else o.tile[:2]
    more = {"kv_heads": o.kv_heads, "causal": o.causal, "fused": o.fused}
    return attention(s[0], s[1], s[2], s[3], tile, **more, dtype=o.dtype)  # type: ignore[arg-type] # mixed values


def _block(s: Sequence[int], o: ProgramOptions) -> TileGraph:
    tile = o.tile or (128, 128, 128)
    more = {"kv_heads": o.kv_heads, "causal": o.causal, "splits": o.splits}
    return attention_block(s[0], s[1], s[2], s[3], tile, **more, dtype=o.dtype)  # type: ignore[arg-type] # mixed values


def _conv(s: Sequence[int], o: ProgramOptions) -> TileGraph:
    return conv2d((s[0], s[1], s[2], s[3]), s[4], (s[5], s[6]), tile=o.gemm_tile, dtype=o.dtype)


PROGRAMS: dict[str, ProgramRow] = {
    "gemm": ProgramRow(("M", "N", "K"), (), _gemm, "C[M,N] = A[M,K] B[K,N]"),
    "chain": ProgramRow(
        ("M", "K", "N0", "N1"), (), _chain, "H = X[M,K] W0[K,N0], Y = H W1[N0,N1]", ("tile", "dtype", "splits")
    ),
    "ffn": ProgramRow(
        ("M", "HIDDEN", "INTERMEDIATE"), (), _ffn, "gate, up, SiLU, down", ("tile", "dtype", "splits", "fused")
    ),
    "attention": ProgramRow(
        ("SQ", "SK", "HEADS", "HEAD_DIM"), (1, 128), _attention, "QK^T, softmax, PV",
        ("tile", "dtype", "fused", "causal", "kv_heads"),
    ),
    "block": ProgramRow(
        ("SEQ", "HEADS", "HEAD_DIM", "INTERMEDIATE"), (), _block, "attention, projection, FFN",
        ("tile", "dtype", "splits", "causal", "kv_heads"),
    ),
    "conv": ProgramRow(("N", "H", "W", "C", "OUT", "KH", "KW"), (3, 3), _conv, "convolution as implicit GEMM"),
}  # fmt: skip
"""Programs with numbers as sizes. Beside them: notation FILE."""
_MAX_NOTATION_BYTES = 1 << 20
_ALWAYS_READ = ("program", "sizes", "workers", "stream_k")


def build_program(
    kind: str, sizes: Sequence[str | int], options: ProgramOptions | None = None
) -> tuple[TileGraph, tuple[tuple[int, ...], ...] | None]:
    """Build a program. Returns its graph, and queues per worker where it prescribes them (Stream-K), else None.

    kind: a name in PROGRAMS, or "notation" (sizes: a file's path). Raises InvalidArgumentError, for an option that
    means nothing to the program, too.
    """
    options = options or ProgramOptions()
    if kind == "notation":
        return read_notation(sizes, options).graph, None
    row = PROGRAMS.get(kind)
    if row is None:
        raise InvalidArgumentError("program", got=repr(kind[:40]), allowed=f"{', '.join(PROGRAMS)}, notation")
    check_options(kind, options, row.reads)
    numbers = read_sizes(kind, sizes)
    if options.stream_k and kind == "gemm":
        m, n, k = numbers
        return gemm_stream_k(m, n, k, options.gemm_tile, workers=options.workers, dtype=options.dtype)
    return row.build(numbers, options), None


def read_notation(sizes: Sequence[str | int], options: ProgramOptions | None = None) -> Notation:
    """Read the fusion tree that build_program's "notation" builds, with its caches. Raises InvalidArgumentError."""
    from onewave.tiles.graph.notation import parse_notation

    check_options("notation", options or ProgramOptions(), ())
    [path] = exactly("notation", sizes, ("FILE",))
    text = read_bounded(str(path), "notation file", _MAX_NOTATION_BYTES)
    with in_file(str(path)):
        try:
            return parse_notation(text.decode())
        except UnicodeDecodeError:
            raise InvalidArgumentError("notation", got="no UTF-8", allowed="a text file") from None


def check_options(kind: str, options: DataclassInstance, reads: Sequence[str]) -> None:
    """Refuse an option that a program does not read: a field that is not as it is by default.

    Raises InvalidArgumentError.
    """
    for field in fields(options):
        value = getattr(options, field.name)
        if value != field.default and field.name not in (*reads, *_ALWAYS_READ):
            named = ", ".join(name.replace("_", "-") for name in reads) or "none"
            raise InvalidArgumentError(f"{kind}: option {field.name.replace('_', '-')}", got=str(value), allowed=named)


def read_sizes(kind: str, sizes: Sequence[str | int]) -> list[int]:
    """Read the sizes of a program in PROGRAMS, the optional ones filled in. Raises InvalidArgumentError."""
    row = PROGRAMS[kind]
    least = len(row.sizes) - len(row.optional)
    given = list(sizes) if len(sizes) < least else [*sizes, *row.optional[len(sizes) - least :]]
    return [_whole(name, size) for name, size in zip(row.sizes, exactly(kind, given, row.sizes), strict=True)]


def parse_tile(text: str) -> tuple[int, int, int]:
    """Read "128x128x64" (or "128x128", the K step then 64). Raises InvalidArgumentError."""
    parts = text.lower().split("x")
    if len(parts) not in (2, 3) or not all(re.fullmatch(r"[0-9]{1,9}", part) and int(part) for part in parts):
        raise InvalidArgumentError("tile", got=repr(text[:40]), allowed="three sizes of 1 or more, as 128x128x64")
    rows, columns, depth = (*map(int, parts), 64)[:3]
    return rows, columns, depth


_UNITS = {"": 1, "b": 1} | {
    f"{letter}{binary}b": (1024 if binary else 1000) ** power
    for power, letter in enumerate("kmgt", start=1)
    for binary in ("", "i")
}


def parse_bytes(text: str) -> int:
    """Read "50MB" (decimal), "50MiB" (binary), "4096" (bytes). Raises InvalidArgumentError."""
    found = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*([kmgt]?i?b?)", text.strip().lower())
    unit = None if found is None else _UNITS.get(found[2] if found[2].endswith("b") or not found[2] else f"{found[2]}b")
    if found is None or unit is None or float(found[1]) * unit < 1:
        raise InvalidArgumentError("size", got=repr(text[:40]), allowed="1 byte or more, as 50MB, 228KiB or 4096")
    return int(float(found[1]) * unit)


def exactly(kind: str, given: Sequence[str | int], names: tuple[str, ...]) -> Sequence[str | int]:
    """Refuse another number of sizes than the program has. Raises InvalidArgumentError."""
    if len(given) != len(names):
        raise InvalidArgumentError(f"{kind}: sizes", got=f"{len(given)} of them", allowed=" ".join((kind, *names)))
    return given


def _whole(name: str, given: str | int) -> int:
    text = str(given)
    if not re.fullmatch(r"[0-9]{1,18}", text) or int(text) < 1:
        raise InvalidArgumentError(name, got=repr(text[:40]), allowed="a whole number of 1 or more, below 10^18")
    return int(text)
