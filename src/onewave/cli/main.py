"""The `onewave` command: its table of commands, and what becomes of errors.

exit status   meaning
0             done
1             internal error, or output that can't be written: one line on stderr, the traceback with --debug
2             bad input, or too little memory: one line on stderr
130           interrupted by Ctrl-C
141           the reader of the output has gone (as a shell reports SIGPIPE)

Nothing that is imported before a command runs loads torch: help and most errors come at once.
"""

import errno
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any

import typer

from onewave.base.errors import OnewaveError, UnsupportedError
from onewave.cli.commands import Listed, group

app = group(
    {
        "generate": Listed("generate:generate", "Continue a prompt, or a batch of them."),
        "chat": Listed("chat:chat", "Talk with a model; answers are printed as they come."),
        "serve": Listed("serve:serve", "Serve a model behind OpenAI's API."),
        "info": Listed("info:info", "Print a model's configuration, tensors and sizes."),
        "env": Listed("env:env", "Print versions, processor, GPUs and caches."),
        "warm": Listed("warm:warm", "Compile attention's kernels before their first call."),
        "profile": Listed("bench.profile:profile", "Say what bounds each part of a model's prompts and steps."),
        "lab": Listed("lab:lab", "Open the tile lab in the browser."),
        "bench": Listed("bench.commands:bench", "Measure speed."),
        "tiles": Listed("tiles.commands:tiles", "Order, simulate, search, prove and lower tile graphs."),
    },
    name="onewave",
    pretty_exceptions_enable=False,
    help="LLaMA inference for small batches.",
    epilog="Any command takes --debug: show the traceback of an error. `onewave COMMAND --help` says more.",
)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """LLaMA inference for small batches."""
    del debug  # `run` has taken it out of the arguments, wherever it stood
    if version:
        import onewave

        print(f"onewave {onewave.__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help())


def main() -> None:
    """Run the command line and leave with its exit status."""
    # Closed ones, as of a service, take what has no reader.
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (for as long as the process)
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    # A terminal that can't show a character shows a question mark; that is no reason to stop.
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, ValueError):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr] # streams may be replaced by other objects
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command line (without the program's name). Returns its exit status; raises nothing."""
    debug, rest = _take_debug(arguments)
    try:
        status = _invoke(_with_ledger_value(rest))
        sys.stdout.flush()
    except BaseException as error:
        return _report(error, rest, debug=debug)
    return status


def _invoke(arguments: list[str]) -> int:
    # Not command.main(): it has its own ways with interrupts and closed pipes.
    command = typer.main.get_command(app)
    try:
        with command.make_context("onewave", arguments) as context:
            try:
                command.invoke(context)
            except ModuleNotFoundError as error:
                if error.name != "torch":
                    raise
                what = f"{context.invoked_subcommand or 'this command'} needs PyTorch"
                raise UnsupportedError(what, got="not installed", next="Run `pip install torch`.") from error
    except typer.Exit as leaving:
        return leaving.exit_code
    return 0


def _take_debug(arguments: Sequence[str]) -> tuple[bool, list[str]]:
    """Take --debug out of the arguments, wherever it stands before a `--`."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    rest = [argument for argument in arguments[:end] if argument != "--debug"]
    return len(rest) < end, [*rest, *arguments[end:]]


def _with_ledger_value(arguments: Sequence[str]) -> list[str]:
    """Write a --ledger without a directory as --ledger=ledger; click has no optional values."""
    given = list(arguments)
    for i, argument in enumerate(given):
        alone = i + 1 == len(given) or given[i + 1].startswith("-")
        if argument == "--ledger" and alone and given[0] == "bench":
            given[i] = "--ledger=ledger"
    return given


def _report(error: BaseException, arguments: Sequence[str], *, debug: bool) -> int:
    """Say what went wrong in one line on stderr (nothing for an interrupt or a closed pipe) and return the status."""
    if isinstance(error, (KeyboardInterrupt, typer.Abort)):
        status, line = 130, None
    elif isinstance(error, BrokenPipeError) or (
        # rich makes a SystemExit of it.
        isinstance(error, SystemExit) and isinstance(error.__context__, BrokenPipeError)
    ):
        _drop_output()
        status, line = 141, None
    elif isinstance(error, OSError) and error.errno == errno.ENOSPC:
        _drop_output()
        status, line = 1, f"error: {error.filename or 'the output'}: {error.strerror or error}"
    elif isinstance(error, OnewaveError):
        from onewave.cli.text.naming import error_line, option_names

        status, line = 2, f"error: {error_line(error, option_names(_command_of(arguments)[1]))}"
    elif _is_out_of_memory(error):
        status, line = 2, f"error: {_command_of(arguments)[0]}: no memory left. Use smaller shapes or a smaller model."
    elif isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    elif callable(getattr(error, "format_message", None)):
        # typer carries click within itself, or beside, depending on its version: known by its method.
        status, line = 2, f"error: {_usage_line(error, arguments)}"
    else:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        status, line = 1, f"internal error: {text} (run again with --debug for the traceback)"
    with suppress(OSError, ValueError):
        if debug and line is not None:
            traceback.print_exception(error)
        if line is not None:
            print(line, file=sys.stderr, flush=True)
    return status


def _is_out_of_memory(error: BaseException) -> bool:
    if "torch" not in sys.modules:
        return isinstance(error, MemoryError)
    from onewave.memory.shortage import is_out_of_memory

    return is_out_of_memory(error)


def _drop_output() -> None:
    """Drop the output left in the buffer: exit would flush it into the same closed pipe or full disk."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _usage_line(error: Any, arguments: Sequence[str]) -> str:
    """Reduce a usage error to one sentence and where to read on."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else _command_of(arguments)[0]
    text = " ".join(str(error.format_message()).split()).rstrip(".")
    return f"{text}{'' if text.endswith('?') else '.'} See `{command} --help`."


def _command_of(arguments: Sequence[str]) -> tuple[str, Any]:
    """The command that a line names: its words, and itself."""
    path = ["onewave"]
    found: Any = typer.main.get_command(app)
    for word in arguments:
        if word in getattr(found, "listed", ()):
            path.append(word)
            found = found.get_command(None, word)
    return " ".join(path), found
