"""`onewave bench throughput`: many requests at once, without a server."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onewave.base.settings import Settings
from onewave.cli import options
from onewave.cli.bench.report import Reps, Results, Rows, Warmup, host_line, name_of, open_llm, show_status
from onewave.weights.fetch.sources import resolve

if TYPE_CHECKING:
    from onewave.bench.engine.throughput import Throughput


def throughput(
    asked: options.ModelOptions,
    *,
    requests: Annotated[int, typer.Option("--requests", min=1, help="Requests, all there from the beginning.")] = 64,
    input_len: Annotated[int, typer.Option("--input-len", min=1, help="Tokens of each prompt.")] = 512,
    output_len: Annotated[int, typer.Option("--output-len", min=1, help="Tokens of each answer.")] = 128,
    max_num_seqs: Annotated[int, typer.Option("--max-num-seqs", help="Sequences that run together.")] = 16,
    peer: Annotated[
        bool, typer.Option("--peer", help="Beside it: transformers' continuous batching, on random weights.")
    ] = False,
    reps: Reps = 3,
    warmup: Warmup = 1,
    out: Results,
) -> None:
    """Measure tokens a second of many requests, prompts and decoding together, as offline work has them."""
    from onewave.bench.engine.latency import Case, facts_of
    from onewave.bench.engine.throughput import measure_throughput, measure_transformers
    from onewave.bench.engine.transformers_peer import check_transformers

    found = resolve(asked.model, Settings.from_env(), revision=asked.revision, load_format="dummy") if peer else None
    if found is not None:
        check_transformers(found, asked="bench throughput --peer")
    case = Case(requests, input_len, output_len, f"{requests} requests")
    opened = open_llm(asked, max_num_seqs=max_num_seqs, max_model_len=input_len + output_len)
    with opened.llm as llm:
        results = [measure_throughput(llm, case, reps=reps, warmup=warmup, show=show_status)]
        facts: dict[str, Any] = {"model": llm.name, "device": str(llm.device), "decode_path": llm.decode_path}
        where, dtype = llm.device, llm.dtype
        extra = facts_of(llm)
    title = f"{facts['model']}, {name_of(dtype)} on {where}, {requests} requests, {input_len} in, {output_len} out"
    columns = ("engine", "together", "seconds", "requests/s", "generated tokens/s", "all tokens/s")
    rows = Rows(out, where, title, *columns)

    def add(result: Throughput, extra: dict[str, Any]) -> None:
        seconds = result.seconds
        cells = (
            result.engine,
            "-" if result.together is None else str(result.together),
            f"{seconds.p50:.2f} ± {seconds.sd:.2f}",
            f"{requests / seconds.p50:.2f}",
            f"{result.tokens_per_second:.1f}",
            f"{requests * (input_len + output_len) / seconds.p50:.1f}",
        )
        rows.add(cells, [result.measurement(facts["model"], extra)])

    add(results[0], extra)
    if found is not None:
        results.append(measure_transformers(found, (where, dtype), case, reps=reps, warmup=warmup, show=show_status))
        add(results[1], {"dtype": name_of(dtype)})
    shown = [asdict(result) | {"tokens_per_second": result.tokens_per_second} for result in results]
    host = [host_line(results[0].host_us)] if results[0].host_us else []  # one token an answer takes no decode step
    rows.finish(facts | {"results": shown}, *host)
