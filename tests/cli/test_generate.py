"""`onewave generate` on a tiny model."""

import io
import json
import os
import subprocess
import sys
from dataclasses import fields

import pytest

from onewave.cli.sampling import GenerateSampling, Sampling
from onewave.engine.grammar.params import StructuredOutputsParams
from onewave.engine.params import SamplingParams


class Pipe(io.TextIOWrapper):
    """Standard input that is no terminal."""

    def __init__(self, data: bytes):
        super().__init__(io.BytesIO(data))


@pytest.fixture
def run(onewave, tiny_model):
    return lambda *arguments: onewave("generate", "--model", tiny_model, "--max-tokens", "6", *arguments)


def test_the_streamed_text_is_the_whole_text(run):
    streamed, whole = run("Hello"), run("Hello", "--no-stream")
    assert streamed.status == whole.status == 0
    assert streamed.out == whole.out != "\n"
    assert streamed.err == ""


def test_json_holds_text_tokens_and_metrics(run):
    done = run("Hello", "--json", "--logprobs", "2")
    result = json.loads(done.out)
    (sample,) = result["outputs"]
    assert result["prompt"] == "Hello"
    assert len(result["prompt_token_ids"]) == 5
    assert len(sample["token_ids"]) == len(sample["logprobs"]) == 6
    assert sample["logprobs"][0][0]["token_id"] == sample["token_ids"][0]
    assert sample["finish_reason"] == "length"
    assert result["metrics"]["num_generation_tokens"] == 6
    assert result["metrics"]["time_to_first_token_s"] > 0


def test_prompts_come_from_a_file_as_a_batch(run, tmp_path):
    (tmp_path / "prompts.txt").write_text("one\n\ntwo\r\nthree")
    lines = run("--prompt-file", tmp_path / "prompts.txt", "--json").out.splitlines()
    assert [json.loads(line)["prompt"] for line in lines] == ["one", "two", "three"]


def test_prompts_come_from_standard_input(run, monkeypatch):
    monkeypatch.setattr(sys, "stdin", Pipe("eins\nzwölf\n".encode()))
    lines = run("--json").out.splitlines()
    assert [json.loads(line)["prompt"] for line in lines] == ["eins", "zwölf"]


def test_json_loses_no_character_where_standard_output_is_not_unicode(tiny_model):
    command = [sys.executable, "-m", "onewave", "generate", "é 日本", "--model", str(tiny_model), "--max-tokens", "2"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([*command, "--json"], env=environment, capture_output=True, check=True)
    assert json.loads(done.stdout)["prompt"] == "é 日本"


@pytest.mark.parametrize("arguments", [[], ["--prompt-file", "-"], ["Hello", "--prompt-file", "-"]])
def test_a_closed_standard_input_is_an_error(run, monkeypatch, arguments):
    monkeypatch.setattr(sys, "stdin", None)
    assert "standard input is closed" in run(*arguments).error()


def test_an_empty_standard_input_is_an_error(run, monkeypatch):
    monkeypatch.setattr(sys, "stdin", Pipe(b""))
    assert "standard input" in run().error()


def test_a_batch_gives_each_prompt_the_text_it_gets_alone(run):
    alone = [json.loads(run(prompt, "--json", "--temperature", "1", "--seed", "7").out) for prompt in ("ab", "cde")]
    batch = run("--prompt", "ab", "--prompt", "cde", "--json", "--temperature", "1", "--seed", "7").out.splitlines()
    assert [json.loads(line)["outputs"] for line in batch] == [one["outputs"] for one in alone]


def test_several_samples_are_told_apart(run):
    done = run("Hello", "--n", "3", "--temperature", "1", "--seed", "1")
    assert [line for line in done.out.splitlines() if line.startswith("--- 'Hello' [")]
    samples = json.loads(run("Hello", "--n", "3", "--temperature", "1", "--seed", "1", "--json").out)["outputs"]
    assert [sample["index"] for sample in samples] == [0, 1, 2]


def test_every_sampling_parameter_has_an_option_of_generate(run):
    assert {each.name for each in fields(GenerateSampling)} == {each.name for each in fields(SamplingParams)}
    text = run("--help").out
    assert all(f"--{each.name.replace('_', '-')}" in text for each in fields(SamplingParams))


def test_options_become_sampling_parameters():
    options = GenerateSampling(
        logit_bias=["15=-100", "3=2.5"],
        stop=[r"\n\t\r\\", r"\u00e9\U0001f600\ud83d\ude00", "end."],
        stop_token_ids=["2,13", "7"],
        seed=7,
        temperature=1.5,
        skip_special_tokens=False,
        detokenize=True,
        structured_outputs='{"choice": ["a", "b"]}',
    )
    assert options.params() == SamplingParams(
        max_tokens=128,
        seed=7,
        temperature=1.5,
        logit_bias={15: -100, 3: 2.5},
        stop=["\n\t\r\\", "é😀😀", "end."],
        stop_token_ids=[2, 13, 7],
        skip_special_tokens=False,
        structured_outputs=StructuredOutputsParams(choice=("a", "b")),
    )
    assert Sampling().params() == SamplingParams(max_tokens=None, temperature=0)


def test_options_reach_the_model(run):
    usual = json.loads(run("Hello", "--json").out)["outputs"][0]
    first, second = usual["token_ids"][:2]
    banned = json.loads(run("Hello", "--json", "--logit-bias", f"{first}=-100").out)["outputs"][0]
    assert banned["token_ids"][0] != first
    stopped = json.loads(run("Hello", "--json", "--stop-token-ids", f"1,{second}").out)["outputs"][0]
    assert (stopped["token_ids"][-1], stopped["stop_reason"]) == (second, second)
    bare = json.loads(run("Hello", "--json", "--no-detokenize").out)["outputs"][0]
    assert (bare["text"], bare["token_ids"]) == ("", usual["token_ids"])


def test_prompt_logprobs_are_printed_for_all_but_the_first_token(run):
    lines = run("Hello", "--prompt-logprobs", "1").out.splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["'e'", "'l'", "'l'", "'o'"]
    found = json.loads(run("Hello", "--prompt-logprobs", "1", "--json").out)["prompt_logprobs"]
    assert [entries and entries[0]["token"] for entries in found] == [None, "e", "l", "l", "o"]


def test_json_lines_hold_prompts_of_several_lines_and_token_ids(run, tmp_path, monkeypatch):
    said = '"one\\ntwo"\n\n{"prompt": "three"}\r\n{"prompt_token_ids": [7, 8]}\n'
    (tmp_path / "prompts.jsonl").write_text(said)
    done = [json.loads(line) for line in run("--prompt-file", tmp_path / "prompts.jsonl", "--json").out.splitlines()]
    assert [each["prompt"] for each in done] == ["one\ntwo", "three", None]
    assert done[2]["prompt_token_ids"] == [7, 8]
    assert "--- [7, 8]" in run("--prompt-file", tmp_path / "prompts.jsonl").out
    monkeypatch.setattr(sys, "stdin", Pipe(said.encode()))
    assert json.loads(run("--prompt-format", "jsonl", "--json").out.splitlines()[0])["prompt"] == "one\ntwo"
    lines = run("--prompt-file", tmp_path / "prompts.jsonl", "--prompt-format", "lines", "--json").out.splitlines()
    assert json.loads(lines[0])["prompt"] == '"one\\ntwo"'


@pytest.mark.parametrize("line", ["one", '""', "[1]", "{}", '{"prompt": "a", "outputs": []}', "7", "null"])
def test_a_line_that_is_no_prompt_in_json_is_named(run, tmp_path, line):
    (tmp_path / "prompts.jsonl").write_text(f'"a"\n\n{line}\n')
    message = run("--prompt-file", tmp_path / "prompts.jsonl").error()
    assert message.startswith(f"error: --prompt-file {tmp_path / 'prompts.jsonl'} line 3: ")


def test_logprobs_are_printed_a_line_a_token(run):
    assert run("Hello", "--logprobs", "1").out.count("(rank 1)") == 6


def test_stats_go_to_stderr(run):
    done = run("Hello", "--stats")
    assert "load" in done.err
    assert "tokens/s" in done.err
    assert "tokens/s" not in done.out


@pytest.mark.parametrize(
    "words", ["generate Hello --max-tokens 60 --model MODEL", "tiles search gemm 512 512 512 --cache-panels 4"]
)
def test_a_reader_that_leaves_ends_text_and_tables_quietly(tiny_model, words):
    command = [sys.executable, "-m", "onewave", *words.replace("MODEL", str(tiny_model)).split()]
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "wb") as closed:
        done = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_model_without_a_tokenizer_takes_anothers(onewave, own_model, tiny_model):
    (own_model / "tokenizer.json").unlink()
    flags = ("--model", own_model, "--max-tokens", "4")
    assert "tokenizer" in onewave("generate", "Hello", *flags).error()
    assert onewave("generate", "Hello", *flags, "--tokenizer", tiny_model).status == 0
