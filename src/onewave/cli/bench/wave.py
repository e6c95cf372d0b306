"""`onewave bench wave`: a decode step as one launch, beside what it replaces."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from onewave.base.errors import CapacityError, InvalidArgumentError, OnewaveError, OutOfReachError, UnsupportedError
from onewave.base.settings import Settings
from onewave.base.weight_formats import WeightFormat, find_rounding
from onewave.cli import options
from onewave.cli.bench.plans import time_plans
from onewave.cli.bench.report import Reps, Results, ceiling_line, make_current, name_of, numbers, show_status
from onewave.cli.output import table, write_file
from onewave.cli.tiles.tables import timeline_table
from onewave.engine.arguments import check_device, check_dtype, check_kv_cache_dtype
from onewave.wave.plan.layout import PAGES
from onewave.weights.fetch import sources

if TYPE_CHECKING:
    from rich.table import Table

    from onewave.bench.ceilings import Ceiling
    from onewave.bench.engine.wave import WaveResult
    from onewave.models.llama import Llama


def wave(
    call: typer.Context,
    *,
    model: options.Model = "llama-3.2-1b",
    batch_size: Annotated[str, typer.Option("--batch-size", help="Sequences at once; several: 1,8.")] = "1",
    context: Annotated[str, typer.Option("--context", help="Tokens in each cache; several: 512,4096.")] = "512",
    reps: Reps = 30,
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
    out: Results,
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
    batches, contexts = numbers("--batch-size", batch_size, 1), numbers("--context", context)
    chosen = "dummy" if dummy else load_format
    from onewave.bench.ceilings import read_bandwidth
    from onewave.bench.engine.random_codes import Q4_K_M, q4_k_m, random_codes
    from onewave.bench.engine.wave import WaveCase, keep_in, measure_wave
    from onewave.engine.load.checkpoint import load_model
    from onewave.engine.load.choices import (
        check_dtype_on,
        choose_device,
        choose_dtype,
        choose_kv_dtype,
        choose_weight_format,
    )
    from onewave.engine.load.options import LoadOptions
    from onewave.engine.load.wave import load_streamed, program_of
    from onewave.memory.shortage import is_out_of_memory
    from onewave.models.config.read import load_config
    from onewave.models.llama_plan import unsupported_because

    where = choose_device(device)
    if where.type != "cuda":
        raise UnsupportedError("bench wave", got=str(where), allowed="a GPU of compute capability 9.0")
    check_dtype_on(dtype, where)
    make_current(where)
    # After all that may be refused: finding a model may mean a download.
    settings = Settings.from_env()
    location = sources.resolve(model, settings, load_format=chosen)
    config = load_config(location)
    for batch in batches:
        reason = unsupported_because(config, batch)
        if reason is not None:
            raise UnsupportedError("bench wave", got=reason)
    kind, kv_dtype = choose_dtype(dtype, config, where), choose_kv_dtype(kv_cache_dtype, where)
    most = max(contexts) + 1
    plain: Llama | None = None
    show_status("measuring the read ceiling")
    ceiling = read_bandwidth(where)
    results: list[WaveResult] = []
    notes: list[str] = []
    traced = None
    failed: OnewaveError | None = None
    try:
        for batch in batches:
            made = network = stream = None  # a stream is packed for its batch, and is the model's only copy
            if quantization == Q4_K_M:
                weight_format: WeightFormat | None = q4_k_m(config)
            else:
                weight_format = choose_weight_format(quantization, compact, dtype=kind, decode="wave")
            how = LoadOptions(
                dtype=kind,
                device=where,
                max_num_seqs=batch,
                max_model_len=max(most, 64),
                cache_dir=settings.cache_dir,
                load_format=chosen,
                weight_format=weight_format,
            )
            if weight_format is None:
                plain = network = plain or load_model(location, config, how)
            elif dummy and weight_format.weight_bytes < 1:
                made = random_codes(config, program_of(config, how), how)
                network, stream = made.model, made.stream
            else:
                try:
                    made = load_streamed(location, config, how)
                except OutOfReachError as error:
                    if compact:
                        raise
                    notes.append(f"weights are not compact: {error.got}")
                    made = load_streamed(location, config, replace(how, weight_format=None))
                network, stream = made.model, made.stream
            keep_in(network, kv_dtype)
            for length in contexts:
                show_status(f"batch {batch}, context {length}")
                case = WaveCase(batch, length, page_size, compiled=torch_compile, traced=trace is not None)
                found, traced = measure_wave(network, case, reps=reps, stream=stream, report=notes.append)
                results += found
    except (OnewaveError, RuntimeError, MemoryError) as error:
        if not isinstance(error, OnewaveError) and not is_out_of_memory(error):
            raise
        failed = error if isinstance(error, OnewaveError) else CapacityError("bench wave", got="no memory for a case")
    # What was measured before is shown first.
    if failed is not None and not results:
        raise failed
    parts = [_table(f"{location.name}, {name_of(kind)} on {where}", results, ceiling), ceiling_line(ceiling, 0), *notes]
    if traced is not None and trace is not None:
        from onewave.tiles.sim.timeline import timeline

        write_file("--trace", trace, traced.to_json())
        parts.append(timeline_table(timeline(traced)))
    records = [result.measurement(location.name, name_of(kind), ceiling) for result in results]
    steps = [{"ms": record.summary.p50, **record.extra} for record in records]
    facts = {"model": location.name, "ceiling_gb_s": ceiling.value, "steps": steps, "notes": notes}
    out.show(facts, out.record(records, where), *parts)
    if failed is not None:
        raise failed


def _table(title: str, results: list[WaveResult], ceiling: Ceiling) -> Table:
    rows = table(title, "path", "batch", "context", "ms/token", "GB/s", "of ceiling", "us/hop", "self-check")
    for result in results:
        rate, hop = result.gigabytes_per_second, result.microseconds_per_hop(ceiling)
        path = result.path if result.page is None else f"{result.path} of {result.page}"
        if result.weights is not None and path.startswith("wave"):
            path += f", {result.weights} weights"
        if result.kv_dtype is not None:
            path += f", {result.kv_dtype} cache"
        rows.add_row(
            path,
            str(result.batch),
            str(result.context),
            f"{result.seconds.p50 * 1e3:.3f}",
            f"{rate:.0f}",
            f"{rate / ceiling.value:.1%}",
            "" if hop is None else f"{hop:.2f}",
            "" if result.difference is None else f"{result.difference:.2%}",
        )
    return rows
