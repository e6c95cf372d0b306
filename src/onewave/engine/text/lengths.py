"""Prompts that are too long, some of them known to be so before they are encoded."""

from typing import NoReturn

from onewave.base.errors import InvalidArgumentError
from onewave.engine.text.tokenizer import Tokenizer

# Characters a token that a text may have before its beginning is looked at alone: more than any control token has.
_MAX_CHARACTERS = 64


def is_long(num_characters: int, max_model_len: int) -> bool:
    """Whether a text is several times as long as any prompt that fits."""
    return num_characters > _MAX_CHARACTERS * max_model_len


def check_length(tokenizer: Tokenizer, text: str, max_model_len: int) -> None:
    """Refuse a long text by its beginning: to encode all of it may take seconds. Raises InvalidArgumentError."""
    if is_long(len(text), max_model_len):
        count = len(tokenizer.encode_plain(text[: _MAX_CHARACTERS // 2 * max_model_len]))
        if count > 2 * max_model_len:  # more than what the cut may have changed
            refuse_length(f"{len(text)} characters, over {count} tokens", max_model_len)


def refuse_length(got: str, max_model_len: int) -> NoReturn:
    """Raise InvalidArgumentError for a prompt that does not fit."""
    allowed = f"up to {max_model_len - 1}, one less than max_model_len={max_model_len}"
    raise InvalidArgumentError("prompt", got=got, allowed=allowed, next="Shorten the prompt or raise max_model_len.")
