"""`onewave chat`: talk with a model."""

from __future__ import annotations

import re
import signal
import sys
import threading
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onewave.base.errors import InvalidArgumentError, OnewaveError
from onewave.cli import options
from onewave.cli.remote import RemoteModel, Said
from onewave.cli.sampling import Sampling
from onewave.cli.session import Opened, open_llm, stats_line
from onewave.cli.text.files import read_chat_template, read_tools
from onewave.cli.text.naming import error_line, option_names

if TYPE_CHECKING:
    from onewave.engine.output import RequestOutput
    from onewave.engine.params import SamplingParams

_HELP = """/reset  forget the conversation (the system prompt stays)
/keep N drop the oldest turns whenever the context is full, but never the last N
/help   this list
/exit   leave; Ctrl-D does too
Ctrl-C  stops an answer, or drops the line being typed; what was answered so far stays in the conversation"""
_REMEDIES = "/reset begins anew, /keep N drops the oldest turns but N (from the start: --keep N)"
# With --keep, turns go until this share of the context is free for an answer, or what --max-tokens asks for.
_ANSWERS_SHARE = 4


def chat(
    context: typer.Context,
    message: Annotated[str | None, typer.Option("--message", help="Answer this alone, then leave.")] = None,
    system_prompt: Annotated[str | None, typer.Option("--system-prompt", help="How the model should behave.")] = None,
    chat_template: Annotated[
        str | None,
        typer.Option("--chat-template", metavar="FILE", help="Jinja; or the name of one of the model's templates."),
    ] = None,
    tools: Annotated[
        Path | None, typer.Option("--tools", metavar="FILE", help="JSON schemas of functions that it may call.")
    ] = None,
    keep: Annotated[
        int | None,
        typer.Option("--keep", min=0, help="When the context is full, drop the oldest turns, but never the last N."),
    ] = None,
    url: Annotated[
        str | None, typer.Option("--url", help="Talk to this running server; --model is a name that it knows.")
    ] = None,
    api_key: Annotated[str | None, typer.Option("--api-key", help="With --url: a key that the server knows.")] = None,
    *,
    sampling: Sampling,
    loading: options.Loading,
    stats: options.Stats = False,
) -> None:
    """Talk with a model, or with --url to a running server; answers are printed as they come.

    Reads a message a line, from a terminal or a pipe. /help lists what else it understands.
    """
    params = sampling.params()
    if message is not None and not message.strip():
        raise InvalidArgumentError("--message", got="empty", allowed="at least one character")
    if message is None and sys.stdin is None:  # pyright: ignore[reportUnnecessaryComparison] # closed by the shell
        raise InvalidArgumentError(
            "chat", got="standard input is closed", next="Give --message, or messages on standard input."
        )
    layout: dict[str, Any] = {}
    if chat_template is not None:
        layout["chat_template"] = read_chat_template(chat_template)
    if tools is not None:
        layout["tools"] = read_tools(tools)
    model: LocalModel | RemoteModel
    if url is None:
        opened = open_llm(**asdict(loading), max_num_seqs=1, seed=params.seed or 0)
        if chat_template is not None and layout["chat_template"] == chat_template:
            own = opened.llm.get_tokenizer().parts.chat_templates
            if chat_template not in own:
                allowed = f"a file of Jinja, or the name of one of the model's templates ({', '.join(own) or 'none'})"
                raise InvalidArgumentError("--chat-template", got=repr(chat_template), allowed=allowed)
        model = LocalModel(opened, params, layout)
    else:
        asked = options.chosen(context, [field.name for field in fields(loading)])
        name = asked.pop("--model", None)
        if asked:
            got = f"{', '.join(asked)} with --url"
            raise InvalidArgumentError("chat", got=got, allowed="--model alone: the server has loaded it")
        model = RemoteModel(url, api_key=api_key, name=name, params=params, layout=layout)
        print(f"{model.name} at {url}", file=sys.stderr, flush=True)
    names = option_names(context.command)
    conversation = Conversation(
        model, params.max_tokens, names, system_prompt=system_prompt, keep=keep, show_stats=stats
    )
    if message is not None:
        conversation.answer(message, keep_going=False)
    elif not _talk(conversation):
        raise typer.Exit(2)


@dataclass
class LocalModel:
    """Answers conversations in this process. layout: arguments of LLM.chat_stream."""

    opened: Opened
    params: SamplingParams
    layout: Mapping[str, Any]
    last: RequestOutput | None = None

    @property
    def max_model_len(self) -> int:
        """Tokens of a conversation, the next answer included."""
        return self.opened.llm.max_model_len

    def stream(self, messages: list[dict[str, str]]) -> Generator[Said]:
        """Answer, part by part; closing the iterator ends it."""
        stream: Iterator[RequestOutput] = self.opened.llm.chat_stream(messages, self.params, **self.layout)
        try:
            for self.last in stream:
                output = self.last.outputs[0]
                yield Said(output.delta, len(output.token_ids), output.finish_reason)
        finally:
            if isinstance(stream, Generator):
                stream.close()  # pyright: ignore[reportUnknownMemberType] # its send type does not matter here

    def room(self, messages: list[dict[str, str]]) -> int:
        """Tokens that an answer to these messages could have."""
        return self.max_model_len - len(self.opened.llm.get_tokenizer().encode_chat(messages, **self.layout))

    def stats(self) -> str:
        """A line about the last answer."""
        return "" if self.last is None else stats_line(self.opened, [self.last])


@dataclass
class Conversation:
    """The messages so far, and the model that answers.

    names: of the command's options, for errors. keep: last turns that are never dropped for want of room; None drops
    none. messages: role and content, the system prompt first.
    """

    model: LocalModel | RemoteModel
    max_tokens: int | None
    names: Mapping[str, str]
    system_prompt: str | None = None
    keep: int | None = None
    show_stats: bool = False
    messages: list[dict[str, str]] = field(default_factory=list[dict[str, str]])

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system prompt."""
        self.messages = [] if self.system_prompt is None else [{"role": "system", "content": self.system_prompt}]

    def answer(self, text: str, *, keep_going: bool = True) -> None:
        """Answer a message, printing as it comes; stderr says where an answer was cut.

        keep_going: Ctrl-C stops the answer, which stays in the conversation as far as it got; otherwise it raises
        KeyboardInterrupt. A message without any answer (too long, or stopped at once) leaves no trace in it.
        """
        asked = self._with_room([*self.messages, {"role": "user", "content": text}])
        said, last = "", None
        with _interrupts(enabled=keep_going) as interrupted:
            stream = self.model.stream(asked)
            try:
                for last in stream:
                    said += last.delta
                    sys.stdout.write(last.delta)
                    sys.stdout.flush()
                    if interrupted.is_set():
                        break
            except KeyboardInterrupt:
                if not keep_going:
                    raise
            finally:
                stream.close()
                if said:
                    print(flush=True)
        if interrupted.is_set():
            _remark("stopped")
        elif last is not None and last.finish_reason == "length":
            _remark(self._why_cut(last.num_tokens))
        if interrupted.is_set() and not said:
            return
        self.messages = [*asked, {"role": "assistant", "content": said}]
        if self.show_stats and last is not None:
            print(self.model.stats(), file=sys.stderr)

    def _with_room(self, asked: list[dict[str, str]]) -> list[dict[str, str]]:
        """The messages, without the oldest turns where they leave too little room for an answer and may go.

        Raises InvalidArgumentError where there is no room at all and turns could go.
        """
        first = 0 if self.system_prompt is None else 1
        if len(asked) == first + 1:
            return asked
        size, dropped, room = self.model.max_model_len, 0, self.model.room(asked)
        if size is None or room is None:  # the server will say so
            return asked
        wanted = min(self.max_tokens or size, size // _ANSWERS_SHARE)
        while self.keep is not None and room < wanted and len(asked) > first + 2 * self.keep + 1:
            del asked[first : first + 2]
            dropped, room = dropped + 1, self.model.room(asked) or 0
        if room < 1 and len(asked) > first + 1:
            got, allowed = f"{size - room} tokens", f"up to {size - 1}"
            raise InvalidArgumentError("the context is full", got=got, allowed=allowed, next=f"{_REMEDIES}.")
        if dropped:
            _remark(f"the context is full: the oldest {'turn is' if dropped == 1 else f'{dropped} turns are'} dropped")
        return asked

    def _why_cut(self, num_tokens: int) -> str:
        if num_tokens == self.max_tokens:
            return f"cut off by --max-tokens {num_tokens}"
        return f"cut off: the context of {self.model.max_model_len} tokens is full. {_REMEDIES}"


def _remark(text: str) -> None:
    """A line beside the conversation."""
    print(f"[{text}]", file=sys.stderr, flush=True)


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
    elif match := re.fullmatch(r"/keep (\d{1,9})", line):
        conversation.keep = int(match[1])
    elif line.startswith("/keep ") or (line.startswith("/") and " " not in line and "/" not in line[1:]):
        print(f"error: no such command: {line}; /help lists them", file=sys.stderr)
        return False
    else:
        try:
            conversation.answer(line)
        except OnewaveError as error:
            print(f"error: {error_line(error, conversation.names)}", file=sys.stderr)
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
