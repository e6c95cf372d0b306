"""Tokenizers of Hugging Face directories, against transformers and against the same vocabulary in a GGUF file."""

import errno
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from kit.models.tiny_tokenizers import (
    byte_level_directory,
    byte_level_metadata,
    corpus,
    save_directory,
    sentencepiece_directory,
    sentencepiece_metadata,
)
from onewave.base.errors import TokenizerError
from onewave.engine.text.gguf_tokenizer import gguf_tokenizer_parts
from onewave.engine.text.tokenizer import Tokenizer, load_tokenizer
from onewave.engine.text.tokenizer_parts import backend_call
from onewave.weights.fetch.sources import ModelLocation

LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_WORDS = LLAMA3_WORDS.replace("{1,3}", "")


def open_directory(directory: Path) -> Tokenizer:
    return load_tokenizer(ModelLocation("hf", directory, directory.name))


def from_gguf(metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer(gguf_tokenizer_parts(metadata, "tiny.gguf"))


@pytest.mark.parametrize(
    ("words", "pre"), [(LLAMA3_WORDS, "llama-bpe"), (QWEN2_WORDS, "qwen2")], ids=["llama 3", "qwen 2"]
)
def test_a_byte_level_vocabulary_gives_the_same_ids_from_both_kinds_of_file(
    words: str, pre: str, tmp_path: Path
) -> None:
    ours = open_directory(byte_level_directory(tmp_path, words))
    gguf = from_gguf(byte_level_metadata(pre))
    for text in [*corpus().values(), "<|im_start|>user <think> [INST] x<|im_end|>    y"]:
        for allow_special in (False, True):
            ids = ours.encode(text, add_special_tokens=False, allow_special=allow_special)
            assert ids == gguf.encode(text, add_special_tokens=False, allow_special=allow_special)
            assert ours.decode(ids) == gguf.decode(ids)
    assert (ours.vocab_size, ours.special_ids) == (gguf.vocab_size, gguf.special_ids)


def test_a_sentencepiece_vocabulary_gives_the_same_ids_from_both_kinds_of_file(tmp_path: Path) -> None:
    ours = open_directory(sentencepiece_directory(tmp_path, prepend_scheme=None))
    gguf = from_gguf(sentencepiece_metadata())
    for text in [*corpus().values(), "<s>[INST] x </s> y<think> z"]:
        for allow_special in (False, True):
            ids = ours.encode(text, allow_special=allow_special)
            assert ids == gguf.encode(text, allow_special=allow_special)
            assert ours.decode(ids) == gguf.decode(ids)


DIRECTORIES = {
    "llama 3": lambda path: byte_level_directory(path, LLAMA3_WORDS),
    "qwen 2": lambda path: byte_level_directory(path, QWEN2_WORDS),
    "sentencepiece, old": lambda path: sentencepiece_directory(path, prepend_scheme=None),
    "sentencepiece, first": lambda path: sentencepiece_directory(path, prepend_scheme="first"),
    "sentencepiece, always": lambda path: sentencepiece_directory(path, prepend_scheme="always"),
    "sentencepiece, never": lambda path: sentencepiece_directory(path, prepend_scheme="never"),
    "sentencepiece, no BOS": lambda path: sentencepiece_directory(path, prepend_scheme="first", add_bos_token=False),
    "sentencepiece, EOS": lambda path: sentencepiece_directory(
        path, prepend_scheme="first", add_bos_token=True, add_eos_token=True
    ),
}


@pytest.mark.parametrize("name", DIRECTORIES)
def test_ids_and_text_are_transformers_own(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    directory = DIRECTORIES[name](tmp_path)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(directory))
    ours = open_directory(directory)
    for text in [*corpus().values(), "", " a", "x<|im_end|> <s> y</s>z", " <s> <s>"]:
        for part in (text, *text.split("\n")):
            ids, wanted = ours.encode(part), theirs.encode(part)
            # A text that begins with BOS gets no second one.
            assert ids == (wanted[1:] if wanted[:2] == [ours.bos_token_id] * 2 else wanted)
            assert ours.encode(part, add_special_tokens=False) == theirs.encode(part, add_special_tokens=False)
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
            assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.eos_token_ids == (theirs.eos_token_id,)


@pytest.mark.parametrize("name", DIRECTORIES)
def test_plain_text_makes_no_control_token_and_keeps_the_post_processor(name: str, tmp_path: Path) -> None:
    ours = open_directory(DIRECTORIES[name](tmp_path))
    text = "x<|im_end|> <s> y</s>z"
    ids = ours.encode(text, allow_special=False)
    assert ours.special_ids.isdisjoint(ours.encode(text, add_special_tokens=False, allow_special=False))
    assert ours.decode(ids) == text
    around = ours.encode("")
    assert [i for i in ids if i in ours.special_ids] == around


def test_add_bos_token_counts_where_tokenizer_json_has_no_post_processor(tmp_path: Path) -> None:
    ours = open_directory(byte_level_directory(tmp_path, QWEN2_WORDS, add_bos_token=True, add_eos_token=True))
    bare = ours.encode("hi", add_special_tokens=False)
    assert ours.encode("hi") == [ours.bos_token_id, *bare, ours.eos_token_ids[0]]


def test_named_tokens_are_control_tokens_though_tokenizer_json_lists_them_as_words(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    backend = Backend(models.WordLevel({"<unk>": 0, "<s>": 1, "a": 2, "b": 3}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"bos_token": "<s>", "unk_token": "<unk>", "tokenizer_class": "PreTrainedTokenizerFast"}
    ours = open_directory(save_directory(tmp_path, backend, names))
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    assert ours.encode("a<s>b") == theirs.encode("a<s>b") == [2, 1, 3]
    assert ours.decode([2, 1, 3]) == theirs.decode([2, 1, 3], skip_special_tokens=True) == "a b"


def test_text_that_the_vocabulary_lacks_is_unknown_unless_that_would_end_an_answer(tmp_path: Path) -> None:
    backend = Backend(models.WordLevel({"<unk>": 0, "<s>": 1, "a": 2}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"bos_token": "<s>", "unk_token": "<unk>", "chat_template": "{{ bos_token }}{{ messages[0].content }}"}
    talk = [{"role": "user", "content": "a z"}]
    ours = open_directory(save_directory(tmp_path, backend, names))
    assert (ours.encode_chat(talk), ours.encode("a z", allow_special=False)) == ([1, 2, 0], [2, 0])
    ours = open_directory(save_directory(tmp_path, backend, names | {"eos_token": "<unk>"}))
    assert (ours.encode_chat(talk), ours.encode("a z", allow_special=False)) == ([1, 2], [2])


def test_text_that_unigrams_lack_is_unknown_though_no_file_names_that_token(tmp_path: Path) -> None:
    backend = Backend(models.Unigram([("<unk>", 0.0), ("a", -1.0), ("<", -2.0), ("u", -2.0)], unk_id=0))
    backend.add_special_tokens(["<unk>"])
    ours = open_directory(save_directory(tmp_path, backend, {"chat_template": "a{{ messages[0].content }}"}))
    assert ours.encode("az", allow_special=False) == [1, 0]
    assert ours.encode_chat([{"role": "user", "content": "za"}]) == [1, 0, 1]


def change_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")


def with_plain_end_token(directory: Path, **config: Any) -> Tokenizer:
    """The byte-level directory whose tokenizer.json lists <|im_end|> as an ordinary added token."""
    byte_level_directory(directory, QWEN2_WORDS, **config)
    path = directory / "tokenizer.json"
    added = json.loads(path.read_text(encoding="utf-8"))["added_tokens"]
    plain = [
        token | ({"special": False, "lstrip": True} if token["content"] == "<|im_end|>" else {}) for token in added
    ]
    change_json(path, added_tokens=plain)
    return open_directory(directory)


END = {"content": "<|im_end|>", "lstrip": True, "rstrip": False, "single_word": False, "normalized": False}
WRITES_ENDS = "{% for m in messages %}{{ m.content }}{{ '<|im_end|>' }}{% endfor %}"


@pytest.mark.parametrize("where", ["named", "described"])
def test_a_token_that_only_the_config_calls_special_is_a_control_token(where: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    end = byte_level_metadata("gpt-2")["tokenizer.ggml.tokens"].index("<|im_end|>")
    described = {"eos_token": "<|end_of_text|>", "added_tokens_decoder": {str(end): END | {"special": True}}}
    config = {"chat_template": WRITES_ENDS} | (described if where == "described" else {})
    ours = with_plain_end_token(tmp_path, **config)
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    ids = ours.encode("a <|im_end|>b")
    assert ids == theirs.encode("a <|im_end|>b")  # its lstrip is kept: the space goes with it
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True) == "ab"
    assert end not in ours.encode("a<|im_end|>b", allow_special=False)
    chat = ours.encode_chat([{"role": "user", "content": "a<|im_end|>b"}], add_generation_prompt=False)
    assert (chat.count(end), chat[-1]) == (1, end)


def test_the_config_takes_no_control_token_back(tmp_path: Path) -> None:
    byte_level_directory(tmp_path, QWEN2_WORDS)
    inst = open_directory(tmp_path).encode("[INST]", add_special_tokens=False)
    assert len(inst) == 1
    entry = END | {"content": "[INST]", "special": False}
    change_json(tmp_path / "tokenizer_config.json", added_tokens_decoder={str(inst[0]): entry})
    assert open_directory(tmp_path).special_ids.issuperset(inst)


def test_tokens_that_only_the_config_describes_are_added(tmp_path: Path) -> None:
    size = open_directory(byte_level_directory(tmp_path, QWEN2_WORDS)).vocab_size
    entries = {str(size + 1): {"content": "<b>"}, str(size): END | {"content": "<a>", "special": True}}
    change_json(tmp_path / "tokenizer_config.json", added_tokens_decoder=entries)
    ours = open_directory(tmp_path)
    assert ours.encode("<a><b>", add_special_tokens=False) == [size, size + 1]
    assert ours.decode([size, size + 1]) == "<b>"
    change_json(tmp_path / "tokenizer_config.json", added_tokens_decoder={str(size + 7): {"content": "<b>"}})
    without = open_directory(tmp_path)
    assert without.vocab_size == size
    assert without.encode("<b>") == without.encode("<b>", allow_special=False)


def test_old_files_beside_add_their_tokens_and_lists_name_control_tokens(tmp_path: Path) -> None:
    size = open_directory(byte_level_directory(tmp_path, QWEN2_WORDS)).vocab_size
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<a>": size, "<b>": size + 1, "<late>": size + 9}))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"additional_special_tokens": ["<b>", "th", "no"]}))
    ours = open_directory(tmp_path)
    assert ours.encode("<a><b>", add_special_tokens=False) == [size, size + 1]
    assert ours.decode([size, size + 1]) == "<a>"
    assert ours.vocab_size == size + 2
    (th,) = ours.encode("th", add_special_tokens=False)
    assert th in ours.special_ids
    assert ours.special_ids.isdisjoint(ours.encode("the <b>", allow_special=False))


WHITESPACE = pre_tokenizers.Whitespace()
WITHOUT_UNKNOWN: dict[str, Any] = {
    "byte pairs": models.BPE({"a": 0, "b": 1}, [], unk_token="<unk>"),
    "words": models.WordLevel({"a": 0, "b": 1}, unk_token="<unk>"),
    "word pieces": models.WordPiece({"a": 0, "b": 1}, unk_token="[UNK]"),
    "unigrams": models.Unigram([("a", -1.0), ("b", -1.0)]),
}


@pytest.mark.parametrize("name", WITHOUT_UNKNOWN)
def test_text_that_the_pipeline_fails_at_is_refused_by_name(name: str, tmp_path: Path) -> None:
    backend = Backend(WITHOUT_UNKNOWN[name])
    backend.pre_tokenizer = WHITESPACE
    ours = open_directory(save_directory(tmp_path, backend, {"chat_template": "{{ messages[0].content }}"}))
    assert ours.encode("a b") == [0, 1]
    for call in (
        lambda: ours.encode("a z"),
        lambda: ours.encode("a z", allow_special=False),
        lambda: ours.encode_plain("a z"),
        lambda: ours.encode_chat([{"role": "user", "content": "a z"}]),
    ):
        with pytest.raises(TokenizerError, match=r"tokenizer\.json: the tokenizers library fails at encoding text \("):
            call()


def test_a_panic_of_the_library_is_one_of_our_errors(tmp_path: Path) -> None:
    backend = Backend(models.BPE({"a": 0, "b": 1}, []))
    backend.decoder = decoders.Sequence([decoders.Replace("a", ""), decoders.Strip(" ", 0, 1)])
    ours = open_directory(save_directory(tmp_path, backend, {}))
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: the tokenizers library fails at decoding token ids \("):
        ours.decode([0])
    undefined = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<x>", "type_id": 0}}]}
    change_json(tmp_path / "tokenizer.json", post_processor=undefined | {"pair": [], "special_tokens": {}})
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: the tokenizers library fails at encoding text \("):
        open_directory(tmp_path).encode("a")
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"], "continuing_subword_prefix": "##"}
    change_json(tmp_path / "tokenizer.json", post_processor=None, model=model)
    assert "tokenizer.json: the tokenizers library fails at loading (" in refusal(tmp_path)


def test_an_interrupt_inside_the_library_passes() -> None:
    with pytest.raises(KeyboardInterrupt), backend_call("tokenizer.json", "encoding text"):
        raise KeyboardInterrupt


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
def test_small_files_may_start_with_a_byte_order_mark(encoding: str, tmp_path: Path) -> None:
    byte_level_directory(tmp_path, QWEN2_WORDS)
    for name, text in (("generation_config.json", '{"eos_token_id": 5}'), ("tokenizer_config.json", "{}")):
        (tmp_path / name).write_text(text, encoding=encoding)
    assert open_directory(tmp_path).eos_token_ids == (5,)


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja"])
def test_a_file_that_one_may_not_look_at_is_named(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    byte_level_directory(tmp_path, QWEN2_WORDS)
    (tmp_path / name).touch()
    found = os.stat

    def guarded(path: Any, **options: Any) -> os.stat_result:
        if os.path.basename(path) == name:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return found(path, **options)

    monkeypatch.setattr(os, "stat", guarded)
    assert f"{name}: can't be read (Permission denied)" in refusal(tmp_path)


def test_ids_that_end_an_answer_come_from_the_generation_config(tmp_path: Path) -> None:
    byte_level_directory(tmp_path, QWEN2_WORDS)
    assert [open_directory(tmp_path).token_text(i) for i in open_directory(tmp_path).eos_token_ids] == ["<|im_end|>"]
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 901]}', encoding="utf-8")
    named = open_directory(tmp_path).eos_token_ids
    assert named[:2] == (7, 901)
    assert len(named) == 3
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 5}', encoding="utf-8")
    assert open_directory(tmp_path).eos_token_ids[0] == 5
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": -1}', encoding="utf-8")
    assert [open_directory(tmp_path).token_text(i) for i in open_directory(tmp_path).eos_token_ids] == ["<|im_end|>"]


def test_named_tokens_may_stand_in_the_special_tokens_map(tmp_path: Path) -> None:
    byte_level_directory(tmp_path, QWEN2_WORDS)
    (tmp_path / "tokenizer_config.json").write_text("{}", encoding="utf-8")
    assert open_directory(tmp_path).bos_token_id is None
    named = {"bos_token": {"content": "<|begin|>", "lstrip": False}, "eos_token": "<|im_end|>"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(named), encoding="utf-8")
    tokenizer = open_directory(tmp_path)
    assert tokenizer.token_text(tokenizer.bos_token_id or 0) == "<|begin|>"


def test_tokens_that_the_config_names_beside_the_usual_are_seen_by_templates_and_are_control_tokens(
    tmp_path: Path,
) -> None:
    transformers = pytest.importorskip("transformers")
    template = "{{ image_token }}{{ messages[0].content }}"
    config: dict[str, Any] = {"extra_special_tokens": {"image_token": "<think>"}, "chat_template": template}
    ours = open_directory(byte_level_directory(tmp_path, QWEN2_WORDS, **config))
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    talk = [{"role": "user", "content": "a <think>"}]
    assert ours.render_chat(talk) == theirs.apply_chat_template(talk, tokenize=False)
    ids = ours.encode("a<think>b")
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True) == "ab"
    assert sum(i in ours.special_ids for i in ours.encode_chat(talk)) == 1


def test_what_a_tokenizers_training_left_in_the_file_is_not_applied(tmp_path: Path) -> None:
    path = byte_level_directory(tmp_path, QWEN2_WORDS) / "tokenizer.json"
    ids = open_directory(tmp_path).encode("one two three four five six")
    state = json.loads(path.read_text(encoding="utf-8"))
    state["model"]["dropout"] = 1.0
    state["truncation"] = {"max_length": 3, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    path.write_text(json.dumps(state), encoding="utf-8")
    assert open_directory(tmp_path).encode("one two three four five six") == ids


def refusal(directory: Path) -> str:
    with pytest.raises(TokenizerError) as caught:
        open_directory(directory)
    assert "\n" not in str(caught.value)
    assert str(directory) in str(caught.value)
    return str(caught.value)


def test_a_directory_without_tokenizer_says_that_token_ids_still_work(tmp_path: Path) -> None:
    assert "missing. Text can't be encoded without it; generation from token ids still works." in refusal(tmp_path)
    (tmp_path / "vocab.json").touch()
    assert "There is a vocab.json; transformers converts it" in refusal(tmp_path)
    (tmp_path / "tokenizer.model").touch()
    assert "There is a tokenizer.model; transformers" in refusal(tmp_path)
    assert f"AutoTokenizer.from_pretrained('{tmp_path}').save_pretrained('{tmp_path}')" in refusal(tmp_path)


def test_a_pipe_beside_tokenizer_json_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(byte_level_directory(tmp_path, QWEN2_WORDS) / "special_tokens_map.json")
    assert "special_tokens_map.json: not a file" in refusal(tmp_path)


@pytest.mark.parametrize("keep", [0, 1, 100, 5000])
def test_a_truncated_tokenizer_json_is_refused(keep: int, tmp_path: Path) -> None:
    path = byte_level_directory(tmp_path, QWEN2_WORDS) / "tokenizer.json"
    path.write_bytes(path.read_bytes()[:keep])
    assert "tokenizer.json: not a tokenizer" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("tokenizer.json", "[]", "not a tokenizer"),
        ("tokenizer_config.json", "[1]", "not a JSON object"),
        ("tokenizer_config.json", '{"bos_token": ', "not valid JSON"),
        ("tokenizer_config.json", '{"added_tokens_decoder": [1]}', "added_tokens_decoder: list; allowed: an object"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": {"content": "a"}}}', 'allowed: {"ID": {"content": '),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"1": 2}}', "added_tokens_decoder: {'1': 2}; allowed: {"),
        (
            "tokenizer_config.json",
            '{"added_tokens_decoder": {"1": {"content": "\\ud800"}}}',
            "added_tokens_decoder: a lone surrogate; allowed",
        ),
        ("tokenizer_config.json", '{"chat_template": 3}', "chat_template: int; allowed: a string or a list"),
        ("tokenizer_config.json", '{"chat_template": ["x"]}', "chat_template: 'x'; allowed: {"),
        ("tokenizer_config.json", '{"eos_token": "\\ud800"}', "eos_token: a lone surrogate; allowed: Unicode text"),
        ("special_tokens_map.json", '{"pad_token": {"content": "x\\udfff"}}', "pad_token: a lone surrogate; allowed"),
        ("special_tokens_map.json", "null", "not a JSON object"),
        ("generation_config.json", '{"eos_token_id": "x"}', "eos_token_id: 'x'; allowed: a token id"),
        ("generation_config.json", "[" * 100_000, "not valid JSON"),
    ],
)
def test_a_malformed_file_is_named_in_one_line(name: str, text: str, says: str, tmp_path: Path) -> None:
    byte_level_directory(tmp_path, QWEN2_WORDS)
    (tmp_path / name).write_text(text, encoding="utf-8")
    message = refusal(tmp_path)
    assert re.escape(name) in re.escape(message)
    assert says in message
