"""Broken metadata and files end in one of our errors, never in a crash or a hang."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.models.tiny_tokenizers import byte_level_directory, byte_level_metadata, sentencepiece_metadata
from onewave.base.errors import OnewaveError
from onewave.engine.text.gguf_tokenizer import gguf_tokenizer_parts
from onewave.engine.text.hf_tokenizer import hf_tokenizer_parts
from onewave.engine.text.tokenizer import Tokenizer

SMALL: dict[str, Any] = {
    "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "a", "b", "ab", "▁", "<0x0A>"],
    "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1, 1, 6],
    "tokenizer.ggml.scores": [0.0, 0.0, 0.0, -3.0, -4.0, -1.0, -2.0, 0.0],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.add_space_prefix": True,
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.chat_template": "{{ messages[0].content }}",
}
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**40), 2**40),
    st.floats(),
    st.text(max_size=5),
    st.just("\ud800"),
    st.binary(max_size=3),
    st.lists(st.one_of(st.none(), st.integers(-9, 9), st.floats(), st.text(max_size=3), st.just("\ud800")), max_size=9),
    st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
)


@settings(max_examples=400)
@given(
    model=st.sampled_from(["gpt2", "llama"]),
    pre=st.sampled_from(["llama-bpe", "default", "x"]),
    changes=st.dictionaries(st.sampled_from(sorted(SMALL)), VALUES, min_size=1, max_size=3),
    text=st.text(alphabet="ab \n<s>é", max_size=9),
)
def test_any_metadata_builds_a_tokenizer_or_is_refused(
    model: str, pre: str, changes: dict[str, Any], text: str
) -> None:
    metadata = {**SMALL, "tokenizer.ggml.model": model, "tokenizer.ggml.pre": pre, **changes}
    with contextlib.suppress(OnewaveError):
        tokenizer = Tokenizer(gguf_tokenizer_parts(metadata, "fuzzed.gguf"))
        tokenizer.decode(tokenizer.encode(text))
        tokenizer.encode_chat([{"role": "user", "content": text}])


@pytest.mark.parametrize("kind", ["byte level", "sentencepiece"])
@settings(max_examples=200)
@given(data=st.data())
def test_a_damaged_array_builds_a_tokenizer_or_is_refused(kind: str, data: st.DataObject) -> None:
    metadata = byte_level_metadata("qwen2") if kind == "byte level" else sentencepiece_metadata()
    key = data.draw(st.sampled_from([key for key, value in metadata.items() if isinstance(value, list)]))
    values = list(metadata[key])
    for _ in range(data.draw(st.integers(1, 3))):
        values[data.draw(st.integers(0, len(values) - 1))] = data.draw(VALUES)
    keep = data.draw(st.one_of(st.just(len(values)), st.integers(0, len(values))))
    with contextlib.suppress(OnewaveError):
        tokenizer = Tokenizer(gguf_tokenizer_parts({**metadata, key: values[:keep]}, "damaged.gguf"))
        tokenizer.decode(tokenizer.encode("Hello <s> 世界"))


@settings(max_examples=150)
@given(position=st.integers(0, 40_000), byte=st.integers(0, 255), keep=st.integers(0, 60_000))
def test_a_damaged_tokenizer_json_builds_a_tokenizer_or_is_refused(
    position: int, byte: int, keep: int, tmp_path: Path
) -> None:
    directory = tmp_path / "model"
    if not directory.exists():
        byte_level_directory(directory, r"\p{L}+|\P{L}")
        (directory / "whole").write_bytes((directory / "tokenizer.json").read_bytes())
    data = bytearray((directory / "whole").read_bytes())
    data[position % len(data)] = byte
    (directory / "tokenizer.json").write_bytes(data[: max(keep, len(data) // 2)] if keep % 3 == 0 else data)
    with contextlib.suppress(OnewaveError):
        tokenizer = Tokenizer(hf_tokenizer_parts(directory))
        tokenizer.decode(tokenizer.encode("Hello 世界"))


@settings(max_examples=200)
@given(
    messages=st.one_of(VALUES, st.lists(st.dictionaries(st.sampled_from(["role", "content", "x"]), VALUES), max_size=3))
)
def test_any_messages_are_encoded_or_refused(messages: Any) -> None:
    template = "{% for m in messages %}<|im_start|>{{ m.role }}{{ m.content }}{{ m | tojson }}<|im_end|>{% endfor %}"
    metadata = byte_level_metadata("qwen2", **{"tokenizer.chat_template": template})
    tokenizer = Tokenizer(gguf_tokenizer_parts(metadata, "tiny.gguf"))
    with contextlib.suppress(OnewaveError):
        tokenizer.encode_chat(messages)


def test_the_small_vocabulary_is_sound() -> None:
    for model in ("gpt2", "llama"):
        metadata = {**SMALL, "tokenizer.ggml.model": model, "tokenizer.ggml.pre": "llama-bpe"}
        tokenizer = Tokenizer(gguf_tokenizer_parts(metadata, "small.gguf"))
        assert tokenizer.decode(tokenizer.encode("abab")) == "abab"
