"""`onewave bench serve`: how soon a running server answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onewave.base.errors import InvalidArgumentError, shown
from onewave.cli import options
from onewave.cli.bench.report import Results, Rows, host_line, numbers, show_status
from onewave.engine.arguments import number, seconds

if TYPE_CHECKING:
    from onewave.bench.serve.client import Endpoint
    from onewave.bench.serve.load import Level, LevelResult
    from onewave.bench.serve.workload import Workload

_COLUMNS = ("load", "metric", "p50", "p90", "p99", "mean", "tokens/s", "good", "failed", "cached")


@dataclass(frozen=True)
class _Server:
    """Where it is."""

    url: Annotated[str, typer.Option("--url", help="The server's address.")] = "http://127.0.0.1:8000"
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="The model's name. Default: the server's first.")
    ] = None
    api_key: Annotated[str | None, typer.Option("--api-key", help="A key that the server knows.")] = None
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds that a request may take.")] = 600.0


@dataclass(frozen=True)
class _Asked:
    """The options of the workload; see Workload."""

    api: Annotated[str, typer.Option("--api", help="completions (token ids) or chat (words).")] = "completions"
    data: Annotated[str, typer.Option("--data", help="random, shared-prefix or multi-turn.")] = "random"
    input_len: Annotated[int, typer.Option("--input-len", help="Tokens of a prompt, or of each turn.")] = 512
    output_len: Annotated[int, typer.Option("--output-len", help="Tokens of an answer.")] = 128
    shared_len: Annotated[
        int, typer.Option("--shared-len", help="Tokens before each prompt that all share (shared-prefix).")
    ] = 2048
    turns: Annotated[int, typer.Option("--turns", help="Turns of a conversation (multi-turn).")] = 4
    vocab_size: Annotated[int, typer.Option("--vocab-size", help="Random token ids lie below this.")] = 10_000
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos/--no-ignore-eos", help="Ask for whole answers, a field beyond OpenAI's.")
    ] = True
    seed: Annotated[int, typer.Option("--seed", help="Of prompts and arrivals.")] = 0


@dataclass(frozen=True)
class _Load:
    """How much at once, and what is good."""

    clients: Annotated[str, typer.Option("--clients", help="Clients that each wait for their answer: 1,8,16.")] = "1,8"
    rate: Annotated[
        str | None, typer.Option("--rate", help="Instead: conversations that begin at random, a second: 0.5,4.")
    ] = None
    conversations: Annotated[
        int | None, typer.Option("--conversations", min=1, help="Of each load. Default: 8 a client, 64 at a rate.")
    ] = None
    slo_first: Annotated[
        float | None, typer.Option("--slo-first", help="Good answers: most ms to the first token.")
    ] = None
    slo_token: Annotated[float | None, typer.Option("--slo-token", help="And ms a token after it, on average.")] = None
    slo_whole: Annotated[float | None, typer.Option("--slo-whole", help="And ms to the last one.")] = None


def serve(
    server: _Server,
    asked: _Asked,
    load: _Load,
    *,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Draw the latencies (SVG).")] = None,
    device: options.Device = "auto",
    out: Results,
) -> None:
    """Measure a running server with OpenAI's API, this one's or another's: times to first token, between tokens and to
    the last, at each load.

    A load of clients is closed, one of a rate is open (Poisson). --device only names the device in the ledger.
    """
    from onewave.bench.serve.client import Endpoint
    from onewave.bench.serve.load import Level
    from onewave.bench.serve.workload import Workload
    from onewave.engine.load.choices import choose_device

    levels = _levels(load, Level)
    for name, ms in (("slo_first", load.slo_first), ("slo_token", load.slo_token), ("slo_whole", load.slo_whole)):
        if ms is not None:
            number(name, ms, 0.0, 1e9, "milliseconds from 0")
    endpoint = Endpoint.parse(server.url, server.api_key, timeout=seconds("timeout", server.timeout))
    workload = Workload(server.model or "", **vars(asked))
    if plot is not None and not plot.absolute().parent.is_dir():
        raise InvalidArgumentError("--plot", got=str(plot), allowed="a file in a directory that is there")
    where = choose_device(device)
    results: list[LevelResult] = []
    rows: Rows | None = None
    sizes = f"{asked.data}, {asked.input_len} in, {asked.output_len} out, ms"

    def add(result: LevelResult) -> None:
        nonlocal rows
        results.append(result)
        rows = rows or Rows(out, where, f"{result.workload.model} at {server.url}, {sizes}", *_COLUMNS, left=2)
        _add_rows(rows, result)

    asyncio.run(_run(endpoint, workload, levels, load, add))
    assert rows is not None
    notes = [f"{one.level.name}: {host_line(one.host_us)}" for one in results if one.host_us]
    notes += [f"failed: {answer.error}" for result in results for answer in result.answers if answer.error][:3]
    if plot is not None:
        from onewave.bench.serve.plot import picture

        plot.write_text(picture(results, f"{results[0].workload.model} at {server.url}, {sizes}"))
        notes.append(f"drawn: {plot}")
    facts = {"model": results[0].workload.model, "url": server.url, **vars(asked)}
    rows.finish(facts | {"results": [_facts(result) for result in results]}, *notes)


def _levels(load: _Load, make: type[Level]) -> list[Level]:
    if load.rate is None:
        return [make(clients=clients) for clients in numbers("--clients", load.clients, 1)]
    try:
        rates = [float(part) for part in load.rate.split(",")]
    except ValueError:
        rates = []
    if not rates or not all(0 < rate < 1e6 for rate in rates):
        raise InvalidArgumentError("--rate", got=shown(load.rate), allowed="numbers above 0 separated by commas")
    return [make(rate=rate) for rate in rates]


async def _run(
    endpoint: Endpoint, workload: Workload, levels: list[Level], load: _Load, add: Callable[[LevelResult], None]
) -> None:
    from dataclasses import replace

    from onewave.bench.serve.load import Level, Limits, run_level

    if not workload.model:
        workload = replace(workload, model=await endpoint.first_model())
    limits = Limits(*(None if ms is None else ms / 1e3 for ms in (load.slo_first, load.slo_token, load.slo_whole)))
    for level in levels:
        show_status(f"{level.name}: warming up")
        # The first requests of a server compile kernels and capture graphs, others for other numbers of requests.
        clients = level.clients or 1
        other = replace(workload, seed=~workload.seed)
        await run_level(endpoint, other, Level(clients=clients), count=2 * clients, limits=limits)
        count = load.conversations or (64 if level.rate is not None else 8 * (level.clients or 1))
        add(await run_level(endpoint, workload, level, count=count, limits=limits, show=show_status))


def _add_rows(rows: Rows, result: LevelResult) -> None:
    from onewave.bench.serve.load import percentile

    for metric, samples in result.samples().items():
        first = metric == "ttft"
        if not samples and not first:
            continue
        share = result.cached_share
        cells = (
            result.level.name if first else "",
            metric,
            *(f"{percentile(samples, at):.2f}" if samples else "-" for at in (50, 90, 99)),
            f"{sum(samples) / len(samples):.2f}" if samples else "-",
            f"{result.tokens_per_second:.1f}" if first else "",
            f"{result.good / result.seconds:.2f}/s" if first else "",
            str(len(result.answers) - len(result.done)) if first else "",
            ("-" if share is None else f"{share:.0%}") if first else "",
        )
        rows.add(cells, result.measurements() if first else ())


def _facts(result: LevelResult) -> dict[str, Any]:
    from onewave.bench.serve.load import percentile

    tails = {
        metric: {f"p{at}": percentile(samples, at) for at in (50, 90, 99)} | {"n": len(samples)}
        for metric, samples in result.samples().items()
        if samples
    }
    return {
        "load": result.level.name,
        "requests": len(result.answers),
        "failed": len(result.answers) - len(result.done),
        "seconds": result.seconds,
        "requests_per_second": len(result.done) / result.seconds,
        "tokens_per_second": result.tokens_per_second,
        "good_per_second": result.good / result.seconds,
        "cached_share": result.cached_share,
        **result.host_us.facts,
        **tails,
    }
