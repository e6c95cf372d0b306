"""`onewave bench predict`: what a decode step of one wave should take, by simulation."""

import json
import math
from pathlib import Path
from typing import Annotated

import typer

from onewave.base.errors import InvalidArgumentError
from onewave.cli import options
from onewave.cli.output import answer, write_file
from onewave.cli.tiles import options as given
from onewave.cli.tiles.tables import read_trace, timeline_table

# More SMs than any GPU has; the simulation takes longer with each.
_MAX_WORKERS = 1024


def predict(
    call: typer.Context,
    model: Annotated[str, typer.Option("--model", "-m", help=given.MODEL)] = "llama-3.2-1b",
    batch_size: given.BatchSize = 1,
    workers: Annotated[
        int,
        typer.Option(
            "--workers",
            min=1,
            max=_MAX_WORKERS,
            help="SMs that share the bandwidth; with --fit, as many as the trace's.",
        ),
    ] = 132,
    context: given.Context = 512,
    weight_format: given.WeightFormat = "compact",
    costs: Annotated[
        Path | None, typer.Option("--costs", metavar="FILE", help="What --fit has written. Default: an H200's.")
    ] = None,
    fit: Annotated[
        Path | None,
        typer.Option(
            "--fit",
            metavar="TRACE",
            help="Fit the costs to a step that `bench wave --trace TRACE` has measured: a minute or two.",
        ),
    ] = None,
    bandwidth: Annotated[
        float | None, typer.Option("--bandwidth", help="With --fit: the read ceiling of that run, GB/s.")
    ] = None,
    source: Annotated[str, typer.Option("--source", help="With --fit: what was measured, as its ledger line.")] = "",
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="With --fit: write the costs here.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", metavar="FILE", help="Write the simulated Trace as JSON.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Predict a decode step of one wave: the plan that the engine launches, proved and simulated; needs no GPU.

    `onewave tiles compare` sets the trace beside a measured one, phase by phase.
    """
    _check_fit(call, fitted=fit is not None, bandwidth=bandwidth)
    form = given.format_of(weight_format)
    from onewave.models.config.read import find_config
    from onewave.models.llama_plan import DecodeStep
    from onewave.models.wave_prediction import fit_costs, kept_costs, predict_step

    known = None if fit is not None else kept_costs() if costs is None else kept_costs(costs)
    measured = None if fit is None else read_trace(fit)
    step = DecodeStep(find_config(model), batch_size, form)
    if known is None:
        assert measured is not None
        assert bandwidth is not None
        workers = measured.workers
        known = fit_costs(step, measured, context=context, memory_bandwidth=bandwidth, source=source or str(fit))
        if out is not None:
            write_file("--out", out, known.to_json())
    made = predict_step(step, known, workers=workers, context=context)
    if trace is not None:
        write_file("--trace", trace, made.to_json())
    from onewave.tiles.sim.timeline import timeline

    facts = {"model": model, "batch_size": batch_size, "predicted_ms": made.makespan * 1e-6}
    answer(
        as_json,
        facts | {"costs": json.loads(known.to_json())},
        f"{model}, {batch_size} at once: {made.makespan * 1e-6:.3f} ms predicted",
        timeline_table(timeline(made)),
        f"costs: {known.source or 'fitted'}; {known.memory_bandwidth:,.0f} GB/s",
    )


def _check_fit(call: typer.Context, *, fitted: bool, bandwidth: float | None) -> None:
    """Refuse options that --fit does not go with, or that mean nothing without it. Raises InvalidArgumentError."""
    needs_fit, without_fit = ("bandwidth", "source", "out"), ("costs", "workers")
    for name in options.chosen(call, without_fit if fitted else needs_fit):
        got, allowed = ("with --fit", "a step on the trace's SMs, by its own costs")
        if not fitted:
            got, allowed = "no --fit", "with --fit TRACE"
        raise InvalidArgumentError(name, got=got, allowed=allowed)
    if fitted and (bandwidth is None or not 0 < bandwidth < math.inf):
        got = "nothing" if bandwidth is None else str(bandwidth)
        raise InvalidArgumentError("--bandwidth", got=got, allowed="the read ceiling of the trace's run, above 0")
