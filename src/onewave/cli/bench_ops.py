"""`onewave bench ops`: how fast the operators are one by one, beside PyTorch's."""

from __future__ import annotations

import json
import shlex
import sys
from typing import Annotated

import typer

from onewave.base.errors import InvalidArgumentError
from onewave.base.settings import Settings
from onewave.cli import options
from onewave.weights import sources

__all__ = ["ops"]


def ops(
    names: Annotated[list[str] | None, typer.Argument(help="Operators to measure. Default: all.")] = None,
    model: Annotated[
        str, typer.Option("--model", "-m", help="Whose shapes: anything `generate` takes, or a built-in configuration.")
    ] = options.DEFAULT_ALIAS,
    batch_size: Annotated[int, typer.Option("--batch-size", help="Sequences of the decode step.")] = 1,
    context: Annotated[int, typer.Option("--context", help="Keys a sequence attends to.")] = 512,
    weight_format: Annotated[str, typer.Option("--weight-format", help="How a CPU keeps its matrices.")] = "Q4_1",
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    reps: Annotated[int, typer.Option("--reps", help="Measured repetitions of each trial.")] = 20,
    as_json: options.Json = False,
    ledger: options.Ledger = None,
) -> None:
    """Time each operator of a decode step on random operands that no cache holds, and the read ceiling beside them."""
    for name, value in (("--batch-size", batch_size), ("--context", context), ("--reps", reps)):
        if value < 1:
            raise InvalidArgumentError(name, got=str(value), allowed="whole numbers from 1")
    settings = Settings.from_env()
    load_format = "dummy" if model in sources.builtin_names() else "auto"
    location = sources.resolve(model, settings, load_format=load_format)
    import torch
    from rich.console import Console
    from rich.table import Table

    from onewave.bench import ledger as ledgers
    from onewave.bench.ceilings import read_bandwidth
    from onewave.bench.operators import OPERATORS, measure, trials
    from onewave.engine.options import check_dtype, choose_device, choose_dtype
    from onewave.models.config_file import load_config
    from onewave.ops.linear.packed import FORMATS

    chosen = names or list(OPERATORS)
    for name in chosen:
        if name not in OPERATORS:
            raise InvalidArgumentError("operator", got=repr(name), allowed=", ".join(OPERATORS))
    if weight_format not in FORMATS:
        raise InvalidArgumentError("--weight-format", got=repr(weight_format), allowed=", ".join(FORMATS))
    check_dtype(dtype)
    where = choose_device(device)
    config = load_config(location)
    kind = choose_dtype(dtype, config, where)
    ceiling = read_bandwidth(where)
    plan = trials(config, where, kind, tokens=batch_size, context=context, weight_format=weight_format)
    results = [measure(trial, where, reps=reps) for trial in plan if trial.operator in chosen]
    dtype_name = str(kind).removeprefix("torch.")
    records = [result.measurement(location.name, dtype_name, ceiling) for result in results]
    citations: list[str] = []
    if ledger is not None:
        full_name = torch.cuda.get_device_name(where) if where.type == "cuda" else "cpu"
        command = shlex.join(["onewave", *sys.argv[1:]])
        lines = (ledgers.as_record(r, device_name=full_name, command=command, settings=settings) for r in records)
        citations = [ledgers.append(ledger, line) for line in lines]
    if as_json:
        rows = [
            {"operator": r.metric, "us": r.summary.p50, "gigabytes_per_second": x.gigabytes_per_second, **r.extra}
            for r, x in zip(records, results, strict=True)
        ]
        print(json.dumps({"model": location.name, "device": str(where), "ceiling_gb_s": ceiling.value, "trials": rows}))
        return
    table = Table(title=f"{location.name}, {dtype_name} on {where}, batch {batch_size}", title_justify="left")
    for heading in ("operator", "shape", "implementation"):
        table.add_column(heading, no_wrap=True)
    for heading in ("us", "GB/s", "of ceiling"):
        table.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        rate = result.gigabytes_per_second
        cells = (f"{result.seconds.p50 * 1e6:.1f}", f"{rate:.1f}", f"{rate / ceiling.value:.1%}")
        table.add_row(result.trial.operator, result.trial.shape, result.trial.implementation, *cells)
    console = Console(width=None if sys.stdout.isatty() else 110)
    console.print(table)
    console.print(f"read ceiling {ceiling.value:.1f} {ceiling.unit} ({ceiling.method})", highlight=False)
    for citation in citations:
        print(f"ledger/{citation}")
