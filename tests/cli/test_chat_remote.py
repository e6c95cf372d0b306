"""`onewave chat --url` with a tiny model's server."""

import pytest

pytest.importorskip("fastapi", reason="the server needs onewave[serve]")

from kit.serving import NAME, Serving, answering, serve_in_thread, tiny_llm
from onewave.cli.remote import RemoteModel
from onewave.engine.params import SamplingParams
from onewave.server.options import ServeOptions


@pytest.fixture(scope="module")
def serving(tmp_path_factory):
    options = ServeOptions(model_names=(NAME, "other"), api_keys=("secret",))
    with tiny_llm(tmp_path_factory.mktemp("tiny"), max_num_seqs=2) as llm, serve_in_thread(llm, options) as found:
        yield found


def test_a_server_answers_as_its_model_does_here(onewave, serving: Serving):
    params = SamplingParams(temperature=0.0, max_tokens=12, stop=["\x00"])
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    expected = serving.llm.chat(messages, params)[0].outputs[0].text
    sampling = ("--max-tokens", "12", "--stop", "\\u0000", "--system-prompt", "Be brief.", "--message", "Hello")
    where = ("--url", serving.url, "--api-key", "secret")
    done = onewave("chat", *where, *sampling, "--stats")
    assert (done.status, done.out) == (0, expected + "\n")
    assert done.err.startswith(f"{NAME} at {serving.url}\n")
    assert "12 generated tokens" in done.err
    assert onewave("chat", *where, "--model", "other", *sampling).err.startswith("other at ")


def test_a_conversation_knows_how_much_room_is_left_and_an_answer_may_be_left(serving: Serving):
    model = RemoteModel(serving.url, api_key="secret", name=None, params=SamplingParams(max_tokens=9000), layout={})
    talk = [{"role": "user", "content": "Hello"}]
    room = model.room(talk)
    assert model.room([{"role": "user", "content": "Hello, hello"}]) == room - len(", hello")
    stream = model.stream(talk)
    first = next(said for said in stream if said.delta)
    assert first.finish_reason is None
    stream.close()
    *_, last = RemoteModel(
        serving.url, api_key="secret", name=None, params=SamplingParams(max_tokens=3, ignore_eos=True), layout={}
    ).stream(talk)
    assert last.num_tokens <= 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--api-key", "wrong"), "status 401"),
        (("--api-key", "secret", "--model", "unknown", "--message", "Hi"), "unknown"),
        (("--api-key", "secret", "--dtype", "float32"), "--dtype with --url"),
        (("--api-key", "sécret"), "--api-key"),
    ],
)
def test_what_a_server_or_the_command_refuses_is_one_error(onewave, serving: Serving, options, message):
    assert message in onewave("chat", "--url", serving.url, *options).error()


@pytest.mark.parametrize(("url", "message"), [("http://127.0.0.1:1", "127.0.0.1:1"), ("ftp://here", "--url")])
def test_a_server_that_is_not_there_is_one_error(onewave, url, message):
    assert message in onewave("chat", "--url", url, "--message", "Hi").error()


MODELS = b'HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{"data": [7, {"id": "m", "max_model_len": "8"}]}'
EVENTS = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ([EVENTS + b'{"data": {"id": "m"}}'], "the server lists no model"),
        ([MODELS, EVENTS + b"data: null\n\n"], "Is a server with OpenAI's API there"),
        ([MODELS, EVENTS.replace(b"Connection: close", b"Content-Length: %d" % 10**20)], "Is a server with OpenAI's"),
        ([MODELS, EVENTS + b"data: " + b"[" * 100_000 + b"\n\n"], "Is a server with OpenAI's API there"),
        ([MODELS, EVENTS + b'data: {"choices": 5}\n\n'], "Is a server with OpenAI's API there"),
        ([MODELS, EVENTS + b'data: {"usage": {"completion_tokens": "x"}}\n\n'], "Is a server with OpenAI's API there"),
    ],
)
def test_a_server_that_answers_badly_is_one_error(onewave, answers, message):
    with answering(*answers) as url:
        done = onewave("chat", "--url", url, "--message", "Hi")
    assert (done.status, done.out) == (2, "")
    assert message in done.err.splitlines()[-1]


def test_a_server_that_does_not_count_tokens_is_talked_to_all_the_same(onewave):
    models = MODELS.replace(b'"8"', b"8")
    event = EVENTS + b'data: {"choices": [{"delta": {"content": "Yes."}}], "usage": {"completion_tokens": 2}}\n\n'
    with answering(models, b"HTTP/1.1 404 Not Found\r\nConnection: close\r\n\r\n", event) as url:
        assert onewave("chat", "--url", url, "--message", "Hi", "--max-tokens", "5").out == "Yes.\n"
