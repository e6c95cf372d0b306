"""What a tokenizer is made of, whichever file it came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tokenizers import Tokenizer as Backend

from onewave.engine.pieces import PieceTable

__all__ = ["AddedPiece", "TokenizerParts"]


@dataclass(frozen=True)
class AddedPiece:
    """A token matched as a whole in text, before anything else.

    special: a control token, matched only where the caller allows it; otherwise one that text always turns into
    (`<think>`). lstrip, rstrip: whether the match takes the whitespace beside it along. single_word: whether it must
    stand alone.
    """

    content: str
    id: int
    special: bool
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False


@dataclass(frozen=True)
class TokenizerParts:
    """All that `Tokenizer` needs.

    origin: the file or directory, for messages. backend: the `tokenizers` pipeline with its added tokens. pieces: id
    -> bytes, or None when the decoder is none that we read. added: the added tokens. vocab_size: ids are below it.
    prefix_ids, suffix_ids: put around a text encoded with add_special_tokens; None when the backend's own
    post-processor does so. special_tokens: name -> text ("bos_token": "<s>"), as chat templates see them.
    chat_templates: name -> Jinja source.
    """

    origin: str
    backend: Backend
    pieces: PieceTable | None
    added: tuple[AddedPiece, ...]
    vocab_size: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    prefix_ids: tuple[int, ...] | None = None
    suffix_ids: tuple[int, ...] | None = None
    special_tokens: Mapping[str, str] = field(default_factory=dict[str, str])
    chat_templates: Mapping[str, str] = field(default_factory=dict[str, str])
