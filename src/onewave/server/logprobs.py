"""Log-probabilities in the shapes of chat answers and of completions."""

from collections.abc import Sequence
from typing import Any

from onewave.engine.output import Logprob, Logprobs
from onewave.server.served import Served

# JSON has no -Infinity; OpenAI's number for a token that can't come.
_LOWEST = -9999.0


def token_bytes(served: Served, token_id: int) -> bytes:
    """A token's own bytes; b"" without a tokenizer."""
    if not served.has_tokenizer:
        return b""
    tokenizer = served.tokenizer
    if tokenizer.pieces is not None:
        return tokenizer.pieces[token_id]
    return tokenizer.token_text(token_id).encode("utf-8", "replace")


def chat_logprobs(served: Served, logprobs: Sequence[Logprobs] | None, num_top: int) -> dict[str, Any] | None:
    """A choice's "logprobs". num_top: how many were asked for beside the sampled one."""
    if logprobs is None:
        return None

    def entry(token_id: int, found: Logprob) -> dict[str, Any]:
        data = token_bytes(served, token_id)
        return {"token": _spelled(data), "logprob": max(found.logprob, _LOWEST), "bytes": list(data)}

    content = [
        {**entry(*next(iter(each.items()))), "top_logprobs": [entry(*top) for top in _top(each, num_top)]}
        for each in logprobs
    ]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """A completion's "logprobs", with offsets into its text that go on from chunk to chunk."""

    def __init__(self, served: Served, num_top: int, *, skip_special_tokens: bool) -> None:
        self._served, self._num_top = served, num_top
        self._skip = served.tokenizer.special_ids if served.has_tokenizer and skip_special_tokens else frozenset[int]()
        self._offset = 0

    def take(self, token_ids: Sequence[int], logprobs: Sequence[Logprobs | None]) -> dict[str, Any]:
        """The next tokens. None: the first of a prompt, which has no probability."""
        tokens: list[str] = []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for token_id, found in zip(token_ids, logprobs, strict=True):
            data = token_bytes(self._served, token_id)
            tokens.append(_spelled(data))
            offsets.append(self._offset)
            if token_id not in self._skip:
                # A character is counted where it begins: bytes that go on with one are 0b10xxxxxx.
                self._offset += sum(byte & 0xC0 != 0x80 for byte in data)
            values.append(None if found is None else max(found[token_id].logprob, _LOWEST))
            tops.append(None if found is None else self._tops(found))
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}

    def _tops(self, found: Logprobs) -> dict[str, float]:
        # The sampled token is always there, as in OpenAI's answers.
        kept = dict([next(iter(found.items())), *_top(found, self._num_top)])
        return {_spelled(token_bytes(self._served, i)): max(each.logprob, _LOWEST) for i, each in kept.items()}


def prompt_logprobs(logprobs: Sequence[Logprobs | None] | None) -> list[dict[str, Any] | None] | None:
    """vLLM's "prompt_logprobs": token id -> logprob, rank and text."""
    if logprobs is None:
        return None
    return [
        None
        if each is None
        else {
            str(token_id): {
                "logprob": max(found.logprob, _LOWEST),
                "rank": found.rank,
                "decoded_token": found.decoded_token,
            }
            for token_id, found in each.items()
        }
        for each in logprobs
    ]


def _top(logprobs: Logprobs, count: int) -> list[tuple[int, Logprob]]:
    return sorted(logprobs.items(), key=lambda item: -item[1].logprob)[:count]


def _spelled(data: bytes) -> str:
    """A token as text; where its bytes are no whole characters, OpenAI's way to spell them."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
