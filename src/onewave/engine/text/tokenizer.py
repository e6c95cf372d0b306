"""Text to token ids and back, for Hugging Face directories and GGUF files alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, lru_cache, partial
from numbers import Integral
from typing import TYPE_CHECKING, Any, cast

from tokenizers import Tokenizer as Backend
from tokenizers.pre_tokenizers import PreTokenizer, Whitespace

from onewave.base.errors import InvalidArgumentError, TokenizerError, shown
from onewave.engine.text.conversations import ChatLayout, is_template
from onewave.engine.text.tokenizer_parts import backend_call

if TYPE_CHECKING:
    from onewave.engine.text.chat_template import ChatTemplate
    from onewave.engine.text.pieces import PieceTable
    from onewave.engine.text.tokenizer_parts import TokenizerParts
    from onewave.weights.fetch.sources import ModelLocation

_CALLERS_TEMPLATES = 8


def load_tokenizer(location: ModelLocation, metadata: Mapping[str, Any] | None = None) -> Tokenizer:
    """The tokenizer that comes with a model.

    metadata: a GGUF file's key-value pairs where the caller has read them already.
    Raises TokenizerError when there is none or it can't be read; generation from token ids needs none.
    """
    if location.path is None:
        raise TokenizerError(
            f"tokenizer of {location.name}",
            got="a built-in configuration, which has no tokenizer",
            next="Name one with tokenizer=, or generate from token ids.",
        )
    if location.path.is_dir():
        from onewave.engine.text.hf_tokenizer import hf_tokenizer_parts

        return Tokenizer(hf_tokenizer_parts(location.path))
    from onewave.engine.text.gguf_tokenizer import gguf_tokenizer_parts

    if metadata is None:
        from onewave.weights.formats.gguf_file import GGUFFile

        file = GGUFFile.open(location.path)
        metadata = file.metadata
        file.close()
    return Tokenizer(gguf_tokenizer_parts(metadata, str(location.path)))


class Tokenizer:
    """A tokenizer with its special tokens and chat templates. Safe to share between threads.

    vocab_size: ids are below it (an embedding may have more rows). bos_token_id. eos_token_ids: every id that ends an
    answer, the main one first. special_ids: control tokens, which skip_special_tokens hides. pieces: id -> bytes,
    None for a decoder of another kind.
    """

    def __init__(self, parts: TokenizerParts):
        self._parts = parts
        self._backend = parts.backend
        self.pieces: PieceTable | None = parts.pieces
        self.vocab_size: int = parts.vocab_size
        self.bos_token_id: int | None = parts.bos_token_id
        self.eos_token_ids: tuple[int, ...] = parts.eos_token_ids
        self.special_ids: frozenset[int] = frozenset(piece.id for piece in parts.added if piece.special)
        self._templates: dict[str, ChatTemplate] = {}

    def __repr__(self) -> str:
        return f"Tokenizer({self._parts.origin!r}, vocab_size={self.vocab_size})"

    @property
    def chat_template(self) -> str | None:
        """The Jinja source of the usual chat template."""
        return self._parts.chat_templates.get("default")

    def encode(self, text: str, add_special_tokens: bool = True, allow_special: bool = True) -> list[int]:
        """Token ids of a text.

        add_special_tokens: put BOS (and whatever else the model's files ask for) around it. allow_special: read
        `<|im_end|>` and its like in the text as control tokens; otherwise they are plain text and no control token
        comes out of it. Raises InvalidArgumentError for what is not Unicode text, TokenizerError where the model's
        pipeline fails at it.
        """
        try:
            with backend_call(self._parts.file, "encoding text", callers=(TypeError, UnicodeError)):
                return self._encode(text, add_special_tokens, allow_special)
        except (TypeError, UnicodeError) as error:
            raise _not_text(text) from error

    def _encode(self, text: str, add_special_tokens: bool, allow_special: bool) -> list[int]:
        parts = self._parts
        by_backend = add_special_tokens and parts.prefix_ids is None
        backend = self._backend if allow_special else self._text_backend
        ids = backend.encode(text, add_special_tokens=by_backend).ids
        if not allow_special:
            first, last = self._around if by_backend else (0, 0)
            body = ids[first : len(ids) - last]
            ids = [*ids[:first], *self._spell_out(body), *ids[len(ids) - last :]]
        if not add_special_tokens or by_backend:
            return ids
        return [*(parts.prefix_ids or ()), *ids, *(parts.suffix_ids or ())]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids; bytes that are no UTF-8 become U+FFFD. Raises InvalidArgumentError for an id out of
        range and for what is no list of whole numbers, TokenizerError where the model's decoder fails at it."""
        return self.decode_lenient(self._checked(ids), skip_special_tokens)

    def _checked(self, ids: object) -> list[int]:
        allowed = "a list of token ids"
        if hasattr(ids, "tolist"):  # of an array or a tensor; one without axes is a number then
            try:
                ids = cast("Any", ids).tolist()
            except Exception as error:  # any library's tensor: sparse, nested, without data
                raise InvalidArgumentError("token ids", got=type(ids).__name__, allowed=allowed) from error
        if isinstance(ids, (str, bytes, bytearray, Mapping)) or not isinstance(ids, Iterable):
            raise InvalidArgumentError("token ids", got=shown(cast("object", ids)), allowed=allowed)
        found = list(cast("Iterable[Any]", ids))
        # Of a long list these three loops run in C; what they don't let through is looked at one by one.
        if not found or (set(map(type, found)) == {int} and min(found) >= 0 and max(found) < self.vocab_size):
            return found
        for token_id in found:
            is_id = not isinstance(token_id, bool) and isinstance(token_id, Integral)
            if not is_id or not 0 <= int(token_id) < self.vocab_size:
                raise InvalidArgumentError("token id", got=shown(token_id), allowed=f"0 to {self.vocab_size - 1}")
        return [int(token_id) for token_id in found]

    def decode_lenient(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """As decode, but an id without a token is no text."""
        skip = self.special_ids if skip_special_tokens else frozenset[int]()
        kept = [token_id for token_id in ids if token_id not in skip]
        if self.pieces is None:
            known = [token_id for token_id in kept if 0 <= token_id < self.vocab_size]
            with backend_call(self._parts.file, "decoding token ids"):
                return self._backend.decode(known, skip_special_tokens=False)
        data = b"".join([self.pieces[token_id] for token_id in kept])
        if self.pieces.strip_first_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    def token_text(self, token_id: int) -> str:
        """One token as readable text: its leading space kept, bytes of an incomplete character as U+FFFD, "" for no
        token."""
        if self.pieces is not None:
            return self.pieces[token_id].decode("utf-8", "replace")
        return self.decode_lenient([token_id])

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> list[int]:
        """Token ids of a conversation laid out by the model's chat template.

        messages: {"role": ..., "content": text or a list of {"type": "text", "text": ...}, ...}. template_kwargs:
        further template variables (tools=, documents=, enable_thinking=...), and chat_template= for a template (Jinja
        source or the name of one of the model's) other than the usual. BOS is there when the template writes it. Only
        what the template itself writes can be a control token: `<|im_end|>` inside a message is encoded as the text
        it is. Raises InvalidArgumentError for malformed messages, TokenizerError for a missing template or one that
        fails.
        """
        return self.lay_out_chat(messages, add_generation_prompt, **template_kwargs)[1]

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> str:
        """The text that encode_chat encodes. Arguments and errors as there."""
        return self._template(template_kwargs).render_marked(messages, add_generation_prompt, template_kwargs).text

    def lay_out_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **template_kwargs: Any,
    ) -> tuple[str, list[int]]:
        """What render_chat and encode_chat return, of one rendering. Arguments and errors as there.

        continue_final_message: end where the last message's text ends.
        """
        from onewave.engine.text.chat_encoding import encode_rendered
        from onewave.engine.text.open_end import cut_at, mark_end

        template = self._template(template_kwargs)
        if continue_final_message:
            messages, mark = mark_end(messages)
            rendered = cut_at(template.render_marked(messages, add_generation_prompt, template_kwargs), mark)
        else:
            rendered = template.render_marked(messages, add_generation_prompt, template_kwargs)
        try:
            return rendered.text, encode_rendered(self, rendered)
        except (TypeError, UnicodeError) as error:
            raise _not_text(rendered.text) from error

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        **variables: Any,
    ) -> str | list[int]:
        """A conversation's token ids, or with tokenize=False its text, under the names of transformers' method.

        Raises as encode_chat.
        """
        layout = ChatLayout(
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template=chat_template,
            chat_template_kwargs=variables,
        )
        text, ids = self.lay_out_chat(conversation, add_generation_prompt, continue_final_message, **layout.variables())
        return ids if tokenize else text

    def _template(self, template_kwargs: dict[str, Any]) -> ChatTemplate:
        """The template to use; takes chat_template out of template_kwargs."""
        named = self._parts.chat_templates
        wanted: object = template_kwargs.pop("chat_template", None)
        if wanted is None:
            wanted = "tool_use" if template_kwargs.get("tools") and "tool_use" in named else "default"
            if wanted not in named:
                raise TokenizerError(
                    f"{self._parts.origin}: chat template",
                    got="none" if not named else f"only {', '.join(sorted(named))}",
                    next="Pass chat_template=, or lay the conversation out yourself and use generate.",
                )
        if not isinstance(wanted, str) or (wanted not in named and not is_template(wanted)):
            own = ", ".join(sorted(named)) or "none"
            raise InvalidArgumentError(
                "chat_template",
                got=shown(wanted),
                allowed=f"Jinja source, or the name of one of the model's templates ({own})",
                next="Of a file, pass the text." if isinstance(wanted, str) else None,
            )
        if wanted not in named:
            return self._callers_templates(wanted)
        if wanted not in self._templates:
            self._templates[wanted] = self._compile_template(named[wanted])
        return self._templates[wanted]

    @cached_property
    def _compile_template(self) -> Callable[[str], ChatTemplate]:
        from onewave.engine.text.chat_template import ChatTemplate

        parts = self._parts
        return partial(ChatTemplate, origin=parts.origin, special_tokens=parts.special_tokens, added=parts.added)

    @cached_property
    def _callers_templates(self) -> Callable[[str], ChatTemplate]:
        """Compiled templates that the model does not have, for as long as they are among the last ones used."""
        return lru_cache(_CALLERS_TEMPLATES)(self._compile_template)

    @cached_property
    def _text_backend(self) -> Backend:
        """The pipeline with control tokens read as text; shares the model with the other."""
        view = self._view(self._backend.pre_tokenizer)
        decoder = self._backend.get_added_tokens_decoder()
        view.add_tokens([decoder[i] for i in sorted(decoder)])  # pyright: ignore[reportUnknownMemberType]
        if view.get_added_tokens_decoder() != decoder:  # ids with gaps: only a full copy keeps them
            view = Backend.from_str(self._backend.to_str())
        if self._backend.post_processor is not None:
            view.post_processor = self._backend.post_processor
        view.encode_special_tokens = True
        return view

    def _view(self, pre_tokenizer: PreTokenizer | None) -> Backend:
        """The pipeline without added tokens, sharing model and normalizer, with this pre-tokenizer (or None)."""
        view = Backend(self._backend.model)
        if self._backend.normalizer is not None:
            view.normalizer = self._backend.normalizer
        if pre_tokenizer is not None:
            view.pre_tokenizer = pre_tokenizer
        return view

    @cached_property
    def _plain_backend(self) -> Backend:
        """The pipeline without added tokens."""
        return self._view(self._backend.pre_tokenizer)

    @cached_property
    def _plain_inner_backend(self) -> Backend:
        """The same for text that is not the start: Metaspace's "first" means the very first word."""
        if self._backend.pre_tokenizer is None:
            return self._plain_backend
        state = cast("bytes", self._backend.pre_tokenizer.__getstate__())  # pyright: ignore[reportUnknownMemberType]
        inner = Whitespace()  # takes on whatever kind the state is of
        inner.__setstate__(state.replace(b'"prepend_scheme":"first"', b'"prepend_scheme":"never"'))
        return self._view(inner)

    @cached_property
    def _around(self) -> tuple[int, int]:
        """How many ids the post-processor puts before and after a text."""
        bare = self._text_backend.encode("a", add_special_tokens=False).ids
        ids = self._text_backend.encode("a", add_special_tokens=True).ids
        first = next((i for i in range(len(ids)) if ids[i : i + len(bare)] == bare), 0)
        return first, len(ids) - first - len(bare)

    def encode_plain(self, text: str, *, at_start: bool = True) -> list[int]:
        """Ids of a text in which no added token is recognised and from which no control token comes.

        at_start: False for a stretch from the middle of a text, which gets no space prefix where only the first word
        has one.
        """
        if not text:
            return []
        with backend_call(self._parts.file, "encoding text", callers=(TypeError, UnicodeError)):
            backend = self._plain_backend if at_start else self._plain_inner_backend
            return self._spell_out(backend.encode(text, add_special_tokens=False).ids)

    @property
    def parts(self) -> TokenizerParts:
        """What this was made of."""
        return self._parts

    def _spell_out(self, ids: list[int]) -> list[int]:
        """Replace control tokens that plain text merged into by tokens of their halves."""
        if self.special_ids.isdisjoint(ids):
            return ids
        spelled: list[int] = []
        for token_id in ids:
            spelled += self._spell(token_id) if token_id in self.special_ids else [token_id]
        return spelled

    def _spell(self, token_id: int) -> list[int]:
        """A control token's text in other tokens."""
        text = self._backend.id_to_token(token_id) or ""
        # Cut into ever more parts: a merge that makes the token needs at least one of the cuts whole.
        for cut in range(1, len(text)):
            ids = [i for part in (text[:cut], text[cut:]) for i in self._plain_backend.encode(part).ids]
            if self.special_ids.isdisjoint(ids):
                return ids
        return [token_id]


def _not_text(text: object) -> InvalidArgumentError:
    if isinstance(text, str):
        return InvalidArgumentError(
            "text", got="a lone surrogate", allowed="Unicode text that UTF-8 can write",
            next="Where a shell's words were read: set a UTF-8 locale, as LC_ALL=C.UTF-8.",
        )  # fmt: skip
    return InvalidArgumentError("text", got=type(text).__name__, allowed="str")
