"""A load's requests: conversations of one or more turns, the same in every run."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from onewave.base.errors import InvalidArgumentError, shown
from onewave.engine.arguments import whole

DATA = ("random", "shared-prefix", "multi-turn")
APIS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
# About a token each.
_WORDS = (
    "one", "two", "red", "blue", "house", "river", "stone", "light", "water", "green", "small", "large", "tree", "road",
    "night", "day", "hand", "eye", "time", "year", "work", "word", "book", "door", "fire", "bird", "fish", "wind",
)  # fmt: skip


@dataclass(frozen=True)
class Workload:
    """The shape of the requests to a server.

    api: completions (prompts are token ids below `vocab_size`) or chat (words). input_len: tokens of a turn, or words.
    shared_len: as much again before the first turn, the same in all conversations (shared-prefix). turns: of a
    conversation (multi-turn): each repeats what came before, in chat with the model's answers and else with random ids
    in their place. output_len: tokens of each answer. ignore_eos: a field beyond OpenAI's. seed: of all that is random.
    Raises InvalidArgumentError.
    """

    model: str
    api: str = "completions"
    data: str = "random"
    input_len: int = 512
    output_len: int = 128
    shared_len: int = 2048
    turns: int = 4
    vocab_size: int = 10_000
    ignore_eos: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value, allowed in (("api", self.api, tuple(APIS)), ("data", self.data, DATA)):
            if value not in allowed:
                raise InvalidArgumentError(name, got=shown(value), allowed=", ".join(allowed))
        for name in ("input_len", "output_len", "shared_len", "turns", "vocab_size"):
            whole(name, getattr(self, name), 1)

    @property
    def path(self) -> str:
        return APIS[self.api]

    @property
    def num_turns(self) -> int:
        return self.turns if self.data == "multi-turn" else 1

    def conversations(self, count: int, name: str) -> Iterator[Conversation]:
        """So many; another name has others."""
        shared = self._text(random.Random(f"{self.seed} shared"), self.shared_len)
        for index in range(count):
            draw = random.Random(f"{self.seed} {name} {index}")
            turns = [self._text(draw, self.input_len) for _ in range(self.num_turns)]
            if self.data == "shared-prefix":
                turns[0] = shared + turns[0]
            yield Conversation(self, tuple(turns), draw.random())

    def _text(self, draw: random.Random, length: int) -> tuple[Any, ...]:
        """Token ids, or words."""
        if self.api == "completions":
            return tuple(draw.randrange(self.vocab_size) for _ in range(length))
        return tuple(draw.choices(_WORDS, k=length))


@dataclass(frozen=True)
class Conversation:
    """Turns of one client, and what was said so far."""

    workload: Workload
    turns: tuple[tuple[Any, ...], ...]
    seed: float
    said: tuple[Any, ...] = ()

    def body(self) -> dict[str, Any]:
        """The next turn's request."""
        work = self.workload
        body: dict[str, Any] = {"model": work.model, "max_tokens": work.output_len, "temperature": 0.0, "stream": True}
        body["stream_options"] = {"include_usage": True}
        if work.ignore_eos:
            body["ignore_eos"] = True
        if work.api == "completions":
            return body | {"prompt": [*self.said, *self.turns[0]]}
        return body | {"messages": [*self.said, self._asked()]}

    def after(self, answer: str) -> Conversation | None:
        """Return the rest of the conversation after an answer; None at the end."""
        if len(self.turns) == 1:
            return None
        if self.workload.api == "chat":
            said = (*self.said, self._asked(), {"role": "assistant", "content": answer})
        else:
            draw = random.Random(f"{self.seed} {len(self.turns)}")
            answered = (draw.randrange(self.workload.vocab_size) for _ in range(self.workload.output_len))
            said = (*self.said, *self.turns[0], *answered)
        return replace(self, turns=self.turns[1:], said=said)

    def _asked(self) -> dict[str, str]:
        return {"role": "user", "content": " ".join(self.turns[0])}
