"""Options of benchmarks, and of `warm`, that make no sense are refused before anything is measured."""

import json

import pytest

from onewave.bench import ceilings


@pytest.fixture
def nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("read_bandwidth", "matmul_rate"):
        monkeypatch.setattr(ceilings, name, lambda *args: pytest.fail("measured all the same"))


@pytest.mark.usefixtures("nothing_is_measured")
@pytest.mark.parametrize("command", ["latency", "ops", "peers", "wave"])
@pytest.mark.parametrize("below", ["", "under/it"])
def test_a_ledger_that_cannot_be_written_is_refused(onewave, tmp_path, command, below):
    (tmp_path / "file").write_text("")
    message = onewave("bench", command, "--ledger", tmp_path / "file" / below).error()
    assert message.startswith(f"error: --ledger: {tmp_path / 'file' / below}")
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


@pytest.mark.usefixtures("nothing_is_measured")
@pytest.mark.parametrize("flag", ["--causal", "--no-causal"])
def test_operators_with_one_mask_take_no_other(onewave, flag):
    message = onewave("bench", "ops", "decode-attention", flag).error()
    assert message.startswith("error: --causal: decode_attention; allowed: attention,")


@pytest.mark.usefixtures("nothing_is_measured")
@pytest.mark.parametrize("option", [["--causal"], ["--logits", "last"]])
def test_the_feed_forward_block_takes_no_option_of_attention(onewave, option):
    assert option[0] in onewave("bench", "ops", "ffn", *option).error()


def test_host_times_have_shapes_of_their_own(onewave, tiny_model):
    message = onewave("bench", "ops", "--host-time", "--batch-size", "2", "--shape", "1,1,1,64").error()
    assert message == "error: --batch-size, --shape: --host-time; allowed: --model, --dtype, --device, --reps"
    flags = ("--host-time", "--reps", "1", "--device", "cpu", "--model", tiny_model)
    assert "allowed: add_rms_norm, append_kv" in onewave("bench", "ops", "wave", *flags).error()
    done = onewave("bench", "ops", "decode-attention", *flags, "--json")
    (found,) = json.loads(done.out)["trials"]
    assert found["operator"] == "decode_attention"
    assert found["ratio"] == pytest.approx(found["us"]["onewave"] / found["us"]["torch"])


@pytest.mark.usefixtures("nothing_is_measured")
@pytest.mark.parametrize("operator", ["attention", "decode-attention", "ffn"])
def test_operators_with_shapes_of_their_own_take_no_decode_steps(onewave, operator):
    message = onewave("bench", "ops", operator, "--batch-size", "1", "--context", "9").error()
    name = operator.replace("-", "_")
    assert message == f"error: --batch-size, --context: {name}; allowed: --shape, for shapes of its own"


def test_no_gpu_has_so_many_sms(onewave):
    assert (
        "'--workers': 1025 is not in the range 1<=x<=1024" in onewave("bench", "predict", "--workers", "1025").error()
    )


def test_kernels_are_compiled_for_a_gpu_and_for_16_bits(onewave):
    assert onewave("warm", "--device", "cpu").error() == (
        "error: warm: cpu; allowed: a CUDA GPU. A CPU's kernels need none."
    )
    assert onewave("bench", "prompt", "--device", "cpu").error() == (
        "error: bench prompt: cpu; allowed: a CUDA GPU. Use bench latency."
    )
    assert onewave("bench", "prompt", "--input-len", "8,0").error() == (
        "error: --input-len: 8,0; allowed: whole numbers from 1"
    )
    assert onewave("warm", "--threads", "0").error().startswith("error: --threads: 0; allowed: a whole number from 1")
    assert onewave("warm", "--dtype", "int3").error().startswith("error: --dtype: 'int3'")


def test_a_step_of_no_sequences_is_refused(onewave):
    assert onewave("bench", "wave", "--batch-size", "1,0").error().startswith("error: --batch-size: 1,0")
