"""Structured output: what a grammar allows, token by token, and nothing else changed."""

import builtins
import json
import sys
from collections.abc import Collection
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kit.models.fake_model import EOS, PIECES, VOCAB, FakeRunner, expected_tokens, make_engine, run_all
from onewave.base.errors import InvalidArgumentError, UnsupportedError
from onewave.engine.engine import Engine
from onewave.engine.grammar.compiler import Grammar, GrammarCompiler
from onewave.engine.grammar.params import StructuredOutputsParams
from onewave.engine.params import SamplingParams
from onewave.engine.request import Request
from onewave.ops.sampling import stream_key

pytest.importorskip("llguidance")

PROMPT = [5, 9, 33]
CHOICES = ("abcab", "abba", "cab", "bcaa b", "a", "ccaabx")


def compiler(pieces: list[bytes], eos: Collection[int] = (EOS,)) -> GrammarCompiler:
    tokenizer: Any = SimpleNamespace(pieces=dict(enumerate(pieces)), special_ids={*eos}, encode=lambda text, **_: [])
    return GrammarCompiler(tokenizer, vocab_size=len(pieces), eos_token_ids=sorted(eos))


WORDS = compiler([piece.encode() for piece in PIECES])
BYTES = compiler([*(bytes([i]) for i in range(256)), b"<end>"], [256])


def add(engine: Engine, params: SamplingParams, prompt: list[int] = PROMPT) -> Request:
    return engine.add(None, prompt, params, grammar=None if params.form is None else WORDS.compile(params.form))


def among_choices(output: list[int]) -> set[int]:
    """Every token after which the text can still become one of CHOICES."""
    text = "".join(PIECES[token] for token in output)
    may = {t for t in range(VOCAB) if PIECES[t] and any(choice.startswith(text + PIECES[t]) for choice in CHOICES)}
    return may | {EOS} if text in CHOICES else may


@pytest.mark.parametrize(
    ("run_ahead", "more"),
    [
        (0, {"temperature": 0.0}),
        (1, {"temperature": 0.0, "repetition_penalty": 1.5}),
        (0, {"n": 3, "top_k": 5, "logit_bias": {7: 2.0}}),
        (1, {"n": 3, "top_p": 0.8, "min_tokens": 2}),
    ],
)
def test_a_choice_is_sampled_as_if_there_were_no_other_tokens(run_ahead: int, more: dict[str, Any]) -> None:
    for seed in range(8):
        params = SamplingParams(seed=seed, max_tokens=40, structured_outputs={"choice": CHOICES}, **more)
        engine = make_engine(FakeRunner(run_ahead=run_ahead))
        request = add(engine, params, [*PROMPT, seed])
        run_all(engine)
        for i, sample in enumerate(request.samples):
            expected = expected_tokens(request.prompt_token_ids, params, stream_key(0, seed, i), allowed=among_choices)
            assert sample.token_ids == expected
            assert (sample.text in CHOICES, sample.finish_reason) == (True, "stop")


@pytest.mark.parametrize(("run_ahead", "num_blocks"), [(0, None), (1, None), (0, 8), (1, 8)])
def test_batch_mates_of_a_grammar_and_preemptions_change_no_token(run_ahead: int, num_blocks: int | None) -> None:
    runner = FakeRunner(max_num_seqs=3, run_ahead=run_ahead, num_blocks=num_blocks, block_size=4)
    engine = make_engine(runner)
    plain = SamplingParams(seed=4, max_tokens=20, n=2, frequency_penalty=0.25)
    formed = replace(plain, structured_outputs={"regex": "(ab|c )*x"}, max_tokens=12)
    requests = [add(engine, params, [*PROMPT, i]) for i, params in enumerate([plain, formed] * 4)]
    run_all(engine)
    for i, request in enumerate(requests):
        if request.params.form is None:
            for k, sample in enumerate(request.samples):
                assert sample.token_ids == expected_tokens([*PROMPT, i], plain, stream_key(0, 4, k))
        else:
            alone = make_engine(FakeRunner())
            again = add(alone, formed, [*PROMPT, i])
            run_all(alone)
            assert [s.token_ids for s in again.samples] == [s.token_ids for s in request.samples]
    preempted = [start for each in runner.passes for _, start, _ in each]
    assert num_blocks is None or len(preempted) > 16, "nothing was preempted"


@pytest.mark.parametrize(
    ("regex", "more", "text", "reason"),
    [
        ("(ab)*", {"ignore_eos": True}, "ab" * 5, "length"),  # it may end at any time, and is told not to
        ("(ab)*", {"logit_bias": {EOS: 100.0}}, "", "stop"),
        ("(ab)*", {"logit_bias": {EOS: 100.0}, "min_tokens": 3}, "ab" * 3, "stop"),
        ("abab", {"ignore_eos": True, "min_tokens": 4}, "abab", "stop"),  # nothing may follow
        # Before min_tokens a stop token ends nothing, and comes where the grammar allows no other.
        ("abab", {"stop_token_ids": [*range(VOCAB)], "min_tokens": 4}, "abab", "stop"),
    ],
)
@pytest.mark.parametrize("run_ahead", [0, 1])
def test_an_output_ends_where_its_grammar_may_end(
    run_ahead: int, regex: str, more: dict[str, Any], text: str, reason: str
) -> None:
    only_ab = {token: -100.0 for token in range(VOCAB) if PIECES[token] not in ("ab", "")}
    more = {**more, "logit_bias": {**only_ab, **more.get("logit_bias", {})}}
    params = SamplingParams(temperature=0, max_tokens=5, structured_outputs={"regex": regex}, **more)
    engine = make_engine(FakeRunner(run_ahead=run_ahead))
    sample = add(engine, params).samples[0]
    run_all(engine)
    assert (sample.text, sample.finish_reason) == (text, reason)


def allowed(form: dict[str, Any], text: str, begin: dict[str, bool] | None = None) -> set[int]:
    """The tokens that may follow a text, of the vocabulary of bytes."""
    state = BYTES.compile(StructuredOutputsParams(**form)).begin(**begin or {})
    for byte in text.encode():
        state.accept(byte)
    assert state.failure is None, text
    words = np.zeros(state.num_words, dtype=np.int32)
    state.fill(words)
    return {*np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()}


@pytest.mark.parametrize("place", ["{", '{"a"', '{"a":', '{"a":[', '{"a":[1', '{"a":[1],"b":{'])
def test_whitespace_in_json_comes_to_an_end(place: str) -> None:
    line = "\n" + 32 * " "
    for form in ({"json_object": True}, {"json": {"type": "object"}}):
        assert ord(" ") in allowed(form, place + line[:-1])
        for spaces in (" ", line):
            assert not allowed(form, place + spaces) & {*b" \t\r\n"}
        assert ord("\t") in allowed({**form, "whitespace_pattern": "[ \t]{1,2}"}, place + " ")
        assert not allowed({**form, "disable_any_whitespace": True}, place) & {*b" \t\r\n"}


def test_the_end_is_allowed_only_where_the_grammar_may_end() -> None:
    schema = {"properties": {"z": {"type": "integer"}, "a": {"enum": ["é", "𝄞"]}}, "required": ["z", "a"]}
    form = {"json": {"type": "object", **schema}, "disable_additional_properties": True, "disable_any_whitespace": True}
    whole = json.dumps({"z": 12, "a": "𝄞"}, ensure_ascii=False, separators=(",", ":"))
    assert [256 in allowed(form, whole[:end]) for end in range(len(whole) + 1)] == [False] * len(whole) + [True]
    assert allowed(form, '{"z":12,"a":"é"') == {ord("}")}  # no further property; and properties in the order given
    assert 256 not in allowed({"regex": "a+"}, "aa", {"may_end": False})


@pytest.mark.parametrize(
    ("schema", "whole", "begun"),
    [
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, "0.5", "0"),
        ({"type": "number", "minimum": -0.5, "exclusiveMaximum": 0}, "-0.5", "-0"),
        ({"type": "number", "exclusiveMinimum": True, "minimum": 0, "maximum": 0.5}, "0.5", "0"),
        ({"type": "array", "uniqueItems": False, "items": {"type": "null"}, "maxItems": 1}, "[null]", "[null"),
        ({"type": "object", "propertyNames": {"type": "string"}, "minProperties": 1}, '{"a":1}', "{"),
        ({"type": "string", "format": "password", "maxLength": 1}, '"a"', '"a'),
        ({"const": {"format": "x", "properties": {}}}, '{"format":"x","properties":{}}', "{"),
        ({"items": {"multipleOf": 1009}, "prefixItems": [{"multipleOf": 997}]}, "[997,1009]", "[997,1008"),
    ],
)
def test_a_schema_is_kept_to_where_llguidance_by_itself_would_not(schema: Any, whole: str, begun: str) -> None:
    form = {"json": schema, "disable_any_whitespace": True, "disable_additional_properties": "const" in schema}
    assert 256 in allowed(form, whole)
    assert 256 not in allowed(form, begun)


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ({"json": {"type": "objct"}}, r"structured_outputs.json: .*Invalid type: objct$"),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json": {"$ref": "#/$defs/none"}}, "does not exist"),
        ({"json": {"multipleOf": 1000003}}, "multipleOf beyond .* up to 100,000"),
        ({"json": {"allOf": [{"multipleOf": 0.97}, {"multipleOf": 89}, {"multipleOf": 83}]}}, "multipleOf beyond"),
        ({"grammar": 'start: %json {"multipleOf": 1000003}'}, "multipleOf beyond"),
        ({"json": {"allOf": [{"type": "string"}, {"type": "null"}]}}, "Unsatisfiable"),
        ({"json": "[1]"}, "a JSON schema"),
        ({"json": {"const": b"bytes"}}, "a JSON schema"),
        ({"json": "{'a': 1}"}, "a JSON schema"),
        ({"regex": "(a"}, "structured_outputs.regex: .*unclosed group"),
        ({"regex": ""}, "text, not empty"),
        ({"choice": []}, "a list of strings"),
        ({"choice": ["a", ""]}, "none of them empty"),
        ({"grammar": "start: nothing"}, "structured_outputs.grammar"),
        ({"grammar": "root = 1"}, "structured_outputs.grammar"),
        ({"grammar": 'start: start "a"'}, "no text of this form"),
        ({"json": {"const": "\ud800"}}, "structured_outputs.json: a lone surrogate$"),
        ({"regex": "\ud800"}, "structured_outputs.regex: a lone surrogate$"),
        ({}, "nothing; allowed: one of json"),
        ({"json": {}, "regex": "a"}, "json and regex"),
        ({"json_object": False}, "json_object=False"),
        ({"schema": {}}, "unknown field 'schema'"),
        (7, "StructuredOutputsParams, or a mapping"),
    ],
)
def test_a_form_that_can_not_be_followed_is_refused_in_one_line(form: Any, said: str) -> None:
    def ask() -> None:
        wanted = SamplingParams(structured_outputs=form).form
        assert wanted is not None
        BYTES.compile(wanted)

    with pytest.raises(InvalidArgumentError, match=said) as raised:
        ask()
    assert len(str(raised.value).splitlines()) == 1


@pytest.mark.parametrize("text", ['a "b"\\', "no\nway\t", "😀é", "\u2028", "/x/ | y"])
def test_a_choice_is_taken_letter_by_letter(text: str) -> None:
    assert allowed({"choice": [text, "other"]}, text) == {256}


def test_there_may_be_thousands_of_choices_and_one_may_begin_another() -> None:
    choices = [str(number) for number in range(20_000)]
    assert allowed({"choice": choices}, "1999") == {256, *b"0123456789"}
    assert allowed({"choice": choices}, "2000") == {256}


def test_without_llguidance_or_bytes_the_error_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    none: Any = SimpleNamespace(pieces=None)
    with pytest.raises(UnsupportedError, match="do not spell bytes"):
        GrammarCompiler(none, vocab_size=3, eos_token_ids=[2])
    found = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name == "llguidance":
            raise ImportError(name)
        return found(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UnsupportedError, match=r"onewave\[serve\]"):
        compiler([b"a"], [0])


def test_a_grammar_that_fails_ends_its_own_request_with_the_reason() -> None:
    regex = StructuredOutputsParams(regex="[abc x]{3,}")
    whole, calls = WORDS.compile(regex), []

    class Broken(Grammar):
        def begin(self, **options: Any) -> Any:
            state = whole.begin(**options)
            accept = state.accept
            state.accept = lambda token: accept(1 if calls.append(token) or len(calls) == 3 else token)
            return state

    engine = make_engine(FakeRunner(run_ahead=1))
    plain = SamplingParams(seed=1, max_tokens=20)
    broken = engine.add(None, PROMPT, plain, grammar=Broken(None, np.zeros(2, dtype=np.int32)))
    mate = add(engine, plain)
    run_all(engine)
    assert isinstance(broken.failure, UnsupportedError)  # the form's fault: status 400
    assert "structured_outputs: token 1" in str(broken.failure)
    assert len(broken.samples[0].token_ids) == 3
    assert mate.samples[0].token_ids == expected_tokens(PROMPT, plain, stream_key(0, 1, 0))


def test_an_llguidance_that_knows_one_end_of_text_token_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", SimpleNamespace(LLTokenizer=object))
    with pytest.raises(UnsupportedError, match=r"before 1\.7"):
        compiler([b"a", b"b"], [1])
