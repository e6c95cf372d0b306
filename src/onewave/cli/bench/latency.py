"""`onewave bench latency`: how fast this engine is here."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onewave.base.settings import Settings
from onewave.cli import options
from onewave.cli.bench import report

if TYPE_CHECKING:
    from onewave.bench.ceilings import Ceiling
    from onewave.bench.engine.latency import Result
    from onewave.engine.llm import LLM

# Runs that may take longer on a CPU are announced.
_LONG_S = 10.0
_COLUMNS = ("test", "decoding", "batch", "t/s", "ms/token", "GB/s", "of ceiling")


def latency(
    asked: options.ModelOptions,
    *,
    batch_size: Annotated[str, typer.Option("--batch-size", help="Sequences at once; several: 1,8.")] = "1",
    input_len: Annotated[str, typer.Option("--input-len", help="Prompt tokens of the pp tests; 0: none.")] = "512",
    output_len: Annotated[str, typer.Option("--output-len", help="Generated tokens of the tg tests; 0: none.")] = "128",
    depth: Annotated[str, typer.Option("--depth", help="Tokens in the cache before a tg test.")] = "0",
    reps: report.Reps = 5,
    warmup: report.Warmup = 1,
    max_model_len: options.MaxModelLen = None,
    enforce_eager: options.EnforceEager = False,
    out: report.Results,
) -> None:
    """Measure prefill (pp) and decode (tg), and the memory's read ceiling in the same run.

    Prompts are random token ids with a fixed seed; decoding is greedy and goes on after end-of-text tokens.
    GB/s counts the weights and the cache that a decode step reads. Rows are printed as they are measured.
    """
    batches = report.numbers("--batch-size", batch_size, 1)
    given = {"--input-len": input_len, "--output-len": output_len, "--depth": depth}
    lengths = [report.numbers(name, text) for name, text in given.items()]
    from onewave.bench.ceilings import read_bandwidth
    from onewave.bench.engine.latency import cases, expected_seconds, measure, measurement

    tests = cases(batches, *lengths)
    llm: LLM | None = None
    ceiling: Ceiling | None = None
    rows: report.Rows | None = None
    threads = Settings.from_env().num_threads
    results: list[Result] = []
    load_seconds: dict[int, float] = {}
    # An engine of its own for each batch size: it decodes with as many rows as may run at once, idle or not.
    with report.failure_kept("bench latency", "no memory left") as failures:
        for size in dict.fromkeys(batches):
            more: dict[str, Any] = {"max_model_len": max_model_len, "enforce_eager": enforce_eager}
            opened = report.open_llm(asked, **more, max_num_seqs=size, enable_prefix_caching=False)
            llm, load_seconds[size] = opened.llm, opened.load_seconds
            own = [case for case in tests if case.batch_size == size]
            if ceiling is None:
                report.show_status("measuring the read ceiling")
                ceiling = read_bandwidth(llm.device)
                if llm.device.type == "cpu":
                    _announce(expected_seconds(llm, tests, repetitions=warmup + reps))
            for result in measure(llm, own, reps=reps, warmup=warmup, ceiling=ceiling, show=report.show_status):
                rows = rows or report.Rows(out, llm.device, _title(llm), *_COLUMNS, left=2)
                rows.add(_cells(result), [measurement(result, llm, threads=threads)])
                results.append(result)
            llm.close()
    if rows is None:
        raise failures[0]
    assert llm is not None
    assert ceiling is not None
    loaded = ", ".join(f"{seconds:.2f} s" for seconds in load_seconds.values())
    note = f"{report.ceiling_line(ceiling)}; model loaded in {loaded}"
    rows.finish(_facts(llm, load_seconds, ceiling, results), note)
    for failure in failures:
        raise failure


def _announce(seconds: float) -> None:
    if seconds > _LONG_S:
        span = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
        hint = "smaller --input-len, --output-len and --reps take less"
        print(f"up to {span} on this CPU; {hint}", file=sys.stderr, flush=True)


def _title(llm: LLM) -> str:
    weights = "" if llm.quantization is None else f", {llm.quantization} weights"
    return f"{llm.name}, {report.name_of(llm.dtype)}{weights} on {llm.device}"


def _cells(result: Result) -> tuple[str, ...]:
    case, rate, share = result.case, result.gigabytes_per_second, result.ceiling_share
    tokens = case.prompt * case.batch_size if case.is_prefill else 1
    return (
        case.name,
        "-" if case.is_prefill else result.decode_path + (", compact" if result.compact else ""),
        str(case.batch_size),
        f"{result.tokens_per_second.mean:.2f} ± {result.tokens_per_second.sd:.2f}",
        f"{result.step_ms.p50 / tokens:.3f}",
        "-" if rate is None else f"{rate:.1f}",
        "-" if share is None else f"{share:.1%}",
    )


def _facts(llm: LLM, load_seconds: dict[int, float], ceiling: Ceiling, results: list[Result]) -> dict[str, Any]:
    """load_s: of the engine of each batch size."""
    rows = [
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
    ]
    facts = {"model": llm.name, "dtype": report.name_of(llm.dtype), "quantization": llm.quantization}
    facts |= {"device": str(llm.device), "load_s": load_seconds, "ceiling": asdict(ceiling), "results": rows}
    return facts
