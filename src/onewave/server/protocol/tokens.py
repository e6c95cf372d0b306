"""/tokenize and /detokenize, as vLLM has them."""

from typing import Annotated, Any

from pydantic import BaseModel, Field

from onewave.server.protocol.base import Strict
from onewave.server.protocol.chat import ChatMessage
from onewave.server.protocol.sampling import TokenId


class TokenizeRequest(Strict):
    """A text, or a conversation: one of the two."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool = False
    tools: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeAnswer(BaseModel):
    """Its token ids. token_strs: the text of each, where asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(Strict):
    """Token ids."""

    model: str | None = None
    tokens: list[TokenId]


class DetokenizeAnswer(BaseModel):
    """Their text, control tokens included."""

    prompt: str
