"""/v1/chat/completions."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from onewave.server.protocol.base import Strict, TokenLimit, Usage
from onewave.server.protocol.forms import EarlierCall, ToolFields
from onewave.server.protocol.sampling import SamplingFields

MAX_TOP_LOGPROBS = 20


class TextPart(Strict):
    """A part of a message. Only text is read; marks for caches are passed over."""

    type: Literal["text"]
    text: str
    cache_control: Annotated[dict[str, Any] | None, Field(exclude=True)] = None


class ChatMessage(BaseModel):
    """One message. Further fields are the template's to read."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[EarlierCall] | None = None
    tool_call_id: str | None = None


class ChatRequest(SamplingFields, ToolFields):
    """A conversation to answer."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_tokens: TokenLimit | None = None
    max_completion_tokens: TokenLimit | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    modalities: list[Literal["text"]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None

    @property
    def token_limit(self) -> int | None:
        """Most tokens of an answer, under its new name or its old one."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        """SamplingParams.logprobs."""
        return (self.top_logprobs or 0) if self.logprobs else None


class TopLogprob(BaseModel):
    """A token, its natural-log probability, and its own bytes."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """A sampled token and the most probable ones."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Log probabilities of a choice's tokens."""

    content: list[TokenLogprob] | None
    refusal: None = None


class FunctionCall(BaseModel):
    """A call, whole or, in a stream, a part of one."""

    name: str | None = None
    arguments: str | None = None


class ToolCall(BaseModel):
    """index: in a stream alone."""

    index: int | None = None
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCall


class AnswerMessage(BaseModel):
    """The model's message. reasoning_content: the model's thoughts, where it has them apart."""

    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatAnswer(BaseModel):
    """All of them."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None
