"""Tools, reasoning and forms of answers over HTTP, on a model of random weights that writes anything that it may."""

import json
import re
from typing import Any

import pytest

from kit.serving import WEATHER, Serving

jsonschema: Any = pytest.importorskip("jsonschema")

PATH = "/v1/chat/completions"
USER = [{"role": "user", "content": "Hi"}]
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "description": "Weather.", "parameters": WEATHER}},
    # Otherwise it takes any object, and a random model writes a long one.
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "additionalProperties": False}}},
]
BAD = {"type": "function", "function": {"name": "bad", "parameters": {"properties": {"a": {"type": "objct"}}}}}
SCHEMAS = {"weather": WEATHER, "now": {"type": "object", "maxProperties": 0}}
NO_THOUGHT = {"enable_thinking": False}
NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture(params=["qwen", "plain"])
def server(request: pytest.FixtureRequest) -> Serving:
    return request.getfixturevalue(request.param)


def ask(server: Serving, **body: Any) -> dict[str, Any]:
    answer = server.post(PATH, {"messages": USER, "max_tokens": 400, "chat_template_kwargs": NO_THOUGHT, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def streamed(server: Serving, **body: Any) -> dict[str, Any]:
    """A streamed answer put together as clients do."""
    message: dict[str, Any] = {"content": "", "tool_calls": []}
    reason = None
    events = server.events(PATH, {"messages": USER, "max_tokens": 400, "chat_template_kwargs": NO_THOUGHT, **body})
    for choice in (event["choices"][0] for event in events if event["choices"]):
        message["content"] += choice["delta"].get("content") or ""
        for part in choice["delta"].get("tool_calls", ()):
            if "id" in part:
                assert part["index"] == len(message["tool_calls"])
                function = {"name": part["function"]["name"], "arguments": ""}
                message["tool_calls"].append({"type": part["type"], "function": function})
            message["tool_calls"][part["index"]]["function"]["arguments"] += part["function"]["arguments"]
        reason = reason or choice["finish_reason"]
    return {"message": message, "finish_reason": reason}


@pytest.mark.parametrize("mode", ["required", "auto"])
def test_allowed_tools_are_the_ones_that_are_called_of_those_that_are_told(plain: Serving, mode: str) -> None:
    now = {"type": "function", "function": {"name": "now"}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [now]}}
    asked: dict[str, Any] = {"tools": TOOLS, "max_tokens": 40}
    prompts: list[int] = []
    for choice in (allowed, mode):
        answer = plain.post(PATH, {"messages": USER, **asked, "tool_choice": choice}).json()
        prompts.append(answer["usage"]["prompt_tokens"])
        for call in answer["choices"][0]["message"].get("tool_calls") or ():
            assert choice is mode or call["function"]["name"] == "now"
    assert prompts[0] == prompts[1]
    responses = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "now"}]}
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    body = {"input": "Hi", "tools": tools, "max_output_tokens": 400, "tool_choice": responses}
    calls = [each for each in plain.post("/v1/responses", body).json()["output"] if each["type"] == "function_call"]
    assert {call["name"] for call in calls} == ({"now"} if mode == "required" else set())
    unknown = {**allowed, "allowed_tools": {"mode": mode, "tools": [{"type": "function", "function": {"name": "x"}}]}}
    refused = plain.post(PATH, {"messages": USER, "tools": TOOLS, "tool_choice": unknown})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tool_choice")


@pytest.mark.parametrize(
    ("server", "choice", "more"),
    [
        ("qwen", "required", {}),
        ("plain", "required", {"parallel_tool_calls": False}),
        ("plain", NAMED, {}),
        ("qwen", "required", {"n": 2}),
    ],
    indirect=["server"],
)
def test_forced_calls_keep_to_their_schemas_whole_and_streamed(server: Serving, choice: Any, more: Any) -> None:
    for seed in range(2):
        asked: dict[str, Any] = {"tools": TOOLS, "tool_choice": choice, "seed": seed, **more}
        answer = ask(server, **asked)
        calls = answer["message"]["tool_calls"]
        assert (answer["finish_reason"], answer["message"]["content"]) == ("tool_calls", None)
        assert len(calls) == 1 or (choice == "required" and more.get("parallel_tool_calls") is not False)
        assert len({call["id"] for call in calls}) == len(calls)
        for call in calls:
            jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMAS[call["function"]["name"]])
        if "n" not in more:
            again = streamed(server, **asked)
            whole = [{key: call[key] for key in ("type", "function")} for call in calls]
            assert (again["message"]["tool_calls"], again["finish_reason"]) == (whole, "tool_calls")


def test_a_forced_call_that_is_cut_off_is_no_tool_calls_finish(server: Serving) -> None:
    answer = ask(server, tools=TOOLS, tool_choice="required", max_tokens=3)
    assert answer["finish_reason"] == "length"
    assert "tool_calls" not in answer["message"]


def test_an_answer_that_ends_in_its_text_has_no_calls(server: Serving) -> None:
    for choice in ("auto", "none"):
        answer = ask(server, tools=TOOLS, tool_choice=choice, max_tokens=20, seed=1)
        assert answer["finish_reason"] in ("stop", "length")
        assert "tool_calls" not in answer["message"]
    prompts = [
        server.post(PATH, {"messages": USER, "max_tokens": 1, **more}).json()["usage"]["prompt_tokens"]
        for more in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": TOOLS})
    ]
    assert prompts[0] == prompts[1] < prompts[2]


SHAPE: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"enum": [1, "b"]}},
    "required": ["a"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "form",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SHAPE, "strict": True}}},
        {"guided_json": SHAPE},
        {"guided_json": json.dumps(SHAPE), "guided_whitespace_pattern": " "},
        {"structured_outputs": {"json": SHAPE}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SHAPE}}, "tools": TOOLS},
    ],
)
def test_an_answer_has_the_form_that_was_asked_for(server: Serving, form: dict[str, Any]) -> None:
    for seed in range(2):
        answer = ask(server, seed=seed, **form)
        if "tool_calls" in answer["message"]:
            assert "tools" in form
        else:
            jsonschema.validate(json.loads(answer["message"]["content"]), SHAPE)
    for more, match in (
        ({"guided_choice": ["yes", "no"]}, ("yes", "no")),
        ({"guided_regex": "[ab]{2}c"}, ("aac", "abc", "bac", "bbc")),
        ({"guided_grammar": 'root ::= "x" | "y"'}, ("x", "y")),
        ({"structured_outputs": {"choice": ["ü"]}}, ("ü",)),
    ):
        assert ask(server, **more)["message"]["content"] in match
    assert ask(server, response_format={"type": "json_object"}, max_tokens=8)["message"]["content"].startswith("{")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"tool_choice": "required"}, "tool_choice: given without tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "none"}}}, "allowed: weather, now"),
        ({"tools": [TOOLS[0]] * 2}, "two functions of one name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tools": [{"type": "web_search"}]}, "tools.0"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]}, "type object"),
        ({"tools": [*TOOLS, BAD], "tool_choice": "required"}, "tools: 'bad': .*Invalid type: objct"),
        ({"response_format": {"type": "json_schema"}}, "json_schema with type json_schema"),
        ({"response_format": {"type": "grammar"}}, "response_format.type"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "several forms"),
        ({"guided_regex": "(a"}, "unclosed group"),
        ({"guided_json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "regex and choice"),
        ({"tools": TOOLS, "guided_json": {"$ref": "#/x"}}, "does not exist"),
        (
            {"messages": [*USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "["}}]}]},
            "no JSON object",
        ),
    ],
)
def test_what_can_not_be_followed_is_refused(server: Serving, body: dict[str, Any], said: str) -> None:
    answer = server.post(PATH, {"messages": USER, **body})
    assert (answer.status_code, bool(re.search(said, answer.json()["error"]["message"]))) == (400, True), answer.text


def test_a_conversation_goes_on_after_calls(server: Serving) -> None:
    arguments = '{"city": "Bern", "days": 2}'
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    talk = [
        {"role": "developer", "content": "Be short."},
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Sun."},
    ]
    body = {"messages": talk, "tools": TOOLS, "max_tokens": 1}
    assert server.post(PATH, body).status_code == 200
    called = {**call, "function": {"name": "weather", "arguments": json.loads(arguments)}}
    messages: list[Any] = [
        {**talk[0], "role": "system"},
        *USER,
        {"role": "assistant", "content": "", "tool_calls": [called]},
        talk[3],
    ]
    if server.served.style.reads_tools:
        text = server.llm.tokenizer.render_chat(messages, tools=TOOLS)
        assert f'{{"name": "weather", "arguments": {arguments}}}' in text
        ids = server.llm.tokenizer.encode_chat(messages, tools=TOOLS)
        assert server.post(PATH, body).json()["usage"]["prompt_tokens"] == len(ids)


def test_a_thought_that_the_template_begins_is_reasoning(server: Serving) -> None:
    if server.served.style.marks is None:
        pytest.skip("a model that does not think aloud")
    opened = "{{ messages[0].content }}<think>\n"
    for more in ({}, {"guided_regex": "a"}):
        body = {"chat_template": opened, "max_tokens": 6, "seed": 3, **more}
        message = ask(server, **body)["message"]
        assert message["reasoning_content"]
        assert not message["content"]
    asked = [{}, {"reasoning_effort": "high"}, {"reasoning_effort": "none"}]
    posted = [server.post(PATH, {"messages": USER, "max_tokens": 3, **more}).json() for more in asked]
    assert [("reasoning_content" in each["choices"][0]["message"]) for each in posted] == [False, True, False]
    assert posted[2]["usage"]["prompt_tokens"] > posted[0]["usage"]["prompt_tokens"]  # an empty thought


def test_openais_client_reads_calls_and_parses_forms(server: Serving) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    more = {"chat_template_kwargs": NO_THOUGHT}
    with client.chat.completions.stream(
        model="tiny", messages=USER, tools=TOOLS, tool_choice="required", seed=1, max_tokens=400, extra_body=more
    ) as stream:
        kinds = [event.type for event in stream]
        call = stream.get_final_completion().choices[0].message.tool_calls[0]
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= set(kinds)
    jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SHAPE, "strict": True}}
    found = client.chat.completions.create(
        model="tiny", messages=USER, response_format=form, max_tokens=100, extra_body=more
    )
    jsonschema.validate(json.loads(found.choices[0].message.content), SHAPE)


def test_completions_take_forms_too(server: Serving) -> None:
    answer = server.post("/v1/completions", {"prompt": ["a", "b"], "guided_choice": ["yes", "no"], "max_tokens": 9})
    assert [choice["text"] in ("yes", "no") for choice in answer.json()["choices"]] == [True, True]


def test_a_call_that_a_stop_string_cuts_is_no_tool_calls_finish(plain: Serving) -> None:
    days = {"type": "object", "properties": {"a": {"const": "ab"}}, "required": ["a"], "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "f", "parameters": days}}
    for stop, reason in (("b", "stop"), ("no", "tool_calls")):
        answer = ask(plain, tools=[tool], tool_choice="required", parallel_tool_calls=False, stop=[stop])
        assert answer["finish_reason"] == reason
        assert answer["message"]["tool_calls"][0]["function"]["arguments"].endswith('"a' if reason == "stop" else "}")
