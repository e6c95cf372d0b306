"""`onewave chat`: talk with a model."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from onewave.base.errors import InvalidArgumentError, OnewaveError
from onewave.cli import options
from onewave.cli.session import Opened, open_llm, stats_line
from onewave.weights.fetch.aliases import DEFAULT_ALIAS

if TYPE_CHECKING:
    from onewave.engine.output import RequestOutput
    from onewave.engine.params import SamplingParams

_HELP = """/reset  forget the conversation (the system prompt stays)
/help   this list
/exit   leave; Ctrl-D does too
Ctrl-C  stops an answer, or drops the line being typed; what was answered so far stays in the conversation"""


def chat(
    model: options.Model = DEFAULT_ALIAS,
    message: Annotated[str | None, typer.Option("--message", help="Answer this alone, then leave.")] = None,
    system_prompt: Annotated[str | None, typer.Option("--system-prompt", help="How the model should behave.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", help="Most tokens of an answer. Default: as many as fit.")
    ] = None,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    seed: options.Seed = None,
    stop: options.Stop = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    max_model_len: options.MaxModelLen = None,
    load_format: options.LoadFormat = "auto",
    revision: options.Revision = None,
    tokenizer: options.Tokenizer = None,
    enforce_eager: options.EnforceEager = False,
    decode: options.Decode = "auto",
    keep_unpacked: options.KeepUnpacked = None,
    quantization: options.Quantization = None,
    compact: options.Compact = None,
    stats: options.Stats = False,
) -> None:
    """Talk with a model; answers are printed as they come.

    Reads a message a line, from a terminal or a pipe. /help lists what else it understands.
    """
    from onewave.engine.params import SamplingParams

    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=stop,
    )
    if message is not None and not message.strip():
        raise InvalidArgumentError("--message", got="empty", allowed="at least one character")
    if message is None and sys.stdin is None:  # pyright: ignore[reportUnnecessaryComparison] # closed by the shell
        raise InvalidArgumentError(
            "chat", got="standard input is closed", next="Give --message, or messages on standard input."
        )
    opened = open_llm(
        model,
        load_format=load_format,
        revision=revision,
        tokenizer=tokenizer,
        dtype=dtype,
        device=device,
        max_model_len=max_model_len,
        max_num_seqs=1,
        seed=params.seed or 0,
        enforce_eager=enforce_eager,
        decode=decode,
        keep_unpacked=keep_unpacked,
        quantization=quantization,
        compact=compact,
    )
    conversation = Conversation(opened, params, system_prompt, show_stats=stats)
    if message is not None:
        conversation.answer(message, keep_going=False)
    elif not _talk(conversation):
        raise typer.Exit(2)


@dataclass
class Conversation:
    """What was said so far, and the model that answers. messages: role and content, the system prompt first."""

    opened: Opened
    params: SamplingParams
    system_prompt: str | None = None
    show_stats: bool = False
    messages: list[dict[str, str]] = field(default_factory=list[dict[str, str]])

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system prompt."""
        self.messages = [] if self.system_prompt is None else [{"role": "system", "content": self.system_prompt}]

    def answer(self, text: str, *, keep_going: bool = True) -> None:
        """Answer a message, printing as it comes.

        keep_going: Ctrl-C stops the answer, which stays in the conversation as far as it got; otherwise it raises
        KeyboardInterrupt. A message without any answer (too long, or stopped at once) leaves no trace in it.
        """
        asked = [*self.messages, {"role": "user", "content": text}]
        said, last = "", None
        with _interrupts(enabled=keep_going) as interrupted:
            stream: Iterator[RequestOutput] = self.opened.llm.chat_stream(asked, self.params)
            try:
                for last in stream:
                    said += last.outputs[0].delta
                    sys.stdout.write(last.outputs[0].delta)
                    sys.stdout.flush()
                    if interrupted.is_set():
                        break
            except KeyboardInterrupt:
                if not keep_going:
                    raise
            finally:
                if isinstance(stream, Generator):
                    stream.close()  # pyright: ignore[reportUnknownMemberType] # its send type does not matter here
                if said:
                    print(flush=True)
        if interrupted.is_set() and not said:
            return
        self.messages = [*asked, {"role": "assistant", "content": said}]
        if self.show_stats and last is not None:
            print(stats_line(self.opened, [last]), file=sys.stderr)


def _talk(conversation: Conversation) -> bool:
    """Read and answer messages until the end. Returns False when a line from a pipe was no command and not answered.
    Raises InvalidArgumentError for a pipe that can't be read."""
    interactive = sys.stdin.isatty()
    if interactive:
        with suppress(ImportError):
            # Line editing and history for input().
            import_module("readline")
        print("/help lists the commands, Ctrl-D leaves.", file=sys.stderr)
    all_answered = True
    while True:
        try:
            line = input("> ").strip() if interactive else _read_line()
            if line in ("/exit", "/quit"):
                return all_answered
            if line and not _obey(conversation, line):
                all_answered = interactive
        except UnicodeDecodeError:
            print(f"error: {InvalidArgumentError('standard input', got='a line that is not UTF-8')}", file=sys.stderr)
            all_answered = interactive
        except EOFError:
            if interactive:
                print()
            return all_answered
        except KeyboardInterrupt:
            # At the prompt, or in the moment before an answer begins.
            if not interactive:
                raise
            print()


def _obey(conversation: Conversation, line: str) -> bool:
    """Carry out a command, or answer a message. Returns False for what can't be done or answered."""
    if line == "/reset":
        conversation.reset()
    elif line == "/help":
        print(_HELP)
    elif line.startswith("/") and " " not in line and "/" not in line[1:]:
        print(f"error: no such command: {line}; /help lists them", file=sys.stderr)
        return False
    else:
        try:
            conversation.answer(line)
        except OnewaveError as error:
            print(f"error: {error}", file=sys.stderr)
            return False
    return True


def _read_line() -> str:
    """The next line of a pipe. Raises EOFError at its end, UnicodeDecodeError for what is not UTF-8,
    InvalidArgumentError for a pipe that can't be read."""
    try:
        line = sys.stdin.buffer.readline()
    except OSError as error:
        raise InvalidArgumentError("standard input", got=f"can't be read ({error.strerror or error})") from None
    if not line:
        raise EOFError
    return line.decode("utf-8-sig").strip()


@contextmanager
def _interrupts(*, enabled: bool) -> Generator[threading.Event]:
    """Turn the first Ctrl-C within the block into an event that is seen between two tokens.

    The engine's step is left to finish. A second Ctrl-C raises KeyboardInterrupt at once, for a prompt that takes long.
    """
    interrupted = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        del number, frame
        if interrupted.is_set():
            raise KeyboardInterrupt
        interrupted.set()

    if not enabled or threading.current_thread() is not threading.main_thread():
        yield interrupted
        return
    before = signal.signal(signal.SIGINT, handle)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)
