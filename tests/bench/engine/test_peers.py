"""Comparing engines: a worker that speaks the protocol stands in for each of them."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from onewave.bench.engine import peers
from onewave.bench.engine.peers import Job, compare, text_prompts

JOB = Job(path="model.gguf", kind="gguf", dtype="float32", device="cpu", threads=1, prompt_tokens=4, output_tokens=3)
PROMPTS = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]

WORKER = """
import json, sys
job = json.loads(sys.stdin.readline())
def answer(value): print(json.dumps(value), flush=True)
peer = job["peer"]
if peer == "absent": answer({"missing": "a_library"})
elif peer == "llama-cpp-python": answer({"missing": "llama_cpp"})
elif peer == "chatty": print("activating environment", flush=True)
elif peer == "dead": print("out of luck", file=sys.stderr); sys.exit(3)
else:
    answer({"ready": True, "version": "1.0", "load_s": 0.1})
    speed = {"onewave": 1.0, "slow": 4.0, "mortal": 1.0}[peer]
    for number, line in enumerate(sys.stdin):
        order = json.loads(line)
        if peer == "mortal" and number == 1: sys.exit(1)
        ids = [order["prompt"][0], 7, 7 if peer == "onewave" else 8]
        answer({"prefill_s": 0.1 * speed, "decode_s": 0.2 * speed * (10 if number == 0 else 1), "token_ids": ids})
"""


@pytest.fixture(autouse=True)
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "worker.py"
    path.write_text(WORKER)
    monkeypatch.setattr(peers, "_WORKER", path)
    monkeypatch.setattr(peers, "_MODULES", peers._MODULES | {"absent": "a_library"})


def test_rates_and_ratios_leave_the_warm_up_out():
    ours, slow = compare(JOB, ["onewave", "slow"], PROMPTS)
    assert ours.decode.p50 == pytest.approx(2 / 0.2)
    assert slow.decode.p50 == pytest.approx(2 / 0.8)
    assert slow.prefill.p50 == pytest.approx(4 / 0.4)
    assert (ours.ratio, slow.ratio, slow.prefill_ratio) == (1.0, pytest.approx(4.0), pytest.approx(4.0))
    assert slow.decode.n == 2


def test_tokens_are_compared_up_to_the_first_that_differs():
    _, slow = compare(JOB, ["onewave", "slow"], PROMPTS)
    assert (slow.same_tokens, slow.num_tokens) == (2, 3)


def test_an_engine_that_is_not_there_is_said_to_be_missing():
    _, absent, llama = compare(JOB, ["onewave", "absent", "llama-cpp-python"], PROMPTS)
    assert (absent.absent, absent.decode, absent.ratio) == ("not installed", None, None)
    assert llama.absent == "not installed"


def test_an_engine_that_dies_is_said_to_have_failed_with_its_last_words():
    _, dead = compare(JOB, ["onewave", "dead"], PROMPTS)
    assert dead.absent == "failed: exit status 3, out of luck"


def test_an_engine_that_prints_something_else_has_failed_with_it():
    ours, chatty = compare(JOB, ["onewave", "chatty"], PROMPTS)
    assert ours.decode is not None
    assert chatty.absent == "failed: answered 'activating environment'"


def test_an_engine_that_dies_half_way_leaves_no_figures():
    ours, mortal = compare(JOB, ["onewave", "mortal"], PROMPTS)
    assert ours.decode is not None
    assert mortal.decode is None
    assert mortal.absent == "failed: exit status 1"


def test_without_ours_the_others_have_no_ratio():
    _, slow = compare(JOB, ["dead", "slow"], PROMPTS)
    assert slow.decode is not None
    assert slow.ratio is None


def test_an_interpreter_that_cannot_be_run_is_said_so():
    _, slow = compare(JOB, ["onewave", "slow"], PROMPTS, pythons={"slow": "/no/such/python"})
    assert "can't be run" in slow.absent


def test_llama_cpp_reads_gguf_files_only():
    job = Job(path="m", kind="hf", dtype="float32", device="cpu", threads=1, prompt_tokens=4, output_tokens=3)
    _, llama = compare(job, ["onewave", "llama-cpp-python"], PROMPTS)
    assert llama.absent == "reads GGUF files only"


def test_prompts_are_different_pieces_of_one_text():
    tokenizer = SimpleNamespace(encode=lambda text, add_special_tokens: list(range(17)))
    prompts = text_prompts(tokenizer, tokens=40, count=3)
    assert [len(prompt) for prompt in prompts] == [40, 40, 40]
    assert prompts[0][:3] == [0, 1, 2]
    assert prompts[1][:3] == [5, 6, 7]


def test_the_real_worker_measures_this_engine(monkeypatch, smollm2_path):
    monkeypatch.setattr(peers, "_WORKER", Path(peers.__file__).with_name("peer_worker.py"))
    job = Job(str(smollm2_path), "gguf", "float32", "cpu", threads=2, prompt_tokens=4, output_tokens=3)
    (ours,) = compare(job, ["onewave"], PROMPTS, pythons={"onewave": sys.executable})
    assert ours.absent is None
    assert ours.decode is not None
    assert ours.load_s is not None
    assert ours.same_tokens == 3
