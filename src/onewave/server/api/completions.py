"""/v1/completions, and the refusal of /v1/embeddings."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from onewave.base.errors import InvalidArgumentError
from onewave.engine.output import CompletionOutput, Logprobs, RequestOutput
from onewave.engine.params import SamplingParams
from onewave.engine.prompts import RawPrompt
from onewave.server.http.errors import ApiError
from onewave.server.http.events import EventResponse, event, guarded, json_response, merged, together, until_gone
from onewave.server.logprobs import CompletionLogprobs, prompt_logprobs
from onewave.server.protocol.base import ERRORS, whole_or_streamed
from onewave.server.protocol.completions import CompletionAnswer, CompletionRequest
from onewave.server.served import Served, answer_id, served_of
from onewave.server.turn import Step, Turn, steps, usage_of, whole

router = APIRouter()


@router.post("/v1/completions", responses=whole_or_streamed(CompletionAnswer))
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Continue one prompt or several."""
    served = served_of(request)
    name = served.model_of(body.model)
    own_id = answer_id(request, "cmpl-")
    params = _params(body)
    turns = [await _turn(served, body, prompt, params, f"{own_id}-{i}") for i, prompt in enumerate(body.prompts)]
    served.engine.check_room(len(turns))
    head = {"id": own_id, "object": "text_completion", "created": int(time.time()), "model": name}
    if body.stream:
        return EventResponse(guarded(_chunks(served, body, turns, head)))
    return json_response(await until_gone(request, _answer(served, body, turns, head)))


@router.post("/v1/embeddings", responses=ERRORS)
async def refuse_embeddings() -> Response:
    """Not served: these models give text."""
    raise ApiError(
        400, "embeddings: this server has a model that writes text, and no embedding model", code="no_embeddings"
    )


def _params(body: CompletionRequest) -> SamplingParams:
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise InvalidArgumentError("best_of", got=str(body.best_of), allowed=f"n={body.n or 1}, or left out")
    if body.echo and body.logprobs is not None:
        if body.prompt_logprobs not in (None, body.logprobs):
            got = f"{body.prompt_logprobs} with echo and logprobs={body.logprobs}"
            raise InvalidArgumentError("prompt_logprobs", got=got, allowed="the same number")
        body = body.model_copy(update={"prompt_logprobs": body.logprobs})
    # The engine makes a token at least; where none is asked for, it is left out of the answer.
    return body.sampling_params(max_tokens=1 if body.max_tokens == 0 else body.max_tokens, logprobs=body.logprobs)


async def _turn(
    served: Served, body: CompletionRequest, prompt: str | list[int], params: SamplingParams, request_id: str
) -> Turn:
    raw = RawPrompt(prompt, None) if isinstance(prompt, str) else RawPrompt(None, tuple(prompt))
    job = await served.engine.prepare(raw, params, add_special_tokens=body.add_special_tokens)
    served.check_context(job)
    return Turn(job._replace(priority=body.priority or 0, cache_salt=body.cache_salt), request_id)


async def _answer(served: Served, body: CompletionRequest, turns: list[Turn], head: dict[str, Any]) -> dict[str, Any]:
    done = await together([whole(served, turn) for turn in turns])
    choices: list[dict[str, Any]] = []
    for i, (turn, step) in enumerate(zip(turns, done, strict=True)):
        choices += _Choices(served, body, turn, i).of(step)
    usage = usage_of(*[_without_unasked(body, step.result) for step in done])
    return {**head, "choices": choices, "usage": usage}


async def _chunks(
    served: Served, body: CompletionRequest, turns: list[Turn], head: dict[str, Any]
) -> AsyncGenerator[bytes]:
    choices = [_Choices(served, body, turn, i) for i, turn in enumerate(turns)]
    newest: dict[int, RequestOutput] = {}
    include_usage, usage_in_chunks = body.include_usage, body.usage_in_chunks
    usage: dict[str, Any] = {"usage": None} if include_usage else {}
    async with aclosing(merged([steps(served, turn) for turn in turns])) as found:
        async for i, step in found:
            newest[i] = _without_unasked(body, step.result)
            if usage_in_chunks:
                usage = {"usage": usage_of(*newest.values())}
            for choice in choices[i].of(step):
                yield event({**head, "choices": [choice], **usage})
    if include_usage:
        yield event({**head, "choices": [], "usage": usage_of(*newest.values())})


class _Choices:
    """One prompt's choices, as its steps come. number: the prompt's."""

    def __init__(self, served: Served, body: CompletionRequest, turn: Turn, number: int) -> None:
        self._served, self._body, self._turn = served, body, turn
        n = turn.job.params.n
        self._first_index = number * n
        self._fresh = [True] * n
        skip = turn.job.params.skip_special_tokens
        self._logprobs = [CompletionLogprobs(served, body.logprobs or 0, skip_special_tokens=skip) for _ in range(n)]

    def of(self, step: Step) -> list[dict[str, Any]]:
        """Return the choices that a step brought."""
        return [self._choice(step.result, delta.output) for delta in step.deltas]

    def _choice(self, result: RequestOutput, output: CompletionOutput) -> dict[str, Any]:
        body, index = self._body, output.index
        fresh, self._fresh[index] = self._fresh[index], False
        none_asked = body.max_tokens == 0
        text, ids, logprobs = ("", list[int](), list[Logprobs]()) if none_asked else _said(output)
        choice: dict[str, Any] = {
            "index": self._first_index + index,
            "text": text,
            "logprobs": None,
            "finish_reason": "length" if none_asked and output.finish_reason else output.finish_reason,
        }
        shown_ids, shown = list(ids), list[Logprobs | None](logprobs)
        if body.echo and fresh:
            choice["text"] = self._prompt_text() + text
            shown_ids, shown = [*result.prompt_token_ids, *ids], [*(result.prompt_logprobs or []), *logprobs]
        if body.logprobs is not None:
            choice["logprobs"] = self._logprobs[index].take(shown_ids, shown)
        if output.stop_reason is not None and not none_asked:
            choice["stop_reason"] = output.stop_reason
        if body.return_token_ids:
            choice["token_ids"] = ids
            if fresh:
                choice["prompt_token_ids"] = result.prompt_token_ids
        if body.prompt_logprobs is not None and fresh:
            choice["prompt_logprobs"] = prompt_logprobs(result.prompt_logprobs)
        return choice

    def _prompt_text(self) -> str:
        job = self._turn.job
        if job.prompt is not None:
            return job.prompt
        if not self._served.has_tokenizer:
            return ""
        return self._served.tokenizer.decode(job.prompt_token_ids, job.params.skip_special_tokens)


def _said(output: CompletionOutput) -> tuple[str, list[int], list[Logprobs]]:
    return output.text, output.token_ids, output.logprobs or []


def _without_unasked(body: CompletionRequest, result: RequestOutput) -> RequestOutput:
    """A result whose metrics count no token where none was asked for."""
    if body.max_tokens != 0:
        return result
    return replace(result, metrics=replace(result.metrics, num_generation_tokens=0))
