"""One turn of the model, between the endpoints and the engine: what runs, and how what it says is read.

An endpoint makes a Turn of its request: a checked job, and for each sample an AnswerReader, which takes the answer's
text apart into content, reasoning and tool calls as it comes. `deltas` then yields what each step brought, `whole`
the answers at the end. Endpoints only write that down in their API's shape.
"""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from onewave.engine.llm import Job
from onewave.engine.output import CompletionOutput, RequestOutput
from onewave.server.answers.pieces import AnswerReader, Piece, PlainReader
from onewave.server.http.errors import ApiError
from onewave.server.served import Served


@dataclass(frozen=True)
class Turn:
    """A job to run, with the reader of its answers. request_id: the API's, which the engine's logs name too."""

    job: Job
    request_id: str
    make_reader: Callable[[], AnswerReader] = PlainReader


@dataclass(frozen=True)
class Delta:
    """One sample's part of a step. output: the engine's own words for it. finish_reason: with the last one."""

    output: CompletionOutput
    piece: Piece
    finish_reason: str | None


@dataclass(frozen=True)
class Step:
    """One step of a turn. result: the engine's."""

    result: RequestOutput
    deltas: list[Delta]


async def steps(served: Served, turn: Turn) -> AsyncGenerator[Step]:
    """Run a turn; yield each step that brought something. Raises as AsyncLLM.run."""
    watch = served.metrics.watch(turn.job)
    readers = [turn.make_reader() for _ in range(turn.job.params.n)]
    ended = [False] * len(readers)
    try:
        async with aclosing(served.engine.run(turn.job, request_id=turn.request_id, delta=True)) as results:
            async for result in results:
                deltas: list[Delta] = []
                for index, output in enumerate(result.outputs):
                    if not ended[index] and (output.token_ids or output.text or output.finish_reason):
                        deltas.append(_read(output, readers[index]))
                        ended[index] = output.finish_reason is not None
                try:
                    if deltas or result.finished:
                        yield Step(result, deltas)
                finally:
                    watch.step(result)  # once it is sent
    finally:
        watch.end()


async def whole(served: Served, turn: Turn) -> Step:
    """Run a turn and return all of it as one step. Raises as AsyncLLM.run."""
    watch = served.metrics.watch(turn.job)
    try:
        result = await served.engine.complete(turn.job, request_id=turn.request_id)
        watch.step(result)
    finally:
        watch.end()
    return Step(result, [_read(output, turn.make_reader()) for output in result.outputs])


def usage_of(*results: RequestOutput) -> dict[str, Any]:
    """The tokens of some requests so far, as protocol.base.Usage says."""
    prompt = sum(len(result.prompt_token_ids) for result in results)
    generated = sum(result.metrics.num_generation_tokens for result in results)
    cached = sum(result.num_cached_tokens or 0 for result in results)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _read(output: CompletionOutput, reader: AnswerReader) -> Delta:
    reason = output.finish_reason
    if reason == "abort":
        raise ApiError(503, "the request was ended, as the server is stopping", code="stopping", retry_after=1)
    piece = reader.push(output.text, last=reason is not None)
    return Delta(output, piece, None if reason is None else reader.finish_reason(reason))
