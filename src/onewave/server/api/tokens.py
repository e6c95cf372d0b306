"""/tokenize and /detokenize."""

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from onewave.base.errors import InvalidArgumentError
from onewave.engine.text.conversations import ChatLayout
from onewave.server.api.chat import as_conversation
from onewave.server.conversation import with_tools
from onewave.server.http.events import json_response
from onewave.server.protocol.base import ERRORS
from onewave.server.protocol.tokens import DetokenizeAnswer, DetokenizeRequest, TokenizeAnswer, TokenizeRequest
from onewave.server.served import Served, served_of

router = APIRouter()


@router.post("/tokenize", responses={200: {"model": TokenizeAnswer}, **ERRORS})
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """Give the token ids of a text, or of a conversation in the model's template."""
    served = served_of(request)
    served.model_of(body.model)
    if (body.prompt is None) == (body.messages is None):
        got = "neither prompt nor messages" if body.prompt is None else "prompt and messages"
        raise InvalidArgumentError("prompt", got=got, allowed="one of the two")
    ids = await asyncio.to_thread(_encode, served, body)
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": served.engine.llm.max_model_len, "tokens": ids}
    if body.return_token_strs:
        answer["token_strs"] = [served.tokenizer.token_text(i) for i in ids]
    return json_response(answer)


@router.post("/detokenize", responses={200: {"model": DetokenizeAnswer}, **ERRORS})
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """Give the text of token ids."""
    served = served_of(request)
    served.model_of(body.model)
    vocab_size = served.engine.llm.config.vocab_size
    unknown = next((token_id for token_id in body.tokens if token_id >= vocab_size), None)
    if unknown is not None:
        raise InvalidArgumentError("tokens", got=str(unknown), allowed=f"0..{vocab_size - 1} (the vocabulary)")
    text = await asyncio.to_thread(served.tokenizer.decode, body.tokens, False)
    return json_response({"prompt": text})


def _encode(served: Served, body: TokenizeRequest) -> list[int]:
    if body.prompt is not None:
        return served.tokenizer.encode(body.prompt, body.add_special_tokens is not False)
    layout = ChatLayout(
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        chat_template=body.chat_template,
        chat_template_kwargs=body.chat_template_kwargs,
    )
    messages, layout = with_tools(served, as_conversation(body.messages or []), body.tools or [], layout)
    return served.tokenizer.lay_out_chat(messages, layout)[1]
