"""`onewave bench throughput`: many requests at once, without a server."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from onewave.cli import options
from onewave.cli.bench.report import Reps, Results, Warmup, name_of, show_status
from onewave.cli.output import table
from onewave.cli.session import open_llm


def throughput(
    asked: options.ModelOptions,
    *,
    requests: Annotated[int, typer.Option("--requests", min=1, help="Requests, all there from the beginning.")] = 64,
    input_len: Annotated[int, typer.Option("--input-len", min=1, help="Tokens of each prompt.")] = 512,
    output_len: Annotated[int, typer.Option("--output-len", min=1, help="Tokens of each answer.")] = 128,
    max_num_seqs: Annotated[int, typer.Option("--max-num-seqs", help="Sequences that run together.")] = 16,
    reps: Reps = 3,
    warmup: Warmup = 1,
    out: Results,
) -> None:
    """Measure tokens a second of many requests, prompts and decoding together, as offline work has them."""
    from onewave.bench.engine.latency import Case
    from onewave.bench.engine.throughput import measure_throughput

    case = Case(requests, input_len, output_len, f"{requests} requests")
    opened = open_llm(**vars(asked), max_num_seqs=max_num_seqs, max_model_len=input_len + output_len)
    with opened.llm as llm:
        result = measure_throughput(llm, case, reps=reps, warmup=warmup, show=show_status)
        seconds, total = result.seconds, requests * (input_len + output_len)
        title = (
            f"{llm.name}, {name_of(llm.dtype)} on {llm.device}, {requests} requests, {input_len} in, {output_len} out"
        )
        rows = table(title, "decoding", "together", "seconds", "requests/s", "generated tokens/s", "all tokens/s")
        rows.add_row(
            llm.decode_path,
            str(max_num_seqs),
            f"{seconds.p50:.2f} ± {seconds.sd:.2f}",
            f"{requests / seconds.p50:.2f}",
            f"{result.tokens_per_second:.1f}",
            f"{total / seconds.p50:.1f}",
        )
        facts = {"model": llm.name, "device": str(llm.device), "decode_path": llm.decode_path, **asdict(result)}
        facts |= {"tokens_per_second": result.tokens_per_second, "total_tokens_per_second": total / seconds.p50}
        out.show(facts, out.record([result.measurement(llm)], llm.device), rows)
