"""Reasoning and tool calls in answers, whole and in all kinds of pieces."""

import json
import random
from typing import Any

import pytest

from kit.models.chat_templates import CHATML, LLAMA3, MISTRAL, QWEN3
from onewave.server.answers.blocks import Blocks
from onewave.server.answers.pieces import AnswerReader, Piece, PlainReader
from onewave.server.answers.reasoning import MARKS, ReasoningReader, Thought, marks_of, thought_at
from onewave.server.answers.tool_calls import FORMS, ToolReader, form_of

THINK = MARKS[0]
Read = tuple[str, str, list[tuple[str, str]]]


def read(reader: AnswerReader, parts: list[str]) -> Read:
    """(content, reasoning, calls), each call a name and its arguments as they came."""
    piece, calls = Piece(), {}
    for at, part in enumerate(parts):
        piece += reader.push(part, last=at == len(parts) - 1)
    for part in piece.calls:
        if part.name is not None:
            assert part.index == len(calls)  # the name comes first, and in order
            assert part.call_id
            calls[part.index] = [part.name, ""]
        calls[part.index][1] += part.arguments
    return piece.content, piece.reasoning, [(name, arguments) for name, arguments in calls.values()]


def blocks(reader: AnswerReader, parts: list[str]) -> list[tuple[str, str, str]]:
    """The kind, name and text of each block of an answer."""
    found = Blocks()
    for at, part in enumerate(parts):
        for _ in found.push(reader.push(part, last=at == len(parts) - 1)):
            pass
    return [(block.kind, block.name, block.text) for block in found.all]


def in_pieces(text: str) -> list[list[str]]:
    """The text whole, in letters, and cut at random, sometimes with nothing between two cuts."""
    rng = random.Random(7)
    cuts = [sorted(rng.choices(range(len(text) + 1), k=rng.randint(1, 6))) for _ in range(10)]
    random_ones = [[text[a:b] for a, b in zip([0, *cut], [*cut, len(text)], strict=True)] for cut in cuts]
    return [[text], [*text, ""], *random_ones]


WEATHER = '{"name": "get_weather", "arguments": {"city": "Zürich {1}", "days": [1, 2]}}'
ARGUMENTS = '{"city": "Zürich {1}", "days": [1, 2]}'
CALLS: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    # form, text, content, calls
    ("hermes", "Only text, with < and { in it. ", "Only text, with < and { in it. ", []),
    ("hermes", f"<tool_call>\n{WEATHER}\n</tool_call>", "", [("get_weather", ARGUMENTS)]),
    (
        "hermes",
        f'I look.\n\n<tool_call>{WEATHER}</tool_call>\n<tool_call>\n{{"name": "now"}}\n</tool_call>\nDone.',
        "I look.Done.",
        [("get_weather", ARGUMENTS), ("now", "{}")],
    ),
    # keys the other way round; a call that was cut off; no call at all.
    ("hermes", '<tool_call>{"arguments": {"a": "\\"}"}, "name": "now"}</tool_call>', "", [("now", '{"a": "\\"}"}')]),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": [1', "", [("now", '{"a": [1')]),
    ("hermes", '<tool_call>{"name": "no', '<tool_call>{"name": "no', []),
    ("hermes", '<tool_call>{"name": 7}</tool_call> x', '<tool_call>{"name": 7}</tool_call> x', []),
    # what is no JSON in the arguments' place; names and arguments twice, of which the first count.
    ("hermes", '<tool_call>{"name": "now", "arguments": ;}', "", [("now", "")]),
    ("hermes", '<tool_call>{"name": "now", "name": "x", "arguments": {}, "parameters": {"a": 1}}', "", [("now", "{}")]),
    ("hermes", "<tool_call>now</tool_call>", "<tool_call>now</tool_call>", []),
    ("hermes", "<tool_cal", "<tool_cal", []),
    ("hermes", '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("now", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', "", [("now", "{}")]),
    ("llama3_json", '{"name": "now", "parameters": {}}', "", [("now", "{}")]),
    (
        "llama3_json",
        ' {"type": "function", "name": "now", "parameters": {"a": null}}; {"name": "get_weather", "parameters": {}}',
        "",
        [("now", '{"a": null}'), ("get_weather", "{}")],
    ),
    ("llama3_json", '<|python_tag|>{"name": "other", "parameters": {"a": 1}}', "", [("other", '{"a": 1}')]),
    ("llama3_json", '{"name": "Ann", "age": 3} is one.', '{"name": "Ann", "age": 3} is one.', []),
    ("llama3_json", '{"a": [1, 2', '{"a": [1, 2', []),
    ("llama3_json", 'See {"name": "now", "parameters": {}}', 'See {"name": "now", "parameters": {}}', []),
    ("pythonic", "[now()]", "", [("now", "{}")]),
    (
        "pythonic",
        "[get_weather(city='Zürich, (CH) \\'', days=[1, 2]), now(a=True, b=null, c={'d': -1.5})]",
        "",
        [
            ("get_weather", '{"city": "Zürich, (CH) \'", "days": [1, 2]}'),
            ("now", '{"a": true, "b": null, "c": {"d": -1.5}}'),
        ],
    ),
    ("pythonic", "<|python_start|>[now(a=1)]<|python_end|>", "", [("now", '{"a": 1}')]),
    ("pythonic", "[now(a=1e999)]", "", [("now", "")]),
    ("pythonic", "[Note: now() is late]", "[Note: now() is late]", []),
    ("pythonic", "[1, 2]", "[1, 2]", []),
    ("mistral", f"[TOOL_CALLS] [{WEATHER}, {WEATHER}]", "", [("get_weather", ARGUMENTS)] * 2),
    ("mistral", f"Hm. [TOOL_CALLS]get_weather{ARGUMENTS}", "Hm.", [("get_weather", ARGUMENTS)]),
    (
        "mistral_args",
        f"[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}[TOOL_CALLS]now[ARGS]{{}}",
        "",
        [("get_weather", ARGUMENTS), ("now", "{}")],
    ),
    ("mistral_args", "[TOOL_CALLS]so {what}", "[TOOL_CALLS]so {what}", []),
    ("mistral_args", "[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]; x", "[TOOL_CALLS]; x", [("now", "{}")]),
    ("mistral_args", "[TOOL_CALLS]so, what?", "[TOOL_CALLS]so, what?", []),
]


@pytest.mark.parametrize(("form", "text", "content", "calls"), CALLS)
def test_calls_and_content_are_told_apart_however_the_text_is_cut(
    form: str, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    for parts in in_pieces(text):
        reader = ToolReader(FORMS[form], ["get_weather", "now"])
        assert read(reader, parts) == (content, "", calls), parts
        whole = bool(calls) and calls[-1][1] not in ("", '{"a": [1')
        assert reader.finish_reason("stop") == ("tool_calls" if whole else "stop")
        assert reader.finish_reason("length") == "length"


SCRAPS = [
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<|python_start|>", "<|python_end|>"),
    *('{"name": "now"', '"arguments": ', '{"a": ', "now", "now(", "a=1", "null", "[1, 2]", "Zürich", "<tool"),
    *"{}[](),;:\"\\' \n",
]


@pytest.mark.parametrize("form", FORMS)
def test_whatever_a_model_writes_reads_alike_however_it_is_cut(form: str) -> None:
    rng = random.Random(form)
    for _ in range(400):
        text = "".join(rng.choices(SCRAPS, k=rng.randint(1, 16)))
        for shown in (read, blocks):
            found = [shown(ToolReader(FORMS[form], ["now"]), parts) for parts in ([text], [*text, ""])]
            assert found[0] == found[1], text


@pytest.mark.parametrize(("form", "text"), [(form, text) for form, text, _, calls in CALLS if calls])
def test_a_name_and_its_arguments_come_as_soon_as_they_are_written(form: str, text: str) -> None:
    reader = ToolReader(FORMS[form], ["get_weather", "now"])
    name: str | None = None
    arguments, late = "", 0
    for letter in text:
        for part in reader.push(letter, last=False).calls:
            name, arguments = part.name or name, arguments * (part.name is None) + part.arguments
        if name and form != "pythonic" and letter in "[1]" and arguments.startswith('{"city"') and "}" not in arguments:
            late = max(late, 0 if arguments.endswith(letter) else 1)
    assert name is not None
    assert not late


def test_a_thought_is_told_apart_from_the_answer_however_the_text_is_cut() -> None:
    call = f"<tool_call>{WEATHER}</tool_call>"
    for text, opened, expected in [
        ("<think>\nI am.\n\n So </b>\n</think>\n\nYes.\n", False, ("Yes.\n", "I am.\n\n So </b>", [])),
        ("I am.</think>Yes.", True, ("Yes.", "I am.", [])),
        ("\n\n</think>\n\nYes.", True, ("Yes.", "", [])),
        (f" <think>So.</think>{call}", False, ("", "So.", [("get_weather", ARGUMENTS)])),
        (f"{call}</think>\n{call}", True, ("", call, [("get_weather", ARGUMENTS)])),
        ("\nNo <think>thought</think>.", False, ("\nNo <think>thought</think>.", "", [])),
        ("<thi", False, ("<thi", "", [])),
        ("<think>cut of</thi", False, ("", "cut of</thi", [])),
        ("", True, ("", "", [])),
    ]:
        for parts in in_pieces(text):
            tools = ToolReader(FORMS["hermes"], ["get_weather"])
            assert read(ReasoningReader(THINK, tools, Thought.OPEN if opened else Thought.FREE), parts) == expected, (
                parts
            )


@pytest.mark.parametrize(
    ("template", "form", "thinks"),
    [
        (QWEN3, "hermes", True),
        (CHATML, None, False),
        (LLAMA3, None, False),
        (MISTRAL, None, False),
        (None, None, False),
    ],
)
def test_forms_are_found_in_the_chat_template(template: str | None, form: str | None, thinks: bool) -> None:
    assert form_of(template) == form
    assert marks_of(template) == (THINK if thinks else None)


def test_a_prompt_says_where_its_answer_begins() -> None:
    head = "<|im_start|>assistant\n"
    assert thought_at(f"{head}<think>\n", "", THINK) is Thought.OPEN
    assert thought_at(f"{head}<think>\n\n</think>\n\n", "", THINK) is Thought.CLOSED
    assert thought_at(f"<|im_start|>user\nWhat is <think>?\n{head}", "", THINK) is Thought.FREE
    assert thought_at(f"{head}<think>\nSo", "<think>\nSo", THINK) is Thought.OPEN
    assert thought_at(f"{head}<think>So</think>I", "<think>So</think>I", THINK) is Thought.CLOSED
    assert thought_at(f"{head}Well <think>", "Well", THINK) is Thought.CLOSED
    assert read(ReasoningReader(THINK, PlainReader(), Thought.FREE), ["Hi"]) == ("Hi", "", [])


def test_arguments_are_the_json_that_the_model_wrote() -> None:
    for form, text, _, calls in CALLS:
        for _, arguments in read(ToolReader(FORMS[form], ["get_weather", "now"]), [text])[2]:
            assert calls
            if arguments and '"a": [1' not in arguments:  # cut off, or what the model wrote is none
                value: Any = json.loads(arguments)
                assert isinstance(value, dict)
