"""`onewave bench peers`: this engine beside others."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from onewave.base.errors import InvalidArgumentError
from onewave.base.settings import MAX_THREADS, Settings
from onewave.cli import options
from onewave.cli.bench.report import Results, show_status
from onewave.cli.output import table
from onewave.engine.arguments import check_device, check_dtype
from onewave.weights.fetch.aliases import DEFAULT_ALIAS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.table import Table

    from onewave.bench.engine.peers import Job, PeerResult
    from onewave.bench.ledger import Measurement
    from onewave.weights.fetch.sources import ModelLocation


def peers(
    *,
    model: options.Model = DEFAULT_ALIAS,
    input_len: Annotated[int, typer.Option("--input-len", min=1, help="Prompt tokens.")] = 64,
    output_len: Annotated[int, typer.Option("--output-len", min=2, help="Generated tokens.")] = 64,
    reps: Annotated[int, typer.Option("--reps", min=1, help="Measured rounds; one more warms up.")] = 3,
    threads: Annotated[
        int | None,
        typer.Option(
            "--threads", min=1, max=MAX_THREADS, help="CPU threads of every engine. Default: the cores there are."
        ),
    ] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="auto: float32 on a CPU, bfloat16 on a GPU.")] = "auto",
    device: options.Device = "auto",
    revision: options.Revision = None,
    llama_cpp_python: Annotated[
        str | None,
        typer.Option("--llama-cpp-interpreter", help="A Python that has llama-cpp-python, where this one doesn't."),
    ] = None,
    out: Results,
) -> None:
    """Measure load time, prefill and decode beside transformers and, on a GGUF file, llama-cpp-python.

    All read the same file, in processes of their own, with the same threads, in turns. Prompts are English text, a
    different piece each round; decoding is greedy, one sequence. An engine that isn't there is named as such.
    """
    check_dtype(dtype)
    check_device(device)
    from onewave.bench.engine.peer_worker import PEERS
    from onewave.bench.engine.peers import Job, compare, text_prompts
    from onewave.engine.load.choices import check_dtype_on, choose_device
    from onewave.engine.text.tokenizer import load_tokenizer

    where = choose_device(device)
    check_dtype_on(dtype, where)
    location = _find(model, revision, input_len + output_len)
    job = Job(
        path=str(location.path),
        kind=location.kind,
        dtype=("float32" if where.type == "cpu" else "bfloat16") if dtype == "auto" else dtype,
        device=str(where),
        threads=threads or Settings.from_env().num_threads,
        prompt_tokens=input_len,
        output_tokens=output_len,
    )
    prompts = text_prompts(load_tokenizer(location), tokens=input_len, count=1 + reps)
    pythons = {} if llama_cpp_python is None else {"llama-cpp-python": llama_cpp_python}
    results = compare(job, list(PEERS), prompts, pythons=pythons, show=show_status)
    citations = out.record(_measurements(model, job, results), where)
    absent = [f"{result.name}: {result.absent}" for result in results if result.absent is not None]
    facts = {"job": asdict(job), "peers": [asdict(result) for result in results]}
    out.show(facts, citations, _table(model, job, results), *absent)
    if all(result.decode is None for result in results):
        raise typer.Exit(1)


def _find(model: str, revision: str | None, context: int) -> ModelLocation:
    """Find the model's file and check that it holds that many tokens."""
    from onewave.models.config.read import load_config
    from onewave.weights.fetch.sources import resolve

    location = resolve(model, Settings.from_env(), revision=revision, progress=sys.stderr.isatty())
    longest = load_config(location).max_position
    if context > longest:
        raise InvalidArgumentError("--input-len and --output-len", got=f"{context} tokens", allowed=f"up to {longest}")
    return location


def _measurements(model: str, job: Job, results: list[PeerResult]) -> Iterator[Measurement]:
    """The decode rate of every engine that ran."""
    from onewave.bench.ledger import Measurement

    for result in results:
        if result.decode is None or result.prefill is None:
            continue
        extra = {
            "peer": result.name,
            "version": result.version,
            "load_s": result.load_s,
            "prefill_tokens_per_second": result.prefill.p50,
            "ours_over_peer": result.ratio,
            "ours_over_peer_prefill": result.prefill_ratio,
            "same_greedy_tokens": result.same_tokens,
            "prompt_tokens": job.prompt_tokens,
            "generated_tokens": job.output_tokens,
            "dtype": job.dtype,
            "threads": job.threads,
        }
        yield Measurement(model, "peer_decode", "tok/s", result.decode, None, extra)


def _table(model: str, job: Job, results: list[PeerResult]) -> Table:
    title = f"{model} on {job.device}, {job.threads} threads, {job.prompt_tokens}+{job.output_tokens} tokens"
    rows = table(title, "engine", "load s", "prefill t/s", "decode t/s", "ours / it", "same tokens")
    for result in results:
        if result.prefill is None or result.decode is None:
            rows.add_row(result.name, "-", "-", "-", "-", "-")
            continue
        rows.add_row(
            f"{result.name} {result.version}",
            f"{result.load_s:.2f}",
            f"{result.prefill.p50:.1f}",
            f"{result.decode.mean:.1f} ± {result.decode.sd:.1f}",
            "-" if result.ratio is None else f"{result.ratio:.2f}x",
            "-" if result.same_tokens is None else f"{result.same_tokens} of {result.num_tokens}",
        )
    return rows
