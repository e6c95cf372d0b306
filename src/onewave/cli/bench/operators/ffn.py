"""`onewave bench ops ffn` and `post-attention`: either in every arrangement, its time or its traffic."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onewave.base.errors import InvalidArgumentError, shown
from onewave.cli.bench.report import Results, Rows, ceiling_line, name_of, numbers, show_status
from onewave.cli.output import table

if TYPE_CHECKING:
    import torch

    from onewave.bench.ops.ffn import FFNShape

# Counters hardly differ from run to run.
_MAX_COUNTED = 3


FFN, LAYER = "ffn", "post-attention"


def bench_ffn(
    name: str, shapes: list[str] | None, *, device: torch.device, dtype: torch.dtype, reps: int, out: Results
) -> None:
    """Time the feed-forward block, or all of a layer behind attention, in every arrangement.

    name: FFN or LAYER. shapes of FFN: "rows,hidden,intermediate", with ",gated" behind it or not; "sweep" for 16 and 64
    to 32,768 rows of 4096, 14336 without and with a gate; None for 1 to 64 rows of them. Of LAYER:
    "rows,attended,hidden,intermediate"; "sweep" or None for 256 to 32,768 rows of the 8B and the 1B.
    """
    from onewave.bench.ceilings import matmul_rate, read_bandwidth
    from onewave.bench.ops.ffn import check_gpu, measure_ffn

    plan = _shapes(name, shapes)
    check_gpu(device)
    show_status("measuring the ceilings")
    # Few rows read, many multiply: each case is compared with what bounds it.
    ceilings = {many: matmul_rate(device) if many else read_bandwidth(device) for many in {s.is_many for s in plan}}
    kind = name_of(dtype)
    trials: list[dict[str, object]] = []
    columns = ("us", "GB/s", "TFLOP/s", "of ceiling", f"x {plan[0].baseline_name}")
    rows = Rows(out, device, f"{name}, {kind} on {device}", "shape", "implementation", *columns, left=2)
    for shape in plan:
        show_status(f"{name} {shape}")
        ceiling = ceilings[shape.is_many]
        found = measure_ffn(shape, device, dtype, reps=reps)
        records = [result.measurement(kind, ceiling) for result in found]
        trials.extend({"us": record.summary.p50, **record.extra} for record in records)
        for result, record in zip(found, records, strict=True):
            cells = (
                str(shape),
                result.implementation,
                f"{result.seconds.p50 * 1e6:.1f}",
                f"{result.gigabytes_per_second:.0f}",
                f"{result.teraflops_per_second:.0f}",
                f"{result.share(ceiling):.1%}",
                "" if result.speedup is None else f"{result.speedup:.2f}",
            )
            rows.add(cells, [record])
    facts = {"ceilings": {each.unit: each.value for each in ceilings.values()}, "trials": trials}
    rows.finish(facts, *(ceiling_line(each, 0) for each in ceilings.values()))


def count_ffn(
    name: str, shapes: list[str] | None, *, device: torch.device, dtype: torch.dtype, reps: int, out: Results
) -> None:
    """Bytes of device memory and hit rate of the L2 cache of every arrangement, from ncu; shapes as in bench_ffn.

    Three repetitions at most. Raises UnsupportedError without a GPU, without ncu or without its permission.
    """
    from onewave.bench.ops import ffn_counters

    plan = _shapes(name, shapes)
    show_status("counting under ncu")
    results = ffn_counters.count_ffn(plan, device, dtype, reps=min(reps, _MAX_COUNTED), show=show_status)
    records = [result.measurement(name_of(dtype)) for result in results]
    columns = ("MB read", "MB written", "x least", "L2 hits")
    title = f"{name}, {name_of(dtype)} on {device}: from a cold L2 cache, by ncu"
    rows = table(title, "shape", "implementation", *columns, left=2)
    for result in results:
        median = result.median
        rows.add_row(
            str(result.shape),
            result.implementation,
            f"{median.dram_read_bytes * 1e-6:.1f}",
            f"{median.dram_write_bytes * 1e-6:.1f}",
            f"{result.times_least:.2f}",
            f"{median.l2_hit_rate:.1%}",
        )
    facts = {"counted": [{"dram_bytes": record.summary.p50, **record.extra} for record in records]}
    out.show(facts, out.record(records, device), rows, "least: the matrices, rows in and rows out, once")


def _shapes(name: str, texts: list[str] | None) -> list[FFNShape]:
    from onewave.bench.ops.ffn import SHAPES, SWEEP, FFNShape

    plan: list[FFNShape] = []
    if name == LAYER:
        from onewave.bench.ops import post_attention as layer

        for text in texts or ["sweep"]:
            plan += layer.SWEEP if text == "sweep" else [_layer(text)]
        return plan
    for text in texts or []:
        rows, hidden, intermediate, gated = (0, 0, 0, False) if text == "sweep" else _block(text)
        plan += SWEEP if text == "sweep" else [FFNShape(rows, hidden, intermediate, gated)]
    return plan or list(SHAPES)


def _layer(text: str) -> FFNShape:
    from onewave.bench.ops.post_attention import LayerShape

    try:
        rows, attended, hidden, intermediate = numbers("--shape", text, least=1)
    except (InvalidArgumentError, ValueError):
        allowed = "rows,attended,hidden,intermediate, or sweep"
        raise InvalidArgumentError("--shape", got=shown(text), allowed=allowed) from None
    return LayerShape(rows, hidden, intermediate, attended=attended)


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
