"""Faults of other servers, over HTTP: BOS twice, an end-of-text id of several, another first answer."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kit.models.dummy import write_config
from kit.serving import CHANGES, NAME, Serving, serve_in_thread, tiny_directory, tiny_llm
from onewave.engine.llm import LLM
from onewave.engine.params import SamplingParams

BOS, ENDS = 256, (257, 65)
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ '<|user|>' + m['content'] }}{% endfor %}{{ '<|bot|>' }}"
USER = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A model whose tokenizer and template both put BOS, with two ends of text."""
    path = tiny_directory(tmp_path_factory.mktemp("bos"), chat_template=TEMPLATE)
    bos = {"SpecialToken": {"id": "<|pad|>", "type_id": 0}}
    sequences = [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing", "single": [bos, sequences[0]], "pair": [bos, *sequences],
        "special_tokens": {"<|pad|>": {"id": "<|pad|>", "ids": [BOS], "tokens": ["<|pad|>"]}},
    }  # fmt: skip
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    names = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**names, "bos_token": "<|pad|>"}))
    write_config(path, **CHANGES | {"eos_token_id": list(ENDS)})
    with LLM(path, device="cpu", load_format="dummy") as llm, serve_in_thread(llm) as found:
        yield found


def test_bos_is_there_once_whichever_way_a_prompt_comes(server: Serving) -> None:
    more: dict[str, Any] = {"max_tokens": 2, "return_token_ids": True}
    chat = server.post("/v1/chat/completions", {"messages": USER, **more}).json()["prompt_token_ids"]
    prompts = [chat]
    for text in ("Hi", "<|pad|>Hi"):
        prompts.append(
            server.post("/v1/completions", {"prompt": text, **more}).json()["choices"][0]["prompt_token_ids"]
        )
        prompts.append(server.post("/tokenize", {"prompt": text}).json()["tokens"])
    prompts.append(server.post("/tokenize", {"messages": USER}).json()["tokens"])
    for ids in prompts:
        assert (ids[0], ids.count(BOS)) == (BOS, 1)
    given = {"model": NAME, "messages": USER, "max_tokens": 2}
    counts = [
        server.post("/v1/messages", given).json()["usage"]["input_tokens"],
        server.post("/v1/messages/count_tokens", {"model": NAME, "messages": USER}).json()["input_tokens"],
        server.post("/v1/responses", {"input": "Hi", "max_output_tokens": 2}).json()["usage"]["input_tokens"],
    ]
    assert counts == [len(chat)] * 3


@pytest.mark.parametrize(("end", "reason"), [*((each, "stop") for each in ENDS), (66, "length")])
def test_each_of_a_config_s_ends_of_text_ends_an_answer(server: Serving, end: int, reason: str) -> None:
    body = {"prompt": "ab", "max_tokens": 4, "temperature": 0, "logit_bias": {str(end): 100}}
    choice = server.post("/v1/completions", body).json()["choices"][0]
    assert choice["finish_reason"] == reason


def test_the_first_answer_of_a_server_is_the_model_s_own_first(tmp_path: Path) -> None:
    """Nothing that begins a server draws from the engine's random streams or leaves keys in its cache."""
    with tiny_llm(tmp_path / "a") as llm:
        own = llm.generate("abcd", SamplingParams(max_tokens=12, ignore_eos=True))[0].outputs[0].token_ids
    with tiny_llm(tmp_path / "b") as llm, serve_in_thread(llm) as serving:
        for path in ("/health", "/metrics", "/v1/models"):
            assert serving.ask("GET", path).status_code == 200
        body = {"prompt": "abcd", "max_tokens": 12, "ignore_eos": True, "temperature": 1.0, "return_token_ids": True}
        answer = serving.post("/v1/completions", body).json()
    assert answer["choices"][0]["token_ids"] == own
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
