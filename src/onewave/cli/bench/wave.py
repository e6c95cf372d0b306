"""`onewave bench wave`: a decode step as one launch, beside what it replaces."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onewave.base.errors import InvalidArgumentError, OutOfReachError, UnsupportedError
from onewave.base.settings import Settings
from onewave.base.weight_formats import WeightFormat, find_rounding
from onewave.cli import options
from onewave.cli.bench import report
from onewave.cli.bench.plans import time_plans
from onewave.cli.output import write_file
from onewave.cli.tiles.tables import timeline_table
from onewave.engine.arguments import check_device, check_dtype, check_kv_cache_dtype
from onewave.engine.load.stopwatch import phases_told
from onewave.wave.plan.layout import PAGES
from onewave.weights.fetch import sources

if TYPE_CHECKING:
    import torch
    from rich.table import Table

    from onewave.bench.ceilings import Ceiling
    from onewave.bench.engine.wave import WaveResult
    from onewave.engine.load.options import LoadOptions
    from onewave.models.config.model_config import ModelConfig
    from onewave.models.llama import Llama
    from onewave.wave.weights.pack import WeightStream


def wave(
    call: typer.Context,
    *,
    model: options.Model = "llama-3.2-1b",
    batch_size: Annotated[str, typer.Option("--batch-size", help="Sequences at once; several: 1,8.")] = "1",
    context: Annotated[str, typer.Option("--context", help="Tokens in each cache; several: 512,4096.")] = "512",
    reps: report.Reps = 30,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    load_format: options.LoadFormat = "auto",
    quantization: Annotated[
        str | None,
        typer.Option(
            "--quantization",
            help="int8, fp8 or int4, as of other commands; of dummy weights also q4_k_m, llama.cpp's mix of four and"
            " six bits. Dummy weights of four bits are random codes.",
        ),
    ] = None,
    kv_cache_dtype: options.KvCacheDtype = "auto",
    compact: options.Compact = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Write the wave's tasks with their times (the last case) here.")
    ] = None,
    page_size: Annotated[
        int | None,
        typer.Option("--page-size", help="Also time the wave from a cache in pages of so many keys: 16 to 256."),
    ] = None,
    torch_compile: Annotated[
        bool, typer.Option("--torch-compile", help="Also time what torch.compile makes of PyTorch's operators.")
    ] = False,
    plan: Annotated[
        list[Path] | None,
        typer.Option(
            "--plan", metavar="FILE", help="Instead, time the step by this plan beside the wave's own. Repeatable."
        ),
    ] = None,
    plans: Annotated[
        Path | None, typer.Option("--plans", metavar="DIR", help="The same for every plan in a directory.")
    ] = None,
    out: report.Results,
) -> None:
    """Time a whole decode step as one launch and as a CUDA graph of plain operators, in one process.

    With --plan or --plans: the step by each plan, in turns, beside the predicted time, and whether the bits are the
    same. The plans name the model, its weights' format and the sequences.
    """
    if plan or plans is not None:
        time_plans(call, plan or [], plans, trace, out)
        return
    if torch_compile and quantization is not None:
        allowed = "16-bit weights"
        raise InvalidArgumentError("--torch-compile", got=f"--quantization {quantization}", allowed=allowed)
    if page_size is not None and page_size not in PAGES:
        raise InvalidArgumentError("--page-size", got=str(page_size), allowed=", ".join(map(str, PAGES)))
    dummy = model in sources.builtin_names() or load_format == "dummy"
    if quantization != "q4_k_m":
        find_rounding(quantization)
    elif not dummy or compact is not None:
        got = f"q4_k_m with {'--compact or --no-compact' if dummy else 'the weights of a checkpoint'}"
        raise InvalidArgumentError("--quantization", got=got, allowed="q4_k_m of dummy weights alone")
    check_kv_cache_dtype(kv_cache_dtype)
    if kv_cache_dtype != "auto" and (page_size is not None or torch_compile):
        raise InvalidArgumentError(
            "--kv-cache-dtype", got=f"{kv_cache_dtype} with --page-size or --torch-compile", allowed="without them"
        )
    check_dtype(dtype)
    check_device(device)
    batches, contexts = report.numbers("--batch-size", batch_size, 1), report.numbers("--context", context)
    chosen = "dummy" if dummy else load_format
    from onewave.bench.ceilings import read_bandwidth
    from onewave.bench.engine.ahead import PROCESSES, make_ready
    from onewave.bench.engine.random_codes import Q4_K_M, q4_k_m
    from onewave.bench.engine.wave import SPREAD, WaveCase, measure_wave
    from onewave.engine.load import choices
    from onewave.engine.load.checkpoint import load_model
    from onewave.engine.load.options import LoadOptions
    from onewave.engine.load.sketches import keep_in
    from onewave.gpu.compile_pool import processes
    from onewave.models.config.read import load_config
    from onewave.models.llama_plan import unsupported_because

    where = choices.choose_device(device)
    if where.type != "cuda":
        raise UnsupportedError("bench wave", got=str(where), allowed="a GPU of compute capability 9.0")
    choices.check_dtype_on(dtype, where)
    # After all that may be refused: finding a model may mean a download.
    settings = Settings.from_env()
    location = sources.resolve(model, settings, load_format=chosen)
    config = load_config(location)
    for batch in batches:
        reason = unsupported_because(config, batch)
        if reason is not None:
            raise UnsupportedError("bench wave", got=reason)
    kind, kv_dtype = choices.choose_dtype(dtype, config, where), choices.choose_kv_dtype(kv_cache_dtype, where)
    most = max(contexts) + 1
    plain: Llama | None = None
    notes: list[str] = []
    traced = None
    shown = _Shown(out, where, (location.name, report.name_of(kind)))
    with processes(PROCESSES) as pool:  # before this process uses the GPU
        report.make_current(where)
        report.show_status("measuring the read ceiling")
        ceiling = read_bandwidth(where)
        with report.failure_kept("bench wave", "no memory for a case") as failures:
            for batch in batches:
                network = stream = None  # a stream is packed for its batch, and is the model's only copy
                if quantization == Q4_K_M:
                    weight_format: WeightFormat | None = q4_k_m(config)
                else:
                    weight_format = choices.choose_weight_format(quantization, compact, dtype=kind, decode="wave")
                how = LoadOptions(
                    dtype=kind,
                    device=where,
                    max_num_seqs=batch,
                    max_model_len=max(most, 64),
                    cache_dir=settings.cache_dir,
                    load_format=chosen,
                    weight_format=weight_format,
                    insists=bool(compact),
                    kv_dtype=kv_dtype,
                )
                cases = [
                    WaveCase(batch, length, page_size, compiled=torch_compile, traced=trace is not None)
                    for length in contexts
                ]
                report.show_status(f"planning and compiling for {batch} at once")
                make_ready(config, how, cases, pool)
                report.show_status(f"loading {location.name} for {batch} at once")
                with phases_told(report.show_status):
                    if weight_format is None:
                        plain = network = plain or load_model(location, config, how)
                    else:
                        network, stream = _load(location, config, how, notes)
                keep_in(network, kv_dtype, 1 / SPREAD)
                told: dict[str, Any] = {
                    "show": report.show_status,
                    "report": notes.append,
                    "measured": partial(shown.add, ceiling),
                }
                for case in cases:
                    _, traced = measure_wave(network, case, reps=reps, stream=stream, **told)
    if not shown.steps:
        raise failures[0]
    parts: list[Table | str] = [report.ceiling_line(ceiling, 0), *notes]
    if traced is not None and trace is not None:
        from onewave.tiles.sim.timeline import timeline

        write_file("--trace", trace, traced.to_json())
        parts.append(timeline_table(timeline(traced)))
    facts = {"model": location.name, "ceiling_gb_s": ceiling.value, "steps": shown.steps, "notes": notes}
    shown.rows.finish(facts, *parts)
    for failure in failures:
        raise failure


def _load(
    location: sources.ModelLocation, config: ModelConfig, options: LoadOptions, notes: list[str]
) -> tuple[Llama, WeightStream]:
    """Load a model into a stream; of dummy weights in four bits make codes. notes: gets what is said about it."""
    from onewave.bench.engine.random_codes import random_codes
    from onewave.engine.load.wave import load_streamed, program_of

    if options.load_format == "dummy" and options.weight_bytes < 1:
        with options.times.phase("program and kernels"):
            program = program_of(config, options)
        with options.times.phase("weights"):
            made = random_codes(config, program, options)
    else:
        try:
            made = load_streamed(location, config, options)
        except OutOfReachError as error:
            if options.insists:
                raise
            notes.append(f"weights are not compact: {error.got}")
            made = load_streamed(location, config, replace(options, weight_format=None))
    return made.model, made.stream


class _Shown:
    """Results of a model as they are measured: rows, and the same as JSON has it. named: the model and its dtype."""

    def __init__(self, out: report.Results, device: torch.device, named: tuple[str, str]) -> None:
        columns = ("path", "batch", "context", "ms/token", "GB/s", "of ceiling", "us/hop", "self-check")
        self.rows = report.Rows(out, device, f"{', '.join(named)} on {device}", *columns)
        self._named = named
        self.steps: list[dict[str, Any]] = []

    def add(self, ceiling: Ceiling, result: WaveResult) -> None:
        """Show a result and append its line."""
        line = result.measurement(*self._named, ceiling)
        self.steps.append({"ms": line.summary.p50, **line.extra})
        rate, hop = result.gigabytes_per_second, result.microseconds_per_hop(ceiling)
        path = result.path if result.page is None else f"{result.path} of {result.page}"
        if result.weights is not None and path.startswith("wave"):
            path += f", {result.weights} weights"
        if result.kv_dtype is not None:
            path += f", {result.kv_dtype} cache"
        cells = (
            path,
            str(result.batch),
            str(result.context),
            f"{result.seconds.p50 * 1e3:.3f}",
            f"{rate:.0f}",
            f"{rate / ceiling.value:.1%}",
            "" if hop is None else f"{hop:.2f}",
            "" if result.difference is None else f"{result.difference:.2%}",
        )
        self.rows.add(cells, [line])
