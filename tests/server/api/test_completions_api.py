"""/v1/completions, /tokenize and /detokenize."""

from typing import Any

import pytest

from kit.serving import Serving
from onewave import SamplingParams

PATH = "/v1/completions"
ASKED: dict[str, Any] = {"prompt": "ab", "max_tokens": 9, "temperature": 0, "ignore_eos": True}


def texts(serving: Serving, **more: Any) -> list[str]:
    return [choice["text"] for choice in serving.post(PATH, {**ASKED, **more}).json()["choices"]]


@pytest.mark.parametrize(
    "more",
    [
        {"prompt": ["ab", "long prompt", "c"], "n": 2, "temperature": 1.0, "seed": 1},
        {"prompt": [[3, 4, 5], [6]], "echo": True, "logprobs": 2},
        {"prompt": "é", "echo": True, "logprobs": 0, "stop": ["zz"]},
        {"max_tokens": 0, "echo": True, "logprobs": 1},
        {"prompt_logprobs": 1, "include_stop_str_in_output": True, "stop_token_ids": [7]},
    ],
)
def test_a_stream_joins_to_the_whole_answer(serving: Serving, more: dict[str, Any]) -> None:
    body = {**ASKED, **more, "return_token_ids": True}
    whole = serving.post(PATH, body).json()
    chunks = serving.events(PATH, {**body, "stream_options": {"include_usage": True}})
    assert (chunks[-1]["choices"], chunks[-1]["usage"]) == ([], whole["usage"])
    assert whole["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in whole["choices"])
    for choice in whole["choices"]:
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [i for part in parts for i in part["token_ids"]] == choice["token_ids"]
        assert parts[0]["prompt_token_ids"] == choice["prompt_token_ids"]
        assert parts[-1]["finish_reason"] == choice["finish_reason"] is not None
        if choice["logprobs"] is not None:
            for name, values in choice["logprobs"].items():
                assert [value for part in parts for value in part["logprobs"][name]] == values


def test_echoed_logprobs_are_those_of_the_prompt_and_offsets_point_into_the_text(serving: Serving) -> None:
    choice = serving.post(PATH, {**ASKED, "prompt": "aé😀b", "echo": True, "logprobs": 1}).json()["choices"][0]
    found = choice["logprobs"]
    assert found["tokens"][0] == "a"
    assert found["tokens"][1:3] == ["bytes:\\xc3", "bytes:\\xa9"]
    assert found["text_offset"][:9] == [0, 1, 2, 2, 3, 3, 3, 3, 4][:9]
    assert found["token_logprobs"][0] is None
    assert found["top_logprobs"][0] is None
    ids = serving.llm.tokenizer.encode("aé😀b")
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, logprobs=1, prompt_logprobs=1)
    output = serving.llm.generate([ids], params)[0]
    expected = [entry[i].logprob for i, entry in zip(ids, output.prompt_logprobs, strict=True) if entry]
    assert found["token_logprobs"][1 : len(ids)] == pytest.approx(expected)


def test_a_prompt_that_ends_within_a_character_leaks_nothing_into_the_first_delta(serving: Serving) -> None:
    pieces = serving.llm.tokenizer.pieces
    of_byte = {pieces[i]: i for i in range(256)}
    half = [of_byte[bytes([byte])] for byte in "é😀".encode()[:-1]]
    last, a = of_byte["😀".encode()[-1:]], of_byte[b"a"]
    body = {**ASKED, "prompt": half, "max_tokens": 1}
    for token, text in ((last, "😀"), (a, "a")):
        biased = {**body, "logit_bias": {str(token): 100}}
        assert texts(serving, **biased) == [text]
        assert [c["text"] for chunk in serving.events(PATH, biased) for c in chunk["choices"]] == [text]


def test_a_character_of_several_tokens_is_sent_once_and_whole(serving: Serving) -> None:
    text = "日本語 e\u0301😀👩‍🚀!\u2028\x85."
    body = {**ASKED, "max_tokens": 80, "ignore_eos": False, "guided_choice": [text]}
    assert texts(serving, **body) == [text]
    deltas = [c["text"] for chunk in serving.events(PATH, body) for c in chunk["choices"]]
    assert "".join(deltas) == text  # each delta is text: half a character would be U+FFFD in it
    assert len([delta for delta in deltas if delta]) > len(text) // 2


@pytest.mark.parametrize("stop", ["z-", "-", "😀"])
def test_a_stop_string_holds_back_text_and_ids_alike(serving: Serving, stop: str) -> None:
    text = "xyz-xyz😀end"
    body = {
        **ASKED, "max_tokens": 80, "ignore_eos": False, "guided_choice": [text], "stop": [stop], "logprobs": 0,
        "return_token_ids": True,
    }  # fmt: skip
    choice = serving.post(PATH, body).json()["choices"][0]
    shown = text[: text.index(stop)]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (shown, "stop", stop)
    assert serving.llm.tokenizer.decode(choice["token_ids"]) == shown
    seen = ""
    for chunk in serving.events(PATH, body):
        part = chunk["choices"][0]
        seen += part["text"]
        assert shown.startswith(seen)
        assert serving.llm.tokenizer.decode(part["token_ids"]) == part["text"] == "".join(part["logprobs"]["tokens"])
    assert seen == shown
    kept = serving.post(PATH, {**body, "include_stop_str_in_output": True}).json()["choices"][0]
    assert kept["text"] == shown + stop
    assert serving.llm.tokenizer.decode(kept["token_ids"]) == shown + stop


def test_prompt_logprobs_are_the_same_when_the_prompt_is_cached(serving: Serving) -> None:
    body = {**ASKED, "prompt": "the same long prompt twice " * 5, "max_tokens": 1}
    first, cached = (serving.post(PATH, body).json()["usage"]["prompt_tokens_details"]["cached_tokens"] for _ in "ab")
    assert first == 0 < cached
    asked = {**body, "echo": True, "logprobs": 3}
    found = [serving.post(PATH, asked).json()["choices"][0]["logprobs"] for _ in range(2)]
    assert found[0] == found[1]
    assert texts(serving, **body) == texts(serving, **body, cache_salt="another")


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [999_999]}, "prompt token id"),
        ({"prompt": "a" * 600}, "prompt"),
        ({"best_of": 3}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"logprobs": True}, "logprobs"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"n": 0}, "n"),
        ({"min_tokens": 10}, "min_tokens"),
    ],
)
def test_what_it_can_not_honour_is_refused_by_name(serving: Serving, more: Any, named: str) -> None:
    answer = serving.post(PATH, {**ASKED, **more})
    assert answer.status_code == 400
    assert named in answer.json()["error"]["message"]


def test_tokenize_and_detokenize_are_each_other_s_inverse(serving: Serving) -> None:
    found = serving.post("/tokenize", {"prompt": "hé 😀", "return_token_strs": True}).json()
    assert found["tokens"] == serving.llm.tokenizer.encode("hé 😀")
    assert (found["count"], len(found["token_strs"])) == (len(found["tokens"]),) * 2
    assert serving.post("/detokenize", {"tokens": found["tokens"]}).json() == {"prompt": "hé 😀"}
    chat = [{"role": "user", "content": "hi"}]
    ids = serving.post("/tokenize", {"messages": chat}).json()["tokens"]
    assert ids == serving.llm.tokenizer.encode_chat(chat)
    body = {"messages": chat, "max_tokens": 1, "return_token_ids": True}
    assert serving.post("/v1/chat/completions", body).json()["prompt_token_ids"] == ids
    assert serving.post("/tokenize", {}).status_code == 400


def test_embeddings_are_refused_in_words(serving: Serving) -> None:
    answer = serving.post("/v1/embeddings", {"input": "a"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "no_embeddings")
