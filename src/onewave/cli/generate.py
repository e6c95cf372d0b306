"""`onewave generate`: continue prompts."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onewave.base.errors import InvalidArgumentError
from onewave.cli import options
from onewave.cli.session import open_llm, stats_line
from onewave.weights.fetch.aliases import DEFAULT_ALIAS

if TYPE_CHECKING:
    from onewave.engine.llm import LLM
    from onewave.engine.output import CompletionOutput, RequestOutput
    from onewave.engine.params import SamplingParams

_MAX_PROMPT_BYTES = 64 * 2**20


def generate(
    prompt: Annotated[str | None, typer.Argument(metavar="[PROMPT]", help="The text to continue.")] = None,
    model: options.Model = DEFAULT_ALIAS,
    more_prompts: Annotated[list[str] | None, typer.Option("--prompt", help="The same; several make a batch.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option("--prompt-file", help="A prompt a line, run as a batch; - is standard input.")
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Most tokens to generate for a prompt.")] = 128,
    min_tokens: Annotated[int, typer.Option("--min-tokens", help="Nothing but --max-tokens ends it before.")] = 0,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    presence_penalty: Annotated[
        float, typer.Option("--presence-penalty", help="Against tokens generated before, -2 to 2.")
    ] = 0.0,
    frequency_penalty: Annotated[
        float, typer.Option("--frequency-penalty", help="The same, times how often, -2 to 2.")
    ] = 0.0,
    seed: options.Seed = None,
    stop: options.Stop = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end-of-text token.")] = False,
    n: Annotated[int, typer.Option("--n", "-n", help="Samples a prompt.")] = 1,
    logprobs: Annotated[
        int | None, typer.Option("--logprobs", help="Report this many likely tokens beside each one taken.")
    ] = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    max_model_len: options.MaxModelLen = None,
    max_num_seqs: Annotated[int, typer.Option("--max-num-seqs", help="Sequences that run together.")] = 8,
    load_format: options.LoadFormat = "auto",
    revision: options.Revision = None,
    tokenizer: options.Tokenizer = None,
    enforce_eager: options.EnforceEager = False,
    decode: options.Decode = "auto",
    keep_unpacked: options.KeepUnpacked = None,
    quantization: options.Quantization = None,
    compact: options.Compact = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a prompt and line.")] = False,
    no_stream: Annotated[bool, typer.Option("--no-stream", help="Print the text when it is whole.")] = False,
    stats: options.Stats = False,
) -> None:
    """Continue a prompt, or a batch of them.

    Without a prompt, reads standard input, a prompt a line. One prompt's text is printed as it comes.
    """
    from onewave.engine.params import SamplingParams

    params = SamplingParams(
        n=n,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
        stop=stop,
        ignore_eos=ignore_eos,
        logprobs=logprobs,
    )
    prompts = _gather(prompt, more_prompts or [], prompt_file)
    opened = open_llm(
        model,
        load_format=load_format,
        revision=revision,
        tokenizer=tokenizer,
        dtype=dtype,
        device=device,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        seed=params.seed or 0,
        enforce_eager=enforce_eager,
        decode=decode,
        keep_unpacked=keep_unpacked,
        quantization=quantization,
        compact=compact,
    )
    plain = not (as_json or no_stream) and len(prompts) == 1 and n == 1 and logprobs is None
    if plain:
        outputs = [_stream(opened.llm, prompts[0], params)]
    else:
        outputs = opened.llm.generate(prompts, params)
        for output in outputs:
            if as_json:
                print(json.dumps(_as_json(output), ensure_ascii=not _writes_unicode()))
            else:
                _show(output, several=len(outputs) > 1)
    if stats:
        sys.stdout.flush()
        print(stats_line(opened, outputs), file=sys.stderr)


def _writes_unicode() -> bool:
    """Whether standard output can spell every character: elsewhere JSON's escapes do."""
    return (getattr(sys.stdout, "encoding", None) or "utf-8").lower().startswith("utf")


def _gather(prompt: str | None, more: list[str], file: Path | None) -> list[str]:
    """All prompts in the order given; standard input when there is no other."""
    prompts = [*([] if prompt is None else [prompt]), *more]
    for text in prompts:
        if not text:
            raise InvalidArgumentError("prompt", got="empty", allowed="at least one character")
    if file is not None:
        prompts += _lines(file)
    elif not prompts:
        if sys.stdin is not None and sys.stdin.isatty():
            raise InvalidArgumentError(
                "no prompt", next="Write one after `onewave generate`, give --prompt-file, or pipe prompts in."
            )
        prompts = _lines(Path("-"))
    return prompts


def _lines(file: Path) -> list[str]:
    """The lines of a file that are not empty."""
    name = "standard input" if str(file) == "-" else str(file)
    try:
        if str(file) == "-":
            if sys.stdin is None:  # pyright: ignore[reportUnnecessaryComparison] # so it is where the shell closed it
                raise OSError("standard input is closed")
            data = sys.stdin.buffer.read(_MAX_PROMPT_BYTES + 1)
        else:
            with file.open("rb") as source:
                data = source.read(_MAX_PROMPT_BYTES + 1)
        if len(data) > _MAX_PROMPT_BYTES:
            raise InvalidArgumentError(f"prompts of {name}", got=f"more than {_MAX_PROMPT_BYTES} bytes")
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise InvalidArgumentError(f"prompts of {name}", got=f"can't be read ({error.strerror or error})") from None
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(f"prompts of {name}", got=f"not UTF-8 (byte {error.start})") from None
    # Only line feeds end a prompt: str.splitlines would also split at form feeds and Unicode separators.
    lines = [line for line in text.replace("\r\n", "\n").split("\n") if line.strip()]
    if not lines:
        raise InvalidArgumentError(f"prompts of {name}", got="empty", allowed="a prompt a line")
    return lines


def _stream(llm: LLM, prompt: str, params: SamplingParams) -> RequestOutput:
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
    for sample in output.outputs:
        if several or len(output.outputs) > 1:
            number = f" [{sample.index}]" if len(output.outputs) > 1 else ""
            print(f"--- {output.prompt!r}{number}")
        print(sample.text)
        if sample.logprobs is not None:
            _show_logprobs(sample)


def _show_logprobs(sample: CompletionOutput) -> None:
    """A line a token: the token taken with its log-probability and rank, then the most likely ones."""
    assert sample.logprobs is not None
    for token_id, entries in zip(sample.token_ids, sample.logprobs, strict=True):
        taken = entries[token_id]
        others = [f"{e.decoded_token!r} {e.logprob:.4f}" for i, e in entries.items() if i != token_id]
        print("  ".join([f"{taken.decoded_token!r} {taken.logprob:.4f} (rank {taken.rank})", *others]))


def _number(value: float | None) -> float | None:
    """JSON has neither infinities nor NaN."""
    return value if value is not None and math.isfinite(value) else None


def _as_json(output: RequestOutput) -> dict[str, Any]:
    metrics = output.metrics
    return {
        "prompt": output.prompt,
        "prompt_token_ids": output.prompt_token_ids,
        "outputs": [
            {
                "index": sample.index,
                "text": sample.text,
                "token_ids": sample.token_ids,
                "finish_reason": sample.finish_reason,
                "stop_reason": sample.stop_reason,
                "cumulative_logprob": _number(sample.cumulative_logprob),
                "logprobs": None
                if sample.logprobs is None
                else [
                    [
                        {"token_id": i, "token": e.decoded_token, "logprob": _number(e.logprob), "rank": e.rank}
                        for i, e in entries.items()
                    ]
                    for entries in sample.logprobs
                ],
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
