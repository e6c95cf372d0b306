"""`onewave bench prompt`: the time to the first token."""

from __future__ import annotations

from dataclasses import asdict
from itertools import chain, product
from typing import TYPE_CHECKING, Annotated

import typer

from onewave.base.settings import Settings
from onewave.cli import options
from onewave.cli.bench.report import Reps, Results, Rows, Warmup, gpu_for, name_of, numbers, open_llm, show_status

if TYPE_CHECKING:
    from collections.abc import Iterator

    from onewave.bench.engine.beside import GapResult
    from onewave.bench.engine.prompt import PromptResult
    from onewave.weights.fetch.sources import ModelLocation

_COLUMNS = ("attention", "batch", "tokens", "ms", "GPU ms", "host ms", "x onewave's", "alone ms")


def prompt(
    asked: options.ModelOptions,
    *,
    batch_size: Annotated[str, typer.Option("--batch-size", help="Prompts at once; several: 1,8.")] = "1",
    input_len: Annotated[
        str, typer.Option("--input-len", help="Tokens of each prompt; several: 64,8192.")
    ] = "8,64,256,512,2048,8192",
    reps: Reps = 7,
    peer: Annotated[
        bool, typer.Option("--peer", help="Beside it: transformers, plain and compiled, on random weights.")
    ] = False,
    beside_stream: Annotated[
        bool, typer.Option("--beside-stream", help="Instead: a stream's longest gap while each prompt arrives.")
    ] = False,
    warmup: Warmup = 2,
    out: Results,
) -> None:
    """Time prompts to the first token of all: with the engine's own attention, and with PyTorch's cuDNN and flash
    kernels in its place. --peer: also transformers' static cache, as it is and compiled. --beside-stream: instead, the
    longest time between two tokens of a stream while each prompt arrives.

    They take turns. Beside each stand the GPU's and the host's time of the passes, and what the attention of all layers
    takes by itself.
    """
    batches = numbers("--batch-size", batch_size, 1)
    lengths = numbers("--input-len", input_len, 1)
    from onewave.bench.engine.prompt import measure_prompts
    from onewave.bench.engine.transformers_peer import (
        check_transformers,
        measure_transformers_prompts,
        random_transformers,
    )
    from onewave.weights.fetch.sources import resolve

    gpu_for("bench prompt", asked.device, next="Use bench latency.")
    if beside_stream:
        _show_gaps(asked, lengths, reps=reps, warmup=warmup, out=out)
        return
    location = resolve(asked.model, Settings.from_env(), revision=asked.revision, load_format="dummy") if peer else None
    if location is not None:
        check_transformers(location, asked="bench prompt --peer")
    room = {"max_model_len": max(lengths) + 1, "max_num_seqs": max(batches)}
    llm = open_llm(asked, **room, enable_prefix_caching=False).llm
    sizes, notes = list(product(batches, lengths)), list[str]()
    own = measure_prompts(llm, sizes, reps=reps, warmup=warmup, show=show_status, note=notes.append)

    def peers(location: ModelLocation) -> Iterator[PromptResult]:
        llm.close()
        model = random_transformers(location, llm.device, llm.dtype)
        yield from measure_transformers_prompts(model, sizes, reps=reps, warmup=warmup, show=show_status)

    results: list[PromptResult] = []
    rows = Rows(out, llm.device, f"{llm.name}, {name_of(llm.dtype)} on {llm.device}, first tokens", *_COLUMNS)
    ours: dict[tuple[int, int], float] = {}
    # Each as it is measured: a peer that compiles takes minutes.
    for result in chain(own, peers(location) if location is not None else ()):
        size, seconds = (result.batch, result.tokens), result.seconds
        ours.setdefault(size, seconds.p50)
        results.append(result)
        times = f"{seconds.p50 * 1e3:.2f} ± {seconds.sd * 1e3:.2f}"
        parts = f"{result.gpu * 1e3:.2f}", f"{result.host * 1e3:.2f}", f"{seconds.p50 / ours[size]:.3f}"
        alone = "-" if result.alone is None else f"{result.alone * 1e3:.2f}"
        rows.add((result.attention, *map(str, size), times, *parts, alone), [result.measurement(llm)])
    facts = {"model": llm.name, "results": [asdict(result) for result in results], "notes": notes}
    rows.finish(facts, *notes)


def _show_gaps(asked: options.ModelOptions, lengths: list[int], *, reps: int, warmup: int, out: Results) -> None:
    from onewave.bench.engine.beside import STREAM_PROMPT, measure_gaps, stream_tokens

    longest = max(*lengths, STREAM_PROMPT + stream_tokens(max(lengths)))
    llm = open_llm(asked, max_model_len=longest + 1, max_num_seqs=2, enable_prefix_caching=False).llm
    results: list[GapResult] = []
    title = f"{llm.name}, {name_of(llm.dtype)} on {llm.device}, a stream beside a prompt"
    columns = ("prompt tokens", "longest gap ms", "without a prompt ms", "first token ms", "same tokens")
    rows = Rows(out, llm.device, title, *columns)
    for result in measure_gaps(llm, lengths, reps=reps, warmup=warmup, show=show_status):
        results.append(result)
        cells = (
            str(result.tokens),
            f"{result.gap.p50 * 1e3:.2f} ± {result.gap.sd * 1e3:.2f}",
            f"{result.alone.p50 * 1e3:.2f}",
            f"{result.first.p50 * 1e3:.2f}",
            "yes" if result.same_tokens else "NO",
        )
        rows.add(cells, [result.measurement(llm)])
    rows.finish({"model": llm.name, "results": [asdict(result) for result in results]})
