"""`onewave bench wave --plan`: a decode step by several plans, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from onewave.base.errors import InvalidArgumentError, UnsupportedError, shown
from onewave.base.settings import Settings
from onewave.base.weight_formats import find_format
from onewave.cli import options
from onewave.cli.bench.report import Results, ceiling_line, make_current, name_of, numbers, show_status
from onewave.cli.output import table, write_file
from onewave.cli.tiles.options import plan_and_config

if TYPE_CHECKING:
    from rich.table import Table

    from onewave.bench.engine.wave import WaveResult
    from onewave.models.config.model_config import ModelConfig
    from onewave.models.step_plan import StepPlan

# Each has a copy of the packed weights.
_MAX_PLANS = 8
_BESIDE = ("context", "reps", "trace", "device", "load_format", "as_json", "ledger", "plan", "plans")


def time_plans(
    call: typer.Context, files: list[Path], directory: Path | None, trace: Path | None, out: Results
) -> None:
    """Measure and show what `bench wave` does with --plan or --plans. call: its other options. Raises OnewaveError."""
    others = options.chosen(call, {str(parameter.name) for parameter in call.command.params} - {*_BESIDE})
    for name in others:
        allowed = ", ".join(f"--{option.replace('_', '-')}" for option in _BESIDE[:5])
        raise InvalidArgumentError("--plan", got=f"with {name}", allowed=f"{allowed} beside it")
    read, config = _read([*files, *_plans_in(directory)])
    first = next(iter(read.values()))
    from onewave.bench.ceilings import read_bandwidth
    from onewave.bench.engine.plans import OWN, measure_plans, rank_correlation
    from onewave.bench.engine.wave import WaveCase
    from onewave.engine.load.checkpoint import open_parts
    from onewave.engine.load.choices import choose_device, choose_dtype
    from onewave.engine.load.options import LoadOptions
    from onewave.engine.load.streamed import StreamedModel, stream_model
    from onewave.models.llama_plan import DecodePlan, plan_decode, workers_for
    from onewave.models.step_plan import prove_plan
    from onewave.wave.launch.launch import co_resident
    from onewave.weights.fetch import sources

    where = choose_device(call.params["device"])
    if where.type != "cuda":
        raise UnsupportedError("bench wave", got=str(where), allowed="a GPU of compute capability 9.0")
    make_current(where)
    settings, [context] = Settings.from_env(), numbers("--context", call.params["context"])
    chosen = "dummy" if first.model in sources.builtin_names() else call.params["load_format"]
    location = sources.resolve(first.model, settings, load_format=chosen)
    weight_format = find_format(first.weights)
    how = LoadOptions(
        dtype=choose_dtype("auto", config, where),
        device=where,
        max_num_seqs=first.batch,
        max_model_len=max(context + 1, 64),
        cache_dir=settings.cache_dir,
        load_format=chosen,
        weight_format=weight_format,
    )
    show_status("proving the plans")
    workers = workers_for(config, batch=first.batch, available=co_resident(where), weight_bytes=how.weight_bytes)
    own = plan_decode(config, batch=first.batch, workers=workers, weight_bytes=how.weight_bytes, context=context)
    proved = {OWN: own} | {name: prove_plan(config, each, context=context) for name, each in read.items()}
    show_status("measuring the read ceiling")
    ceiling = read_bandwidth(where)

    def load(plan: DecodePlan) -> StreamedModel:
        with open_parts(location, config, how) as parts:
            return stream_model(parts, config, plan.program, how)

    case = WaveCase(first.batch, context, traced=trace is not None)
    results, traces = measure_plans(load, proved, case, rounds=call.params["reps"], show=show_status)
    for number, (name, traced) in enumerate(traces.items()):
        if trace is not None:
            write_file("--trace", trace if number == 0 else trace.with_stem(f"{trace.stem}-{name}"), traced.to_json())
    correlation = rank_correlation(results)
    notes = [] if correlation is None else [f"rank correlation of predicted and measured time: {correlation:.2f}"]
    records = [result.measurement(location.name, name_of(how.dtype), ceiling) for result in results]
    steps = [{"ms": record.summary.p50, **record.extra} for record in records]
    facts: dict[str, Any] = {"model": location.name, "ceiling_gb_s": ceiling.value, "steps": steps}
    facts["rank_correlation"] = correlation
    title = f"{location.name}, {first.batch} at once, {first.weights} weights, {context} tokens before, on {where}"
    out.show(facts, out.record(records, where), _table(title, results), ceiling_line(ceiling, 0), *notes)


def _plans_in(directory: Path | None) -> list[Path]:
    if directory is None:
        return []
    found = sorted(directory.glob("*.json")) if directory.is_dir() else []
    if not found:
        raise InvalidArgumentError("--plans", got=shown(str(directory)), allowed="a directory with plans, *.json")
    return found


def _read(files: list[Path]) -> tuple[dict[str, StepPlan], ModelConfig]:
    """The plans by their files' names, which are for one model, batch and weight format."""
    if len(files) > _MAX_PLANS:
        raise InvalidArgumentError("--plans", got=f"{len(files)} plans", allowed=f"up to {_MAX_PLANS}")
    read: dict[str, StepPlan] = {}
    config: ModelConfig | None = None
    for file in files:
        read[file.stem], config = plan_and_config(str(file))
        first = next(iter(read.values()))
        mine, theirs = (
            f"{plan.model}, {plan.batch} at once, {plan.weights} weights" for plan in (read[file.stem], first)
        )
        if mine != theirs or read[file.stem].config != first.config:
            raise InvalidArgumentError(f"--plan {file}", got=mine, allowed=f"{theirs}, as of the first plan")
    assert config is not None
    return read, config


def _table(title: str, results: list[WaveResult]) -> Table:
    rows = table(title, "plan", "ms/token", "predicted ms", "x own", "bits", "self-check")
    own = results[0].seconds.p50
    for result in results:
        predicted, check = result.predicted or 0.0, result.difference or 0.0
        rows.add_row(
            result.plan,
            f"{result.seconds.p50 * 1e3:.4f} ± {result.seconds.sd * 1e3:.4f}",
            f"{predicted * 1e3:.4f}",
            f"{result.seconds.p50 / own:.4f}",
            "the same" if result.same_bits else "others",
            f"{check:.2%}",
        )
    return rows
