"""Tools for chat templates that read none: described in the system message, in the form that most models know."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

# The words of Qwen 2.5's and Qwen 3's chat templates, which follow Nous Research's Hermes.
_ABOUT = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def describe_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The conversation with its tools, earlier calls and their results as plain text."""
    told = [_as_text(message) for message in messages]
    if not tools:
        return told
    about = _ABOUT.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if told[0]["role"] == "system":
        return [{**told[0], "content": f"{_text(told[0])}\n\n{about}"}, *told[1:]]
    return [{"role": "system", "content": about}, *told]


def _as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{_text(message)}\n</tool_response>"}
    calls = [_call(call["function"]) for call in message.get("tool_calls") or ()]
    if not calls:
        return dict(message)
    return {"role": message["role"], "content": "\n".join(filter(None, (_text(message), *calls)))}


def _call(function: Mapping[str, Any]) -> str:
    called = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>\n{json.dumps(called, ensure_ascii=False)}\n</tool_call>"


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)
