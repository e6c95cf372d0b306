"""The parts of an answer as its text comes, and the readers that find them."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class CallPart:
    """A tool call, or a further part of its arguments. name, call_id: with the first part alone."""

    index: int
    arguments: str
    name: str | None = None
    call_id: str | None = None


@dataclass(frozen=True)
class Piece:
    """The content, reasoning and calls in a stretch of an answer's text."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[CallPart, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)

    def __add__(self, other: "Piece") -> "Piece":
        return Piece(self.content + other.content, self.reasoning + other.reasoning, self.calls + other.calls)


class AnswerReader(Protocol):
    """Reads one sample's text as it comes."""

    def push(self, text: str, *, last: bool) -> Piece:
        """Return the piece that the new text makes certain; `last`: and all that was held back."""
        ...

    def finish_reason(self, reason: str) -> str:
        """The reason of the API for the engine's, once the last text has been pushed."""
        ...


class PlainReader:
    """All of the text is content."""

    def push(self, text: str, *, last: bool) -> Piece:
        """The text itself."""
        del last
        return Piece(content=text)

    def finish_reason(self, reason: str) -> str:
        return reason
