"""The tokenizer that a GGUF file carries in its metadata.

What the keys mean is llama.cpp's to say (docs: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, behaviour:
llama.cpp/src/llama-vocab.cpp at b10000 and near); tests compare ids with its own. Where transformers reads a file
differently (tests/engine/text/test_tokenizer_gguf.py lists the cases), we follow llama.cpp, for which the file was
written.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from onewave.base.errors import TokenizerError, shown
from onewave.engine.text.pieces import SPACE_MARK, PieceTable
from onewave.engine.text.tokenizer_parts import AddedPiece, TokenizerParts, backend_call

# Token types of tokenizer.ggml.token_type.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

# llama.cpp treats these as ends of an answer, whatever eos_token_id says and whatever type the file gave them
# (special_eog_ids of llama-vocab.cpp, as in llama-cpp-python 0.3.36).
END_TOKENS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "</s>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<｜end▁of▁sentence｜>",
    "[e~[",
)
# So it does the padding, repository and file marks of code infilling. Of each kind one token counts: the one that the
# key names, else the first of these names.
INFILL_ENDS: Mapping[str, tuple[str, ...]] = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}


@dataclass(frozen=True)
class PreTokenizer:
    """How a byte-level vocabulary cuts text into words before merging.

    splits: regular expressions applied in turn, each to the pieces the one before left. ignore_merges: a word that is
    a token is that token, whatever the merges make of it. add_bos: the default where the file has no add_bos_token.
    """

    splits: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


# Limit in characters: real tokens end at a few hundred, and every way to split one in two is looked at.
_LONGEST_TOKEN = 4096
# Limits of a sentencepiece vocabulary: merges grow with the square of a token's length if every prefix is a token.
# 256,000 tokens of five characters that split everywhere make a million merges of five million characters.
_MAX_MERGES = 4_000_000
_MAX_MERGE_CHARACTERS = 64_000_000

_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_MODERN_WORDS = (  # %s: how many digits make a word
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_WORDS = _MODERN_WORDS % "{1,3}"
_QWEN2_WORDS = _MODERN_WORDS % ""

_GPT2 = PreTokenizer((_GPT2_WORDS,))
_SMOLLM = PreTokenizer((r"\p{N}", _GPT2_WORDS))
_LLAMA3 = PreTokenizer((_LLAMA3_WORDS,), ignore_merges=True, add_bos=True)
_QWEN2 = PreTokenizer((_QWEN2_WORDS,))
# Letters but for ASCII's small ones, then letters but for its capitals.
_TEKKEN_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{L}&&[^a-z]]*[\p{L}&&[^A-Z]]+|[^\r\n\p{L}\p{N}]?[\p{L}&&[^a-z]]+[\p{L}&&[^A-Z]]*|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK_V3_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SEED_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEFAULT = PreTokenizer((r"[\p{P}$+<=>^~|]+", _GPT2_WORDS, r"\p{N}+", r"[0-9][0-9][0-9]"))

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "default": _DEFAULT,
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "mpt": _GPT2,
    "olmo": _GPT2,
    "smollm": _SMOLLM,
    "starcoder": _SMOLLM,
    "refact": _SMOLLM,
    "command-r": _SMOLLM,
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "falcon3": _LLAMA3,
    "pixtral": _LLAMA3,
    "midm-2.0": _LLAMA3,
    "tekken": PreTokenizer((_TEKKEN_WORDS,), ignore_merges=True, add_bos=True),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿&&[^\s]]+", r"\p{N}")),
    "deepseek-v3": PreTokenizer((r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK_V3_WORDS)),
    "seed-coder": PreTokenizer((_SEED_WORDS,)),
    "viking": PreTokenizer((r" ?[^(\s|.,!?…。，、।۔،)]+", r"\p{N}")),
    "minerva-7b": _SMOLLM,
    "trillion": _GPT2,
    "mellum": _GPT2,
    "megrez": _QWEN2,
    "dbrx": PreTokenizer((_LLAMA3_WORDS,)),
    "smaug-bpe": PreTokenizer((_LLAMA3_WORDS,)),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "stablelm2": _QWEN2,
}


@dataclass(frozen=True)
class _Keys:
    """A GGUF file's `tokenizer.ggml.*`. origin: the file, for messages."""

    metadata: Mapping[str, Any]
    origin: str

    def get(self, name: str, default: object = None) -> Any:
        return self.metadata.get(f"tokenizer.ggml.{name}", default)

    def error(self, name: str, got: str, allowed: str | None = None, next: str | None = None) -> TokenizerError:
        """Build the error for a key; the caller raises it."""
        return TokenizerError(f"{self.origin}: tokenizer.ggml.{name}", got=got, allowed=allowed, next=next)

    def array(self, name: str, kind: type) -> list[Any]:
        value = self.get(name)
        if value is None:
            raise self.error(name, "missing", next="The tokenizer can't be built without it.")
        if hasattr(value, "tolist"):
            value = value.tolist()
        if not isinstance(value, Sequence) or isinstance(value, str | bytes):
            raise self.error(name, type(value).__name__, f"an array of {kind.__name__}")
        items = list(cast("Sequence[Any]", value))
        if not set(map(type, items)) <= ({int, float} if kind is float else {kind}):
            raise self.error(name, "values of another type", f"an array of {kind.__name__}")
        return items

    def array_beside(self, tokens: list[str], name: str, kind: type) -> list[Any]:
        """An array with an entry a token."""
        values = self.array(name, kind)
        if len(values) != len(tokens):
            raise self.error(name, f"{len(values)} values for {len(tokens)} tokens")
        return values

    def flag(self, name: str, *, default: bool) -> bool:
        value = self.get(name, default)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(name, repr(value)[:60], "true or false")
        return value


@dataclass(frozen=True)
class _Vocabulary:
    """The checked arrays of the metadata. types and scores are as long as tokens; ids maps text to id."""

    keys: _Keys
    tokens: list[str]
    ids: dict[str, int]
    types: list[int]

    @property
    def added(self) -> tuple[AddedPiece, ...]:
        special = {CONTROL, UNKNOWN}
        return tuple(
            AddedPiece(self.tokens[i], i, special=kind in special)
            for i, kind in enumerate(self.types)
            if kind in special or kind == USER_DEFINED
        )

    def special_id(self, name: str, default: int | None) -> int | None:
        value = self.keys.get(f"{name}_token_id", default)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.keys.error(f"{name}_token_id", repr(value)[:60], "a token id")
        if 0 <= value < len(self.tokens):
            return value
        # llama.cpp keeps its default, disabled where that is out of range as well; converters write -1 or 2^32-1 for
        # "none".
        return default if default is not None and default < len(self.tokens) else None


def gguf_tokenizer_parts(metadata: Mapping[str, Any], origin: str) -> TokenizerParts:
    """Build the tokenizer described by a GGUF file's `tokenizer.*` keys.

    metadata: the file's key-value pairs, arrays as sequences. origin: the file, for messages.
    Raises TokenizerError for an unknown tokenizer model or pre-tokenizer, and for missing or inconsistent arrays.
    """
    keys = _Keys(metadata, origin)
    model = keys.get("model")
    if model in (None, "none", "no_vocab"):
        raise keys.error("model", "missing", next="This file carries no tokenizer.")
    if model not in ("gpt2", "llama"):
        raise keys.error("model", shown(model), "'gpt2' (byte-level BPE), 'llama' (sentencepiece)")
    vocabulary = _read_vocabulary(keys)
    added = vocabulary.added
    with backend_call(origin, "building the pipeline"):
        if model == "gpt2":
            pre = _pre_tokenizer(keys)
            backend = _byte_level_backend(vocabulary, pre)
            add_bos, bos_default, eos_default, space_prefix = pre.add_bos, None, None, False
        else:
            space_prefix = keys.flag("add_space_prefix", default=True)
            backend = _sentencepiece_backend(vocabulary, space_prefix)
            add_bos, bos_default, eos_default = True, 1, 2
        backend.add_tokens(  # pyright: ignore[reportUnknownMemberType]
            [AddedToken(a.content, normalized=False, special=a.special) for a in added]
        )
    pieces = PieceTable(
        dict(enumerate(vocabulary.tokens)).get,
        spelling="byte_level" if model == "gpt2" else "sentencepiece",
        strip_first_space=space_prefix,
        verbatim=[a.id for a in added],
    )
    bos, eos = vocabulary.special_id("bos", bos_default), vocabulary.special_id("eos", eos_default)
    prefix = (bos,) if keys.flag("add_bos_token", default=add_bos) and bos is not None else ()
    suffix = (eos,) if keys.flag("add_eos_token", default=False) and eos is not None else ()
    return TokenizerParts(
        origin=origin,
        file=origin,
        backend=backend,
        pieces=pieces,
        added=added,
        vocab_size=len(vocabulary.tokens),
        bos_token_id=bos,
        eos_token_ids=_eos_ids(vocabulary, eos),
        prefix_ids=prefix,
        suffix_ids=suffix,
        chat_prefix_ids=prefix,
        special_tokens=_special_tokens(vocabulary, bos, eos),
        chat_templates=_chat_templates(metadata, origin),
    )


def _read_vocabulary(keys: _Keys) -> _Vocabulary:
    tokens: list[str] = keys.array("tokens", str)
    if not tokens:
        raise keys.error("tokens", "an empty list", next="The vocabulary is missing.")
    if "" in tokens:  # llama.cpp's name for a token without text
        tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(tokens)]
    try:
        "".join(tokens).encode()
    except UnicodeEncodeError as error:
        raise keys.error("tokens", "text that is not Unicode") from error
    if max(map(len, tokens)) > _LONGEST_TOKEN:
        got = f"a token of {max(map(len, tokens))} characters"
        raise keys.error("tokens", got, f"up to {_LONGEST_TOKEN}")
    ids = {token: i for i, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        twice = next(token for i, token in enumerate(tokens) if ids[token] != i)
        raise keys.error("tokens", f"{twice!r} twice", "distinct tokens")
    types: list[int] = [NORMAL] * len(tokens)
    if keys.get("token_type") is not None:
        types = keys.array_beside(tokens, "token_type", int)
    for token in (*END_TOKENS, *(name for names in INFILL_ENDS.values() for name in names)):
        if token in ids:
            types[ids[token]] = CONTROL
    for token, kind in _no_ends(ids).items():
        types[token] = kind
    return _Vocabulary(keys, tokens, ids, types)


def _pre_tokenizer(keys: _Keys) -> PreTokenizer:
    name = keys.get("pre")
    # Files from before the key existed: llama.cpp warns and takes its default.
    found = PRE_TOKENIZERS.get("default" if name in (None, "") else str(name))
    if found is None:
        raise keys.error("pre", shown(name), ", ".join(sorted(PRE_TOKENIZERS)))
    return found


def _byte_level_backend(vocabulary: _Vocabulary, pre: PreTokenizer) -> Backend:
    keys = vocabulary.keys
    lines: list[str] = keys.array("merges", str)
    merges = [tuple(line.split(" ")) for line in lines]
    if not set(map(len, merges)) <= {2}:
        wrong = next(line for line, pair in zip(lines, merges, strict=True) if len(pair) != 2)
        raise keys.error("merges", repr(wrong[:60]), "two tokens and a space")
    pairs = cast("list[tuple[str, str]]", merges)
    try:
        model = models.BPE(vocabulary.ids, pairs, ignore_merges=pre.ignore_merges)
    except Exception as error:  # tokenizers raises bare Exceptions
        raise keys.error("merges", _unknown_merge(vocabulary.ids, pairs)) from error
    backend = Backend(model)
    splits = [pre_tokenizers.Split(Regex(words), "isolated") for words in pre.splits]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend


def _unknown_merge(ids: Mapping[str, int], pairs: list[tuple[str, str]]) -> str:
    for left, right in pairs:
        for token in (left, right, left + right):
            if token not in ids:
                return f"{left!r} + {right!r}, where {token!r} is not a token"
    return "merges that don't fit the tokens"


def _sentencepiece_backend(vocabulary: _Vocabulary, space_prefix: bool) -> Backend:
    """Sentencepiece BPE: of all adjacent pairs that together are a token, join the best-scored first.

    Every way to split a normal token in two is a merge, ranked by the token's score. Control, byte and user-defined
    tokens are never made by merging (sentencepiece's rule; llama.cpp would let plain text spell a control token).
    """
    scores: list[float] = vocabulary.keys.array_beside(vocabulary.tokens, "scores", float)
    normal = {t: i for t, i in vocabulary.ids.items() if vocabulary.types[i] == NORMAL}
    best_first = sorted(normal.items(), key=lambda item: -scores[item[1]])
    merges: list[tuple[str, str]] = []
    characters = 0
    for token, _ in best_first:
        cuts = [cut for cut in range(1, len(token)) if token[:cut] in normal and token[cut:] in normal]
        merges += [(token[:cut], token[cut:]) for cut in cuts]
        characters += len(cuts) * len(token)
        if len(merges) > _MAX_MERGES or characters > _MAX_MERGE_CHARACTERS:
            raise vocabulary.keys.error(
                "tokens",
                got=f"{len(merges):,} ways and more to split tokens in two, of {characters:,} characters",
                allowed=f"{_MAX_MERGES:,} ways, of {_MAX_MERGE_CHARACTERS:,} characters",
                next="The vocabulary is damaged; fetch the file again.",
            )
    unknown = vocabulary.special_id("unknown", 0)
    model = models.BPE(
        vocabulary.ids,
        merges,
        unk_token=None if unknown is None else vocabulary.tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = Backend(model)
    to_marks = normalizers.Replace(" ", SPACE_MARK)
    # After every control token too, as llama.cpp and sentencepiece's own first releases have it.
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE_MARK), to_marks]) if space_prefix else to_marks
    strip = [decoders.Strip(" ", 1, 0)] if space_prefix else []
    steps = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    backend.decoder = decoders.Sequence(steps)
    return backend


def _eos_ids(vocabulary: _Vocabulary, eos: int | None) -> tuple[int, ...]:
    """Every id that ends an answer, the file's own eos first."""
    found = [eos, *(vocabulary.special_id(name, None) for name in ("eot", "eom"))]
    found += [vocabulary.ids.get(token) for token in END_TOKENS]
    for name, texts in INFILL_ENDS.items():
        named = next((vocabulary.ids[text] for text in texts if text in vocabulary.ids), None)
        found.append(vocabulary.special_id(name, named))
    no_ends = _no_ends(vocabulary.ids)
    return tuple(dict.fromkeys(i for i in found if i is not None and i not in no_ends))


def _no_ends(ids: Mapping[str, int]) -> dict[int, int]:
    """Tokens that end nothing beside others of their family, though END_TOKENS has them: id -> type."""
    harmony = ids.keys() & {"<|call|>", "<|calls|>"} and ids.keys() & {"<|return|>", "<|flush|>"}
    names = {"<|end|>": USER_DEFINED} if harmony else {}
    if ids.keys() & {"<|tool_response>", "<|plamo:eos|>"}:
        names["</s>"] = NORMAL
    return {ids[name]: kind for name, kind in names.items() if name in ids}


def _special_tokens(vocabulary: _Vocabulary, bos: int | None, eos: int | None) -> dict[str, str]:
    ids = {
        "bos_token": bos,
        "eos_token": eos,
        "unk_token": vocabulary.special_id("unknown", None),
        "pad_token": vocabulary.special_id("padding", None),
    }
    return {name: vocabulary.tokens[i] for name, i in ids.items() if i is not None}


def _chat_templates(metadata: Mapping[str, Any], origin: str) -> dict[str, str]:
    """ "default" from tokenizer.chat_template, others from tokenizer.chat_template.NAME."""
    found: dict[str, str] = {}
    for key, value in metadata.items():
        if key == "tokenizer.chat_template" or key.startswith("tokenizer.chat_template."):
            if not isinstance(value, str):
                raise TokenizerError(f"{origin}: {key}", got=type(value).__name__, allowed="a string")
            found[key.removeprefix("tokenizer.chat_template").removeprefix(".") or "default"] = value
    return found
