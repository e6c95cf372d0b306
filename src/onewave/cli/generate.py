"""`onewave generate`: continue prompts."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onewave.base.errors import InvalidArgumentError, check_one_of
from onewave.cli import options
from onewave.cli.sampling import GenerateSampling
from onewave.cli.session import open_llm, stats_line
from onewave.cli.text.files import PROMPT_FORMATS, read_prompts

if TYPE_CHECKING:
    from onewave.engine.llm import LLM
    from onewave.engine.output import Logprobs, RequestOutput
    from onewave.engine.params import SamplingParams


def generate(
    prompt: Annotated[str | None, typer.Argument(metavar="[PROMPT]", help="The text to continue.")] = None,
    more_prompts: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="The same; several make a batch.")
    ] = None,
    prompt_file: Annotated[
        Path | None, typer.Option("--prompt-file", help="A prompt a line, run as a batch; - is standard input.")
    ] = None,
    prompt_format: Annotated[
        str,
        typer.Option("--prompt-format", help="lines; or jsonl, of strings or objects. auto: jsonl for a *.jsonl file."),
    ] = "auto",
    *,
    sampling: GenerateSampling,
    loading: options.Loading,
    max_num_seqs: Annotated[int, typer.Option("--max-num-seqs", help="Sequences that run together.")] = 8,
    max_num_batched_tokens: Annotated[
        int, typer.Option("--max-num-batched-tokens", help="Prompt tokens of one pass; longer prompts run in chunks.")
    ] = 2048,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a prompt and line.")] = False,
    no_stream: Annotated[bool, typer.Option("--no-stream", help="Print the text when it is whole.")] = False,
    stats: options.Stats = False,
) -> None:
    """Continue a prompt, or a batch of them.

    Without a prompt, reads standard input, a prompt a line. One prompt's text is printed as it comes.
    """
    params = sampling.params()
    if not (params.detokenize or as_json):
        raise InvalidArgumentError("--no-detokenize", got="no text", allowed="with --json, which prints token ids")
    prompts = _gather(prompt, more_prompts or [], prompt_file, prompt_format)
    opened = open_llm(
        **asdict(loading),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        seed=params.seed or 0,
    )
    wants_logprobs = not (params.logprobs is None and params.prompt_logprobs is None)
    if not (as_json or no_stream or wants_logprobs) and len(prompts) == params.n == 1:
        outputs = [_stream(opened.llm, prompts[0], params)]
    else:
        outputs = opened.llm.generate(prompts, params)
        # Where standard output can't spell every character, JSON's escapes do.
        in_unicode = (getattr(sys.stdout, "encoding", None) or "utf-8").lower().startswith("utf")
        for output in outputs:
            if as_json:
                print(json.dumps(_as_json(output), ensure_ascii=not in_unicode))
            else:
                _show(output, several=len(outputs) > 1)
    if stats:
        sys.stdout.flush()
        print(stats_line(opened, outputs), file=sys.stderr)


def _gather(prompt: str | None, more: list[str], file: Path | None, form: str) -> list[Any]:
    """All prompts in the order given; standard input when there is no other."""
    check_one_of("--prompt-format", form, PROMPT_FORMATS)
    prompts: list[Any] = [*([] if prompt is None else [prompt]), *more]
    for text in prompts:
        if not text:
            raise InvalidArgumentError("PROMPT", got="empty", allowed="at least one character")
    if file is not None:
        prompts += read_prompts(file, form)
    elif not prompts:
        if sys.stdin is not None and sys.stdin.isatty():
            raise InvalidArgumentError(
                "no prompt", next="Write one after `onewave generate`, give --prompt-file, or pipe prompts in."
            )
        prompts = read_prompts(Path("-"), form)
    return prompts


def _stream(llm: LLM, prompt: Any, params: SamplingParams) -> RequestOutput:
    """Print the text as it comes; return the last state."""
    last: RequestOutput | None = None
    try:
        for last in llm.stream(prompt, params):
            sys.stdout.write(last.outputs[0].delta)
            sys.stdout.flush()
    finally:
        if last is not None:
            print(flush=True)
    assert last is not None, "a stream yields at least its end"
    return last


def _show(output: RequestOutput, *, several: bool) -> None:
    """Print a prompt's samples; with more than one text in all, each under a line that says whose it is."""
    if output.prompt_logprobs is not None:
        _show_logprobs(output.prompt_token_ids, output.prompt_logprobs)
    for sample in output.outputs:
        if several or len(output.outputs) > 1:
            number = f" [{sample.index}]" if len(output.outputs) > 1 else ""
            print(f"--- {output.prompt_token_ids if output.prompt is None else output.prompt!r}{number}")
        print(sample.text)
        if sample.logprobs is not None:
            _show_logprobs(sample.token_ids, sample.logprobs)


def _show_logprobs(token_ids: list[int], logprobs: Sequence[Logprobs | None]) -> None:
    """A line a token: the token itself with its log-probability and rank, then the most likely ones. A prompt's first
    token has none."""
    for token_id, entries in zip(token_ids, logprobs, strict=True):
        if entries is None:
            continue
        taken = entries[token_id]
        others = [f"{e.decoded_token!r} {e.logprob:.4f}" for i, e in entries.items() if i != token_id]
        print("  ".join([f"{taken.decoded_token!r} {taken.logprob:.4f} (rank {taken.rank})", *others]))


def _json_logprobs(logprobs: Sequence[Logprobs | None] | None) -> Any:
    """JSON's form of a list with the entries of each token."""
    return logprobs and [
        entries
        and [
            {"token_id": i, "token": e.decoded_token, "logprob": _number(e.logprob), "rank": e.rank}
            for i, e in entries.items()
        ]
        for entries in logprobs
    ]


def _number(value: float | None) -> float | None:
    """JSON has neither infinities nor NaN."""
    return value if value is not None and math.isfinite(value) else None


def _as_json(output: RequestOutput) -> dict[str, Any]:
    metrics = output.metrics
    return {
        "prompt": output.prompt,
        "prompt_token_ids": output.prompt_token_ids,
        "prompt_logprobs": _json_logprobs(output.prompt_logprobs),
        "outputs": [
            {
                "index": sample.index,
                "text": sample.text,
                "token_ids": sample.token_ids,
                "finish_reason": sample.finish_reason,
                "stop_reason": sample.stop_reason,
                "cumulative_logprob": _number(sample.cumulative_logprob),
                "logprobs": _json_logprobs(sample.logprobs),
            }
            for sample in output.outputs
        ],
        "metrics": {
            "time_to_first_token_s": metrics.time_to_first_token,
            "tokens_per_second": metrics.tokens_per_second,
            "num_prompt_tokens": metrics.num_prompt_tokens,
            "num_generation_tokens": metrics.num_generation_tokens,
        },
    }
