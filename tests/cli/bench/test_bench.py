"""`onewave bench` on a tiny model."""

import json
import re
import sys

import pytest
import torch

from kit.ledgers import read_ledger
from onewave.bench import ceilings
from onewave.bench.engine import latency as engine
from onewave.cli.bench import latency as bench_latency
from onewave.cli.bench import report


@pytest.fixture
def latency(onewave, tiny_model, monkeypatch):
    """Run it with a small read ceiling: the real one needs a buffer far beyond the caches."""
    monkeypatch.setattr(ceilings, "_CPU_READ_BYTES", 2**22)
    flags = ("--input-len", "16", "--output-len", "6", "--reps", "2", "--model", tiny_model)
    return lambda *arguments: onewave("bench", "latency", *flags, *arguments)


def test_the_table_has_a_row_a_test(latency):
    done = latency("--batch-size", "1,2", "--depth", "0,8")
    assert done.status == 0
    assert done.err == ""
    assert [done.out.count(name) for name in ("pp16", "tg6@d8", "tg6")] == [2, 2, 4]
    assert "read ceiling" in done.out
    assert done.out.count("eager") == 4  # tg rows say how they decoded
    assert "±" in done.out


def test_a_row_and_its_line_are_there_as_soon_as_it_is_measured(latency, tmp_path, monkeypatch, capsys):
    measure, printed, lines, figures = engine.measure, [], [], tmp_path / "figures"

    def measured(*given, **more):
        for result in measure(*given, **more):
            printed.append(capsys.readouterr().out)
            lines.append([line["metric"] for line in read_ledger(figures / "cpu.jsonl")] if figures.exists() else [])
            yield result

    monkeypatch.setattr(engine, "measure", measured)
    latency("--ledger", figures)
    assert ["pp16" in text for text in printed] == [False, True]
    assert lines == [[], ["prefill"]]


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_stages_are_told_on_stderr_as_they_begin(latency, tiny_model, form):
    done = latency("--batch-size", "2", *form)
    named = [f"loading {tiny_model}", "loading: weights", "measuring the read ceiling"]
    assert done.stages == [*named, "pp16 batch 2", "tg6 batch 2"]


def test_a_terminal_has_one_line_for_all_that_is_said(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    report.show_status("packing: 1 of 9")
    report.show_status("packing: 2 of 9")
    said = capsys.readouterr().err
    assert re.fullmatch(r"(\r\x1b\[K\[ *\d+\.\d s\] packing: \d of 9){2}", said)


def test_what_takes_long_on_a_cpu_is_said_beforehand(latency, monkeypatch):
    monkeypatch.setattr(bench_latency, "_LONG_S", 0.0)
    assert re.fullmatch(r"up to \d+ s on this CPU; smaller --input-len, .* take less\n", latency().err)


def test_what_was_measured_before_an_error_is_shown(latency, tmp_path):
    done = latency("--batch-size", "1,100000000", "--ledger", tmp_path / "figures")
    assert done.status == 2
    assert "tg" in done.out
    assert done.err.endswith("error: max_num_seqs: 100000000; allowed: a whole number from 1 to 65536\n")
    assert list((tmp_path / "figures").glob("*.jsonl"))


def test_a_gpu_without_memory_keeps_no_figure_back(latency, monkeypatch):
    measure = engine.measure

    def measured(llm, tests, **given):
        if tests[0].batch_size == 2:
            raise torch.OutOfMemoryError("CUDA")
        return measure(llm, tests, **given)

    monkeypatch.setattr(engine, "measure", measured)
    done = latency("--batch-size", "1,2,3")
    assert done.status == 2
    assert "tg6" in done.out
    assert done.err == "error: bench latency: no memory left\n"
    done = latency("--batch-size", "2")
    assert (done.status, done.out, done.err) == (2, "", "error: bench latency: no memory left\n")


def test_json_holds_the_same(latency):
    document = json.loads(latency("--json").out)
    prefill, decode = document["results"]
    assert (prefill["test"], decode["test"]) == ("pp16", "tg6")
    assert decode["tokens_per_second"]["n"] == 2
    assert decode["gigabytes_per_second"] > 0
    assert decode["decode_path"] == "eager"
    assert decode["ceiling_share"] == pytest.approx(decode["gigabytes_per_second"] / document["ceiling"]["value"])
    assert document["ledger"] == []


def test_the_ledger_gets_a_line_a_test(latency, tmp_path):
    done = latency("--ledger", tmp_path / "figures", "--json")
    assert json.loads(done.out)["ledger"] == [f"{tmp_path}/figures/cpu.jsonl:{n}" for n in (1, 2)]
    lines = list(read_ledger(tmp_path / "figures" / "cpu.jsonl"))
    assert [line["metric"] for line in lines] == ["prefill", "decode_step"]
    assert lines[1]["ceiling"]["unit"] == "GB/s"
    assert lines[1]["extra"]["decode_path"] == "eager"


def test_a_models_name_is_shown_as_it_is(latency, own_model):
    named = own_model.rename(own_model.with_name("a[red]b:key:"))
    assert "a[red]b:key:, float32" in latency("--model", named).out


def test_lines_that_cannot_be_written_are_not_lost(latency, tmp_path):
    (tmp_path / "figures" / "cpu.jsonl").mkdir(parents=True)
    done = latency("--ledger", tmp_path / "figures")
    assert done.status == 2
    *lines, error = done.err.splitlines()
    assert [json.loads(line)["metric"] for line in lines] == ["prefill", "decode_step"]
    assert error.startswith(f"error: --ledger {tmp_path}/figures/cpu.jsonl: can't be written")


def test_each_batch_size_says_what_its_own_engine_did(latency, tmp_path, monkeypatch):
    opens = bench_latency.report.open_llm

    def opened(*arguments, **options):
        found = opens(*arguments, **options)
        found.llm.compact = options["max_num_seqs"] == 1  # as on a GPU, where the wave takes few sequences
        return found

    monkeypatch.setattr(bench_latency.report, "open_llm", opened)
    document = json.loads(latency("--batch-size", "1,2", "--ledger", tmp_path / "figures", "--json").out)
    assert [each["compact"] for each in document["results"]] == [True, True, False, False]
    lines = read_ledger(tmp_path / "figures" / "cpu.jsonl")
    assert [line["extra"]["compact"] for line in lines] == [True, True, False, False]
    assert document["load_s"].keys() == {"1", "2"}
    assert latency("--batch-size", "1,2").out.count("eager, compact") == 1


def test_the_ledger_is_in_the_current_directory_by_default(latency, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert latency("--ledger").status == 0
    assert latency("--ledger", "--debug").status == 0
    assert (tmp_path / "ledger" / "cpu.jsonl").exists()


def test_dummy_weights_need_no_checkpoint(latency, onewave, own_model, monkeypatch):
    (own_model / "model.safetensors").unlink()
    done = latency("--model", own_model, "--load-format", "dummy", "--json")
    assert len(json.loads(done.out)["results"]) == 2


def test_peers_that_are_not_there_are_named_and_given_no_figures(onewave, own_model, monkeypatch):
    from onewave.bench.engine import peer_worker

    # transformers would take long to load; whether it is measured rightly is for `bench peers` itself to show.
    monkeypatch.setattr(peer_worker, "PEERS", {"onewave": None, "llama-cpp-python": None})
    done = onewave("bench", "peers", "--model", own_model, "--input-len", "4", "--output-len", "3", "--reps", "1")
    assert done.status == 0
    assert "llama-cpp-python: reads GGUF files only" in done.out
    assert "1.00x" in done.out
    monkeypatch.setattr(peer_worker, "PEERS", {"llama-cpp-python": None})
    done = onewave("bench", "peers", "--model", own_model, "--input-len", "4", "--output-len", "3", "--reps", "1")
    assert done.status == 1
    assert "reads GGUF files only" in done.out


@pytest.mark.parametrize(
    "arguments", [["--output-len", "1"], ["--reps", "0"], ["--threads", "0"], ["--input-len", "500"], ["--dtype", "x"]]
)
def test_a_comparison_that_makes_no_sense_is_refused(onewave, tiny_model, arguments):
    onewave("bench", "peers", "--model", tiny_model, *arguments).error()


def test_a_start_is_timed_in_processes_of_its_own(onewave, tiny_model, tmp_path):
    flags = ("--reps", "1", "--model", tiny_model, "--ledger", tmp_path / "figures", "--max-model-len", "8")
    document = json.loads(onewave("bench", "startup", "--json", *flags).out)
    assert [start["caches"] for start in document["starts"]] == ["empty", "filled"]
    assert all(start["load_s"]["p50"] > 0 and start["decode_path"] == "eager" for start in document["starts"])
    assert len(document["ledger"]) == 4
    (figures,) = (tmp_path / "figures").iterdir()
    facts = [json.loads(line)["extra"] for line in figures.read_text().splitlines()]
    assert {(each["dtype"], each["max_model_len"], each["prompt_tokens"]) for each in facts} == {("float32", 8, 6)}


@pytest.mark.parametrize(
    "arguments", [["--reps", "0"], ["--max-num-seqs", "0"], ["--dtype", "x"], ["--decode", "wave"]]
)
def test_a_start_that_makes_no_sense_is_refused(onewave, tiny_model, arguments):
    onewave("bench", "startup", "--model", tiny_model, *arguments).error()


@pytest.mark.parametrize("arguments", [["--reps", "0"], ["--device", "cpu"], ["--device", "tpu"]])
def test_first_calls_are_a_gpus(onewave, arguments):
    onewave("bench", "warm", *arguments).error()
