"""`onewave bench ops linear --rows`: the 16-bit product of many rows beside PyTorch's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onewave.base.errors import InvalidArgumentError, shown
from onewave.base.weight_formats import WEIGHT_BYTES, find_format
from onewave.cli.bench.report import Results, Rows, ceiling_line, name_of, numbers, show_status

if TYPE_CHECKING:
    import torch

    from onewave.bench.ops.products import ProductResult
    from onewave.models.config.model_config import ModelConfig


@dataclass(frozen=True)
class ManyRows:
    """The options of the product of many rows."""

    rows: Annotated[
        str | None,
        typer.Option(
            "--rows",
            help="Of linear alone: our product of 16-bit weights beside PyTorch's in turns, with so many rows each:"
            " 64,512,8192. Losses are printed last.",
        ),
    ] = None
    weight_format: Annotated[
        str,
        typer.Option(
            "--weight-format",
            "--tiles",
            help="With --rows: also from the wave's tiles of this format, as prompts run; 16-bit: none.",
        ),
    ] = "compact"


def bench_products(
    asked: ManyRows,
    shapes: list[str] | None,
    model: tuple[str, ModelConfig],
    where: tuple[torch.device, torch.dtype],
    *,
    sequences: int,
    rounds: int,
    out: Results,
) -> None:
    """Time a model's matrices, or those of the shapes "rows,cols", and print losses. model: its name and sizes.

    sequences: of the steps that tiles are for. Raises InvalidArgumentError, UnsupportedError.
    """
    from onewave.bench.ceilings import matmul_rate
    from onewave.bench.ops.products import LOSS, Setting, measure_products, product_of_shape, products_of

    (name, config), (device, dtype) = model, where
    tokens = numbers("--rows", asked.rows or "", 1)
    if asked.weight_format not in WEIGHT_BYTES:
        raise InvalidArgumentError("--weight-format", got=shown(asked.weight_format), allowed=", ".join(WEIGHT_BYTES))
    plan = [product_of_shape(config, *_sizes(text)) for text in shapes or []] or products_of(config)
    if asked.weight_format == "compact" and name_of(dtype) != "bfloat16":
        what = f"compact, of {name_of(dtype)}"
        raise InvalidArgumentError("--weight-format", got=what, allowed="16-bit, or --dtype bfloat16")
    show_status("measuring the matmul ceiling")
    ceiling = matmul_rate(device)
    title = f"{name}, {name_of(dtype)} on {device}: products of many rows, median of {rounds} rounds"
    columns = ("matrix", "implementation", "rows", "us", "TFLOP/s", "of ceiling", "speed by torch's")
    table = Rows(out, device, title, *columns, left=2)
    results: list[ProductResult] = []
    found: list[dict[str, Any]] = []
    setting = Setting(device, dtype, find_format(asked.weight_format), sequences, rounds)
    for result in measure_products(plan, tokens, setting, show=show_status):
        line, rate = result.measurement(name, name_of(dtype), ceiling), result.teraflops_per_second
        cells = (
            "{} {}x{}".format(result.product.name, *result.product.shape),
            result.implementation,
            str(result.rows),
            f"{result.seconds.p50 * 1e6:.1f}",
            f"{rate:.1f}",
            f"{rate / ceiling.value:.1%}",
            "" if result.ratio is None else f"{result.ratio:.3f}",
        )
        table.add(cells, [line])
        results.append(result)
        found.append({"us": line.summary.p50, **line.extra})
    ours = [result for result in results if result.ratio is not None]
    losses = [f"loss: {result}: {result.ratio:.3f} of torch's speed" for result in ours if result.is_loss]
    facts = {"model": name, "device": str(device), "ceiling_tflops": ceiling.value, "products": found, "losses": losses}
    table.finish(facts, ceiling_line(ceiling), *losses, f"{len(losses)} of {len(ours)} below {LOSS} of torch's speed")


def _sizes(text: str) -> tuple[int, int]:
    try:
        rows, cols = numbers("--shape", text, 1)
    except (InvalidArgumentError, ValueError):
        raise InvalidArgumentError("--shape", got=shown(text), allowed="rows,cols of the matrix") from None
    return rows, cols
