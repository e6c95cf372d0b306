"""`onewave bench wave --plan`: a decode step by several plans, side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from onewave.base.errors import InvalidArgumentError, UnsupportedError, shown
from onewave.base.settings import Settings
from onewave.base.weight_formats import find_format
from onewave.cli import options
from onewave.cli.bench.report import Results, Rows, ceiling_line, make_current, name_of, numbers, show_status
from onewave.cli.output import write_file
from onewave.cli.tiles.options import plan_and_config

if TYPE_CHECKING:
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
    from onewave.gpu.compile_pool import processes

    with processes(1 + len(read)) as pool:  # before this process uses the GPU
        _time_plans(call, read, config, trace, out, pool)


def _time_plans(
    call: typer.Context,
    read: Mapping[str, StepPlan],
    config: ModelConfig,
    trace: Path | None,
    out: Results,
    pool: ProcessPoolExecutor | None,
) -> None:
    """pool: proves the plans and compiles their kernels."""
    from onewave.bench.ceilings import read_bandwidth
    from onewave.bench.engine.ahead import launches_of_cases
    from onewave.bench.engine.plans import OWN, ProvedPlan, measure_plans, prove_and_predict, rank_correlation
    from onewave.bench.engine.wave import WaveCase
    from onewave.engine.load.checkpoint import open_parts
    from onewave.engine.load.choices import choose_device, choose_dtype
    from onewave.engine.load.first_load import launches_of_load
    from onewave.engine.load.options import LoadOptions
    from onewave.engine.load.streamed import StreamedModel, stream_model
    from onewave.gpu.compile_pool import compile_in, done_by
    from onewave.gpu.launch import compile_ahead, distinct
    from onewave.models.llama_plan import DecodePlan, plan_decode, workers_for
    from onewave.models.step_plan import prove_plan
    from onewave.ops.warm import side_by_side
    from onewave.wave.launch.launch import co_resident
    from onewave.wave.plan.program import WaveProgram
    from onewave.weights.fetch import sources

    first = next(iter(read.values()))
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
    show_status("proving the plans and compiling their kernels")
    step = how.step(config)
    own = partial(plan_decode, step, workers=workers_for(step, available=co_resident(where)), context=context)
    jobs: dict[str, Callable[[], DecodePlan]] = {OWN: own}
    jobs |= {name: partial(prove_plan, config, each, context=context) for name, each in read.items()}

    def made(job: Callable[[], DecodePlan]) -> ProvedPlan:
        return done_by(pool, partial(prove_and_predict, job))

    with ThreadPoolExecutor(len(jobs)) as threads:
        proved = dict(zip(jobs, threads.map(made, jobs.values()), strict=True))
    case = WaveCase(first.batch, context, traced=trace is not None)
    with compile_in(pool):
        launches = [each for plan in proved.values() for each in launches_of_load(config, how, plan.program)]
        launches += [each for plan in proved.values() for each in launches_of_cases(config, how, [case], plan.program)]
        ready = {f"{at}": partial(compile_ahead, one) for at, one in enumerate(distinct(launches))}
        side_by_side(ready, where, len(ready))
    show_status("measuring the read ceiling")
    ceiling = read_bandwidth(where)

    def load(program: WaveProgram) -> StreamedModel:
        with open_parts(location, config, how) as parts:
            return stream_model(parts, config, program, how)

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
    rows = Rows(out, where, title, "plan", "ms/token", "predicted ms", "x own", "bits", "self-check")
    for result, record in zip(results, records, strict=True):
        rows.add(_cells(result, results[0].seconds.p50), [record])
    rows.finish(facts, ceiling_line(ceiling, 0), *notes)


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


def _cells(result: WaveResult, own: float) -> tuple[str, ...]:
    predicted, check = result.predicted or 0.0, result.difference or 0.0
    return (
        result.plan or "",
        f"{result.seconds.p50 * 1e3:.4f} ± {result.seconds.sd * 1e3:.4f}",
        f"{predicted * 1e3:.4f}",
        f"{result.seconds.p50 / own:.4f}",
        "the same" if result.same_bits else "others",
        f"{check:.2%}",
    )
