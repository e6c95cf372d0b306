"""`onewave bench ops ffn`: the feed-forward block in every arrangement, its time or its traffic."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from onewave.base.errors import InvalidArgumentError, shown
from onewave.cli.bench.latency import numbers
from onewave.cli.bench.report import append_to_ledger, print_table, show_status

if TYPE_CHECKING:
    import torch

    from onewave.bench.ops.ffn import FFNShape

# Counters hardly differ from run to run.
_MAX_COUNTED = 3


def bench_ffn(
    shapes: list[str] | None,
    *,
    device: torch.device,
    dtype: torch.dtype,
    reps: int,
    as_json: bool,
    ledger: Path | None,
) -> None:
    """Time the feed-forward block in every arrangement.

    shapes: "rows,hidden,intermediate", with ",gated" behind it or not; "sweep" for 16 and 64 to 32,768 rows of 4096,
    14336 without and with a gate; None for 1 to 64 rows of them.
    """
    from onewave.bench.ceilings import matmul_rate, read_bandwidth
    from onewave.bench.ops.ffn import FFNResult, check_card, measure_ffn

    plan = _shapes(shapes)
    check_card(device)
    show_status("measuring the ceilings")
    # Few rows read, many multiply: each case is compared with what bounds it.
    ceilings = {many: matmul_rate(device) if many else read_bandwidth(device) for many in {s.is_many for s in plan}}
    name = str(dtype).removeprefix("torch.")
    results: list[FFNResult] = []
    rows_of: list[dict[str, object]] = []
    citations: list[str] = []
    for shape in plan:
        show_status(f"ffn {shape}")
        found = measure_ffn(shape, device, dtype, reps=reps)
        records = [result.measurement(name, ceilings[shape.is_many]) for result in found]
        results += found
        rows_of.extend({"us": record.summary.p50, **record.extra} for record in records)
        # Shape by shape: what is measured stays if a later one fails.
        citations += [] if ledger is None else append_to_ledger(ledger, records, device)
    show_status("")
    if as_json:
        values = {ceiling.unit: ceiling.value for ceiling in ceilings.values()}
        print(json.dumps({"ceilings": values, "trials": rows_of, "ledger": citations}))
        return
    from rich.table import Table

    table = Table(title=f"ffn, {name} on {device}", title_justify="left")
    for heading in ("shape", "implementation", "us", "GB/s", "TFLOP/s", "of ceiling", "x products"):
        table.add_column(heading, justify="left" if heading in ("shape", "implementation") else "right", no_wrap=True)
    for result in results:
        speedup = "" if result.speedup is None else f"{result.speedup:.2f}"
        cells = (f"{result.seconds.p50 * 1e6:.1f}", f"{result.gigabytes_per_second:.0f}")
        cells += (f"{result.teraflops_per_second:.0f}", f"{result.share(ceilings[result.shape.is_many]):.1%}", speedup)
        table.add_row(str(result.shape), result.implementation, *cells)
    notes = [f"{c.name} ceiling {c.value:.0f} {c.unit} ({c.method})" for c in ceilings.values()]
    print_table(table, *notes, *citations)


def count_ffn(
    shapes: list[str] | None,
    *,
    device: torch.device,
    dtype: torch.dtype,
    reps: int,
    as_json: bool,
    ledger: Path | None,
) -> None:
    """Bytes of device memory and hit rate of the L2 cache of every arrangement, from ncu; shapes as in bench_ffn.

    Three repetitions at most. Raises UnsupportedError without a GPU, without ncu or without its permission.
    """
    from onewave.bench.ops import ffn_counters

    plan = _shapes(shapes)
    show_status("counting under ncu")
    results = ffn_counters.count_ffn(plan, device, dtype, reps=min(reps, _MAX_COUNTED))
    show_status("")
    name = str(dtype).removeprefix("torch.")
    records = [result.measurement(name) for result in results]
    citations = [] if ledger is None else append_to_ledger(ledger, records, device)
    if as_json:
        rows = [{"dram_bytes": record.summary.p50, **record.extra} for record in records]
        print(json.dumps({"counted": rows, "ledger": citations}))
        return
    from rich.table import Table

    table = Table(title=f"ffn, {name} on {device}: from a cold L2 cache, by ncu", title_justify="left")
    for heading in ("shape", "implementation", "MB read", "MB written", "x least", "L2 hits"):
        table.add_column(heading, justify="left" if heading in ("shape", "implementation") else "right", no_wrap=True)
    for result in results:
        each = result.median
        cells = (f"{each.dram_read_bytes * 1e-6:.1f}", f"{each.dram_write_bytes * 1e-6:.1f}")
        cells += (f"{result.times_least:.2f}", f"{each.l2_hit_rate:.1%}")
        table.add_row(str(result.shape), result.implementation, *cells)
    print_table(table, "least: the matrices, rows in and rows out, once", *citations)


def _shapes(texts: list[str] | None) -> list[FFNShape]:
    from onewave.bench.ops.ffn import SHAPES, SWEEP, FFNShape

    plan: list[FFNShape] = []
    for text in texts or []:
        rows, hidden, intermediate, gated = (0, 0, 0, False) if text == "sweep" else _block(text)
        plan += SWEEP if text == "sweep" else [FFNShape(rows, hidden, intermediate, gated)]
    return plan or list(SHAPES)


def _block(text: str) -> tuple[int, int, int, bool]:
    sizes, comma, last = text.rpartition(",")
    gated = last.strip() == "gated" and bool(comma)
    allowed = "rows,hidden,intermediate, rows,hidden,intermediate,gated, or sweep"
    try:
        parts = numbers("--shape", sizes if gated else text)
    except InvalidArgumentError:
        parts = []
    if len(parts) != 3 or min(parts) < 1:
        raise InvalidArgumentError("--shape", got=shown(text), allowed=allowed)
    return parts[0], parts[1], parts[2], gated
