"""`onewave bench serve` against a tiny model's server, and servers that answer badly."""

import asyncio
import json
from xml.etree import ElementTree

import pytest

pytest.importorskip("fastapi", reason="the server needs onewave[serve]")

from kit.ledgers import read_ledger
from kit.serving import NAME, answering, serve_in_thread, tiny_llm
from onewave.bench.serve import client, load
from onewave.bench.serve.client import Endpoint
from onewave.bench.serve.load import Answer, Level, LevelResult, Limits, _take, ask, run_level
from onewave.bench.serve.workload import Workload

SMALL = ("--input-len", "9", "--output-len", "6", "--vocab-size", "200")
METRICS = ["ttft", "inter_token", "per_token", "end_to_end"]


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    with tiny_llm(tmp_path_factory.mktemp("tiny"), max_num_seqs=4) as llm, serve_in_thread(llm) as serving:
        yield serving.url


def test_each_load_has_its_latencies_in_table_ledger_and_picture(onewave, url, tmp_path):
    files = ("--ledger", tmp_path, "--plot", tmp_path / "picture.svg")
    done = onewave("bench", "serve", "--url", url, *SMALL, "--clients", "1,3", "--conversations", "6", *files)
    assert done.status == 0, done.err
    assert [done.out.count(name) for name in ("1 client ", "3 clients ", "ttft", "end_to_end")] == [1, 1, 2, 2]
    assert [f"{load}: host a step: scheduler" in done.out for load in ("1 client", "3 clients")] == [True, True]
    lines = list(read_ledger(tmp_path / "cpu.jsonl"))
    assert [line["metric"] for line in lines] == METRICS * 2
    assert {line["model"] for line in lines} == {NAME}
    assert [line["extra"]["clients"] for line in lines[::4]] == [1, 3]
    for kind in ("host_us_per_step", "host_cpu_us_per_step"):
        assert all(us > 0 for line in lines for us in line["extra"][kind].values())
    ElementTree.parse(tmp_path / "picture.svg")


@pytest.mark.parametrize(
    ("data", "level", "requests", "prompt"),
    [
        ("random", Level(rate=50.0), 4, 9),
        ("shared-prefix", Level(clients=2), 4, 25),
        ("multi-turn", Level(clients=2), 12, (9 + 24 + 39) / 3),
    ],
)
def test_every_kind_of_data_is_asked_and_every_answer_counted(url, data, level, requests, prompt):
    workload = Workload(NAME, data=data, input_len=9, output_len=6, shared_len=16, turns=3, vocab_size=200)
    for limits, good in ((Limits(first=60.0), requests), (Limits(first=1e-9), 0)):
        result = asyncio.run(run_level(Endpoint.parse(url), workload, level, count=4, limits=limits))
        assert (len(result.answers), len(result.done), result.good) == (requests, requests, good)
        assert [answer.tokens for answer in result.answers] == [6] * requests
        assert sum(answer.prompt_tokens for answer in result.answers) / requests == prompt
        assert all(answer.begun < answer.times[0] <= answer.times[-1] for answer in result.answers)


@pytest.mark.parametrize(("texts", "deltas"), [(["", "", "", ""], 4), (["a", "", "b", ""], 3)])
def test_tokens_without_a_text_are_timed_and_an_end_without_a_token_is_not(texts, deltas):
    answer = Answer(0.0)
    for at, text in enumerate(texts):
        reason = "length" if at == len(texts) - 1 else None
        _take(answer, {"choices": [{"index": 0, "text": text, "finish_reason": reason}]}, 1.0 + at)
    assert len(answer.times) == deltas


def test_first_tokens_of_prompts_that_were_mostly_cached_stand_apart():
    answers = [Answer(0.0, [ms / 1e3], "", 10, 1, cached) for ms, cached in ((1, None), (2, 0), (3, 5), (4, 6))]
    samples = LevelResult(Level(clients=1), Workload(NAME), answers, 1.0, 4).samples()
    assert (samples["ttft"], samples["ttft_cached"]) == ([1.0, 2.0, 3.0, 4.0], [4.0])


def test_clients_use_their_connections_again(url, monkeypatch):
    opened, real = [], asyncio.open_connection

    async def opening(*arguments, **named):
        opened.append(await real(*arguments, **named))
        return opened[-1]

    monkeypatch.setattr(asyncio, "open_connection", opening)
    workload = Workload(NAME, input_len=9, output_len=6, vocab_size=200)

    async def ask_twice():
        async with Endpoint.parse(url).kept_open() as endpoint:
            answers = [await ask(endpoint, workload, talk) for talk in workload.conversations(2, "a")]
            opened[0][1].close()
            answers += [await ask(endpoint, workload, talk) for talk in workload.conversations(1, "b")]
        assert [answer.error for answer in answers] == [None] * 3

    asyncio.run(ask_twice())
    assert len(opened) == 2  # another only where the first was closed


def test_an_answers_time_begins_when_its_request_is_written(url, monkeypatch):
    order = []
    monkeypatch.setattr(load, "to_json", lambda body: order.append("written") or client.to_json(body))
    monkeypatch.setattr(load, "Answer", lambda begun: order.append("begun") or Answer(begun))
    workload = Workload(NAME, input_len=9, output_len=2, vocab_size=200)
    answer = asyncio.run(ask(Endpoint.parse(url), workload, next(workload.conversations(1, "one"))))
    assert (order, answer.error, answer.tokens) == (["written", "begun"], None, 2)


def test_chat_repeats_what_was_said(onewave, url):
    arguments = ("--url", url, "--api", "chat", "--data", "multi-turn", "--turns", "2", "--input-len", "3")
    done = onewave(
        "bench", "serve", *arguments, "--output-len", "4", "--clients", "1", "--conversations", "1", "--json"
    )
    assert json.loads(done.out)["results"][0]["requests"] == 2


EVENTS = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b'HTTP/1.1 429 Too Many\r\nContent-Length: 31\r\n\r\n{"error": {"message": "queue"}}', "status 429: queue"),
        (b"SSH-2.0-other\r\n\r\n", "no answer in HTTP/1"),
        (b"", "Is the server there?"),
        (EVENTS + b"data: {nonsense}\n\n", "an event that is not OpenAI's"),
        (EVENTS + b"data: [DONE]\n\n", "without a token"),
        (
            EVENTS + b'data: {"usage": {"prompt_tokens": 1, "completion_tokens": 1e999}}\n\n',
            "an event that is not OpenAI's",
        ),
        (EVENTS + b'data: {"error": {"message": "broke"}}\n\n', "broke"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n40\r\ndata", "Is the server there?"),
    ],
)
def test_a_server_that_answers_badly_is_one_clear_error(onewave, answer, message):
    with answering(answer) as where:
        assert message in onewave("bench", "serve", "--url", where, "--model", "m").error()


def test_a_server_that_lists_no_model_is_one_clear_error(onewave):
    with answering(b'HTTP/1.1 200 OK\r\nContent-Length: 12\r\n\r\n{"data": []}') as where:
        assert "no model. Name one with --model" in onewave("bench", "serve", "--url", where).error()


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (("--url", "ftp://here"), "--url"),
        (("--url", "\udcff"), "--url"),
        (("--rate", "0"), "--rate"),
        (("--timeout", "nan"), "--timeout"),
        (("--slo-token", "-1"), "--slo-token"),
        (("--clients", "0"), "--clients"),
        (("--data", "other"), "--data"),
        (("--plot", "/nowhere/at/all.svg"), "--plot"),
        (("--url", "http://127.0.0.1:1", "--model", "m"), "http://127.0.0.1:1"),
    ],
)
def test_what_makes_no_sense_is_refused(onewave, option, message):
    assert message in onewave("bench", "serve", *option).error()


@pytest.mark.parametrize("peer", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_throughput_counts_what_many_requests_generate(onewave, tiny_model, tmp_path, peer):
    lengths = ("--input-len", "5", "--output-len", "7", "--requests", "3", "--max-num-seqs", "2", "--reps", "2")
    more = ("--peer",) if peer else ()
    done = onewave("bench", "throughput", "--model", tiny_model, *lengths, "--ledger", tmp_path, "--json", *more)
    found = json.loads(done.out.splitlines()[-1])["results"]
    assert [result["engine"].split()[0] for result in found] == ["onewave", "transformers"][: 1 + peer]
    for result in found:
        assert result["tokens_per_second"] == pytest.approx(3 * 7 / result["seconds"]["p50"])
    lines = list(read_ledger(tmp_path / "cpu.jsonl"))
    assert [(line["metric"], line["n"]) for line in lines] == [("throughput", 2)] * len(found)
    assert lines[0]["extra"]["max_num_seqs"] == 2
    for tokens in ("1", "2"):
        few = ("--input-len", "5", "--output-len", tokens, "--requests", "1", "--reps", "1")
        assert ("host a step" in onewave("bench", "throughput", "--model", tiny_model, *few).out) == (tokens == "2")
    too_long = onewave("bench", "throughput", "--model", tiny_model, "--input-len", "500").error()
    assert "--max-model-len" in too_long or "max_model_len" in too_long
