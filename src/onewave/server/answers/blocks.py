"""An answer as a row of blocks, as /v1/responses and /v1/messages have it: thoughts, text and calls."""

import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from onewave.server.answers.pieces import CallPart, Piece

Kind = Literal["reasoning", "text", "call"]


@dataclass
class Block:
    """One block. text: so far; of a call, its arguments. block_id: letters that no other block has."""

    kind: Kind
    index: int
    text: str = ""
    name: str = ""
    call_id: str = ""
    block_id: str = field(default_factory=lambda: uuid.uuid4().hex)


class BlockEvent(NamedTuple):
    """A block begins, grows by `delta`, or ends."""

    what: Literal["begin", "delta", "end"]
    block: Block
    delta: str = ""


class Blocks:
    """Puts the pieces of one answer together. all: the blocks so far; the last one may be open."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._open = False

    def push(self, piece: Piece) -> Iterator[BlockEvent]:
        """Yield the events that a piece causes."""
        for part in piece.parts:
            if isinstance(part, CallPart):
                yield from self._grow("call", part.arguments, part)
            else:
                yield from self._grow("reasoning" if part.thought else "text", part.text)

    def finish(self) -> Iterator[BlockEvent]:
        """End the block that is open."""
        if self._open:
            self._open = False
            yield BlockEvent("end", self.all[-1])

    def _grow(self, kind: Kind, text: str, part: CallPart | None = None) -> Iterator[BlockEvent]:
        begins_call = part is not None and part.name is not None
        if not self._open or self.all[-1].kind != kind or begins_call:
            yield from self.finish()
            name, call_id = (part.name or "", part.call_id or "") if part is not None else ("", "")
            self.all.append(Block(kind, len(self.all), name=name, call_id=call_id))
            self._open = True
            yield BlockEvent("begin", self.all[-1])
        if text:
            self.all[-1].text += text
            yield BlockEvent("delta", self.all[-1], text)
