"""`onewave chat` in a real terminal: prompt, Ctrl-C, Ctrl-D."""

import os
import select
import subprocess
import sys
import time

import pytest

pty = pytest.importorskip("pty")

PROMPT = b"> "
_TAKE_TERMINAL = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
LONGEST_WAIT_S = 60.0


class Terminal:
    """A program on a pseudo-terminal of ours."""

    def __init__(self, command: list[str]):
        self.master, slave = pty.openpty()
        # Its own session, so that Ctrl-C reaches it as the terminal's foreground process.
        self.process = subprocess.Popen(
            [sys.executable, "-c", _TAKE_TERMINAL + command[0], *command[1:]],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env={**os.environ, "TERM": "dumb"},
        )
        os.close(slave)
        self.seen = b""

    def wait_for(self, text: bytes) -> bytes:
        """Read until this text has come; what came before it."""
        assert self.comes(text, LONGEST_WAIT_S), (text, self.seen)
        before, _, self.seen = self.seen.partition(text)
        return before

    def comes(self, text: bytes, seconds: float) -> bool:
        """Whether this text comes within a time; it stays to be read."""
        end = time.monotonic() + seconds
        while text not in self.seen and time.monotonic() < end:
            if select.select([self.master], [], [], min(1.0, seconds))[0]:
                self.seen += os.read(self.master, 4096)
        return text in self.seen

    def interrupt(self) -> None:
        """Ctrl-C at the prompt, and the next prompt. CPython's readline sees a signal that comes between a key and its
        waiting for the next one only at the next one; so a patient user presses again."""
        for _ in range(round(LONGEST_WAIT_S / 2)):
            self.type(b"\x03")
            if self.comes(PROMPT, 2.0):
                break
        self.wait_for(PROMPT)

    def type(self, text: bytes) -> None:
        os.write(self.master, text)

    def close(self) -> int:
        status = self.process.wait(LONGEST_WAIT_S)
        os.close(self.master)
        return status


def test_ctrl_c_keeps_the_program_and_ctrl_d_ends_it(tiny_model):
    code = "from onewave.cli.main import main; main()"
    terminal = Terminal([code, "chat", "--model", str(tiny_model), "--max-tokens", "60"])
    terminal.wait_for(PROMPT)
    terminal.type(b"hello\n")
    terminal.wait_for(b"\n")
    terminal.type(b"\x03")
    terminal.wait_for(PROMPT)
    terminal.type(b"half a line")
    terminal.wait_for(b"half a line")
    # A terminal drops what was typed and not yet read when Ctrl-C comes.
    terminal.interrupt()
    terminal.type(b"/help\n")
    terminal.wait_for(b"forget the conversation")
    terminal.wait_for(PROMPT)
    terminal.type(b"\x04")
    assert terminal.close() == 0
