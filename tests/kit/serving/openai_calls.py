"""Sixty calls with the official `openai` client, each with what must hold of its answer, for any served model."""

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest

MESSAGES: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say héllo 😀"}]
LIMIT = 8
CHAT: list[dict[str, Any]] = [
    {},
    {"temperature": 0},
    {"temperature": 0.7, "top_p": 0.5, "seed": 1},
    {"n": 3, "seed": 2},
    {"stop": "e"},
    {"stop": ["qq", "zz"]},
    {"logprobs": True},
    {"logprobs": True, "top_logprobs": 5},
    {"frequency_penalty": 1.5, "presence_penalty": -1.0},
    {"logit_bias": {"5": 2, "6": -100}},
    {"user": "someone", "metadata": {"a": "b"}, "store": False},
    {"max_tokens": openai.NOT_GIVEN, "max_completion_tokens": 3},
    {"messages": [{"role": "developer", "content": "Be kind."}, {"role": "user", "content": "hi"}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
    {"messages": [*MESSAGES, {"role": "assistant", "content": "hello"}, {"role": "user", "content": "again"}]},
    {"extra_body": {"min_p": 0.1, "top_k": 4, "repetition_penalty": 1.1}},
    {"extra_body": {"min_tokens": 4, "ignore_eos": True}},
    {"extra_body": {"priority": -1, "cache_salt": "salt"}},
]
COMPLETIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0},
    {"prompt": ["one", "two", "three"]},
    {"prompt": [10, 11, 12]},
    {"prompt": [[10, 11], [12]], "n": 2, "seed": 4},
    {"echo": True},
    {"echo": True, "logprobs": 2},
    {"logprobs": 0},
    {"logprobs": 5, "stop": ["e"]},
    {"max_tokens": 0, "echo": True, "logprobs": 1},
    {"best_of": 2, "n": 2},
    {"extra_body": {"stop_token_ids": [7], "include_stop_str_in_output": True}},
    {"extra_body": {"return_token_ids": True, "skip_special_tokens": False}},
]


def run_all(client: openai.OpenAI, asynchronous: openai.AsyncOpenAI, model: str) -> int:
    """Make every call; return their number."""
    count = 0
    for made in (*_chats(client, model), *_completions(client, model), *_others(client, model)):
        assert made is not None
        count += 1
    return count + asyncio.run(_at_once(asynchronous, model))


def _chats(client: openai.OpenAI, model: str) -> Iterator[Any]:
    for more in CHAT:
        asked: dict[str, Any] = {"model": model, "messages": MESSAGES, "max_tokens": LIMIT, **more}
        whole = client.chat.completions.create(**asked)
        assert len(whole.choices) == asked.get("n", 1)
        assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
        assert all(choice.message.role == "assistant" for choice in whole.choices)
        assert all(choice.finish_reason in ("stop", "length") for choice in whole.choices)
        assert all((choice.logprobs is not None) == bool(asked.get("logprobs")) for choice in whole.choices)
        yield whole
        chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
        assert chunks[-1].choices == []
        assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
        repeatable = asked.get("temperature") == 0 or "seed" in asked
        for choice in whole.choices if repeatable else ():
            parts = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
            assert "".join(part.delta.content or "" for part in parts) == choice.message.content
        yield chunks


def _completions(client: openai.OpenAI, model: str) -> Iterator[Any]:
    for more in COMPLETIONS:
        asked: dict[str, Any] = {"model": model, "prompt": "Once upon", "max_tokens": LIMIT, **more}
        prompt = asked["prompt"]
        num_prompts = len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1
        whole = client.completions.create(**asked)
        assert [choice.index for choice in whole.choices] == list(range(num_prompts * asked.get("n", 1)))
        if asked.get("echo"):
            assert all(choice.text.startswith("Once upon") for choice in whole.choices)
        for choice in whole.choices:
            assert (choice.logprobs is not None) == ("logprobs" in asked)
            if choice.logprobs is not None:
                assert len(choice.logprobs.tokens or []) == len(choice.logprobs.token_logprobs or [])
        yield whole
        yield list(client.completions.create(**asked, stream=True))


def _others(client: openai.OpenAI, model: str) -> Iterator[Any]:
    listed = client.models.list()
    assert [entry.id for entry in listed] == [model]
    yield listed
    yield client.models.retrieve(model)
    with client.chat.completions.stream(model=model, messages=MESSAGES, max_tokens=LIMIT) as stream:
        kinds = [event.type for event in stream]
        assert "content.done" in kinds
        yield stream.current_completion_snapshot
    raw = client.chat.completions.with_raw_response.create(model=model, messages=MESSAGES, max_tokens=1)
    assert raw.headers["x-request-id"]
    yield raw.parse()
    with client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=64, stream=True) as left:
        yield next(iter(left))  # and closed before its end
    for error, asked in (
        (openai.NotFoundError, {"model": "other", "messages": MESSAGES}),
        (openai.BadRequestError, {"model": model, "messages": []}),
        (openai.BadRequestError, {"model": model, "messages": MESSAGES, "temperature": -1}),
        (openai.BadRequestError, {"model": model, "messages": MESSAGES, "extra_body": {"no_such_field": 1}}),
    ):
        with pytest.raises(error) as raised:
            client.chat.completions.create(**asked)
        yield raised.value.body
    with pytest.raises(openai.BadRequestError) as raised:
        client.embeddings.create(model=model, input="text")
    yield raised.value.body


async def _at_once(client: openai.AsyncOpenAI, model: str) -> int:
    """Eight clients at once, four of them streaming; greedy, so all say the same."""
    asked: dict[str, Any] = {"model": model, "messages": MESSAGES, "max_tokens": LIMIT, "temperature": 0}

    async def whole() -> str:
        return (await client.chat.completions.create(**asked)).choices[0].message.content or ""

    async def streamed() -> str:
        chunks = await client.chat.completions.create(**asked, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    said = await asyncio.gather(*[whole() for _ in range(4)], *[streamed() for _ in range(4)])
    assert len(set(said)) == 1
    return len(said)
