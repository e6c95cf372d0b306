"""`onewave bench prefill`: what the engine's own attention is worth for a prompt."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from onewave.base.errors import InvalidArgumentError, UnsupportedError
from onewave.cli import options
from onewave.cli.bench.latency import numbers
from onewave.cli.bench.report import append_to_ledger, check_count, check_ledger, make_current, print_table, show_status
from onewave.cli.session import open_llm
from onewave.weights.fetch.aliases import DEFAULT_ALIAS

if TYPE_CHECKING:
    from onewave.bench.engine.prefill import PrefillResult
    from onewave.engine.llm import LLM


def prefill(
    model: options.Model = DEFAULT_ALIAS,
    input_len: Annotated[str, typer.Option("--input-len", help="Tokens of the prompts; several: 512,8192.")] = "8192",
    reps: Annotated[int, typer.Option("--reps", help="Measured repetitions of each.")] = 7,
    warmup: Annotated[int, typer.Option("--warmup", help="Repetitions before that.")] = 2,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    load_format: options.LoadFormat = "auto",
    revision: options.Revision = None,
    decode: options.Decode = "auto",
    keep_unpacked: options.KeepUnpacked = None,
    quantization: options.Quantization = None,
    as_json: options.Json = False,
    ledger: options.Ledger = None,
) -> None:
    """Time prompts through the engine with its own attention and with PyTorch's cuDNN and flash kernels in its place.

    They take turns, a prompt each. Beside each stands what the attention of all layers takes by itself.
    """
    check_count("--reps", reps)
    check_count("--warmup", warmup, 0)
    check_ledger(ledger)
    lengths = numbers("--input-len", input_len)
    if min(lengths) < 1:
        raise InvalidArgumentError("--input-len", got=input_len, allowed="whole numbers from 1")
    from onewave.bench.engine.prefill import measure_prefill
    from onewave.engine.options import choose_device

    where = choose_device(device)
    if where.type != "cuda":
        raise UnsupportedError("bench prefill", got=str(where), allowed="a CUDA GPU", next="Use bench latency.")
    opened = open_llm(
        model,
        load_format=load_format,
        revision=revision,
        dtype=dtype,
        device=device,
        max_model_len=max(lengths) + 1,
        max_num_seqs=1,
        decode=decode,
        keep_unpacked=keep_unpacked,
        quantization=quantization,
    )
    llm = opened.llm
    make_current(llm.device)
    results, notes = measure_prefill(llm, lengths, reps=reps, warmup=warmup, show=show_status)
    show_status("")
    lines = [result.measurement(llm) for result in results]
    citations = [] if ledger is None else append_to_ledger(ledger, lines, llm.device)
    if as_json:
        rows = [asdict(result) for result in results]
        print(json.dumps({"model": llm.name, "results": rows, "notes": notes, "ledger": citations}))
    else:
        _print(llm, results, [*notes, *citations])
    llm.close()


def _print(llm: LLM, results: list[PrefillResult], notes: list[str]) -> None:
    from rich.table import Table

    dtype = str(llm.dtype).removeprefix("torch.")
    table = Table(title=f"{llm.name}, {dtype} on {llm.device}, prompts one at a time", title_justify="left")
    table.add_column("attention", no_wrap=True)
    for heading in ("tokens", "ms", "tokens/s", "x onewave's time", "attention alone ms"):
        table.add_column(heading, justify="right", no_wrap=True)
    ours = {result.tokens: result.seconds.p50 for result in results if result.attention == "onewave"}
    for result in results:
        seconds = result.seconds
        table.add_row(
            result.attention,
            str(result.tokens),
            f"{seconds.p50 * 1e3:.2f} ± {seconds.sd * 1e3:.2f}",
            f"{result.tokens / seconds.p50:,.0f}",
            f"{seconds.p50 / ours[result.tokens]:.3f}" if result.tokens in ours else "-",
            f"{result.alone * 1e3:.2f}",
        )
    print_table(table, *notes)
