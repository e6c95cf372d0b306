"""`onewave bench ops attention` and `decode-attention`: our kernels beside their peers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from onewave.base.errors import InvalidArgumentError
from onewave.cli.bench.report import Results, Rows, ceiling_line, name_of, show_status

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from onewave.bench.ceilings import Ceiling
    from onewave.bench.ops.attention import AttentionResult

ATTENTION_OPERATORS = (
    "attention",
    "attention_varlen",
    "attention_fp8",
    "decode_attention",
    "masked_multihead_attention",
)
"""Operators that are measured beside other libraries, on shapes of their own."""


def bench_attention(
    operators: Sequence[str],
    *,
    shapes: Sequence[str] | None,
    causal: bool | None,
    device: torch.device,
    dtype: torch.dtype,
    rounds: int,
    out: Results,
    logits: str | None = None,
) -> None:
    """Measure each operator on each shape and print a table an operator, or JSON. causal: None for both.

    logits: adversarial ones, see bench.attention.hardened; of attention alone.
    """
    if logits is not None and list(operators) != ["attention"]:
        raise InvalidArgumentError("--logits", got=", ".join(operators), allowed="attention alone")
    from onewave.bench.ceilings import matmul_rate, read_bandwidth
    from onewave.bench.ops.attention import PREFILLS

    if causal is not None and not set(operators) & set(PREFILLS):
        allowed = ", ".join(sorted(PREFILLS))
        raise InvalidArgumentError(
            "--causal", got=", ".join(operators), allowed=allowed, next="The others have one mask."
        )
    plans = [(operator, _shapes(operator, shapes, device)) for operator in operators]
    show_status("measuring the ceilings")
    read, matmul = read_bandwidth(device), matmul_rate(device)
    documents: list[dict[str, Any]] = []
    notes: list[str] = []
    rows: Rows | None = None
    for operator, chosen in plans:
        kind = "float8_e4m3fn" if operator == "attention_fp8" else name_of(dtype)
        hard = "" if logits is None else f", logits {logits}"
        prefill = operator in PREFILLS
        rates = ("TFLOP/s", "of matmul") if prefill else ("TB/s", "of read")
        more = ("rms error",) if operator == "attention_fp8" else ()
        columns = ("shape", "engine", "us", *rates, "onewave is", *more)
        title = f"{operator}, {kind} on {device}{hard}, median of {rounds} rounds"
        if rows is None:
            rows = Rows(out, device, title, *columns, left=2)
        else:
            rows.head(title, *columns, left=2)
        for result in _measure(operator, chosen, causal, device, dtype, rounds, logits, notes=notes):
            line = result.measurement(kind, matmul, read)
            rows.add(_cells(result, matmul, read), [] if line is None else [line])
            documents.append(result.details(kind, matmul, read))
            if result.failure is not None:
                notes.append(f"{_label(result)} {result.engine}: {result.failure}")
    assert rows is not None
    ceilings = {"read_gb_s": read.value, "matmul_tflops": matmul.value}
    facts = {"device": str(device), "ceilings": ceilings, "results": documents}
    rows.finish(facts, *notes, ceiling_line(matmul), ceiling_line(read))


def _shapes(operator: str, texts: Sequence[str] | None, device: torch.device) -> list[str]:
    from onewave.bench.ops import attention as bench
    from onewave.bench.ops.attention_fp8 import FP8_SHAPES, SMALL_FP8_SHAPES
    from onewave.bench.ops.attention_varlen import SMALL_VARLEN_SHAPES, VARLEN_SHAPES

    if texts:
        return [str(bench.AttentionShape.parse(text)) for text in texts]
    on_gpu, small = {
        "attention": (bench.PREFILL_SHAPES, bench.SMALL_PREFILL_SHAPES),
        "attention_varlen": (VARLEN_SHAPES, SMALL_VARLEN_SHAPES),
        "attention_fp8": (FP8_SHAPES, SMALL_FP8_SHAPES),
    }.get(operator, (bench.DECODE_SHAPES, bench.SMALL_DECODE_SHAPES))
    return list(on_gpu if device.type == "cuda" else small)


def _measure(
    operator: str,
    shapes: Sequence[str],
    causal: bool | None,
    device: torch.device,
    dtype: torch.dtype,
    rounds: int,
    logits: str | None,
    *,
    notes: list[str],
) -> Iterator[AttentionResult]:
    """Measure shape by shape. notes: gets why an engine is not there."""
    from onewave.bench.ops.attention import PREFILLS, AttentionShape, Operands, compare
    from onewave.bench.ops.attention_engines import decode_engines, mmha_engines, prefill_engines
    from onewave.bench.ops.attention_fp8 import ByteOperands, fp8_engines
    from onewave.bench.ops.attention_varlen import PackedOperands, varlen_engines

    makers = {
        "attention": prefill_engines, "attention_varlen": varlen_engines, "attention_fp8": fp8_engines,
        "decode_attention": decode_engines,
    }  # fmt: skip
    engines, missing = makers.get(operator, mmha_engines)(device)
    masks = (True,) if operator not in PREFILLS else (False, True) if causal is None else (causal,)
    notes += missing
    for text in shapes:
        for mask in masks:
            shape = AttentionShape.parse(text)
            show_status(f"{operator} {shape}{' causal' if mask else ''}")

            def make(shape: AttentionShape = shape, mask: bool = mask) -> Operands:
                if operator == "attention":
                    return Operands.prefill(shape, mask, device, dtype, logits)
                if operator == "attention_varlen":
                    return PackedOperands.make(shape, mask, device, dtype)
                if operator == "attention_fp8":
                    return ByteOperands.make(shape, mask, device, dtype)
                return Operands.decode(shape, device, dtype)

            yield from compare(operator, engines, make, rounds=rounds)


def _label(result: AttentionResult) -> str:
    from onewave.bench.ops.attention import PREFILLS

    shape, causal = result.operands
    return f"{shape} causal" if result.operator in PREFILLS and causal else str(shape)


def _cells(result: AttentionResult, matmul: Ceiling, read: Ceiling) -> list[str]:
    from onewave.bench.ops.attention import PREFILLS

    share = result.share(matmul, read)
    if result.seconds is None or share is None:
        return [_label(result), result.engine, "failed"]
    rate = result.tflops if result.operator in PREFILLS else result.terabytes_per_second
    ratio = "" if result.ratio is None else f"{result.ratio:.2f}x"
    cells = [_label(result), result.engine, f"{result.seconds.p50 * 1e6:.1f}", f"{rate:.3g}", f"{share:.1%}", ratio]
    if result.operator == "attention_fp8" and result.error is not None:
        cells.append(f"{result.error:.2%}")
    return cells


def chosen_operators(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split names into attention operators and others; "decode-attention" is "decode_attention"."""
    plain = [name.replace("-", "_") for name in names]
    ours = [name for name in plain if name in ATTENTION_OPERATORS]
    if ours and len(ours) < len(plain):
        others = ", ".join(name for name in plain if name not in ATTENTION_OPERATORS)
        raise InvalidArgumentError(
            "operators", got=f"{', '.join(ours)} with {others}", next="Attention has a command line of its own."
        )
    return ours, [] if ours else plain
