"""Files that a command reads: prompts, chat templates, tools."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from onewave.base.errors import InvalidArgumentError, shown
from onewave.base.json_files import parse_json
from onewave.cli.output import read_file
from onewave.engine.text.conversations import check_tools, is_template

PROMPT_FORMATS = ("auto", "lines", "jsonl")
_MAX_BYTES = 64 * 2**20


def read_text(file: Path, what: str) -> str:
    """A file's text, or with - standard input's. what: the option that named it. Raises InvalidArgumentError."""
    data = read_file(what, str(file), _MAX_BYTES)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(_name(file, what), got=f"not UTF-8 (byte {error.start})") from None


def _name(file: Path, what: str) -> str:
    return "standard input" if str(file) == "-" else f"{what} {file}"


def read_prompts(file: Path, form: str) -> list[Any]:
    """The prompts of a file or of standard input: of `lines` each line that is not empty, of `jsonl` the JSON of each.

    form: of PROMPT_FORMATS; auto takes jsonl for a name that ends so. Raises InvalidArgumentError.
    """
    name, text = _name(file, "--prompt-file"), read_text(file, "--prompt-file")
    # Only line feeds end a prompt: str.splitlines would also split at form feeds and Unicode separators.
    lines = [(i, line) for i, line in enumerate(text.replace("\r\n", "\n").split("\n"), 1) if line.strip()]
    if not lines:
        raise InvalidArgumentError(name, got="empty", allowed="a prompt a line")
    if form == "jsonl" or (form == "auto" and file.suffix == ".jsonl"):
        return [_json_prompt(line, f"{name} line {i}") for i, line in lines]
    return [line for _, line in lines]


def _json_prompt(line: str, what: str) -> Any:
    prompt = parse_json(line, what)
    keys = set(cast("dict[str, Any]", prompt)) if isinstance(prompt, dict) else set[str]()
    if not prompt or not (isinstance(prompt, str) or keys) or not keys <= {"prompt", "prompt_token_ids"}:
        allowed = '"text", {"prompt": "text"} or {"prompt_token_ids": [ids]}'
        raise InvalidArgumentError(what, got=line[:60], allowed=allowed)
    return cast("Any", prompt)


def read_chat_template(given: str) -> str:
    """The template in a file; what may be the name of one of the model's stays. Raises InvalidArgumentError."""
    if not os.path.isfile(given):
        if not given or re.search(r"[/.\s]", given):
            raise InvalidArgumentError("--chat-template", got=shown(given), allowed="a file of Jinja, or a name")
        return given
    text = read_text(Path(given), "--chat-template")
    if not is_template(text):
        raise InvalidArgumentError(f"--chat-template {given}", got="no Jinja in it", allowed="{{ ... }} and {% ... %}")
    return text


def read_tools(file: Path) -> list[Mapping[str, Any]]:
    """The JSON schemas in a file. Raises InvalidArgumentError."""
    tools = parse_json(read_text(file, "--tools"), f"--tools {file}")
    try:
        return check_tools(tools)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"--tools {file}", got=error.got, allowed=error.allowed) from None
