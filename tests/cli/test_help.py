"""Help, versions and the command itself."""

import inspect
import re
import resource
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from onewave import LLM
from onewave.cli import commands, main
from onewave.cli.bench.commands import bench
from onewave.cli.tiles.commands import tiles

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"

BENCH = [["bench"], ["bench", "latency"], ["bench", "ops"], ["bench", "peers"]]
TILES = [["tiles", name] for name in ("simulate", "bounds", "staircase", "compare", "search", "verify", "lower")]
COMMANDS = [[], ["generate"], ["chat"], ["info"], ["env"], *BENCH, ["tiles"], *TILES, ["lab"]]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_explains_itself(onewave, command):
    done = onewave(*command, "--help")
    assert done.status == 0
    assert "Usage: onewave" in done.out
    assert done.err == ""


def test_the_reference_names_every_command_and_every_argument_of_llm():
    groups = {"bench": bench, "tiles": tiles}
    names = [name for name in main.app.info.cls.listed if name not in groups]
    names += [f"{group} {name}" for group, made in groups.items() for name in made.info.cls.listed]
    # A row names several commands of a group one after the other: "`onewave tiles lower`, `interpret`".
    rows = re.findall(r"^\| `onewave (\w+)(.*?) \|", (REFERENCE / "cli.md").read_text(), re.MULTILINE)
    told = {first for first, _ in rows} | {
        f"{first} {word}" for first, rest in rows for word in re.findall(r"\w+", rest)
    }
    assert [name for name in names if name not in told] == []
    [given] = re.findall(r"^## `LLM\(model, \*, (.*)\)`$", (REFERENCE / "api.md").read_text(), re.MULTILINE)
    wanted = [f"{name}={p.default!r}" for name, p in list(inspect.signature(LLM).parameters.items())[1:]]
    assert given.replace('"', "'") == ", ".join(wanted)


@pytest.mark.parametrize("command", [[], ["bench"], ["tiles"]], ids=" ".join)
def test_no_command_is_cut_off_in_the_list(onewave, command):
    text = onewave(*command, "--help").out
    assert "Commands:" in text
    assert "..." not in text.partition("Commands:")[2]


@pytest.mark.parametrize("command", [["generate"], ["chat"], ["bench", "latency"]], ids=" ".join)
def test_the_flags_are_named_as_in_vllm(onewave, command):
    text = onewave(*command, "--help").out
    for flag in ("--model", "--dtype", "--max-model-len", "--load-format", "--revision", "--enforce-eager"):
        assert flag in text


# Names that options had before, and keep beside the one that all commands share.
SECOND = {
    "--batch-size": "--batch",
    "--host-time": "--host",
    "--input-len": "--tokens",
    "--max-num-seqs": "--batch-size",
    "--time-limit": "--seconds",
    "--weight-format": "--tiles",
}


def options_of(command: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Each (command, option) of a command and of those below it."""
    yield from ((path, each) for each in command.params)
    for below in getattr(command, "listed", ()):
        yield from options_of(command.get_command(None, below), f"{path} {below}")


def test_an_option_is_spelt_alike_and_has_the_same_default_in_every_command():
    spellings, defaults = defaultdict(dict), defaultdict(dict)
    for path, option in options_of(typer.main.get_command(main.app)):
        name = max(option.opts, key=len)
        spellings[name][tuple(one for one in option.opts if one != SECOND.get(name))] = path
        defaults[name][str(option.default)] = path
    assert {"--context", "--batch-size", "--out"} <= spellings.keys()
    assert {name: found for name, found in spellings.items() if len(found) > 1} == {}
    one = ("--context", "--weight-format", "--load-format", "--out", "--json", "--device", "--quantization")
    assert {name: defaults[name] for name in one if len(defaults[name]) > 1} == {}


def test_an_error_while_a_command_is_imported_is_not_taken_for_a_wrong_name(onewave, monkeypatch):
    def broken(name: str, place: str) -> None:
        raise KeyError(place)

    monkeypatch.setattr(commands, "_command", broken)
    done = onewave("chat")
    assert (done.status, "KeyError: 'chat:chat'" in done.err) == (1, True)


def test_a_misspelt_command_is_guessed(onewave):
    message = onewave("bench", "latncy").error()
    assert message.endswith("No such command 'latncy'. Did you mean 'latency'? See `onewave bench --help`.")


def test_without_a_command_the_help_is_shown(onewave):
    done = onewave()
    assert done.status == 0
    assert "generate" in done.out


def test_the_version_is_printed(onewave):
    done = onewave("--version")
    assert (done.status, done.out.split()[0]) == (0, "onewave")


def run_module(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "onewave", *arguments], capture_output=True, text=True, timeout=60)


def test_the_package_runs_as_a_module():
    done = run_module("--help")
    assert done.returncode == 0
    assert done.stdout.startswith("Usage: onewave")


def processor_seconds(*arguments: str) -> float:
    """Processor time of a command alone: unlike the clock, it does not count what else the machine does meanwhile."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run_module(*arguments)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize("arguments", [["--help"], ["generate", "x", "--temperature", "-1"], ["info", "no-such-model"]])
def test_help_and_errors_cost_less_than_half_a_second(arguments):
    assert min(processor_seconds(*arguments) for _ in range(3)) < 0.5
