"""`onewave chat`: the conversation, its commands, Ctrl-C and Ctrl-D."""

import io
import os
import signal
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from onewave.base.errors import InvalidArgumentError
from onewave.cli import chat as chat_module
from onewave.cli.session import Opened


class FakeLLM:
    """Answers `answer to <message>` a word at a time and remembers what it was asked.

    A token is a character of a message. on_token: called before each word with its number. reason: why answers end.
    """

    max_model_len = 100
    parts = SimpleNamespace(chat_templates={"default": "", "tool_use": ""})

    def __init__(self) -> None:
        self.asked: list[list[dict[str, str]]] = []
        self.layouts: list[dict[str, Any]] = []
        self.closed = 0
        self.on_token: Any = lambda number: None
        self.reason = "stop"

    def get_tokenizer(self) -> "FakeLLM":
        return self

    def encode_chat(self, messages: list[dict[str, str]], **layout: Any) -> str:
        return "".join(message["content"] for message in messages)

    def chat_stream(self, messages: list[dict[str, str]], params: Any, **layout: Any) -> Iterator[Any]:
        self.layouts.append(layout)
        if messages[-1]["content"] == "too long":
            raise InvalidArgumentError("prompt", got="99 tokens", allowed="up to 9")
        self.asked.append([dict(message) for message in messages])
        return self._answer(messages[-1]["content"])

    def _answer(self, message: str) -> Iterator[Any]:
        try:
            for number, word in enumerate(["answer", " to", f" {message}"]):
                self.on_token(number)
                output = SimpleNamespace(delta=word, token_ids=[1] * (number + 1), finish_reason=self.reason)
                yield SimpleNamespace(outputs=[output])
        finally:
            self.closed += 1


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> FakeLLM:
    fake = FakeLLM()
    monkeypatch.setattr(chat_module, "open_llm", lambda model, **options: Opened(fake, 0.0))
    return fake


@pytest.fixture
def talk(onewave, monkeypatch):
    """Chat over a pipe that says these lines."""

    def run(text: str | bytes, *arguments: Any):
        data = text.encode() if isinstance(text, str) else text
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="ascii"))
        return onewave("chat", *arguments)

    return run


def contents(messages: list[dict[str, str]]) -> list[str]:
    return [message["content"] for message in messages]


def test_each_message_is_asked_with_what_was_said_before(talk, llm):
    done = talk("one\ntwo\n")
    assert (done.status, done.out) == (0, "answer to one\nanswer to two\n")
    assert contents(llm.asked[1]) == ["one", "answer to one", "two"]
    assert [message["role"] for message in llm.asked[1]] == ["user", "assistant", "user"]


def test_reset_forgets_all_but_the_system_prompt(talk, llm):
    talk("one\n/reset\ntwo\n", "--system-prompt", "Be brief.")
    assert contents(llm.asked[0]) == ["Be brief.", "one"]
    assert contents(llm.asked[1]) == ["Be brief.", "two"]


def test_exit_leaves_at_once(talk, llm):
    done = talk("one\n/exit\ntwo\n")
    assert done.status == 0
    assert len(llm.asked) == 1


def test_help_lists_the_commands(talk, llm):
    out = talk("/help\n").out
    for command in ("/reset", "/keep", "/exit", "/help", "Ctrl-C"):
        assert command in out
    assert not llm.asked


def test_a_byte_order_mark_is_no_part_of_the_first_line(talk, llm):
    assert "/reset" in talk("\ufeff/help\n").out
    assert not llm.asked


def test_an_unknown_command_is_not_sent_to_the_model(talk, llm):
    done = talk("/rest\n")
    assert done.status == 2
    assert "/rest" in done.err
    assert not llm.asked


def test_a_path_is_a_message_and_not_a_command(talk, llm):
    talk("/usr/bin is what?\n/etc/passwd\n")
    assert len(llm.asked) == 2


def test_empty_lines_are_skipped_and_the_end_of_the_pipe_leaves(talk, llm):
    assert talk("\n  \n").status == 0
    assert not llm.asked


def test_a_message_that_cannot_be_answered_leaves_the_conversation_as_it_was(talk, llm):
    done = talk("one\ntoo long\ntwo\n")
    assert done.status == 2
    assert done.err == "error: prompt: 99 tokens; allowed: up to 9\n"
    assert contents(llm.asked[1]) == ["one", "answer to one", "two"]


def test_a_single_message_is_answered_and_nothing_read(talk, llm):
    done = talk("never read\n", "--message", "hello")
    assert (done.status, done.out) == (0, "answer to hello\n")
    assert len(llm.asked) == 1


def test_ctrl_c_stops_the_answer_and_not_the_program(talk, llm):
    def interrupt(number: int) -> None:
        if number == 1 and len(llm.asked) == 1:
            os.kill(os.getpid(), signal.SIGINT)

    llm.on_token = interrupt
    done = talk("one\ntwo\n")
    assert (done.status, done.out, done.err) == (0, "answer to\nanswer to two\n", "[stopped]\n")
    assert contents(llm.asked[1]) == ["one", "answer to", "two"]
    assert llm.closed == 2


def test_a_second_ctrl_c_stops_an_answer_that_has_not_begun(talk, llm):
    def interrupt(number: int) -> None:
        if len(llm.asked) == 1:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    llm.on_token = interrupt
    done = talk("one\ntwo\n")
    assert (done.status, done.out) == (0, "answer to two\n")
    assert contents(llm.asked[1]) == ["two"]


def test_an_answer_cut_by_its_length_says_by_which(talk, llm):
    llm.reason = "length"
    assert talk("one\n", "--max-tokens", "3").err == "[cut off by --max-tokens 3]\n"
    assert talk("one\n").err.startswith(
        "[cut off: the context of 100 tokens is full. /reset begins anew, /keep N drops"
    )


LONG = "x" * 20 + "\n"  # 50 tokens of a turn


def test_a_full_context_says_so_and_offers_what_helps(talk, llm):
    done = talk(LONG + LONG + "y" * 20 + "\n")
    assert done.status == 2
    assert done.err.startswith("error: the context is full: 120 tokens; allowed: up to 99. /reset begins anew, /keep N")
    assert "--keep N" in done.err
    assert len(llm.asked) == 2


def test_the_oldest_turns_go_when_the_context_is_full_but_not_those_to_keep(talk, llm):
    done = talk(LONG + LONG + LONG, "--keep", "0", "--system-prompt", "Be.")
    assert (done.status, done.err) == (0, "[the context is full: the oldest turn is dropped]\n")
    assert [len(asked) for asked in llm.asked] == [2, 4, 4]
    assert contents(llm.asked[2])[0] == "Be."
    llm.asked.clear()
    assert "the context is full: 123 tokens" in talk(LONG + LONG + LONG, "--keep", "2", "--system-prompt", "Be.").err
    assert [len(asked) for asked in llm.asked] == [2, 4]


def test_turns_go_until_an_answer_has_room(talk, llm):
    """A quarter of the context, or what --max-tokens asks for."""
    said = "a\n" * 4 + "x" * 15 + "\n"  # turns of 12 tokens
    done = talk(said, "--keep", "0")
    assert done.err == ""
    assert talk(said, "--keep", "0", "--max-tokens", "99").err == ""
    done = talk("a\n" * 5 + "x" * 20 + "\n", "--keep", "0")
    assert done.err == "[the context is full: the oldest turn is dropped]\n"
    assert talk("a\n" * 5 + "x" * 20 + "\n", "--keep", "0", "--max-tokens", "20").err == ""


def test_what_to_keep_can_be_said_within_the_conversation(talk, llm):
    done = talk(LONG + LONG + "/keep 1\n" + LONG)
    assert (done.status, done.err) == (0, "[the context is full: the oldest turn is dropped]\n")
    assert "/keep two" in talk("/keep two\n").err


def test_a_template_and_tools_come_from_files(talk, llm, tmp_path):
    template, tools = tmp_path / "chat.jinja", tmp_path / "tools.json"
    template.write_text("{{ messages[0].content }}\n")
    tools.write_text('[{"type": "function"}]')
    talk("one\n", "--chat-template", template, "--tools", tools)
    talk("one\n", "--chat-template", "tool_use")
    assert llm.layouts[0] == {"chat_template": "{{ messages[0].content }}\n", "tools": [{"type": "function"}]}
    assert llm.layouts[1] == {"chat_template": "tool_use"}
    message = talk("one\n", "--chat-template", "tools").error()
    assert message.endswith(
        "'tools'; allowed: a file of Jinja, or the name of one of the model's templates (default, tool_use)"
    )


@pytest.mark.parametrize(
    ("option", "text", "says"),
    [
        ("--chat-template", "You are helpful.", "no Jinja in it; allowed: {{ ... }} and {% ... %}"),
        ("--chat-template", None, "'PATH'; allowed: a file of Jinja, or a name"),
        ("--tools", None, "PATH: No such file or directory; allowed: a readable file"),
        ("--tools", "[", "PATH: not valid JSON"),
        ("--tools", '{"name": "f"}', "PATH: {'name': 'f'}; allowed: a list of"),
    ],
)
def test_a_file_that_is_no_template_and_no_tools_is_refused(talk, llm, tmp_path, option, text, says):
    file = tmp_path / "file.txt"
    if text is not None:
        file.write_text(text)
    message = talk("one\n", option, file).error()
    assert message.startswith(f"error: {option}")
    assert says.replace("PATH", str(file)) in message


def test_ctrl_c_acts_as_before_once_an_answer_is_over(talk, llm):
    before = signal.getsignal(signal.SIGINT)
    talk("one\n")
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_ends_a_single_message_with_status_130(talk, llm):
    llm.on_token = lambda number: os.kill(os.getpid(), signal.SIGINT) if number == 1 else None
    done = talk("", "--message", "hello")
    assert (done.status, done.out, done.err) == (130, "answer\n", "")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_ctrl_c_at_the_prompt_drops_the_line_and_ctrl_d_leaves(onewave, llm, monkeypatch):
    said: list[Any] = ["one", KeyboardInterrupt, "two", EOFError]

    def say(prompt: str) -> str:
        line = said.pop(0)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr("builtins.input", say)
    done = onewave("chat")
    assert done.status == 0
    assert [contents(messages)[-1] for messages in llm.asked] == ["one", "two"]
    assert not said


def test_a_pipe_that_is_not_utf_8_is_refused(talk, llm):
    assert "UTF-8" in talk(b"caf\xe9\n").error()


def test_lines_beside_one_that_is_not_utf_8_are_answered_whatever_the_locale(talk, llm):
    done = talk("café\r\n".encode() + b"caf\xe9\ntwo")
    assert done.status == 2
    assert done.out == "answer to café\nanswer to two\n"
    assert done.err == "error: standard input: a line that is not UTF-8\n"
    assert contents(llm.asked[1]) == ["café", "answer to café", "two"]


class Unreadable(io.RawIOBase):
    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        raise OSError(9, "Bad file descriptor")


def test_a_standard_input_that_is_closed_or_can_not_be_read_is_bad_input(onewave, llm, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    assert "standard input is closed" in onewave("chat").error()
    assert onewave("chat", "--message", "hello").out == "answer to hello\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(Unreadable())))
    assert "standard input: can't be read (Bad file descriptor)" in onewave("chat").error()


def test_errors_of_a_template_name_its_option(talk, tiny_model, tmp_path):
    (tmp_path / "chat.jinja").write_text("{{ messages[0].nope.nope }}")
    (tmp_path / "tools.json").write_text('[{"type": "function"}]')
    done = talk("hi\n", "--model", tiny_model, "--chat-template", tmp_path / "chat.jinja")
    assert done.err.startswith("error: --chat-template: failed ('dict object' has no attribute 'nope')")
    done = talk("hi\n", "--model", tiny_model, "--tools", tmp_path / "tools.json")
    assert done.err == "error: --tools: a chat template that reads none. Pass --chat-template for one that does.\n"
    assert done.status == 2


def test_a_real_model_answers_over_a_pipe(talk, tiny_model):
    done = talk("hi\nagain\n", "--model", tiny_model, "--max-tokens", "4", "--stats")
    assert done.status == 0
    assert done.err.count("tokens/s") == 2
    assert done.out
