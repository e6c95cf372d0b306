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
class TextPart:
    """Content, or a part of a thought."""

    text: str
    thought: bool = False


@dataclass(frozen=True)
class Piece:
    """The content, reasoning and calls in a stretch of an answer's text, in the order in which they were written."""

    parts: tuple[TextPart | CallPart, ...] = ()

    @classmethod
    def of(cls, text: str, *, thought: bool = False) -> "Piece":
        """A piece of text; nothing for none."""
        return cls((TextPart(text, thought),)) if text else cls()

    @property
    def content(self) -> str:
        return self._text(thought=False)

    @property
    def reasoning(self) -> str:
        return self._text(thought=True)

    @property
    def calls(self) -> list[CallPart]:
        return [part for part in self.parts if isinstance(part, CallPart)]

    def __bool__(self) -> bool:
        return bool(self.parts)

    def __add__(self, other: "Piece") -> "Piece":
        return Piece(self.parts + other.parts)

    def _text(self, *, thought: bool) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, TextPart) and part.thought is thought)


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
        del last
        return Piece.of(text)

    def finish_reason(self, reason: str) -> str:
        return reason
