"""`onewave bench predict`: what a decode step of one wave should take, by simulation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from onewave.base.errors import InvalidArgumentError
from onewave.base.settings import Settings
from onewave.cli import options
from onewave.cli.bench_report import check_count
from onewave.cli.tiles_tables import read_trace, show_timeline, write_text
from onewave.weights import sources

if TYPE_CHECKING:
    from onewave.models.config import ModelConfig
    from onewave.models.wave_prediction import WaveCosts

__all__ = ["predict"]


def predict(
    model: options.Model = "llama-3.2-1b",
    batch_size: Annotated[int, typer.Option("--batch-size", help="Sequences at once.")] = 1,
    workers: Annotated[int, typer.Option("--workers", help="Multiprocessors.")] = 132,
    costs: Annotated[
        Path | None, typer.Option("--costs", metavar="FILE", help="What --fit has written. Default: an H200's.")
    ] = None,
    fit: Annotated[
        Path | None,
        typer.Option(
            "--fit", metavar="TRACE", help="Fit the costs to a step that `bench wave --trace TRACE` has measured."
        ),
    ] = None,
    bandwidth: Annotated[
        float | None, typer.Option("--bandwidth", help="With --fit: the read ceiling of that run, GB/s.")
    ] = None,
    source: Annotated[str, typer.Option("--source", help="With --fit: what was measured, as its ledger line.")] = "",
    save: Annotated[
        Path | None, typer.Option("--save", metavar="FILE", help="With --fit: write the costs here.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", metavar="FILE", help="Write the simulated Trace as JSON.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Predict a decode step of one wave: its own plan, proved and simulated; no card needed.

    `onewave tiles compare` sets the trace beside a measured one, phase by phase.
    """
    check_count("--batch-size", batch_size)
    check_count("--workers", workers)
    from onewave.models.loading import load_config
    from onewave.models.wave_prediction import kept_costs, predict_step

    chosen = "dummy" if model in sources.builtin_names() else "auto"
    location = sources.resolve(model, Settings.from_env(), load_format=chosen)
    config = load_config(location)
    if fit is None:
        for name, value in (("--bandwidth", bandwidth), ("--source", source or None), ("--save", save)):
            if value is not None:
                raise InvalidArgumentError(name, got="no --fit", allowed="with --fit TRACE")
        known = kept_costs() if costs is None else kept_costs(costs)
    else:
        if costs is not None:
            raise InvalidArgumentError("--costs", got="with --fit", allowed="one of the two")
        known = _fitted(fit, config, batch_size, bandwidth, source)
        workers = read_trace(fit).workers
        if save is not None:
            write_text(save, known.to_json())
    made = predict_step(config, known, batch=batch_size, workers=workers)
    if trace is not None:
        write_text(trace, made.to_json())
    if as_json:
        facts = {"model": location.name, "batch_size": batch_size, "predicted_ms": made.makespan * 1e-6}
        print(json.dumps(facts | {"costs": json.loads(known.to_json())}))
        return
    from onewave.tiles.timeline import timeline

    print(f"{location.name}, {batch_size} at once: {made.makespan * 1e-6:.3f} ms predicted")
    show_timeline(timeline(made))
    print(f"costs: {known.source or 'fitted'}; {known.memory_bandwidth:,.0f} GB/s")


def _fitted(path: Path, config: ModelConfig, batch: int, bandwidth: float | None, source: str) -> WaveCosts:
    from onewave.models.wave_prediction import fit_costs, kept_costs

    rate = kept_costs().memory_bandwidth if bandwidth is None else bandwidth
    if not rate > 0:
        raise InvalidArgumentError("--bandwidth", got=str(bandwidth), allowed="above 0")
    return fit_costs(config, read_trace(path), batch=batch, memory_bandwidth=rate, source=source or str(path))
