"""From the form that a request asks for to the tokens that may come next, through llguidance."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from onewave.base.errors import InvalidArgumentError, OnewaveError, UnsupportedError
from onewave.engine.grammar.lark import as_lark, library, rules_of
from onewave.engine.grammar.params import StructuredOutputsParams

if TYPE_CHECKING:
    from onewave.engine.text.tokenizer import Tokenizer

# Else only the token that the tokenizer would write is allowed where the text can only go on in one way: less than the
# grammar allows, and it takes an encoding that never puts a space before a word.
_NO_FORCING = '%llguidance {"no_forcing": true}\n'
_KEPT_GRAMMARS = 64
_MAX_REASON = 300


class GrammarCompiler:
    """Compiles grammars for one model's vocabulary and keeps the last ones. May be called from several threads.

    Raises UnsupportedError where llguidance is missing or the tokenizer does not spell bytes.
    """

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        if tokenizer.pieces is None:
            raise UnsupportedError("structured_outputs", got="a tokenizer whose tokens do not spell bytes")
        self._library = library()
        vocabulary = _Vocabulary(tokenizer, vocab_size, eos_token_ids)
        self._tokenizer: Any = self._library.LLTokenizer(vocabulary, eos_token=vocabulary.eos_token_ids)
        self._going_on = ~_words(vocabulary.eos_token_ids, -(-len(vocabulary.tokens) // 32))
        self._compiled = lru_cache(_KEPT_GRAMMARS)(self._compile)

    def compile(self, wanted: StructuredOutputsParams) -> Grammar:
        """The grammar of a form. Raises InvalidArgumentError with the reason why there is none."""
        return self._compiled(wanted)

    def _compile(self, wanted: StructuredOutputsParams) -> Grammar:
        try:
            text = f"start: whole\n{rules_of(wanted, 'whole')}" if wanted.grammar is None else as_lark(wanted.grammar)
            text.encode()
        except ValueError as error:
            reason = "a lone surrogate" if isinstance(error, UnicodeError) else str(error)
            raise _refused(wanted.kind, reason) from error
        matcher = self._library.LLMatcher(self._tokenizer, f"{text}\n{_NO_FORCING}", log_level=0)
        if matcher.is_error():
            raise _refused(wanted.kind, matcher.get_error())
        grammar = Grammar(matcher, self._going_on)
        first = grammar.begin()
        first.fill(np.empty_like(self._going_on))
        if first.failure is not None:
            raise _refused(wanted.kind, f"there is no text of this form ({first.failure.got})")
        return grammar


class Grammar:
    """A compiled grammar, which any number of samples may follow. going_on: bits of all tokens but those that end."""

    def __init__(self, matcher: Any, going_on: NDArray[np.int32]) -> None:
        self._matcher, self._going_on = matcher, going_on

    def begin(self, *, may_end: bool = True, min_tokens: int = 0, end_ids: Collection[int] = ()) -> GrammarState:
        """The state before the first token. may_end: allow EOS where the grammar does; otherwise it goes on as long as
        it can. end_ids: tokens that come before min_tokens, as EOS does, only where the grammar allows no other."""
        state = GrammarState(self._matcher.deep_copy(), self._going_on, may_end=may_end)
        if min_tokens:
            state.wait(min_tokens, self._going_on & ~_words(end_ids, len(self._going_on)))
        return state


class GrammarState:
    """How far one sample has come in its grammar.

    num_words: int32 words that hold a bit for each token. ended: whether nothing may follow any more. failure: why the
    grammar could not be followed, where it couldn't.
    """

    def __init__(self, matcher: Any, going_on: NDArray[np.int32], *, may_end: bool) -> None:
        self._matcher, self._going_on, self._may_end = matcher, going_on, may_end
        self.num_words = len(going_on)
        self.failure: OnewaveError | None = None
        # Bits of the tokens that come first, and for how many tokens.
        self._waiting, self._wanted = 0, going_on

    @property
    def ended(self) -> bool:
        return self.failure is None and self._matcher.is_stopped()

    def wait(self, num_tokens: int, wanted: NDArray[np.int32]) -> None:
        """Keep the next tokens to some wherever the grammar allows one of them. wanted: int32 [num_words], bits."""
        self._waiting, self._wanted = num_tokens, wanted

    def fill(self, words: NDArray[np.int32]) -> None:
        """Write which tokens may come next: bit i % 32 of word i // 32 is token i's. EOS is among them only where the
        grammar may end. words: int32 [num_words], contiguous."""
        if self.failure is None:
            assert words.flags.c_contiguous
            self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            self._look("computing the next tokens")
        if self.failure is not None:
            words[:] = -1
            return
        if not self._may_end:
            words &= self._going_on
        if self._waiting > 0 and np.any(wanted := words & self._wanted):
            words[:] = wanted

    def accept(self, token_id: int) -> None:
        """Go on by the token that came."""
        self._waiting -= 1
        if self.failure is None:
            self._matcher.consume_token(token_id)
            self._look(f"token {token_id}")

    def _look(self, at: str) -> None:
        if self._matcher.is_error():
            got = f"{at}: {_one_reason(self._matcher.get_error())}"
            self.failure = UnsupportedError("structured_outputs", got=got, next="Ask for a simpler form.")


class _Vocabulary:
    """A model's tokens, as llguidance asks for them: bytes of each, control tokens apart from all text."""

    is_tokenizer_wrapper = True
    bos_token_id: int | None = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        assert tokenizer.pieces is not None
        self.tokens = [tokenizer.pieces[token_id] for token_id in range(vocab_size)]
        self.special_token_ids = [token_id for token_id in tokenizer.special_ids if token_id < vocab_size]
        self.eos_token_ids = list(eos_token_ids)
        if not self.eos_token_ids:  # llguidance wants one: beyond the vocabulary, so that it is never sampled
            self.eos_token_ids.append(vocab_size)
            self.tokens.append(b"")
        self.eos_token_id = self.eos_token_ids[0]
        self._encode = tokenizer.encode

    def __call__(self, text: str) -> list[int]:
        return self._encode(text, add_special_tokens=False)


def _words(token_ids: Collection[int], count: int) -> NDArray[np.int32]:
    bits = np.zeros(count * 32, dtype=np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def _refused(kind: str, reason: str) -> InvalidArgumentError:
    if kind != "grammar":  # places in the text that was made of it say nothing to the caller
        reason = reason[reason.startswith("at ") and reason.find(": ") + 2 :]
    return InvalidArgumentError(f"structured_outputs.{kind}", got=_one_reason(reason))


def _one_reason(reason: str) -> str:
    # Without a listing of the source, or the parser's state.
    text = " ".join(re.split(r"\n *1 \| |\s<state>", reason)[0].split())
    return text if len(text) <= _MAX_REASON else f"{text[:_MAX_REASON]}..."
