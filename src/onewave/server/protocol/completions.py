"""/v1/completions."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, WithJsonSchema

from onewave.server.protocol.base import Usage
from onewave.server.protocol.sampling import MAX_TOKEN_ID, SamplingFields

MAX_PROMPTS = 128
MAX_LOGPROBS = 20
# The engine checks their range, all at once: a bound here takes ten times as long as the list.
_PromptId = Annotated[int, WithJsonSchema({"type": "integer", "minimum": 0, "maximum": MAX_TOKEN_ID})]
TokenIds = Annotated[list[_PromptId], Field(min_length=1)]
Text = Annotated[str, Field(min_length=1)]


class CompletionRequest(SamplingFields):
    """Text, or token ids, to continue; several prompts run together."""

    prompt: (
        Text
        | TokenIds
        | Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS)]
    )
    max_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = 16
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    suffix: Literal[""] | None = None
    add_special_tokens: bool = True

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, one by one."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        return [prompt] if isinstance(prompt[0], int) else list(prompt)  # type: ignore[list-item]


class CompletionLogprobsBody(BaseModel):
    """One entry a token. text_offset: where the token begins in the choice's text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """One continuation; those of the first prompt come first."""

    index: int
    text: str
    logprobs: CompletionLogprobsBody | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None


class CompletionAnswer(BaseModel):
    """All of them."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
