"""Chat templates: transformers' layout, whatever messages hold, and templates and messages that are refused."""

from datetime import date
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kit.models.chat_templates import CHATML, LLAMA3, MISTRAL, QWEN3, SMOLLM2, TEMPLATES, user, with_template
from kit.models.chat_templates import DIGIT_WORDS as WORDS
from kit.models.tiny_tokenizers import (
    byte_level_directory,
    corpus,
    sentencepiece_directory,
    sentencepiece_metadata,
)
from kit.refusals import refused
from onewave.base.errors import InvalidArgumentError, TokenizerError
from onewave.engine.text import chat_template
from onewave.engine.text.conversations import ChatLayout
from onewave.engine.text.gguf_tokenizer import gguf_tokenizer_parts
from onewave.engine.text.hf_tokenizer import hf_tokenizer_parts
from onewave.engine.text.tokenizer import Tokenizer

CONTINUED = ChatLayout(add_generation_prompt=False, continue_final_message=True)

TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Answer in one word."},
    {"role": "user", "content": "  What's the capital of France?\n\n"},
    {"role": "assistant", "content": "Paris"},
    {"role": "user", "content": "東京 is where? 👩🏽‍🚀 1234  <b>"},
]


@pytest.mark.parametrize("kind", ["byte level", "sentencepiece"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_conversation_has_transformers_ids(name: str, kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    if kind == "byte level":
        byte_level_directory(tmp_path, WORDS, chat_template=TEMPLATES[name])
    else:
        sentencepiece_directory(tmp_path, prepend_scheme="first", chat_template=TEMPLATES[name])
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(tmp_path))
    ours = Tokenizer(hf_tokenizer_parts(tmp_path))
    # Without the corpus's own "<s>" and "[INST]", which transformers would take for control tokens.
    texts = [text for text in corpus().values() if "[INST]" not in text]
    talks = [TALK, TALK[1:], TALK[:2], *(user(text) for text in texts)]
    for talk in talks:
        for prompt in (False, True):
            given = {"add_generation_prompt": prompt, "return_dict": False}
            assert ours.encode_chat(talk, prompt) == theirs.apply_chat_template(talk, tokenize=True, **given)
            assert ours.render_chat(talk, prompt) == theirs.apply_chat_template(talk, tokenize=False, **given)


def test_smollm2s_own_conversation_has_transformers_ids(smollm2_path: Path) -> None:
    from onewave.weights.formats.gguf_file import GGUFFile

    parts = gguf_tokenizer_parts(GGUFFile.open(smollm2_path).metadata, "smollm2")
    ids = Tokenizer(parts).encode_chat(user("Hi"))
    # transformers 5.23: AutoTokenizer.from_pretrained(..., gguf_file=...).apply_chat_template
    system = [9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182]
    assert ids == [1, *system, 2, 198, 1, 4093, 198, 26843, 2, 198, 1, 520, 9531, 198]


def test_tools_and_template_variables_reach_the_template(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    byte_level_directory(tmp_path, WORDS, chat_template=QWEN3)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(tmp_path))
    ours = Tokenizer(hf_tokenizer_parts(tmp_path))
    tool = {"type": "function", "function": {"name": "météo", "parameters": {"b": 1, "a": "<>&'"}}}
    call = {"type": "function", "function": {"name": "météo", "arguments": {"place": "Łódź"}}}
    talk = [
        *TALK[:2],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "12 °C"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nCold.", "reasoning": None},
        {"role": "user", "content": "Thanks"},
    ]
    for thinking in (False, True):
        given: dict[str, Any] = {"tools": [tool], "enable_thinking": thinking}
        wanted = theirs.apply_chat_template(talk, add_generation_prompt=True, return_dict=False, **given)
        assert ours.encode_chat(talk, **given) == wanted


@pytest.mark.parametrize(
    ("tool", "what"),
    [
        ({"since": date(2024, 1, 1)}, r"tools\[0\]\.since"),
        ({"enum": [{"a"}]}, r"tools\[0\]\.enum\[0\]"),
        ({("a", "b"): 1}, r"tools\[0\]: a key"),
        (print, r"tools\[0\]"),
    ],
)
def test_what_json_has_not_is_refused(tool: object, what: str) -> None:
    tokenizer = with_template("{{ tools | tojson }}")
    with pytest.raises(InvalidArgumentError, match=what + ": .*; allowed: "):
        tokenizer.render_chat(user("x"), tools=[tool])


def test_numbers_of_other_libraries_are_numbers() -> None:
    tokenizer = with_template("{{ tools | tojson }}")
    assert tokenizer.render_chat(user("x"), tools=[np.int64(3), np.float32(0.5), np.True_]) == "[3, 0.5, true]"


@pytest.mark.parametrize("template", ["{{ m.at }}", "{{ m.at.year }}", "{% if m.at %}x{% endif %}", "{{ m.at ~ 'x' }}"])
def test_what_json_has_not_is_refused_where_a_template_takes_it_up(template: str) -> None:
    said = [{"role": "user", "content": "x", "at": Fraction(10**400)}]
    assert with_template("{% for m in messages %}{{ m.content }}{% endfor %}").render_chat(said) == "x"
    with pytest.raises(InvalidArgumentError, match=r"messages\[0\]\.at: .*; allowed: what JSON has"):
        with_template("{% for m in messages %}" + template + "{% endfor %}").render_chat(said)
    with pytest.raises(InvalidArgumentError, match=r"messages\[0\]\.content: .*; allowed: what JSON has"):
        with_template(template).render_chat([{"role": "user", "content": {1, 2}}])


PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]


@pytest.mark.parametrize(
    "template",
    [
        SMOLLM2,
        QWEN3,
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% endif %}{% endfor %}",
        "{% for m in messages %}{% if m.content is mapping or m.content is iterable %}{{ m.content | trim }}"
        "{% endif %}{% endfor %}",
    ],
)
def test_text_parts_join_for_a_template_that_knows_only_strings_or_asks_what_they_are(template: str) -> None:
    text = with_template(template).render_chat(user(PARTS))
    assert "one\ntwo" in text
    assert text == with_template(template).render_chat(user("one\ntwo"))


def test_a_template_that_takes_the_first_parts_text_gets_parts() -> None:
    template = "{% for m in messages %}{{ m['content'][0]['text'] }}{% endfor %}"
    assert with_template(template).render_chat(user(PARTS)) == "one"


def test_the_missing_content_of_a_tools_call_is_none_for_who_asks_and_nothing_for_others() -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": "{}"}}
    talk = [*user("x"), {"role": "assistant", "content": None, "tool_calls": [call]}]
    asks = "{% for m in messages %}{{ 'called' if m['content'] is none else m['content'] + ' ' }}{% endfor %}"
    assert with_template(asks).render_chat(talk) == "x called"
    plain = "{% for m in messages %}{{ m['content'] }};{% endfor %}"
    assert "None" not in with_template(plain).render_chat(talk)


@pytest.mark.parametrize(
    ("writes", "said"),
    [
        ("{{ m.content is none or m.content | length }}{{ m.content | length }}{{ m.tool_calls }}", "f"),
        ("{{ '' + m.content }}{{ m.tool_calls }}", "f"),
        ("{{ '' + m.content }}", None),
    ],
    ids=["asks and takes its length", "adds it", "has no calls"],
)
def test_a_template_that_fails_without_content_gets_an_empty_one_if_the_calls_stay(
    writes: str, said: str | None
) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    talk = [*user("x"), {"role": "assistant", "content": None, "tool_calls": [call]}]
    tokenizer = with_template("{% for m in messages %}" + writes + "{% endfor %}")
    if said is None:
        for before in ([], [{"role": "system", "name": "a"}]):  # which may lack content altogether
            with pytest.raises(TokenizerError, match="chat template: failed"):
                tokenizer.render_chat([*before, *talk])
    else:
        assert f"'name': '{said}'" in tokenizer.render_chat(talk)


def test_parts_that_a_template_gets_by_name_are_not_joined() -> None:
    tokenizer = with_template(
        "{% for m in messages %}{% for p in m.get('content') %}{{ p.text }}{% endfor %}{% endfor %}"
    )
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    assert tokenizer.render_chat(user(parts)) == "a b"


def test_named_templates_are_chosen_by_name_and_by_tools(tmp_path: Path) -> None:
    listed = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    tokenizer = Tokenizer(hf_tokenizer_parts(byte_level_directory(tmp_path, WORDS, chat_template=listed)))
    assert tokenizer.chat_template == "plain"
    assert tokenizer.render_chat(user("x")) == "plain"
    assert tokenizer.render_chat(user("x"), tools=[{"name": "f"}]) == "tools"
    assert tokenizer.render_chat(user("x"), chat_template="tool_use") == "tools"
    assert tokenizer.render_chat(user("x"), chat_template="{{ messages[0].content }}!") == "x!"


def test_a_callers_templates_are_not_kept_for_good(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: list[str] = []
    real = chat_template.ChatTemplate

    def counted(source: str, **given: Any) -> chat_template.ChatTemplate:
        made.append(source)
        return real(source, **given)

    monkeypatch.setattr(chat_template, "ChatTemplate", counted)
    tokenizer = Tokenizer(hf_tokenizer_parts(byte_level_directory(tmp_path, WORDS, chat_template="own")))
    for number in (*range(20), *range(12, 20), 0):
        assert tokenizer.render_chat(user("x"), chat_template=f"{{{{ {number} }}}}") == f"{number}"
        assert tokenizer.render_chat(user("x")) == "own"
    assert made == ["{{ 0 }}", "own", *(f"{{{{ {number} }}}}" for number in range(1, 20)), "{{ 0 }}"]


@pytest.mark.parametrize("given", ["tool_use", "/models/chat.jinja", "./{model}.jinja", "You are helpful.", "", 7])
def test_a_name_a_path_or_a_text_is_no_template(given: Any) -> None:
    """Each would become the prompt, and the messages would be gone."""
    with pytest.raises(InvalidArgumentError, match=r"chat_template: .*; allowed: Jinja source, or .* \(default\)"):
        with_template(CHATML).render_chat(user("x"), chat_template=given)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("said", ["Sure, it", "Sure, it ", "  a\n\n", "<|im_end|> an", "half <|im_"])
def test_a_final_message_is_continued_as_in_transformers(name: str, said: str, tmp_path: Path) -> None:
    byte_level_directory(tmp_path, WORDS, chat_template=TEMPLATES[name])
    ours = Tokenizer(hf_tokenizer_parts(tmp_path))
    theirs = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(tmp_path)
    talk = [*user("hi"), {"role": "assistant", "content": said}]
    wanted = theirs.apply_chat_template(talk, tokenize=False, continue_final_message=True)
    assert ours.apply_chat_template(talk, tokenize=False, continue_final_message=True) == wanted
    ids: Any = ours.apply_chat_template(talk, continue_final_message=True)
    assert ours.decode(ids, skip_special_tokens=False) == wanted
    if "<|" not in said:
        assert ids == theirs.encode(wanted, add_special_tokens=False)


def test_the_last_text_part_of_a_final_message_is_continued() -> None:
    tokenizer = with_template("{% for m in messages %}<{% for p in m.content %}{{ p.text }}{% endfor %}>{% endfor %}")
    talk = [{"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert tokenizer.lay_out_chat(talk, CONTINUED)[0] == "<ab"
    assert tokenizer.apply_chat_template(talk, tokenize=False) == "<ab>"


def test_a_final_message_that_the_template_writes_twice_is_continued_the_second_time() -> None:
    tokenizer = with_template("{% for m in messages %}{{ m.content }}#{{ m.content|trim }}<|im_end|>{% endfor %}")
    talk = [{"role": "assistant", "content": " é <|im_end|> "}]
    text, ids = tokenizer.lay_out_chat(talk, CONTINUED)
    assert text == " é <|im_end|> #é <|im_end|>"
    assert tokenizer.special_ids.isdisjoint(ids)


@pytest.mark.parametrize(
    ("template", "message", "says"),
    [
        (CHATML, {"role": "assistant"}, "does not end with text"),
        (CHATML, {"role": "assistant", "content": []}, "does not end with text"),
        ("{{ messages[0].role }}", {"role": "assistant", "content": "x"}, "the template leaves out"),
    ],
)
def test_what_cannot_be_continued_is_refused(template: str, message: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"continue_final_message: a last message that {says}"):
        with_template(template).lay_out_chat([message], CONTINUED)


def test_a_template_file_goes_before_the_config(tmp_path: Path) -> None:
    byte_level_directory(tmp_path, WORDS, chat_template="old")
    (tmp_path / "chat_template.jinja").write_text("new", encoding="utf-8")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools", encoding="utf-8")
    tokenizer = Tokenizer(hf_tokenizer_parts(tmp_path))
    assert tokenizer.chat_template == "new"
    assert tokenizer.render_chat(user("x"), chat_template="tool_use") == "tools"


def test_generation_blocks_loop_controls_and_dates_are_understood() -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'skip' %}{% continue %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}{{ strftime_now('%Y') | length }}"
    )
    talk = [{"role": "skip", "content": "a"}, *user("b")]
    assert with_template(template).render_chat(talk) == "b4"


@pytest.mark.parametrize(
    ("template", "why"),
    [
        *((text, "not a Jinja template") for text in ("{% for m in messages %}", "{{ messages[0", "{% nonsense %}")),
        ("{{ raise_exception('roles must\n alternate!') }}", "failed (roles must alternate!)"),
        ("{{ messages[0].content + 5 }}", "failed"),
        ("{{ nothing.at.all }}", "failed"),
        ("{% include 'x' %}", "failed"),
        # Ways out of the sandbox.
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "failed"),
        ("{{ messages.append(1) }}", "failed"),
        ("{{ raise_exception.__globals__.os }}", "failed"),
        ("{{ cycler.__init__.__globals__.os }}", "failed"),
        # Ranges, calls and output without end.
        ("{{ range(10**6) | list }}", "Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{% set s = 'x' * 1000000 %}{% for i in range(200) %}{{ s }}{% endfor %}", "more than 50,000,000 characters"),
    ],
)
def test_a_template_that_fails_says_why_in_one_line(template: str, why: str) -> None:
    with refused(TokenizerError, "tiny.gguf: chat template", why):
        with_template(template).encode_chat(user("hello"))


def test_a_model_without_template_says_what_to_do() -> None:
    tokenizer = Tokenizer(gguf_tokenizer_parts(sentencepiece_metadata(), "tiny.gguf"))
    assert tokenizer.chat_template is None
    with pytest.raises(TokenizerError, match=r"tiny\.gguf: chat template: none\. Pass chat_template="):
        tokenizer.encode_chat(user("hi"))
    assert tokenizer.render_chat(user("hi"), chat_template="{{ messages[0].content }}") == "hi"


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ("hi", "messages: str"),
        ({"role": "user"}, "messages: dict"),
        (None, "messages: NoneType"),
        ([], "messages: an empty list"),
        (["hi"], "messages[0]: str"),
        ([{"content": "x"}], "messages[0].role: missing"),
        ([{"role": 3, "content": "x"}], "messages[0].role: int"),
        ([{"role": "user"}], "messages[0].content: missing"),
        ([{"role": "user", "content": 3}], "messages[0].content: int"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]: str"),
        ([*TALK, {"role": "user", "content": [{"type": "image"}]}], "messages[4].content[0]: a part of type 'image'"),
        ([{"role": "user", "content": "\ud800"}], "text: a lone surrogate"),
    ],
)
def test_malformed_messages_are_refused_in_one_line(messages: Any, says: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        with_template(CHATML).encode_chat(messages)
    assert str(caught.value).startswith(says)
    assert "\n" not in str(caught.value)


def test_messages_are_left_as_they_were() -> None:
    talk = user([{"type": "text", "text": "<|im_end|>"}])
    with_template(MISTRAL).encode_chat(talk)
    assert talk == user([{"type": "text", "text": "<|im_end|>"}])


def test_bos_is_there_once_when_the_template_writes_it() -> None:
    tokenizer = with_template(LLAMA3, **{"tokenizer.ggml.add_bos_token": True})
    assert tokenizer.encode_chat(user("hi")).count(tokenizer.bos_token_id or -1) == 1


@pytest.mark.parametrize("adds", [True, False])
def test_bos_stands_before_a_gguf_conversation_whose_template_writes_none(adds: bool) -> None:
    plain = with_template(CHATML, **{"tokenizer.ggml.add_bos_token": False}).encode_chat(user("hi"))
    tokenizer = with_template(CHATML, **{"tokenizer.ggml.add_bos_token": adds})
    bos = tokenizer.bos_token_id
    assert tokenizer.encode_chat(user("hi")) == ([bos, *plain] if adds else plain)
    said = tokenizer.encode_chat(user("hi"), chat_template="{{ messages[0].content }}{{ bos_token }}")
    assert said.count(bos or -1) == 1 + adds


def test_messages_that_no_json_holds_are_refused() -> None:
    tokenizer = with_template("{{ messages[0].content }}")
    itself: dict[str, Any] = {"role": "user", "content": "x"}
    itself["again"] = itself
    with pytest.raises(InvalidArgumentError, match="nested without end"):
        tokenizer.render_chat([itself])
    with pytest.raises(InvalidArgumentError, match=r"messages\[0\]: a key: \('a', 'b'\); allowed: a string"):
        tokenizer.render_chat([{"role": "user", "content": "x", ("a", "b"): 1}])
