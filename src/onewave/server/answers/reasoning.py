"""Thoughts apart from the answer: `<think>` parts become `reasoning_content`."""

from enum import Enum
from typing import NamedTuple

from onewave.engine.text.stop_strings import num_held_back
from onewave.server.answers.pieces import AnswerReader, Piece


class Marks(NamedTuple):
    """The marks that begin and end a model's thoughts."""

    begin: str
    end: str


# In the order in which a chat template is searched for them.
MARKS = (Marks("<think>", "</think>"), Marks("[THINK]", "[/THINK]"))


def marks_of(chat_template: str | None) -> Marks | None:
    """The marks that a chat template knows; None: its model does not think aloud."""
    return next((marks for marks in MARKS if chat_template and marks.end in chat_template), None)


class Thought(Enum):
    """Where an answer begins: within a thought, behind the last one, or where a thought may begin."""

    OPEN = "open"
    CLOSED = "closed"
    FREE = "free"


def thought_at(prompt: str, begun: str, marks: Marks) -> Thought:
    """Where the answer to a prompt begins. begun: what the caller has written of the answer, at the prompt's end.

    Only what the template wrote last, or the caller as the answer, counts: a mark in a message is text.
    """
    if begun:
        return Thought.OPEN if begun.rfind(marks.begin) > begun.rfind(marks.end) else Thought.CLOSED
    end = prompt.rstrip()
    return Thought.OPEN if end.endswith(marks.begin) else Thought.CLOSED if end.endswith(marks.end) else Thought.FREE


class ReasoningReader:
    """Thoughts up to their end mark, then an answer, which another reader reads.

    Thoughts begin where the prompt has opened them, or else with the mark at the answer's very beginning. Line breaks
    around both parts are left out.
    """

    def __init__(self, marks: Marks, rest: AnswerReader, thought: Thought) -> None:
        self._marks, self._rest = marks, rest
        self._thinking = {Thought.OPEN: True, Thought.CLOSED: False, Thought.FREE: None}[thought]
        self._held = ""
        self._begun = thought is Thought.CLOSED

    def push(self, text: str, *, last: bool) -> Piece:
        """The text's reasoning, then whatever the other reader makes of the rest."""
        if self._thinking is False:
            return self._answer(text, last=last)
        self._held += text
        if self._thinking is None:
            begin = self._held.lstrip()
            if self._marks.begin.startswith(begin) and begin != self._marks.begin and not last:
                return Piece()
            self._thinking = begin.startswith(self._marks.begin)
            if not self._thinking:
                self._begun = True
                return self._answer(self._held, last=last)
            self._held = begin.removeprefix(self._marks.begin)
        return self._think(last=last)

    def finish_reason(self, reason: str) -> str:
        return self._rest.finish_reason(reason)

    def _think(self, *, last: bool) -> Piece:
        thought, end, rest = self._held.partition(self._marks.end)
        if not self._begun:
            thought = thought.lstrip()
        held = 0 if last or end else num_held_back(thought, (self._marks.end,))
        shown = thought[: len(thought) - held].rstrip()
        self._begun = self._begun or bool(shown)
        if end:
            self._thinking, self._begun = False, False
            return Piece.of(shown, thought=True) + self._answer(rest, last=last)
        self._held = thought[len(shown) :]
        return Piece.of(shown, thought=True) + (self._rest.push("", last=True) if last else Piece())

    def _answer(self, text: str, *, last: bool) -> Piece:
        if not self._begun:
            text = text.lstrip("\r\n")
            self._begun = bool(text)
        return self._rest.push(text, last=last)
