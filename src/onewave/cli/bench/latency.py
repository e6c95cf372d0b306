"""`onewave bench latency`: how fast this engine is here."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onewave.base.errors import CapacityError, InvalidArgumentError, OnewaveError, shown
from onewave.base.settings import Settings
from onewave.cli import options
from onewave.cli.bench.report import append_to_ledger, check_count, check_ledger, print_table, show_status
from onewave.cli.session import Opened, open_llm
from onewave.weights.fetch.aliases import DEFAULT_ALIAS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from onewave.bench.ceilings import Ceiling
    from onewave.bench.engine.latency import Result
    from onewave.bench.ledger import Measurement
    from onewave.engine.llm import LLM


def latency(
    model: options.Model = DEFAULT_ALIAS,
    batch_size: Annotated[str, typer.Option("--batch-size", help="Sequences at once; several: 1,8.")] = "1",
    input_len: Annotated[str, typer.Option("--input-len", help="Prompt tokens of the pp tests; 0: none.")] = "512",
    output_len: Annotated[str, typer.Option("--output-len", help="Generated tokens of the tg tests; 0: none.")] = "128",
    depth: Annotated[str, typer.Option("--depth", help="Tokens in the cache before a tg test.")] = "0",
    reps: Annotated[int, typer.Option("--reps", help="Measured repetitions of each test.")] = 5,
    warmup: Annotated[int, typer.Option("--warmup", help="Repetitions before that.")] = 1,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    load_format: options.LoadFormat = "auto",
    revision: options.Revision = None,
    max_model_len: options.MaxModelLen = None,
    enforce_eager: options.EnforceEager = False,
    decode: options.Decode = "auto",
    keep_unpacked: options.KeepUnpacked = None,
    quantization: options.Quantization = None,
    compact: options.Compact = None,
    as_json: options.Json = False,
    ledger: options.Ledger = None,
) -> None:
    """Measure prefill (pp) and decode (tg), and the memory's read ceiling in the same run.

    Prompts are random token ids with a fixed seed; decoding is greedy and goes on after end-of-text tokens.
    GB/s counts the weights and the cache that a decode step reads.
    """
    check_count("--reps", reps)
    check_count("--warmup", warmup, 0)
    check_ledger(ledger)
    given = [numbers("--batch-size", batch_size), numbers("--input-len", input_len)]
    given += [numbers("--output-len", output_len), numbers("--depth", depth)]
    from onewave.bench.engine.latency import cases, measure
    from onewave.memory.shortage import is_out_of_memory

    tests = cases(*given)
    opened: Opened | None = None
    ceiling: Ceiling | None = None
    results: list[Result] = []
    load_seconds: dict[int, float] = {}
    failed: OnewaveError | None = None
    # An engine of its own for each batch size: it decodes with as many rows as may run at once, idle or not.
    for size in dict.fromkeys(given[0]):
        try:
            opened = open_llm(
                model,
                load_format=load_format,
                revision=revision,
                dtype=dtype,
                device=device,
                max_model_len=max_model_len,
                max_num_seqs=size,
                enforce_eager=enforce_eager,
                decode=decode,
                keep_unpacked=keep_unpacked,
                quantization=quantization,
                compact=compact,
            )
            load_seconds[size] = opened.load_seconds
            if ceiling is None:
                from onewave.bench.ceilings import read_bandwidth

                show_status("measuring the read ceiling")
                ceiling = read_bandwidth(opened.llm.device)
            own = [case for case in tests if case.batch_size == size]
            results += measure(opened.llm, own, reps=reps, warmup=warmup, ceiling=ceiling, show=show_status)
        except (OnewaveError, RuntimeError, MemoryError) as error:
            if not isinstance(error, OnewaveError) and not is_out_of_memory(error):
                raise
            failed = error if isinstance(error, OnewaveError) else CapacityError("bench latency", got="no memory left")
            break
        opened.llm.close()
    # What was measured before is shown first.
    if failed is not None and not results:
        raise failed
    assert opened is not None
    assert ceiling is not None
    show_status("")
    citations: list[str] = []
    if ledger is not None:
        lines = _measurements(results, opened.llm)
        citations = append_to_ledger(ledger, lines, opened.llm.device)
    if as_json:
        print(json.dumps(_as_json(opened.llm, load_seconds, ceiling, results, citations)))
    else:
        _print(opened.llm, load_seconds, ceiling, results)
        for citation in citations:
            print(citation)
    if failed is not None:
        raise failed


def numbers(name: str, text: str) -> list[int]:
    """Whole numbers separated by commas. Raises InvalidArgumentError."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
        raise InvalidArgumentError(name, got=shown(text), allowed="whole numbers separated by commas")
    return [int(part) for part in parts]


def _measurements(results: list[Result], llm: LLM) -> Iterator[Measurement]:
    from onewave.bench.engine.latency import measurements

    threads = Settings.from_env().num_threads
    for result in results:
        yield from measurements(result, llm, threads=threads)


def _print(llm: LLM, load_seconds: dict[int, float], ceiling: Ceiling, results: list[Result]) -> None:
    from rich.table import Table

    dtype = str(llm.dtype).removeprefix("torch.")
    weights = "" if llm.quantization is None else f", {llm.quantization} weights"
    table = Table(title=f"{llm.name}, {dtype}{weights} on {llm.device}", title_justify="left")
    table.add_column("test", no_wrap=True)
    table.add_column("decoding", no_wrap=True)
    for heading in ("batch", "t/s", "ms/token", "GB/s", "of ceiling"):
        table.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        rate, share, step = result.gigabytes_per_second, result.ceiling_share, result.step_ms
        tokens = result.case.prompt if result.case.is_prefill else 1
        table.add_row(
            result.case.name,
            "-" if result.case.is_prefill else result.decode_path + (", compact" if result.compact else ""),
            str(result.case.batch_size),
            f"{result.tokens_per_second.mean:.2f} ± {result.tokens_per_second.sd:.2f}",
            f"{step.p50 / tokens / (result.case.batch_size if result.case.is_prefill else 1):.3f}",
            "-" if rate is None else f"{rate:.1f}",
            "-" if share is None else f"{share:.1%}",
        )
    bound = f"read ceiling {ceiling.value:.1f} {ceiling.unit} ({ceiling.method})"
    loaded = ", ".join(f"{seconds:.2f} s" for seconds in load_seconds.values())
    print_table(table, f"{bound}; model loaded in {loaded}")


def _as_json(
    llm: LLM, load_seconds: dict[int, float], ceiling: Ceiling, results: list[Result], citations: list[str]
) -> dict[str, Any]:
    """load_s: of the engine of each batch size."""
    return {
        "model": llm.name,
        "dtype": str(llm.dtype).removeprefix("torch."),
        "quantization": llm.quantization,
        "device": str(llm.device),
        "load_s": load_seconds,
        "ceiling": asdict(ceiling),
        "results": [
            {
                "test": result.case.name,
                "batch_size": result.case.batch_size,
                "prompt_tokens": result.case.prompt,
                "generated_tokens": result.case.generate,
                "decode_path": result.decode_path,
                "compact": result.compact,
                "tokens_per_second": asdict(result.tokens_per_second),
                ("prefill_ms" if result.case.is_prefill else "step_ms"): asdict(result.step_ms),
                "bytes_per_step": result.step_bytes,
                "gigabytes_per_second": result.gigabytes_per_second,
                "ceiling_share": result.ceiling_share,
            }
            for result in results
        ],
        "ledger": citations,
    }
