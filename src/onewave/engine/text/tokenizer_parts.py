"""The parts of a tokenizer, whichever file it came from."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from tokenizers import Tokenizer as Backend

from onewave.base.errors import OnewaveError, TokenizerError, shown
from onewave.engine.text.pieces import PieceTable

_PANIC = "PanicException"  # pyo3's, a BaseException that no module exports


@contextmanager
def backend_call(file: str, doing: str, *, callers: tuple[type[Exception], ...] = ()) -> Generator[None]:
    """Turn what the `tokenizers` library raises, panics of its Rust code included, into TokenizerError.

    file: what it was built from. doing: the failed step, for the message. callers: exceptions that tell of the
    caller's own value, and pass.
    """
    try:
        yield
    except (OnewaveError, MemoryError, RecursionError, *callers):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != _PANIC:
            raise
        raise TokenizerError(
            file,
            got=f"the tokenizers library fails at {doing} ({shown(str(error))})",
            next="Pass token ids instead of text, or fetch the file again.",
        ) from error


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

    origin: the file or directory, for messages. file: what describes the pipeline. backend: the `tokenizers` pipeline
    with its added tokens. pieces: id -> bytes, or None when the decoder is none that we read. added: the added tokens.
    vocab_size: ids are below it. prefix_ids, suffix_ids: put around a text encoded with add_special_tokens; None when
    the backend's own post-processor does so. chat_prefix_ids: put before a conversation. special_tokens: name -> text
    ("bos_token": "<s>"), as chat templates see them. chat_templates: name -> Jinja source.
    """

    origin: str
    file: str
    backend: Backend
    pieces: PieceTable | None
    added: tuple[AddedPiece, ...]
    vocab_size: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    prefix_ids: tuple[int, ...] | None = None
    suffix_ids: tuple[int, ...] | None = None
    chat_prefix_ids: tuple[int, ...] = ()
    special_tokens: Mapping[str, str] = field(default_factory=dict[str, str])
    chat_templates: Mapping[str, str] = field(default_factory=dict[str, str])
