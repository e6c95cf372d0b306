"""Where the lab listens, and the command that starts it."""

import re
import signal
import socket
import subprocess
import sys
import urllib.request
import webbrowser

import pytest

pytest.importorskip("fastapi", reason="the lab's server needs onewave[lab]")

from kit.paths import DOCS
from onewave.base.errors import InvalidArgumentError
from onewave.cli import lab as command
from onewave.cli import main
from onewave.lab import serve
from onewave.lab.serve import DEFAULT_PORT, bind, host_names, open_browser, url_of


def test_it_listens_on_loopback_only_unless_told_otherwise(monkeypatch):
    asked = {}
    monkeypatch.setattr(serve, "bind", lambda host, port: asked.update(host=host, port=port) or bind("127.0.0.1", 0))
    monkeypatch.setattr(
        serve, "serve", lambda listening, host, browser: asked.update(browser=browser) or listening.close()
    )
    assert main.run(["lab"]) == 0
    assert asked == {"host": "127.0.0.1", "port": None, "browser": True}
    assert main.run(["lab", "--host", "0.0.0.0", "--port", "9001", "--no-browser"]) == 0
    assert asked == {"host": "0.0.0.0", "port": 9001, "browser": False}


def test_a_taken_default_port_gives_way_to_a_free_one():
    with bind("127.0.0.1", 0) as first:
        taken = first.getsockname()[1]
        with pytest.raises(InvalidArgumentError, match=f"127.0.0.1:{taken}.*Choose another --port"):
            bind("127.0.0.1", taken)
    with pytest.MonkeyPatch.context() as patch, bind("127.0.0.1", 0) as first:
        patch.setattr(serve, "DEFAULT_PORT", first.getsockname()[1])
        with bind("127.0.0.1", None) as second:
            assert second.getsockname()[1] not in (0, first.getsockname()[1])
    assert 1024 < DEFAULT_PORT < 65536


@pytest.mark.parametrize("host", ["no-such-host.invalid", "999.1.1.1", "", "\x00", "a b", "x" * 300])
def test_a_host_that_is_not_this_machine_is_refused(host):
    with pytest.raises(InvalidArgumentError):
        bind(host, 0).close()


def test_an_address_of_another_machine_asks_for_another_host_and_not_for_a_port():
    with pytest.raises(InvalidArgumentError, match=r"192\.0\.2\.1.*Choose a --host"):
        bind("192.0.2.1", 0).close()


def test_the_address_is_one_that_a_browser_here_can_open():
    with bind("127.0.0.1", 0) as listening:
        port = listening.getsockname()[1]
        assert url_of(listening, "127.0.0.1") == f"http://127.0.0.1:{port}/"
        assert url_of(listening, "0.0.0.0") == f"http://127.0.0.1:{port}/"
        assert url_of(listening, "::") == f"http://[::1]:{port}/"
        assert url_of(listening, "::1") == f"http://[::1]:{port}/"
        assert url_of(listening, "localhost") == f"http://localhost:{port}/"


def test_the_machines_own_name_is_answered_to_only_where_it_listens_everywhere():
    assert host_names("127.0.0.1") == {"127.0.0.1"}
    assert host_names("MyBox") == {"mybox"}
    assert socket.gethostname().lower() in host_names("0.0.0.0")


def test_a_browser_inside_the_terminal_is_left_alone(monkeypatch):
    opened = []
    for kind, wanted in ((webbrowser.GenericBrowser, []), (webbrowser.BackgroundBrowser, ["http://x/"])):
        found = kind("some-browser")
        monkeypatch.setattr(found, "open", opened.append)
        monkeypatch.setattr(webbrowser, "get", lambda found=found: found)
        open_browser("http://x/")
        assert opened == wanted

    def none():
        raise webbrowser.Error("no browser")

    monkeypatch.setattr(webbrowser, "get", none)
    open_browser("http://x/")


def test_without_its_extra_the_command_says_in_one_line_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setattr(command, "find_spec", lambda name: None if name == "fastapi" else object())
    assert main.run(["lab"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    install = "pip install -e '.[lab]'"
    assert said.err == f"error: onewave lab: fastapi not installed. In a clone: {install}\n"
    assert install in (DOCS / "lab.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "arguments", [["--port", "65536"], ["--port", "-1"], ["--port", "http"], ["--host", "no.such.invalid"], ["x"]]
)
def test_a_bad_option_is_one_line_and_status_2(arguments, capsys):
    assert main.run(["lab", *arguments]) == 2
    said = capsys.readouterr()
    assert len(said.err.splitlines()) == 1
    assert said.err.startswith("error: ")


def test_the_command_serves_the_page_without_torch_and_ends_with_ctrl_c():
    started = subprocess.Popen(
        [sys.executable, "-m", "onewave", "lab", "--no-browser", "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    found = re.search(r"http://127\.0\.0\.1:\d+/", started.stdout.readline())
    with urllib.request.urlopen(found[0], timeout=60) as page:
        assert b"onewave tile lab" in page.read()
    started.send_signal(signal.SIGINT)
    _, errors = started.communicate(timeout=60)
    assert started.returncode == 130
    assert errors == ""
