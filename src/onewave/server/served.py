"""State that every endpoint works with: the engine, the options, the metrics."""

import time
from functools import cached_property

from fastapi import Request

from onewave.engine.aio import AsyncLLM
from onewave.engine.llm import Job
from onewave.engine.text.tokenizer import Tokenizer
from onewave.server.answers.style import AnswerStyle
from onewave.server.http.errors import ApiError
from onewave.server.metrics import Metrics
from onewave.server.options import ServeOptions


class Served:
    """One model behind one app. created: when, in epoch seconds."""

    def __init__(self, engine: AsyncLLM, options: ServeOptions) -> None:
        self.engine, self.options = engine, options
        self.created = int(time.time())
        self.metrics = Metrics(engine, self.names[0], vllm_names=options.vllm_metric_names)

    @property
    def names(self) -> tuple[str, ...]:
        """The model's names; the first stands in answers."""
        return self.options.model_names or (self.engine.llm.name,)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's. Raises TokenizerError when it has none."""
        return self.engine.llm.tokenizer

    @property
    def has_tokenizer(self) -> bool:
        """Whether it has one: without, only token ids come and go."""
        return self.engine.llm.has_tokenizer

    @cached_property
    def style(self) -> AnswerStyle:
        """How the model writes thoughts and tool calls. Raises TokenizerError when it has no tokenizer."""
        return AnswerStyle.of(self.tokenizer, form=self.options.tool_form, reasoning=self.options.reasoning)

    def check_context(self, job: Job) -> None:
        """Raise ApiError (400) for an answer that may not be as long as its request says."""
        asked, room = job.params.max_tokens, self.engine.llm.max_model_len - len(job.prompt_token_ids)
        if asked is not None and asked > room:
            message = (
                f"{asked} tokens to generate: after a prompt of {len(job.prompt_token_ids)} tokens there is room for "
                f"{room} (max_model_len={self.engine.llm.max_model_len})"
            )
            raise ApiError(400, message, code="context_length_exceeded", param="max_tokens")

    def model_of(self, asked: str | None) -> str:
        """The name under which a request is answered. Raises ApiError (404) for one that is not served."""
        if asked is None or asked in self.names:
            return asked or self.names[0]
        raise ApiError(
            404,
            f"model {asked[:100]!r} is not served; there is {', '.join(self.names)}",
            code="model_not_found",
            param="model",
        )


def served_of(request: Request) -> Served:
    """The app's Served. No FastAPI dependency: solving one takes as long as checking a body."""
    served = request.app.state.served
    assert isinstance(served, Served)
    return served


def answer_id(request: Request, prefix: str) -> str:
    """An answer's id: the request's, by which the log knows it."""
    return f"{prefix}{request.state.request_id}"
