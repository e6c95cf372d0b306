"""Errors in the command's words: what Python calls `max_model_len=16`, the command line calls `--max-model-len 16`."""

import re
from collections.abc import Mapping
from typing import Any

from onewave.base.errors import InvalidArgumentError, OnewaveError

# Text in quotes is the user's own.
_QUOTED = r"""(?<!\w)'[^']*'|(?<!\w)"[^"]*\""""


def option_names(command: Any) -> dict[str, str]:
    """Parameter -> its option's longest name, of a click command."""
    options = (parameter for parameter in command.params if parameter.opts[0].startswith("-"))
    return {option.name: max(option.opts, key=len) for option in options}


def error_line(error: OnewaveError, names: Mapping[str, str]) -> str:
    """An error's line for a command with these options.

    The thing that failed is renamed if it is an option's parameter, alone or with its value. Elsewhere only
    `name=value`, and names that are no English words (`max_tokens`), are taken for parameters. None is not an option.
    """
    what = " ".join(error.what.split())
    rest = re.sub(r",? or None\b", "", str(error)[len(what) :])
    name, _, value = re.split(r"(\W|$)", what, maxsplit=1)
    named = isinstance(error, InvalidArgumentError) and ("_" in name or " " not in value)
    if what.replace(" ", "_") in names:
        what = names[what.replace(" ", "_")]
    elif named and name in names:
        what = names[name] + what[len(name) :]
    if not names:
        return what + rest
    parameters = "|".join(sorted(map(re.escape, names), key=len, reverse=True))
    values = r"""\"[^\"]*\"|'[^']*'|[\w:-]*(?:\.[\w:-]+)*"""
    return what + re.sub(
        rf"{_QUOTED}|(?<![\w-])({parameters})(?!\w)(?:=({values}))?", lambda match: _option(match, names), rest
    )


def _option(match: re.Match[str], names: Mapping[str, str]) -> str:
    name, value = match[1], match[2]
    if name is None or (value is None and "_" not in name):
        return match[0]
    if value == "False":
        return names[name].replace("--", "--no-", 1)
    return names[name] if value in (None, "", "True") else f"{names[name]} {value.strip(chr(34) + chr(39))}"
