"""`onewave bench ops attention` and `decode-attention`: our kernels beside their peers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from onewave.base.errors import InvalidArgumentError
from onewave.cli.bench.report import append_to_ledger, print_table, show_status

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

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

_MAX_COLUMNS = 256


def bench_attention(
    operators: Sequence[str],
    *,
    shapes: Sequence[str] | None,
    causal: bool | None,
    device: torch.device,
    dtype: torch.dtype,
    rounds: int,
    as_json: bool,
    ledger: Path | None,
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
    read, matmul = read_bandwidth(device), matmul_rate(device)
    given = str(dtype).removeprefix("torch.")
    documents: list[dict[str, Any]] = []
    citations: list[str] = []
    for operator, chosen in plans:
        kind = "float8_e4m3fn" if operator == "attention_fp8" else given
        results, missing = _measure(operator, chosen, causal, device, dtype, rounds, logits)
        lines = [line for r in results if (line := r.measurement(kind, matmul, read)) is not None]
        if ledger is not None:
            citations += append_to_ledger(ledger, lines, device)
        if as_json:
            documents += [result.details(kind, matmul, read) for result in results]
            continue
        notes = [*missing, f"matmul ceiling {matmul.value:.1f} {matmul.unit} ({matmul.method})"]
        notes.append(f"read ceiling {read.value:.1f} {read.unit} ({read.method})")
        hard = "" if logits is None else f", logits {logits}"
        _print(f"{operator}, {kind} on {device}{hard}, median of {rounds} rounds", results, matmul, read, notes)
    if as_json:
        ceilings = {"read_gb_s": read.value, "matmul_tflops": matmul.value}
        print(json.dumps({"device": str(device), "ceilings": ceilings, "results": documents, "ledger": citations}))
        return
    for citation in citations:
        print(citation)


def attention_resources(shapes: Sequence[str] | None, *, as_json: bool) -> None:
    """Print what the prefill kernels take of an SM for the shapes' head_dims, compiled here for sm_90 and sm_80."""
    from rich.table import Table

    from onewave.bench.ops.attention import PREFILL_SHAPES, AttentionShape
    from onewave.ops.attention.mma.plan import mma_tile
    from onewave.ops.attention.resources_impl import hopper, mma, portable

    head_dims = sorted({AttentionShape.parse(text).head_dim for text in shapes or PREFILL_SHAPES})
    if head_dims[-1] > _MAX_COLUMNS:
        raise InvalidArgumentError("--shape", got=f"head_dim {head_dims[-1]}", allowed=f"at most {_MAX_COLUMNS}")
    table = Table(title="attention: what a program takes of an SM (bf16)", title_justify="left")
    for heading in ("head_dim", "kernel", "GPU"):
        table.add_column(heading, no_wrap=True)
    for heading in ("threads", "registers", "spilled", "shared", "an SM", "occupancy", "compiled"):
        table.add_column(heading, justify="right", no_wrap=True)
    documents: list[dict[str, Any]] = []
    for head_dim in head_dims:
        for causal in (False, True):
            kernels = [hopper(head_dim, causal=causal)]
            for gpu in (90, 80):
                kernels += [portable(head_dim, gpu, causal=causal), mma(head_dim, gpu, causal=causal)]
                if mma_tile(head_dim) != mma_tile(head_dim, narrow=True):
                    kernels.append(mma(head_dim, gpu, narrow=True, causal=causal))
            for found in kernels:
                show_status(f"compiled {found.kernel} kernel, head_dim {head_dim}")
                table.add_row(
                    f"{head_dim}{' causal' if causal else ''}", found.kernel, f"sm_{found.capability}",
                    str(found.threads), str(found.registers), f"{found.stack} B", f"{found.shared / 1024:.0f} KiB",
                    str(found.programs_an_sm), f"{found.occupancy:.0%}", f"{found.seconds:.1f} s",
                )  # fmt: skip
                own = {"head_dim": head_dim, "causal": causal, "programs_an_sm": found.programs_an_sm}
                documents.append(own | vars(found) | {"occupancy": found.occupancy})
    show_status("")
    if as_json:
        print(json.dumps({"resources": documents}))
        return
    print_table(table)


def _shapes(operator: str, texts: Sequence[str] | None, device: torch.device) -> list[str]:
    from onewave.bench.ops import attention as bench
    from onewave.bench.ops.attention_fp8 import FP8_SHAPES, SMALL_FP8_SHAPES
    from onewave.bench.ops.attention_varlen import SMALL_VARLEN_SHAPES, VARLEN_SHAPES

    if texts:
        return [str(bench.AttentionShape.parse(text)) for text in texts]
    if operator == "attention":
        return list(bench.PREFILL_SHAPES if device.type == "cuda" else bench.SMALL_PREFILL_SHAPES)
    if operator == "attention_varlen":
        return list(VARLEN_SHAPES if device.type == "cuda" else SMALL_VARLEN_SHAPES)
    if operator == "attention_fp8":
        return list(FP8_SHAPES if device.type == "cuda" else SMALL_FP8_SHAPES)
    return list(bench.DECODE_SHAPES if device.type == "cuda" else bench.SMALL_DECODE_SHAPES)


def _measure(
    operator: str,
    shapes: Sequence[str],
    causal: bool | None,
    device: torch.device,
    dtype: torch.dtype,
    rounds: int,
    logits: str | None,
) -> tuple[list[AttentionResult], list[str]]:
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
    results: list[AttentionResult] = []
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

            results += compare(operator, engines, make, rounds=rounds)
    show_status("")
    return results, missing


def _print(
    title: str, results: Sequence[AttentionResult], matmul: Ceiling, read: Ceiling, notes: Sequence[str]
) -> None:
    from rich.table import Table

    from onewave.bench.ops.attention import PREFILLS

    prefill = bool(results) and results[0].operator in PREFILLS
    rates = ("TFLOP/s", "of matmul") if prefill else ("TB/s", "of read")
    table = Table(title=title, title_justify="left")
    for heading in ("shape", "engine"):
        table.add_column(heading, no_wrap=True)
    with_errors = any(result.operator == "attention_fp8" for result in results)
    for heading in ("us", *rates, "onewave is", *(("rms error",) if with_errors else ())):
        table.add_column(heading, justify="right", no_wrap=True)
    failed: list[str] = []
    for result in results:
        shape, causal = result.operands
        label = f"{shape} causal" if prefill and causal else str(shape)
        share = result.share(matmul, read)
        if result.seconds is None or share is None:
            table.add_row(label, result.engine, "failed")
            failed.append(f"{label} {result.engine}: {result.failure}")
            continue
        rate = result.tflops if prefill else result.terabytes_per_second
        ratio = "" if result.ratio is None else f"{result.ratio:.2f}x"
        error = (f"{result.error:.2%}",) if with_errors and result.error is not None else ()
        took = f"{result.seconds.p50 * 1e6:.1f}"
        table.add_row(label, result.engine, took, f"{rate:.3g}", f"{share:.1%}", ratio, *error)
    print_table(table, *failed, *notes)


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
