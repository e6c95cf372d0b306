"""Text that streams: never half a character, and the same in the end."""

import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from kit.models.tiny_tokenizers import byte_level_metadata, corpus, save_directory, sentencepiece_metadata
from onewave.engine.text.detokenizer import IncrementalDetokenizer
from onewave.engine.text.gguf_tokenizer import gguf_tokenizer_parts
from onewave.engine.text.hf_tokenizer import hf_tokenizer_parts
from onewave.engine.text.tokenizer import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
TOKENIZERS = {
    "byte level": Tokenizer(gguf_tokenizer_parts(byte_level_metadata("llama-bpe"), "tiny")),
    "sentencepiece": Tokenizer(gguf_tokenizer_parts(sentencepiece_metadata(), "tiny")),
    "sentencepiece without prefix": Tokenizer(
        gguf_tokenizer_parts(sentencepiece_metadata(**{"tokenizer.ggml.add_space_prefix": False}), "tiny")
    ),
}
SMALLEST = min(tokenizer.vocab_size for tokenizer in TOKENIZERS.values())
# Byte tokens and pieces of characters make the hard cases, so draw many of the low ids.
IDS = st.lists(st.one_of(st.integers(0, 260), st.integers(0, SMALLEST - 1)), max_size=30)


def added_text(tokenizer: Tokenizer, prompt: list[int], ids: list[int], skip: bool) -> str:
    """The text that `ids` add to the prompt's, by decoding everything at once."""
    hidden = tokenizer.special_ids if skip else frozenset[int]()
    data = b"".join(tokenizer.pieces[i] for i in prompt if i not in hidden)
    before, after = tokenizer.decode(prompt, skip), tokenizer.decode(prompt + ids, skip)
    whole = after[len(before) :]
    if before.endswith(REPLACEMENT) and not data.endswith(REPLACEMENT.encode()) and not after.startswith(before):
        # The prompt ended inside a character and these ids complete it.
        whole = after[len(before) - 1 :]
    return whole


def stream(tokenizer: Tokenizer, prompt: list[int], ids: list[int], skip: bool, chunk: int = 1) -> list[str]:
    reader = IncrementalDetokenizer(tokenizer, prompt, skip)
    return [*(reader.push(ids[i : i + chunk]) for i in range(0, len(ids), chunk)), reader.finish()]


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=300)
@given(prompt=IDS, ids=IDS, skip=st.booleans(), chunk=st.integers(1, 4))
def test_pushes_and_finish_join_to_the_decoded_text(
    name: str, prompt: list[int], ids: list[int], skip: bool, chunk: int
) -> None:
    tokenizer = TOKENIZERS[name]
    assert "".join(stream(tokenizer, prompt, ids, skip, chunk)) == added_text(tokenizer, prompt, ids, skip)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_corpus_streams_token_by_token_without_half_characters(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    for text in corpus().values():
        ids = tokenizer.encode(text, add_special_tokens=False, allow_special=False)
        shown = stream(tokenizer, [], ids, skip=True)
        assert "".join(shown) == tokenizer.decode(ids)
        assert "".join(shown).count(REPLACEMENT) == text.count(REPLACEMENT)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=200)
@given(text=st.text(max_size=20), split=st.integers(0, 40))
def test_any_text_split_anywhere_into_prompt_and_answer_comes_out_whole(name: str, text: str, split: int) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text, add_special_tokens=False, allow_special=False)
    prompt, answer = ids[:split], ids[split:]
    before = tokenizer.decode(prompt)
    complete = before.removesuffix(REPLACEMENT) if not tokenizer.decode(ids).startswith(before) else before
    assert complete + "".join(stream(tokenizer, prompt, answer, skip=True)) == tokenizer.decode(ids)


def test_an_emoji_of_four_tokens_is_shown_with_its_last() -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    ids = [3 + byte for byte in "🦉".encode()]
    assert stream(tokenizer, [], ids, skip=True) == ["", "", "", "🦉", ""]
    assert stream(tokenizer, [], ids[:3], skip=True) == ["", "", "", REPLACEMENT]
    assert stream(tokenizer, ids[:2], ids[2:], skip=True) == ["", "🦉", ""]


def test_the_prompts_unfinished_character_is_not_charged_to_the_answer() -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    letter = 3 + ord("a")
    assert stream(tokenizer, [3 + 0xF0, 3 + 0x9F], [letter], skip=True) == ["a", ""]
    assert stream(tokenizer, [3 + 0xF0, 3 + 0x9F], [], skip=True) == [""]


class Opaque:
    """A byte a token, by a decoder that nobody can read as bytes."""

    pieces, special_ids = None, frozenset[int]()

    def decode_lenient(self, ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", "replace")


@pytest.mark.parametrize("opaque", [False, True])
def test_bytes_before_a_character_that_the_prompt_began_are_not_shown_again(opaque: bool) -> None:
    tokenizer, first = (Opaque(), 0) if opaque else (TOKENIZERS["sentencepiece"], 3)
    begun = [first + byte for byte in b"a\xff\xf0\x9f"]
    assert "".join(stream(tokenizer, begun, [first + 0x98, first + 0x80], skip=True)) == "\U0001f600"


def test_bytes_that_can_never_become_a_character_are_shown_at_once() -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    assert stream(tokenizer, [], [3 + 0xFF, 3 + ord("b")], skip=True) == [REPLACEMENT, "b", ""]


def test_the_space_before_a_word_is_kept_after_text_and_dropped_at_the_start() -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    word = tokenizer.encode("hi", add_special_tokens=False)
    bos = [tokenizer.bos_token_id or 0]
    assert "".join(stream(tokenizer, bos, word, skip=True)) == "hi"
    assert "".join(stream(tokenizer, bos + word, word, skip=True)) == " hi"


def test_a_token_of_spaces_at_the_start_keeps_them_all(tmp_path: Path) -> None:
    backend = Backend(models.BPE({"▁": 0, "a": 1, "▁a": 2}, [("▁", "a")]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    backend.add_tokens(["  "])
    tokenizer = Tokenizer(hf_tokenizer_parts(save_directory(tmp_path, backend, {})))
    for text, ids in (("  a", [3, 2]), ("a", [2])):
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == "".join(stream(tokenizer, [], ids, skip=True)) == backend.decode(ids)
    assert tokenizer.decode([3, 2]) == "   a"


def test_ids_without_a_token_are_no_text() -> None:
    tokenizer = TOKENIZERS["byte level"]
    assert stream(tokenizer, [], [10**6, tokenizer.vocab_size], skip=True) == ["", "", ""]


def test_other_decoders_stream_through_a_window(tmp_path: Path) -> None:
    words = {word: i for i, word in enumerate(["[UNK]", "the", "owl", "##s", "sleep", "."])}
    backend = Backend(models.WordPiece(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=False)
    tokenizer = Tokenizer(hf_tokenizer_parts(save_directory(tmp_path, backend, {})))
    assert tokenizer.pieces is None
    ids = tokenizer.encode("the owls sleep . the owl") * 8
    assert "".join(stream(tokenizer, [], ids, skip=True)) == tokenizer.decode(ids)
    assert tokenizer.decode(ids[:4]) == "the owls sleep"


@pytest.mark.parametrize("text", ["é", "漢", "😀"])
def test_a_character_that_the_prompt_began_is_shown_through_a_window_too(tmp_path: Path, text: str) -> None:
    vocab = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip("~", 1, 0)])
    tokenizer = Tokenizer(hf_tokenizer_parts(save_directory(tmp_path, backend, {})))
    assert tokenizer.pieces is None
    ids = tokenizer.encode(f"a{text}b")
    for cut in range(2, len(ids) - 1):
        assert "".join(stream(tokenizer, ids[:cut], ids[cut:], skip=True)) == f"{text}b", cut
    # One that these ids do not complete stays the prompt's.
    assert "".join(stream(tokenizer, ids[:2], tokenizer.encode("b"), skip=True)) == "b"


def test_the_cost_of_a_token_does_not_grow_with_the_text() -> None:
    tokenizer = TOKENIZERS["byte level"]
    ids = tokenizer.encode("".join(corpus().values()), add_special_tokens=False)
    many = ids * (200_000 // len(ids))
    reader = IncrementalDetokenizer(tokenizer, many)
    start = time.perf_counter()
    for token_id in many:
        reader.push([token_id])
    # About 0.2 s; were each push to look at the whole text, this would take hours.
    assert time.perf_counter() - start < 10


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_control_token_that_is_not_shown_has_its_text_all_the_same(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    for token_id in (*tokenizer.special_ids, *range(3)):
        hidden = tokenizer.token_text(token_id) if token_id in tokenizer.special_ids else ""
        assert IncrementalDetokenizer(tokenizer, [5]).hidden(token_id) == hidden
        assert IncrementalDetokenizer(tokenizer, [5], skip_special_tokens=False).hidden(token_id) == ""
