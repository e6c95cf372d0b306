"""`onewave bench startup` and `onewave bench warm`: how long the first answer, and a kernel's first call, take."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onewave.base.errors import UnsupportedError
from onewave.base.settings import Settings
from onewave.cli import options
from onewave.cli.bench.report import append_to_ledger, check_count, check_ledger, print_table, show_status
from onewave.engine.arguments import EngineOptions, check_device
from onewave.weights.fetch import sources
from onewave.weights.fetch.aliases import DEFAULT_ALIAS

if TYPE_CHECKING:
    from onewave.bench.engine.startup import StartupResult, WarmResult
    from onewave.weights.fetch.sources import ModelLocation

_Reps = Annotated[int, typer.Option("--reps", help="Starts of each kind.")]


def startup(
    model: options.Model = DEFAULT_ALIAS,
    batch_size: Annotated[int, typer.Option("--batch-size", help="Sequences that the engine can run at once.")] = 1,
    reps: _Reps = 3,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    load_format: options.LoadFormat = "auto",
    revision: options.Revision = None,
    max_model_len: options.MaxModelLen = None,
    decode: options.Decode = "auto",
    quantization: options.Quantization = None,
    compact: options.Compact = None,
    as_json: options.Json = False,
    ledger: options.Ledger = None,
) -> None:
    """Time a model's loading and first answer in new processes, with empty and with filled caches.

    Caches are those of compiled kernels and of the wave's programs. Where the model decodes with the wave, loading for
    CUDA graphs of plain operators is timed beside it.
    """
    check_count("--reps", reps)
    check_ledger(ledger)
    given: dict[str, Any] = {
        "dtype": dtype,
        "device": device,
        "max_model_len": max_model_len,
        "max_num_seqs": batch_size,
        "decode": decode,
        "quantization": quantization,
        "compact": compact,
    }
    EngineOptions(**given)
    chosen = "dummy" if model in sources.builtin_names() else load_format
    from onewave.bench.engine.startup import Job, measure_startup
    from onewave.engine.options import (
        check_dtype_on,
        choose_decode,
        choose_device,
        choose_dtype,
        choose_max_model_len,
    )
    from onewave.models.config.read import load_config

    where = choose_device(device)
    check_dtype_on(dtype, where)
    choose_decode(decode, enforce_eager=False, device=where)
    location = sources.resolve(model, Settings.from_env(), revision=revision, load_format=chosen)
    config = load_config(location)
    length = choose_max_model_len(max_model_len, config)
    told = {**given, "model": _place(location), "load_format": chosen}
    job = Job.of(told, vocab_size=config.vocab_size, max_model_len=length)
    results = measure_startup(job, reps=reps, show=show_status)
    show_status("")
    extra = {
        "dtype": str(choose_dtype(dtype, config, where)).removeprefix("torch."),
        "batch_size": batch_size,
        "max_model_len": length,
        "quantization": quantization,
        "load_format": chosen,
        "prompt_tokens": len(job.prompt),
    }
    lines = [line for result in results for line in result.measurements(location.name, extra)]
    citations = [] if ledger is None else append_to_ledger(ledger, lines, where)
    if as_json:
        rows = [asdict(result) for result in results]
        print(json.dumps({"model": location.name, "device": str(where), "starts": rows, "ledger": citations}))
        return
    _print_starts(f"{location.name} on {where}, starts of each kind: {reps}", results, citations)


def warm(
    reps: _Reps = 3,
    device: options.Device = "auto",
    every: Annotated[
        bool, typer.Option("--every", help="Calls of `onewave warm --every`; prebuilt kernels are taken.")
    ] = False,
    as_json: options.Json = False,
    ledger: options.Ledger = None,
) -> None:
    """Time the first calls of attention's kernels in new processes: what `onewave warm` does, and one after another;
    with prebuilt kernels, with filled caches, and with every kernel compiled."""
    check_count("--reps", reps)
    check_ledger(ledger)
    check_device(device)
    from onewave.bench.engine.startup import measure_warm
    from onewave.engine.options import choose_device

    where = choose_device(device)
    if where.type != "cuda":
        raise UnsupportedError("bench warm", got=str(where), allowed="a CUDA GPU", next="A CPU's kernels need none.")
    results = measure_warm(str(where), reps=reps, every=every, show=show_status)
    show_status("")
    lines = [line for result in results for line in result.measurements()]
    citations = [] if ledger is None else append_to_ledger(ledger, lines, where)
    if as_json:
        print(json.dumps({"device": str(where), "runs": [asdict(result) for result in results], "ledger": citations}))
        return
    _print_calls(f"first calls of attention on {where}, seconds, processes of each kind: {reps}", results, citations)


def _place(location: ModelLocation) -> str:
    """The model for a process whose cache of models is empty."""
    if location.kind == "builtin" or location.path is None:
        return location.name
    return os.path.abspath(location.path)  # a link says more than what it leads to


def _print_starts(title: str, results: list[StartupResult], citations: list[str]) -> None:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for heading in ("caches", "decoding"):
        table.add_column(heading, no_wrap=True)
    for heading in ("import s", "load s", "first answer s", "GPU memory, most", "kept"):
        table.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        times = (result.import_s, result.load_s, result.first_answer_s)
        table.add_row(
            result.caches,
            result.decode_path + (", compact" if result.compact else ""),
            *(f"{each.p50:.2f} ± {each.sd:.2f}" for each in times),
            *("-" if size is None else f"{size / 2**30:.2f} GiB" for size in (result.peak_bytes, result.kept_bytes)),
        )
    print_table(table, *citations)


def _print_calls(title: str, results: list[WarmResult], citations: list[str]) -> None:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    table.add_column("call", no_wrap=True)
    for result in results:
        caches = f"{result.caches} caches" if result.prebuilt else "compiled"
        table.add_column(f"{result.order}, {caches}", justify="right")
    for name in results[0].calls:
        table.add_row(name, *(f"{result.calls[name].p50:.2f}" for result in results))
    table.add_section()
    table.add_row("all of them", *(f"{result.seconds.p50:.2f} ± {result.seconds.sd:.2f}" for result in results))
    print_table(table, *citations)
