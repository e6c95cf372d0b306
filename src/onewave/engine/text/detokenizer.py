"""Text from tokens as they come, never half a character."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from encodings.utf_8 import IncrementalDecoder
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onewave.engine.text.pieces import PieceTable
    from onewave.engine.text.tokenizer import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

# A decoder that we can't read as bytes decodes a window again. UTF-8 spends at most four tokens on a character; a
# window that still ends in U+FFFD after this many holds bytes that will never be completed.
MAX_HELD_TOKENS = 8


def _unfinished_suffix(data: bytes) -> bytes:
    """The last 0 to 3 bytes of `data` that begin a UTF-8 character and don't end it."""
    for count in range(1, min(3, len(data)) + 1):
        if data[-count] & 0xC0 != 0x80:  # not a continuation byte: the last character starts here
            reader = codecs.getincrementaldecoder("utf-8")("strict")
            try:
                return data[-count:] if not reader.decode(data[-count:]) else b""
            except UnicodeDecodeError:
                return b""
    return b""


class IncrementalDetokenizer:
    """Turns a request's tokens into text, piece by piece.

    `push(ids)` returns the text that became certain; bytes that may yet be completed into a character wait.
    `finish()` returns what is left, U+FFFD for bytes that stayed incomplete. All pushes and finish joined equal what
    the generated ids add to the text of prompt plus generated ids: the space that a sentencepiece vocabulary puts
    before a word is kept when the prompt shows any text and dropped at the very start; a character begun by the
    prompt's last tokens is shown when the generated ids complete it. Ids without a token (padding rows of an
    embedding) are no text. The work per token does not grow with the length of the text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool = True):
        self._skip = skip = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._tokenizer = tokenizer
        self._reader: _ByteReader | _WindowReader
        if tokenizer.pieces is not None:
            self._reader = _ByteReader(tokenizer.pieces, prompt_ids, skip)
        else:
            self._reader = _WindowReader(tokenizer, prompt_ids, skip)
        self.push: Callable[[Sequence[int]], str] = self._reader.push
        """Give the new text that some ids make certain."""

    def finish(self) -> str:
        """The text still held back. Call once, after the last push."""
        return self._reader.finish()

    def hidden(self, token_id: int) -> str:
        """The text of a control token that `push` leaves out; "" for any other."""
        return self._tokenizer.token_text(token_id) if token_id in self._skip else ""


class _ByteReader:
    """The way for vocabularies that spell bytes."""

    __slots__ = ("_ascii", "_at_start", "_owes_prompt", "_pieces", "_skip", "_utf8", "_waits")

    def __init__(self, pieces: PieceTable, prompt_ids: Sequence[int], skip: frozenset[int]):
        self._pieces, self._ascii = pieces, pieces.ascii
        self._skip = skip
        self._utf8 = IncrementalDecoder("replace")
        tail = b""
        for token_id in reversed(prompt_ids):
            if token_id not in skip:
                tail = pieces[token_id] + tail
            if len(tail) >= 4:  # no character is longer
                break
        self._at_start = pieces.strip_first_space and not tail
        unfinished = _unfinished_suffix(tail)
        self._utf8.decode(unfinished)
        self._owes_prompt = bool(unfinished)
        # Whether the next bytes may be more or less than their own characters.
        self._waits = self._at_start or self._owes_prompt

    def push(self, ids: Sequence[int]) -> str:
        if len(ids) == 1 and not self._waits and ids[0] not in self._skip:
            text = self._ascii.get(ids[0])
            if text is not None:
                return text  # by far the most, and a fourth of the time
        pieces, skip = self._pieces, self._skip
        if self._at_start:
            ids = [token_id for token_id in ids if token_id not in skip]
            self._at_start = not ids or pieces.strips_before(ids[0])
        data = b"".join([pieces[token_id] for token_id in ids if token_id not in skip])
        return self._read(data) if data else ""

    def finish(self) -> str:
        return self._read(b"", final=True)

    def _read(self, data: bytes, *, final: bool = False) -> str:
        if self._at_start and data:
            data = data.removeprefix(b" ")
            self._at_start = False
        text = self._utf8.decode(data, final)
        if self._owes_prompt and text:
            # The prompt's unfinished character was not completed: its U+FFFD belongs to the prompt.
            text = text.removeprefix(REPLACEMENT)
            self._owes_prompt = False
        self._waits = bool(self._utf8.buffer) or self._at_start or self._owes_prompt
        return text


class _WindowReader:
    """The way for any other decoder: decode a short window with and without its new tokens, and show the difference."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip: frozenset[int]):
        self._decode = tokenizer.decode_lenient
        self._skip = skip
        self._ids = [token_id for token_id in prompt_ids[-MAX_HELD_TOKENS:] if token_id not in skip]
        self._shown = self._decode(self._ids)

    def push(self, ids: Sequence[int]) -> str:
        return "".join([self._step(token_id) for token_id in ids if token_id not in self._skip])

    def _step(self, token_id: int) -> str:
        self._ids.append(token_id)
        whole = self._decode(self._ids)
        if whole.endswith(REPLACEMENT) and len(self._ids) <= 2 * MAX_HELD_TOKENS:
            return ""
        return self._show(whole)

    def _show(self, whole: str) -> str:
        # The last character may have been unfinished, and is not now.
        shown = self._shown
        while not whole.startswith(shown) and shown.endswith(REPLACEMENT):
            shown = shown[:-1]
        new = whole[len(shown) :]
        self._ids = self._ids[-MAX_HELD_TOKENS:]
        self._shown = self._decode(self._ids)
        return new

    def finish(self) -> str:
        return self._show(self._decode(self._ids))
