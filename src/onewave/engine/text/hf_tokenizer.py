"""The tokenizer of a Hugging Face model directory."""

import os
import stat
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from onewave.base.errors import TokenizerError, shown
from onewave.base.json_files import read_json_object
from onewave.engine.text.pieces import pieces_of
from onewave.engine.text.tokenizer_parts import AddedPiece, TokenizerParts, backend_call

SPECIAL_NAMES: tuple[str, ...] = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


def hf_tokenizer_parts(directory: Path) -> TokenizerParts:
    """Read tokenizer.json and the small files beside it.

    tokenizer.json: the pipeline, used as it is. tokenizer_config.json, special_tokens_map.json: the named special
    tokens; added_tokens_decoder; its flags count before tokenizer.json's (as in transformers), though a token that
    either calls special is a control token; add_bos_token and add_eos_token, asked only where tokenizer.json has no
    post-processor (transformers 5 lets that file decide, too); chat_template as a string or a list of named ones.
    chat_template.jinja and additional_chat_templates/*.jinja override those. added_tokens.json: where there is no
    added_tokens_decoder, tokens that tokenizer.json does not list. generation_config.json (else config.json):
    the ids that end an answer. All but the first are optional. Raises TokenizerError naming the file that is missing or
    malformed.
    """
    backend = _read_backend(directory)
    config = _read_object(directory / "tokenizer_config.json")
    named = _special_tokens(directory, config)
    with backend_call(str(directory / "tokenizer.json"), "adding tokens"):
        others = _listed(directory, config)
        _add_described(backend, _described(backend, config, directory, {*named.values(), *others}), directory)
        _mark_named(backend, named, others)
        added = tuple(
            AddedPiece(t.content, i, special=t.special, lstrip=t.lstrip, rstrip=t.rstrip, single_word=t.single_word)
            for i, t in sorted(backend.get_added_tokens_decoder().items())
        )
    bos, eos = (_id_of(backend, named.get(name)) for name in ("bos_token", "eos_token"))
    add_bos, add_eos = (config.get(name) is True for name in ("add_bos_token", "add_eos_token"))
    decides = backend.post_processor is None
    highest = max((piece.id for piece in added), default=-1)
    return TokenizerParts(
        origin=str(directory),
        file=str(directory / "tokenizer.json"),
        backend=backend,
        pieces=pieces_of(backend, [piece.id for piece in added]),
        added=added,
        vocab_size=max(backend.get_vocab_size(with_added_tokens=True), highest + 1),
        bos_token_id=bos,
        eos_token_ids=_eos_ids(directory, eos),
        prefix_ids=((bos,) if add_bos and bos is not None else ()) if decides else None,
        suffix_ids=((eos,) if add_eos and eos is not None else ()) if decides else None,
        special_tokens=named,
        chat_templates=_chat_templates(directory, config),
    )


def _read_backend(directory: Path) -> Backend:
    path = directory / "tokenizer.json"
    if not _is_file(path):
        advice = "Text can't be encoded without it; generation from token ids still works."
        sources = {"tokenizer.model": "transformers (with sentencepiece and protobuf)", "vocab.json": "transformers"}
        for name, tool in sources.items():
            if _is_file(directory / name):
                call = f"AutoTokenizer.from_pretrained({str(directory)!r}).save_pretrained({str(directory)!r})"
                advice = f"There is a {name}; {tool} converts it: {call}"
                break
        raise TokenizerError(str(path), got="missing", next=advice)
    with backend_call(str(path), "loading"):
        try:
            backend = Backend.from_file(str(path))
        except Exception as error:  # tokenizers raises bare Exceptions
            raise TokenizerError(str(path), got=f"not a tokenizer ({error})", next="Fetch the file again.") from error
        backend.no_truncation()
        backend.no_padding()
        if isinstance(backend.model, BPE) and backend.model.dropout:  # for training: it makes encoding random
            backend.model.dropout = None
    return backend


def _is_file(path: Path) -> bool:
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise TokenizerError(
            str(path), got=f"can't be read ({error.strerror or error})", next="Give this user the right to read it."
        ) from error


def _read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; {} when there is no file."""
    return read_json_object(path, TokenizerError) if os.path.lexists(path) else {}


def _special_tokens(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """name -> text. A token is written as a string or as {"content": string}; tokenizer_config.json wins, and names
    further ones in extra_special_tokens."""
    found: dict[str, str] = {}
    of_map, extra = _read_object(directory / "special_tokens_map.json"), config.get("extra_special_tokens")
    sources = [("special_tokens_map.json", of_map, SPECIAL_NAMES), ("tokenizer_config.json", config, SPECIAL_NAMES)]
    if isinstance(extra, dict):
        more = cast("dict[str, Any]", extra)
        sources.append(("tokenizer_config.json", more, tuple(more)))
    for file, source, names in sources:
        for name in names:
            value: object = source.get(name)
            if isinstance(value, dict):
                value = cast("dict[str, Any]", value).get("content")
            if isinstance(value, str):
                found[name] = _unicode(value, f"{directory / file}: {name}")
    return found


def _unicode(text: str, what: str) -> str:
    try:
        text.encode()
    except UnicodeError as error:
        raise TokenizerError(what, got="a lone surrogate", allowed="Unicode text that UTF-8 can write") from error
    return text


def _described(backend: Backend, config: Mapping[str, Any], directory: Path, special: Container[str]) -> object:
    """added_tokens_decoder, or what stood for it before: added_tokens.json has texts and ids."""
    entries: object = config.get("added_tokens_decoder")
    if entries:
        return entries
    listed = {token.content for token in backend.get_added_tokens_decoder().values()}
    ids = _read_object(directory / "added_tokens.json")
    new = {text: i for text, i in ids.items() if type(i) is int and i >= 0 and text not in listed}
    return {str(i): {"content": text, "special": text in special} for text, i in new.items()}


def _add_described(backend: Backend, entries: object, directory: Path) -> None:
    """Give the tokens of added_tokens_decoder the flags written there, and add those that tokenizer.json lacks.

    One that would not get the id written there is left out: its text stays text.
    """
    what = f"{directory / 'tokenizer_config.json'}: added_tokens_decoder"
    if not isinstance(entries, dict):
        raise TokenizerError(what, got=type(entries).__name__, allowed="an object")
    listed = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    described: dict[int, AddedToken] = {}
    for key, value in cast("dict[str, object]", entries).items():
        fields = cast("dict[str, object]", value) if isinstance(value, dict) else {}
        content = fields.get("content")
        if not (key.isascii() and key.isdigit() and len(key) < 10 and isinstance(content, str)):
            raise TokenizerError(
                what, got=shown({key: cast("object", value)}), allowed='{"ID": {"content": TEXT, ...}, ...}'
            )
        if not content:
            continue
        known = listed.get(_unicode(content, what))
        special = fields.get("special") is True or (known is not None and known.special)
        described[int(key)] = AddedToken(
            content,
            special=special,
            normalized=fields.get("normalized", not special) is True,
            **{flag: fields.get(flag) is True for flag in ("lstrip", "rstrip", "single_word")},
        )
    following = backend.get_vocab_size(with_added_tokens=True)
    kept: list[AddedToken] = []
    for token_id, token in sorted(described.items()):
        if backend.token_to_id(token.content) is not None:
            kept.append(token)
        elif token_id == following and token.content not in (each.content for each in kept):
            kept.append(token)
            following += 1
    backend.add_tokens(kept)  # pyright: ignore[reportUnknownMemberType]


def _listed(directory: Path, config: Mapping[str, Any]) -> list[str]:
    """The texts in lists of further special tokens."""
    found: list[str] = []
    for source in (config, _read_object(directory / "special_tokens_map.json")):
        for name in ("additional_special_tokens", "extra_special_tokens"):
            given: object = source.get(name)
            for value in cast("list[object]", given) if isinstance(given, list) else []:
                text = cast("dict[str, object]", value).get("content") if isinstance(value, dict) else value
                if isinstance(text, str) and text:
                    found.append(_unicode(text, f"{directory}: {name}"))
    return found


def _mark_named(backend: Backend, named: Mapping[str, str], others: Iterable[str]) -> None:
    """Make control tokens of the named tokens that the vocabulary has and tokenizer.json forgot to list as such, and of
    others that it does not list at all."""
    listed = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    forgotten: list[AddedToken] = []
    for text in dict.fromkeys(named.values()):
        token = listed.get(text)
        if token is None and backend.token_to_id(text) is not None:
            forgotten.append(AddedToken(text, special=True, normalized=False))
        elif token is not None and not token.special:
            token.special = True
            forgotten.append(token)
    known = {token.content for token in forgotten} | listed.keys()
    for text in dict.fromkeys(others):
        if text not in known and backend.token_to_id(text) is not None:
            forgotten.append(AddedToken(text, special=True, normalized=False))
    backend.add_special_tokens(forgotten)  # pyright: ignore[reportUnknownMemberType]


def _id_of(backend: Backend, token: str | None) -> int | None:
    return None if token is None else backend.token_to_id(token)


def _eos_ids(directory: Path, eos: int | None) -> tuple[int, ...]:
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        value: object = _read_object(path).get("eos_token_id")
        if value in (None, -1):  # exporters write -1 for "none"
            continue
        ids = cast("list[object]", value) if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise TokenizerError(
                f"{path}: eos_token_id", got=repr(cast("object", value))[:60], allowed="a token id or a list of them"
            )
        named = [] if eos is None else [eos]
        return tuple(dict.fromkeys([*cast("list[int]", ids), *named]))
    return () if eos is None else (eos,)


def _chat_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """name -> Jinja source; the usual one is called "default"."""
    what = f"{directory / 'tokenizer_config.json'}: chat_template"
    found: dict[str, str] = {}
    for source in (_read_object(directory / "chat_template.json").get("chat_template"), config.get("chat_template")):
        if isinstance(source, str):
            found["default"] = source
        elif isinstance(source, list):
            for entry in cast("list[object]", source):
                fields = cast("dict[str, Any]", entry) if isinstance(entry, dict) else {}
                name, text = fields.get("name"), fields.get("template")
                if not isinstance(name, str) or not isinstance(text, str):
                    raise TokenizerError(
                        what, got=repr(cast("object", entry))[:60], allowed='{"name": ..., "template": ...} in a list'
                    )
                found[name] = text
        elif source is not None:
            raise TokenizerError(what, got=type(source).__name__, allowed="a string or a list of named templates")
    files = [(path.stem, path) for path in sorted((directory / "additional_chat_templates").glob("*.jinja"))]
    files.append(("default", directory / "chat_template.jinja"))
    for name, path in files:
        if _is_file(path):
            try:
                found[name] = path.read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                raise TokenizerError(str(path), got=f"not readable ({error})") from error
    return found
