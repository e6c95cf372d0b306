"""The attention benchmark: fair rounds, failures that show, and figures that follow from the times."""

import json

import pytest
import torch

from kit.ledgers import read_ledger
from onewave.base.errors import InvalidArgumentError
from onewave.bench import clock
from onewave.bench.ceilings import Ceiling
from onewave.bench.clock import summarize
from onewave.bench.ops import attention as bench
from onewave.bench.ops import attention_engines
from onewave.bench.ops.attention import AttentionShape, Engine, Operands, compare, repetitions
from onewave.cli import main

CPU = torch.device("cpu")
MATMUL = Ceiling("bf16 matmul", 2.0, "TFLOP/s", "none", summarize([2.0]))
READ = Ceiling("read bandwidth", 10.0, "GB/s", "none", summarize([10.0]))


def operands(text="2,4/2,32,16", causal=False):
    return Operands.prefill(AttentionShape.parse(text), causal, CPU, torch.float32)


def run(capsys, *arguments):
    status = main.run(["bench", "ops", "--device", "cpu", *arguments])
    return status, *capsys.readouterr()


def by_torch(o):
    return lambda: torch.nn.functional.scaled_dot_product_attention(o.q, o.k, o.v, is_causal=o.causal, enable_gqa=True)


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("4,16,4096,128", (4, 16, 16, 4096, 128)),
        ("1,32/8,8192,128", (1, 32, 8, 8192, 128)),
        ("1, 2, 3, 8", (1, 2, 2, 3, 8)),
    ],
)
def test_a_shape_is_read_and_printed_as_it_is_written(text, shape):
    parsed = AttentionShape.parse(text)
    assert parsed == AttentionShape(*shape)
    assert str(parsed) == text.replace(" ", "")


@pytest.mark.parametrize("text", ["", "1,2,3", "1,2,3,4,5", "0,2,3,16", "1,3/2,8,16", "a,b,c,d", "1,-2,3,16"])
def test_a_shape_that_makes_no_sense_is_refused_with_an_example(text):
    with pytest.raises(InvalidArgumentError, match="1,32/8,4096,128"):
        AttentionShape.parse(text)


@pytest.mark.parametrize("text", [*bench.PREFILL_SHAPES, *bench.DECODE_SHAPES, *bench.SMALL_PREFILL_SHAPES])
def test_the_built_in_shapes_are_shapes(text):
    assert str(AttentionShape.parse(text)) == text


def test_work_is_counted_as_the_peers_count_it():
    assert operands("1,4/2,32,16").flops == 4 * 4 * 32 * 32 * 16
    assert operands("1,4/2,32,16", causal=True).flops == 2 * 4 * 32 * 32 * 16
    step = Operands.decode(AttentionShape.parse("3,4/2,32,16"), CPU, torch.float32)
    assert step.flops == 4 * 3 * 4 * 32 * 16
    assert step.nbytes == (2 * 3 * 2 * 32 * 16 + 2 * 3 * 4 * 16) * 4


def test_an_engine_that_fails_is_a_result_that_says_why():
    def fail(o):
        raise RuntimeError("no kernel\nfor you")

    results = compare("attention", [Engine("onewave", by_torch), Engine("peer", fail)], operands, rounds=2)
    assert [r.failure for r in results] == [None, "RuntimeError: no kernel for you"]
    assert results[1].seconds is None
    assert results[1].measurement("float32", MATMUL, READ) is None
    assert results[1].details("float32", MATMUL, READ)["tflops"] is None


def test_every_engine_has_its_turn_in_each_round_in_an_order_that_changes():
    turns = []

    def engine(name):
        def prepare(o):
            call = by_torch(o)
            return lambda: (turns.append(name), call())[1]

        return Engine(name, prepare)

    compare("attention", [engine("onewave"), engine("b"), engine("c")], operands, rounds=6)
    # One call for the output, two copies' rotations each to estimate (twice), then warm-up and measurement a round.
    rounds = turns[3 + 12 :]
    order = [rounds[i] for i in range(0, len(rounds), 4)]
    assert all(sorted(order[i : i + 3]) == ["b", "c", "onewave"] for i in range(0, 18, 3))
    assert len({tuple(order[i : i + 3]) for i in range(0, 18, 3)}) > 1


def test_a_recording_of_decode_steps_holds_enough_calls_to_hide_its_own_launch():
    gpu, ours, plain = torch.device("cuda"), Engine("onewave", by_torch), Engine("reference", by_torch, graph=False)
    for copies, times in ((2, 8), (4, 4), (32, 1)):
        assert repetitions("decode_attention", ours, copies, gpu) == times
    assert repetitions("attention", ours, 2, gpu) == 1
    assert repetitions("decode_attention", plain, 2, gpu) == 1
    assert repetitions("decode_attention", ours, 2, CPU) == 1


def test_rates_shares_and_ratios_follow_from_the_times(monkeypatch):
    times = iter([1.0, 1.0, *[2e-6, 3e-6] * 9])
    monkeypatch.setattr(clock, "time_calls", lambda *a, **k: summarize([next(times)]))
    monkeypatch.setattr(clock.random.Random, "shuffle", lambda self, order: None)
    engines = [Engine("onewave", by_torch), Engine("peer", lambda o: lambda: by_torch(o)() + 1)]
    ours, peer = compare("attention", engines, operands, rounds=3)
    # Two copies a repetition.
    assert ours.seconds.p50 == pytest.approx(1e-6)
    assert ours.tflops == pytest.approx(4 * 2 * 4 * 32 * 32 * 16 / 1e-6 * 1e-12)
    assert ours.share(MATMUL, READ) == pytest.approx(ours.tflops / 2)
    assert (ours.ratio, peer.ratio) == (pytest.approx(1), pytest.approx(1.5))
    assert peer.difference == pytest.approx(1)
    line = peer.measurement("float32", MATMUL, READ)
    assert (line.model, line.metric, line.unit, line.ceiling) == ("2,4/2,32,16 full", "attention", "us", MATMUL)
    assert line.extra["onewave_speed_ratio"] == pytest.approx(1.5)


def test_an_engine_that_stores_its_scores_is_not_run_where_they_do_not_fit(monkeypatch):
    engines = [Engine("onewave", by_torch), Engine("reference", by_torch, scores_bytes=16)]
    monkeypatch.setattr(bench, "_CPU_SCORES_BYTES", 1000)
    results = compare("attention", engines, operands, rounds=1)
    assert "its scores take" in results[1].failure


def test_a_peer_that_is_not_installed_or_broken_is_named(monkeypatch):
    def load(name):
        if name == "flash_attn":
            raise OSError("undefined symbol: x")
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(attention_engines, "import_module", load)
    _, notes = attention_engines.decode_engines(CPU)
    assert notes == ["flash-attn 2: flash_attn can't be imported: undefined symbol: x", "flash-attn 3: not installed"]


def test_flash_attention_is_called_with_its_own_layout(monkeypatch):
    class Module:
        @staticmethod
        def flash_attn_func(q, k, v, causal):
            assert q.shape == (2, 32, 4, 16)
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=causal, enable_gqa=True
            ).transpose(1, 2)

        @staticmethod
        def flash_attn_with_kvcache(q, k, v, cache_seqlens, causal, num_splits):
            assert k.shape == (2, 32, 2, 16)
            assert k.is_contiguous()
            return (Module.flash_attn_func(q.expand(-1, 32, -1, -1), k, v, causal=False)[:, :1], None)

    monkeypatch.setattr(attention_engines, "import_module", lambda name: Module)
    engines, notes = attention_engines.decode_engines(CPU)
    chosen = [e for e in engines if e.name in ("onewave", "flash-attn 2", "flash-attn 3")]
    shape = AttentionShape.parse("2,4/2,32,16")
    results = compare("decode_attention", chosen, lambda: Operands.decode(shape, CPU, torch.float32), rounds=1)
    assert notes == []
    assert [r.failure for r in results] == [None] * 3
    assert max(r.difference for r in results) < 1e-5


@pytest.mark.parametrize("operator", ["attention", "decode-attention", "decode_attention"])
def test_the_command_measures_ours_the_reference_and_pytorchs_in_one_run(operator, capsys, tmp_path):
    flags = ("--reps", "1", "--shape", "1,4/2,16,16", "--shape", "2,2,8,32", "--ledger", str(tmp_path))
    status, out, _ = run(capsys, operator, "--json", *flags)
    assert status == 0
    document = json.loads(out)
    rows = {(r["shape"], r["causal"], r["implementation"]): r for r in document["results"]}
    masks = {False, True} if operator == "attention" else {True}
    caches = set() if operator == "attention" else {"onewave, fp8 cache", "onewave, int8 cache"}
    engines = {"onewave", "reference", "torch flash", "torch cuDNN", *caches}
    assert rows.keys() >= {(s, c, e) for s in ("1,4/2,16,16", "2,2,8,32") for c in masks for e in engines}
    for (_, _, engine), row in rows.items():
        if engine == "torch cuDNN":
            assert row["failure"]
        elif engine != "torch flash":
            assert row["failure"] is None
            assert row["max_difference"] < (0.2 if engine in caches else 1e-5)
            assert row["us"] > 0
            assert row["ceiling_share"] > 0
    if caches:
        whole, fp8, int8 = (rows["1,4/2,16,16", True, name]["bytes"] for name in ("onewave", *sorted(caches)))
        assert whole - fp8 == whole - int8 == 2 * 2 * 16 * 16 * 3  # float32 on a CPU: three bytes a number
    lines = list(read_ledger(tmp_path / "cpu.jsonl"))
    assert len(lines) == len(document["ledger"]) == sum(r["us"] is not None for r in rows.values())
    assert {line["metric"] for line in lines} == {operator.replace("-", "_")}


def test_masked_multihead_attention_is_measured_beside_decode_attention_and_agrees(capsys):
    flags = ("--json", "--reps", "1", "--shape", "2,4/2,17,16")
    status, out, _ = run(capsys, "masked_multihead_attention", *flags)
    assert status == 0
    rows = {row["implementation"]: row for row in json.loads(out)["results"]}
    assert rows.keys() == {"onewave", "onewave decode_attention", "reference"}
    assert [row["failure"] for row in rows.values()] == [None] * 3
    assert max(row["max_difference"] for row in rows.values()) < 1e-5
    assert rows["onewave decode_attention"]["onewave_speed_ratio"] > 0


def test_the_table_names_failures_below_it(capsys):
    status, out, _ = run(capsys, "attention", "--causal", "--reps", "1", "--shape", "1,2,16,16")
    assert status == 0
    assert "1,2,16,16 causal torch cuDNN: RuntimeError" in out
    assert "matmul ceiling" in out
    assert "read ceiling" in out
    assert "1.00x" in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["attention", "swiglu"], "command line of its own"),
        (["swiglu", "--shape", "1,2,3,16"], "Name attention first"),
        (["attention", "--shape", "1,2"], "batch,heads"),
        (["attention", "--dtype", "int8"], "dtype"),
        (["atention"], "attention"),
    ],
)
def test_a_command_that_makes_no_sense_is_refused(arguments, says, capsys):
    status, _, err = run(capsys, *arguments)
    assert status == 2
    assert says in " ".join(err.split())


def test_adversarial_logits_have_a_huge_key_or_are_all_larger():
    shape = AttentionShape.parse("2,4/2,40,16")
    made = {
        logits: [torch.manual_seed(0), Operands.prefill(shape, True, CPU, torch.float32, logits)][1]
        for logits in (None, "first", "last", "x16")
    }
    plain = made[None]
    for logits, at in (("first", 0), ("last", 39)):
        others = [row for row in range(40) if row != at]
        assert torch.equal(made[logits].k[:, :, at], 30 * plain.k[:, :, at])
        assert torch.equal(made[logits].k[:, :, others], plain.k[:, :, others])
        assert torch.equal(made[logits].q, plain.q)
    scores, larger = ((o.q[:, :2] @ o.k[:, :1].transpose(-1, -2)) for o in (plain, made["x16"]))
    torch.testing.assert_close(larger, 16 * scores)
    with pytest.raises(InvalidArgumentError, match=r"first, last or a factor such as x16"):
        Operands.prefill(shape, True, CPU, torch.float32, "middle")


def test_a_line_of_adversarial_logits_says_so_and_no_other_operator_takes_them(capsys):
    status, out, _ = run(capsys, "attention", "--shape", "1,2,32,16", "--reps", "1", "--logits", "last", "--json")
    assert status == 0
    assert {row["logits"] for row in json.loads(out)["results"]} == {"last"}
    shape = AttentionShape.parse("1,2,32,16")
    engines = [Engine("onewave", by_torch)]
    made = Operands.prefill(shape, False, CPU, torch.float32, "last")
    line = compare("attention", engines, lambda: made, rounds=1)[0].measurement("float32", MATMUL, READ)
    assert line.model == "1,2,32,16 full logits last"
    status, _, errors = run(capsys, "decode-attention", "--logits", "last")
    assert status == 2
    assert "attention alone" in errors
