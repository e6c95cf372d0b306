"""onewave tiles simulate, bounds and compare, as a person runs them."""

import json
import os
import subprocess
import sys
import threading
import time

import pytest

from onewave.tiles.sim.machine import Machine
from onewave.tiles.sim.trace import Trace

GEMM = ["tiles", "simulate", "gemm", "512", "512", "512", "--tile", "128x128x64"]


def facts(onewave, *arguments):
    done = onewave(*arguments, "--json")
    assert (done.status, done.err) == (0, "")
    return json.loads(done.out)


def test_a_trace_that_does_not_fit_leaves_the_one_before(onewave, tmp_path):
    file = tmp_path / "trace.json"
    facts(onewave, *GEMM, "--trace", str(file))
    before = file.read_bytes()
    code = "import resource as r, sys; r.setrlimit(r.RLIMIT_FSIZE, (1000, 1000)); from onewave.cli.main import run"
    command = [sys.executable, "-c", f"{code}; sys.exit(run(sys.argv[1:]))", *GEMM, "--trace", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "File too large" in done.stderr
    assert (file.read_bytes(), list(tmp_path.iterdir())) == (before, [file])


def test_simulate_prints_tables(onewave):
    done = onewave(
        "tiles", "simulate", "gemm", *["4096"] * 3, "--tile", "128x128x64", "--order", "grouped:8", "--cache", "50MB"
    )
    assert (done.status, done.err) == (0, "")
    for words in ("1,024, 132, 8", "gap to compulsory", "energy (mJ)", "L2: B", "phases"):
        assert words in done.out


def test_simulate_as_json_carries_bytes_waves_idle_energy_and_gaps(onewave):
    found = facts(onewave, *GEMM, "--order", "snake", "--workers", "5", "--cache", "1MB")
    assert (found["tasks"], found["workers"], found["waves"], found["order"]) == (16, 5, 4, "snake")
    assert found["moved_bytes"] == found["loads_bytes"] + found["stores_bytes"]
    assert found["gap"] == pytest.approx(found["moved_bytes"] / found["bound_bytes"] - 1)
    assert {bound["name"] for bound in found["bounds"]} >= {"compulsory", "COSMA"}
    assert len(found["idle"]["per_worker_ns"]) == 5
    assert set(found["energy_mj"]) == {"L2", "memory", "flop"}
    assert found["levels"][0]["hits"] < found["levels"][0]["accesses"] == 16 * 17
    assert found["makespan_ns"] >= found["critical_path_ns"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["chain", "256", "128", "256", "128", "--order", "half-row", "--splits", "2"],
        ["ffn", "256", "128", "256", "--fused", "--order", "critical-path"],
        ["attention", "256", "256", "2", "64", "--causal", "--fused"],
        ["chain", "256", "128", "256", "128", "--sync", "row"],
        ["block", "256", "2", "64", "256", "--order", "bpt", "--kv-heads", "1"],
        ["conv", "1", "14", "14", "32", "64", "--queues", "static"],
        ["gemm", "300", "300", "300", "--order", "stream-k", "--workers", "4"],
        ["gemm", "300", "300", "300", "--level", "smem=228KiB:private", "--skew", "2", "--co-resident", "2"],
        ["gemm", "300", "300", "300", "--mode", "serial", "--policy", "belady", "--cache", "6tiles"],
    ],
    ids=" ".join,
)
def test_every_program_is_simulated(onewave, arguments):
    found = facts(onewave, "tiles", "simulate", *arguments)
    assert found["gap"] >= 0
    assert found["makespan_ns"] > 0


def test_more_cache_or_a_better_policy_never_moves_more(onewave):
    moved = [
        facts(onewave, *GEMM, "--cache", size, "--mode", "serial")["loads_bytes"] for size in ("64KB", "1MB", "50MB")
    ]
    assert moved == sorted(moved, reverse=True)
    lru, best = (facts(onewave, *GEMM, "--cache", "300KB", "--policy", p)["loads_bytes"] for p in ("lru", "belady"))
    assert best <= lru


def test_whole_panels_are_counted_as_in_the_game(onewave):
    found = facts(onewave, *GEMM, "--cache-panels", "3", "--order", "snake", "--policy", "belady")
    assert (found["rows"], found["cols"], found["cache_panels"]) == (4, 4, 3)
    assert found["bound"] <= found["loads"] <= 16 + 4
    assert found["strip_snake"] == 4 + 2 * 4 - 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["4608", "4608", "896", "--cache", "1280KB", "--workers", "4", "--order", "swizzle:4"],
        ["1024", "1024", "1024", "--mode", "serial", "--workers", "8", "--level", "smem=600KiB:private",
         "--cache", "320KiB"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_no_bound_that_applies_is_above_what_was_moved(onewave, arguments):
    found = facts(onewave, "tiles", "simulate", "gemm", *arguments)
    assert found["gap"] >= 0
    assert all(bound["gap"] >= 0 for bound in found["bounds"] if bound["applies"] and bound["gap"] is not None)


def test_names_are_shown_as_they_are_given(onewave, tmp_path):
    done = onewave(*GEMM, "--level", "x[/y][bold]:key:=1MB")
    assert (done.status, done.err) == (0, "")
    assert "x[/y][bold]:key:: A" in done.out
    file = tmp_path / "a[bold]b:key:.txt"
    file.write_text("dim M=64\nop a T[M] = X[M]\ntree for M:16 { a }\n")
    # The title wraps where its folder's name is long.
    assert "a[bold]b:key:.txt,order" in "".join(onewave("tiles", "simulate", "notation", str(file)).out.split())
    trace, named = tmp_path / "trace.json", tmp_path / "named.json"
    facts(onewave, *GEMM, "--trace", str(trace))
    named.write_text(trace.read_text().replace('"gemm"', '"[/gemm]:key:"'))
    assert "[/gemm]:key:" in onewave("tiles", "compare", str(named), str(named)).out


def test_a_fusion_tree_is_simulated_on_its_own_levels(onewave, tmp_path):
    path = tmp_path / "tree.txt"
    path.write_text(
        "dim M=64 N=64\nop a T[M,N] = X[M,N]\nop b Y[M,N] = T[M,N]\n"
        "level smem 8KiB private\nlevel L2 1MB fifo\ntree for M:16 { for N:16 { a b } }\n"
    )
    found = facts(onewave, "tiles", "simulate", "notation", str(path))
    assert [(level["level"], level["policy"]) for level in found["levels"]] == [("smem", "lru"), ("L2", "fifo")]
    done = onewave("tiles", "simulate", "notation", str(path), "--policy", "lru")
    assert (done.status, done.err.count("\n")) == (2, 1)
    assert "--policy: 'lru' for a file that has levels" in done.err
    found = facts(onewave, "tiles", "simulate", "notation", str(path), "--policy", "fifo", "--cache", "1MB")
    assert [(level["level"], level["policy"]) for level in found["levels"]] == [("L2", "fifo")]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
@pytest.mark.parametrize("command", ["simulate", "bounds"])
def test_a_fusion_tree_is_read_once_so_that_a_pipe_will_do(onewave, tmp_path, command):
    pipe = tmp_path / "tree"
    os.mkfifo(pipe)
    text = "dim M=64\nop a T[M] = X[M]\nlevel L2 1MB fifo\ntree for M:16 { a }\n"
    writer = threading.Thread(target=pipe.write_text, args=(text,))
    writer.start()
    assert facts(onewave, "tiles", command, "notation", str(pipe))["program"] == f"notation {pipe}"
    writer.join()


def test_a_trace_is_written_read_back_and_compared(onewave, tmp_path):
    a, b, timeline = (tmp_path / name for name in ("a.json", "b.json", "perfetto.json"))
    found = facts(onewave, *GEMM, "--trace", str(a), "--perfetto", str(timeline), "--workers", "4")
    assert Trace.from_json(a.read_text()).makespan == found["makespan_ns"]
    assert len(json.loads(timeline.read_text())["traceEvents"]) >= 16
    facts(onewave, *GEMM, "--trace", str(b), "--workers", "2")
    rows = facts(onewave, "tiles", "compare", str(a), str(b))["phases"]
    assert [row["phase"] for row in rows] == ["gemm", "total"]
    assert rows[1]["b_span"] > rows[1]["a_span"]
    assert "gemm" in onewave("tiles", "compare", str(a), str(b)).out


def test_the_staircase_counts_waves(onewave):
    found = facts(onewave, "tiles", "staircase", "1024", "256", "--rows", "128:512:128", "--workers", "16")
    assert [(stair["m"], stair["tiles"], stair["waves"]) for stair in found["stairs"]] == [
        (128, 8, 1),
        (256, 16, 1),
        (384, 24, 2),
        (512, 32, 2),
    ]
    assert found["stairs"][2]["time"] > 1.5 * found["stairs"][1]["time"]
    assert "lanes used" in onewave("tiles", "staircase", "1024", "256", "--rows", "128:512:128").out


def test_bounds_know_a_notations_own_caches(onewave, tmp_path):
    tree = "dim M=1024 N=1024 D=512\nop qk S[M,N] += Q[M,D] * K[N,D]\ntree for M:128 { for N:128 { qk } }\n"
    (tmp_path / "a").write_text(f"level L2 1MB fifo\n{tree}")
    (tmp_path / "b").write_text(tree)
    simulated, bound, without = (
        facts(onewave, "tiles", command, "notation", str(tmp_path / name))
        for command, name in (("simulate", "a"), ("bounds", "a"), ("bounds", "b"))
    )
    assert simulated["moved_bytes"] == bound["orders"][0]["moved"] > without["orders"][0]["moved"]


@pytest.mark.parametrize("command", ["bounds", "simulate"])
def test_a_bound_of_0_says_nothing_and_is_left_out(onewave, command):
    for cache, there in (("50MB", False), ("300KB", True)):
        how = ("tiles", command, "gemm", "512", "512", "512", "--cache", cache, "--workers", "5")
        assert ("Smith-van de Geijn" in [bound["name"] for bound in facts(onewave, *how)["bounds"]]) is there
        assert "  0 B  " not in onewave(*how).out.partition("cache levels")[0]


def test_bounds_show_the_gap_of_every_order(onewave):
    found = facts(onewave, "tiles", "bounds", "gemm", "512", "512", "512", "--cache", "1MB", "--workers", "4")
    assert {row["order"] for row in found["orders"]} >= {"row", "snake", "hilbert", "stream-k"}
    assert all(row["gap"] >= 0 for row in found["orders"])
    panels = facts(onewave, "tiles", "bounds", "gemm", "512", "512", "512", "--cache-panels", "3")
    assert panels["unit"] == "panel loads"
    assert "compulsory" in onewave("tiles", "bounds", "decode", "llama-3.2-1b").out


# Words of the error, and the command lines that get it.
BAD = {
    "M: '0'": ["simulate gemm 0 1 1"],
    "larger tiles": [
        "simulate gemm 1000000000 1000000000 1000000000",
        "simulate gemm 32000 32000 1 --tile 1x1x1",
        "simulate attention 1000000000 1000000000",
        "simulate conv 1000000000 1000000000 1000000000 1 1",
        "simulate block 1000000000 64 128 4096",
        "simulate ffn 1000000000 4096 14336",
        "staircase 1000000000 64 --tile 1x1x1",
    ],
    "tiles": ["simulate gemm 1000000000 1000000000 64 --cache-panels 4"],
    "up to 16 sequences": ["simulate decode llama-3.1-8b --batch-size 100000000"],
    "row, column, snake": [f"{command} gemm 64 64 64 --order stream-kaboom" for command in ("simulate", "lower")],
    "rows a band": [f"simulate gemm 64 64 64 --order=grouped:{rows}" for rows in ("0", "1_0", "\u0668")],
    "64tiles": [f"simulate gemm 64 64 64 --cache {count}tiles" for count in ("\u0668", "0", "9" * 5000)],
    "lru, fifo, belady": [
        "simulate gemm 64 64 64 --level smem=228KiB:clock",
        "simulate gemm 64 64 64 --policy clock",
    ],
    "128x128x64": ["simulate gemm 64 64 64 --tile 0x1x1"],
    "50MB": ["simulate gemm 64 64 64 --cache lots"],
    "largest tile": ["simulate gemm 64 64 64 --cache 1KB"],
    "NAME=SIZE": ["simulate gemm 64 64 64 --level smem"],
    "workers": [f"simulate gemm 64 64 64 --workers {count}" for count in (0, 10**9)],
    "serial, wave": ["simulate gemm 64 64 64 --mode x"],
    "ticket, static": ["simulate gemm 64 64 64 --queues x"],
    "bf16": ["simulate gemm 64 64 64 --dtype fp2"],
    "skew": ["simulate gemm 64 64 64 --skew nan"],
    "2 or more": ["simulate gemm 64 64 64 --cache-panels 1"],
    "gemm": ["simulate chain 64 64 64 64 --cache-panels 3"],
    "beside --cache-panels": ["simulate gemm 64 64 64 --cache-panels 3 --trace t.json"],
    "--json beside": ["simulate gemm 64 64 64 --cache-panels 3 --dtype nonsense"],
    "--queues": ["simulate gemm 64 64 64 --cache-panels 3 --queues static"],
    "--workers: '3'": ["simulate gemm 64 64 64 --cache-panels 3 --workers 3"],
    "--tile and --json beside": ["bounds gemm 64 64 64 --cache-panels 3 --batch-size 3"],
    "--cache": ["bounds gemm 64 64 64 --cache-panels 3 --cache 1MB"],
    "gemm: option causal: True; allowed: tile, dtype": ["simulate gemm 64 64 64 --causal"],
    "chain: option kv-heads: 3": ["bounds chain 64 64 64 64 --kv-heads 3"],
    "gemm: option context: 7": ["simulate gemm 64 64 64 --context 7"],
    "ffn: option weight-format: int8": ["bounds ffn 64 64 64 --weight-format int8"],
    "decode: option tile": ["lower decode llama-3.2-1b --tile 64x64x64"],
    "decode MODEL": ["simulate decode"],
    "context: -1": ["simulate decode llama-3.2-1b --context -1"],
    "--weight-format": ["simulate decode llama-3.2-1b --dtype int8"],
    "16-bit, int8, fp8, int4, compact": ["simulate decode llama-3.2-1b --weight-format int3"],
    "compact with bf16": ["simulate decode llama-3.2-1b --weight-format compact --dtype fp16"],
    "can't be read": ["simulate decode /no/such.json"],
    "No such file": ["simulate gemm 64 64 64 --trace /no/such/place.json", "compare /no/a /no/b"],
    "gemm M N K": ["simulate gemm", "bounds gemm 64 64"],
    "llama-3.1-8b": ["simulate decode gpt-9"],
    "from:to:step": [f"staircase 64 64 --rows 1:2{step}" for step in ("", ":" + "3" * 5000)],
    "0 sizes": ["staircase 64 64 --rows 9:1:1"],
    "N: 0": ["staircase 0 64"],
    "K: 99999999999": ["staircase 4096 99999999999"],
    "Missing command": [""],
    "not valid JSON": ["compare /dev/null /dev/null"],
}


@pytest.mark.parametrize(("words", "line"), [(words, line) for words, lines in BAD.items() for line in lines])
def test_bad_input_is_one_line_soon(onewave, words, line):
    began = time.process_time()
    done = onewave("tiles", *line.split())
    assert time.process_time() - began < 10
    assert done.status == 2
    assert done.err.count("\n") == 1
    assert words in done.err
    assert "Traceback" not in done.err


def test_the_help_of_simulate_says_on_what_machine(onewave):
    text = " ".join(onewave("tiles", "simulate", "--help").out.split())
    machine = Machine()
    [level] = machine.levels
    for words in (
        f"{machine.workers} SMs",
        f"{machine.flops_per_ns / 1000:g} TFLOP/s",
        f"{machine.memory_bandwidth:,.0f} GB/s of memory",
        f"{level.capacity / 1e6:g} MB of L2 at {level.bandwidth:,.0f} GB/s",
        f"{machine.task_ns / 1000:g} us on top of each task",
        "--workers deals the same totals out",
    ):
        assert words in text
