"""The bytes that each token id stands for.

Both kinds of vocabulary that LLaMA-family models use spell bytes: byte-level BPE writes every byte as one printable
character, sentencepiece writes a space as U+2581 and what it has no piece for as `<0xXX>`. Text is made by joining
bytes and reading the whole as UTF-8, so that a character split over several tokens comes out once, complete.
"""

import json
from collections.abc import Callable, Iterable
from typing import Any, Literal, cast

from tokenizers import Tokenizer as Backend

Spelling = Literal["byte_level", "sentencepiece"]

SPACE_MARK = "▁"


def _byte_alphabet() -> dict[int, str]:
    """byte -> the character GPT-2 writes it as: itself when printable Latin-1, else U+0100 upwards in byte order."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    moved = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + i) for i, byte in enumerate(moved)}


CHAR_OF_BYTE: dict[int, str] = _byte_alphabet()
BYTE_OF_CHAR: dict[str, int] = {char: byte for byte, char in CHAR_OF_BYTE.items()}


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes([BYTE_OF_CHAR[char] for char in token])
    except KeyError:  # not spelled in the byte alphabet, so it stands for itself
        return token.encode()


def _sentencepiece_bytes(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.replace(SPACE_MARK, " ").encode()


class PieceTable(dict[int, bytes]):
    """id -> bytes, worked out when first asked for; an id without a token is no bytes.

    spelling: how the vocabulary writes bytes. strip_first_space: whether one space at the very start of a text
    belongs to the encoding (sentencepiece's space prefix) and not to the text. verbatim: ids with a
    token text that is the text itself. own_space: ids of tokens that begin with a space of their own, which stays.
    ascii: those so far whose bytes are characters of their own, as text.
    """

    def __init__(
        self,
        token_of: Callable[[int], str | None],
        *,
        spelling: Spelling,
        strip_first_space: bool,
        verbatim: Iterable[int],
        own_space: Iterable[int] = (),
    ):
        super().__init__()
        self.ascii: dict[int, str] = {}
        self.spelling: Spelling = spelling
        self.strip_first_space = strip_first_space
        self._token_of = token_of
        self._verbatim, self._own_space = frozenset(verbatim), frozenset(own_space)
        self._read = _byte_level_bytes if spelling == "byte_level" else _sentencepiece_bytes

    def strips_before(self, token_id: int) -> bool:
        """Whether a text that this token begins loses its first space."""
        return self.strip_first_space and token_id not in self._own_space

    def __missing__(self, token_id: int) -> bytes:
        token = self._token_of(token_id)
        read = str.encode if token_id in self._verbatim else self._read
        self[token_id] = piece = b"" if token is None else read(token)
        if piece.isascii():
            self.ascii[token_id] = piece.decode()
        return piece


def pieces_of(backend: Backend, added_ids: Iterable[int]) -> PieceTable | None:
    """The table for a tokenizer.json, read off its decoder; None for a decoder of another kind.

    Recognised: ByteLevel; Metaspace; and the sentencepiece sequence Replace(U+2581 -> space), ByteFallback, Fuse,
    Strip(1 on the left), each step but the first optional.
    """
    decoder = backend.decoder
    if decoder is None:
        return None
    state = cast("dict[str, Any]", json.loads(decoder.__getstate__()))  # pyright: ignore[reportUnknownMemberType]
    steps: list[dict[str, Any]] = state["decoders"] if state.get("type") == "Sequence" else [state]
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return PieceTable(backend.id_to_token, spelling="byte_level", strip_first_space=False, verbatim=added_ids)
    if kinds == ["Metaspace"] and steps[0].get("replacement") == SPACE_MARK:
        strip = steps[0].get("prepend_scheme") != "never"
        # It takes marks away, not spaces: those of added tokens are the text's.
        spaces = [i for i in added_ids if (backend.id_to_token(i) or "").startswith(" ")]
        token_of = backend.id_to_token
        return PieceTable(token_of, spelling="sentencepiece", strip_first_space=strip, verbatim=(), own_space=spaces)
    strips = [step for step in steps if step.get("type") == "Strip"]
    replace = [step for step in steps if step.get("type") == "Replace"]
    plain = (
        {"Replace", "ByteFallback", "Fuse", "Strip"}.issuperset(kinds)
        and len(replace) == 1
        and (replace[0].get("pattern"), replace[0].get("content")) == ({"String": SPACE_MARK}, " ")
        and all((s.get("content"), s.get("start"), s.get("stop")) == (" ", 1, 0) for s in strips)
        and len(strips) <= 1
        # Without Fuse, Strip would act on every token.
        and (not strips or "Fuse" in kinds[: kinds.index("Strip")])
        and "ByteFallback" in kinds
    )
    if not plain:
        return None
    return PieceTable(backend.id_to_token, spelling="sentencepiece", strip_first_space=bool(strips), verbatim=())
