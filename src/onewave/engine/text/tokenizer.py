"""Text to token ids and back, for Hugging Face directories and GGUF files alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any, cast

from tokenizers import Encoding
from tokenizers import Tokenizer as Backend
from tokenizers.models import Unigram
from tokenizers.pre_tokenizers import PreTokenizer, Whitespace

from onewave.base.errors import InvalidArgumentError, TokenizerError, UnsupportedError, shown
from onewave.engine.arguments import items, whole
from onewave.engine.text.conversations import ChatLayout, is_template
from onewave.engine.text.stretches import KeptStretches
from onewave.engine.text.tokenizer_parts import backend_call

if TYPE_CHECKING:
    from onewave.engine.text.chat_template import ChatTemplate
    from onewave.engine.text.pieces import PieceTable
    from onewave.engine.text.tokenizer_parts import TokenizerParts
    from onewave.weights.fetch.sources import ModelLocation

_CALLERS_TEMPLATES = 8
_NO_CHARACTER = "\U0005fffe"  # which Unicode reserves: no vocabulary has it
# Characters from which on an encoding takes longer than other threads are to wait, some milliseconds.
_LONG_TEXT = 10_000
# Arguments of transformers' apply_chat_template that shape a batch of tensors.
_NOT_APPLIED = ("padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask")


def load_tokenizer(location: ModelLocation) -> Tokenizer:
    """The tokenizer that comes with a model.

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
    from onewave.weights.formats.gguf_file import GGUFFile

    file = GGUFFile.open(location.path, location.headers)
    file.close()
    return Tokenizer(gguf_tokenizer_parts(file.metadata, str(location.path)))


class Tokenizer:
    """A tokenizer with its special tokens and chat templates. Safe to share between threads.

    vocab_size: ids are below it (an embedding may have more rows). bos_token_id. eos_token_ids: every id that ends an
    answer, the main one first. special_ids: control tokens, which skip_special_tokens hides. pieces: id -> bytes,
    None for a decoder of another kind. parts: what it was made of.
    """

    def __init__(self, parts: TokenizerParts):
        self.parts = parts
        self._backend = parts.backend
        self.pieces: PieceTable | None = parts.pieces
        self.vocab_size: int = parts.vocab_size
        self.bos_token_id: int | None = parts.bos_token_id
        self.eos_token_ids: tuple[int, ...] = parts.eos_token_ids
        self.special_ids: frozenset[int] = frozenset(piece.id for piece in parts.added if piece.special)
        self._templates: dict[str, ChatTemplate] = {}
        self.stretches = KeptStretches(lambda text, start, tags: self.encode_plain(text, at_start=start, tags=tags))
        """Its encode_plain, which remembers."""

    def __repr__(self) -> str:
        return f"Tokenizer({self.parts.origin!r}, vocab_size={self.vocab_size})"

    @property
    def eos_token_id(self) -> int | None:
        """The main id that ends an answer."""
        return next(iter(self.eos_token_ids), None)

    @property
    def chat_template(self) -> str | None:
        """The Jinja source of the usual chat template."""
        return self.parts.chat_templates.get("default")

    def encode(self, text: str, add_special_tokens: bool = True, allow_special: bool = True) -> list[int]:
        """Token ids of a text.

        add_special_tokens: put BOS (and whatever else the model's files ask for) around it. allow_special: read
        `<|im_end|>` and its like in the text as control tokens; otherwise they are plain text and no control token
        comes out of it. Raises InvalidArgumentError for what is not Unicode text, TokenizerError where the model's
        pipeline fails at it.
        """
        try:
            with backend_call(self.parts.file, "encoding text", callers=(TypeError, UnicodeError)):
                return self._encode(text, add_special_tokens, allow_special)
        except (TypeError, UnicodeError) as error:
            raise _not_text(text) from error

    def _encode(self, text: str, add_special_tokens: bool, allow_special: bool) -> list[int]:
        ids = encoding_of(self._backend, text, spans=False).ids if allow_special else self.encode_plain(text)
        if not add_special_tokens:
            return ids
        prefix, suffix = self._around
        return [*_missing(prefix, ids), *ids, *suffix]

    def encode_whole(self, text: str) -> Encoding:
        """A text's ids and where they come from, with control tokens read as such and nothing put around it."""
        with backend_call(self.parts.file, "encoding text", callers=(TypeError, UnicodeError)):
            return encoding_of(self._backend, text)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids; bytes that are no UTF-8 become U+FFFD, ids without a token (padding rows) no text.

        Raises InvalidArgumentError for what is no list of whole numbers from 0, TokenizerError where the
        model's decoder fails at it."""
        return self.decode_lenient(self._checked(ids), skip_special_tokens)

    def _checked(self, ids: object) -> list[int]:
        found = cast("list[Any]", items("token ids", ids, "a list of token ids"))
        # These loops run in C, for long lists; ids that they don't let through are checked one by one.
        if not found or (set(map(type, found)) == {int} and min(found) >= 0 and max(found) < self.vocab_size):
            return found
        for token_id in found:
            whole("token id", token_id, 0)
        return [int(token_id) for token_id in found if int(token_id) < self.vocab_size]

    def decode_lenient(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """As decode, but an id without a token is no text."""
        skip = self.special_ids if skip_special_tokens else frozenset[int]()
        kept = [token_id for token_id in ids if token_id not in skip]
        if self.pieces is None:
            known = [token_id for token_id in kept if 0 <= token_id < self.vocab_size]
            with backend_call(self.parts.file, "decoding token ids"):
                return self._backend.decode(known, skip_special_tokens=False)
        data = b"".join([self.pieces[token_id] for token_id in kept])
        if kept and self.pieces.strips_before(kept[0]):
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
        source or the name of one of the model's) other than the usual. BOS is there when the template writes it, or a
        GGUF file asks for it. Only what the template itself writes can be a control token: `<|im_end|>` inside a
        message is encoded as the text it is. Raises InvalidArgumentError for malformed messages, TokenizerError for a
        missing template or one that fails.
        """
        layout = ChatLayout(add_generation_prompt=add_generation_prompt, chat_template_kwargs=template_kwargs)
        return self.lay_out_chat(messages, layout)[1]

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> str:
        """The text that encode_chat encodes. Arguments and errors as there."""
        return self._template(template_kwargs).render(messages, add_generation_prompt, template_kwargs).text

    def lay_out_chat(self, messages: Sequence[Mapping[str, Any]], layout: ChatLayout) -> tuple[str, list[int]]:
        """Return the results of render_chat and encode_chat from one rendering. Messages and errors as there."""
        from onewave.engine.text.chat_encoding import encode_rendered
        from onewave.engine.text.open_end import cut_at, mark_end

        variables = layout.variables()
        template = self._template(variables)
        if layout.continue_final_message:
            messages, mark = mark_end(messages)
            rendered = cut_at(template.render(messages, layout.add_generation_prompt, variables), mark)
        else:
            rendered = template.render(messages, layout.add_generation_prompt, variables)
        try:
            ids = encode_rendered(self, rendered)
            return rendered.text, [*_missing(self.parts.chat_prefix_ids, ids), *ids]
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

        variables: of the template. Raises as encode_chat, UnsupportedError for batches, tensors and dictionaries.
        """
        for name in _NOT_APPLIED:
            if variables.pop(name, None):
                allowed = "one conversation's text, or its ids in a list"
                raise UnsupportedError("apply_chat_template", got=f"{name}=", allowed=allowed)
        layout = ChatLayout(
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template=chat_template,
            chat_template_kwargs=variables,
        )
        text, ids = self.lay_out_chat(conversation, layout)
        return ids if tokenize else text

    def reads_tools(self, **template_kwargs: Any) -> bool:
        """Whether the template that lay_out_chat would take asks for tools. Raises as there."""
        return self._template(template_kwargs).reads_tools

    def _template(self, template_kwargs: dict[str, Any]) -> ChatTemplate:
        """The template to use; takes chat_template out of template_kwargs."""
        named = self.parts.chat_templates
        wanted: object = template_kwargs.pop("chat_template", None)
        if wanted is None:
            wanted = "tool_use" if template_kwargs.get("tools") and "tool_use" in named else "default"
            if wanted not in named:
                raise TokenizerError(
                    f"{self.parts.origin}: chat template",
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
            what = f"{self.parts.origin}: chat template"
            self._templates[wanted] = self._compile_template(named[wanted], what=what)
        return self._templates[wanted]

    def _compile_template(self, source: str, *, what: str) -> ChatTemplate:
        from onewave.engine.text.chat_template import ChatTemplate

        parts = self.parts
        return ChatTemplate(source, what=what, special_tokens=parts.special_tokens, added=parts.added)

    @cached_property
    def _callers_templates(self) -> Callable[[str], ChatTemplate]:
        """Compiled templates that the model does not have, for as long as they are among the last ones used."""
        return lru_cache(_CALLERS_TEMPLATES)(partial(self._compile_template, what="chat_template"))

    @cached_property
    def _around(self) -> tuple[Sequence[int], Sequence[int]]:
        """The ids to put before and after a text."""
        parts = self.parts
        if parts.prefix_ids is not None:
            return parts.prefix_ids, parts.suffix_ids or ()
        encoding = self._backend.encode("a")
        own = [at for at, added in enumerate(encoding.special_tokens_mask) if not added]
        first, last = (own[0], own[-1] + 1) if own else (len(encoding.ids),) * 2
        return encoding.ids[:first], encoding.ids[last:]

    @cached_property
    def _text_backend(self) -> Callable[[frozenset[int], bool], Backend]:
        return lru_cache(_CALLERS_TEMPLATES)(self._make_text_backend)

    def _make_text_backend(self, tags: frozenset[int], at_start: bool) -> Backend:
        """The pipeline with control tokens and these tags read as text; shares the model with the other."""
        pre_tokenizer = self._backend.pre_tokenizer
        if pre_tokenizer is not None and not at_start:
            # Metaspace's "first" means the very first word.
            state = cast("bytes", pre_tokenizer.__getstate__())  # pyright: ignore[reportUnknownMemberType]
            pre_tokenizer = Whitespace()  # takes on whatever kind the state is of
            pre_tokenizer.__setstate__(state.replace(b'"prepend_scheme":"first"', b'"prepend_scheme":"never"'))
        decoder = self._backend.get_added_tokens_decoder()
        for tag in tags:
            decoder[tag].special = True
        tokens = [decoder[i] for i in sorted(decoder)]
        view = self._bare(pre_tokenizer)
        view.add_tokens(tokens)  # pyright: ignore[reportUnknownMemberType]
        if view.get_added_tokens_decoder().keys() != decoder.keys():  # ids with gaps: only a full copy keeps them
            view = Backend.from_str(self._backend.to_str())
            view.add_tokens(tokens)  # pyright: ignore[reportUnknownMemberType]
            if pre_tokenizer is not None:
                view.pre_tokenizer = pre_tokenizer
        view.encode_special_tokens = True
        return view

    def _bare(self, pre_tokenizer: PreTokenizer | None) -> Backend:
        """The pipeline without added tokens, sharing model and normalizer, with this pre-tokenizer (or None)."""
        view = Backend(self._backend.model)
        if self._backend.normalizer is not None:
            view.normalizer = self._backend.normalizer
        if pre_tokenizer is not None:
            view.pre_tokenizer = pre_tokenizer
        return view

    def encode_plain(self, text: str, *, at_start: bool = True, tags: frozenset[int] = frozenset()) -> list[int]:
        """Ids of a text from which no control token and none of `tags` comes.

        at_start: False for a stretch from the middle of a text, which gets no space prefix where only the first word
        has one.
        """
        if not text:
            return []
        with backend_call(self.parts.file, "encoding text", callers=(TypeError, UnicodeError)):
            ids = encoding_of(self._text_backend(tags, at_start), text, spans=False).ids
            forged = self.control_ids | tags
            if forged.isdisjoint(ids):
                return ids
            return [j for i in ids for j in (self._spell(i, forged) if i in forged else [i])]

    @cached_property
    def control_ids(self) -> frozenset[int]:
        """The special ids without the one for text that the vocabulary lacks, unless that begins a text or ends it."""
        model = self._backend.model
        text = getattr(model, "unk_token", None) or self.parts.special_tokens.get("unk_token")
        unknown = None if text is None else self._backend.token_to_id(text)
        if text is None and isinstance(model, Unigram):  # which has one without saying so
            with suppress(Exception):  # tokenizers raises bare ones where there is none
                unknown = model.tokenize(_NO_CHARACTER)[0].id
        return self.special_ids - ({unknown} - {*self.eos_token_ids, self.bos_token_id})

    def _spell(self, token_id: int, forged: frozenset[int]) -> list[int]:
        """A token's text in tokens that are not `forged`; nothing where the vocabulary has none."""
        text = self._backend.id_to_token(token_id) or ""
        bare = self._bare(self._backend.pre_tokenizer)
        # Cut into ever more parts: a merge that makes the token needs at least one of the cuts whole.
        for cut in range(1, len(text)):
            ids = [i for part in (text[:cut], text[cut:]) for i in bare.encode(part, add_special_tokens=False).ids]
            if forged.isdisjoint(ids):
                return ids
        return []


def encoding_of(backend: Backend, text: str, *, spans: bool = True) -> Encoding:
    """A text's encoding with nothing put around it. spans: whether it has to say where ids come from, which takes a
    fifth more. Of a long text, other threads run meanwhile: the backend's encode keeps the interpreter for itself, its
    encode_batch does not."""
    if len(text) <= _LONG_TEXT:
        return backend.encode(text, add_special_tokens=False)
    encode = backend.encode_batch if spans else backend.encode_batch_fast
    return encode([text], add_special_tokens=False)[0]


def _missing(prefix: Sequence[int], ids: Sequence[int]) -> Sequence[int]:
    """The prefix, unless these ids begin with it."""
    return () if prefix and list(ids[: len(prefix)]) == list(prefix) else prefix


def _not_text(text: object) -> InvalidArgumentError:
    if isinstance(text, str):
        return InvalidArgumentError(
            "text", got="a lone surrogate", allowed="Unicode text that UTF-8 can write",
            next="Where a shell's words were read: set a UTF-8 locale, as LC_ALL=C.UTF-8.",
        )  # fmt: skip
    return InvalidArgumentError("text", got=type(text).__name__, allowed="str")
