"""`tiles verify`: the JSON file, its verdicts and its exit statuses."""

import dataclasses
import json
import time
import tracemalloc

import numpy as np
import pytest
from typer.testing import CliRunner

from kit.task_tables.verify_table import verify_table
from onewave.base.errors import InvalidArgumentError
from onewave.cli.tiles.commands import tiles
from onewave.cli.tiles.verify import verify_command
from onewave.tiles.order.schedule import Csr
from onewave.tiles.proof import schedule_file as verify_file
from onewave.tiles.proof.table import TaskTable


def task(name, reads=(), writes=(), after=(), **more):
    return {"id": name, "reads": list(reads), "writes": list(writes), "after": list(after), **more}


def plan(tasks, workers, co_resident=132, mode="static", **more):
    return {"tasks": tasks, "workers": workers, "co_resident": co_resident, "mode": mode, **more}


def run(tmp_path, data):
    file = tmp_path / "plan.json"
    file.write_text(data if isinstance(data, str) else json.dumps(data))
    return CliRunner().invoke(tiles, ["verify", str(file), "--json"])


def verdict(tmp_path, data):
    result = run(tmp_path, data)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    found = json.loads(result.stdout)
    assert found.keys() == {"ok", "kind", "witness", "message"}
    assert result.exit_code == (0 if found["ok"] else 1)
    assert (found["kind"] is None) == found["ok"]
    return found


CHAIN = [task("a", [], ["x"]), task("b", ["x"], ["y"]), task("c", [], ["u"]), task("d", ["u"], ["v"])]


def test_a_sound_plan_is_verified(tmp_path):
    assert verdict(tmp_path, plan(CHAIN, [["a", "b"], ["c", "d"]]))["ok"]
    assert verdict(tmp_path, plan(CHAIN, [["a", "d"], ["c", "b"]]))["ok"]
    assert verdict(tmp_path, plan([], []))["ok"]


def test_the_crossed_queues_are_a_deadlock_and_all_four_tasks_are_named(tmp_path):
    found = verdict(tmp_path, plan(CHAIN, [["b", "c"], ["d", "a"]]))
    assert found["kind"] == "deadlock"
    assert sorted(found["witness"]["cycle"]) == ["a", "b", "c", "d"]
    assert "b waits for a" in found["message"]
    by_after = [task("a"), task("b", after=["a"]), task("c"), task("d", after=["c"])]
    assert verdict(tmp_path, plan(by_after, [["b", "c"], ["d", "a"]]))["kind"] == "deadlock"


def test_a_cycle_of_after_alone_is_a_deadlock_even_with_a_worker_each(tmp_path):
    found = verdict(tmp_path, plan([task("a", after=["b"]), task("b", after=["a"])], [["a"], ["b"]]))
    assert (found["kind"], sorted(found["witness"]["cycle"])) == ("deadlock", ["a", "b"])
    found = verdict(tmp_path, plan([task("a", after=["a"])], [["a"]]))
    assert (found["kind"], found["witness"]["cycle"]) == ("deadlock", ["a"])


def test_a_task_that_must_run_after_itself_is_a_deadlock_beside_explicit_counters_too(tmp_path):
    found = verdict(tmp_path, plan([task("a", after=["a"], posts=[["c", 1]])], [["a"]]))
    assert (found["kind"], found["witness"]["cycle"]) == ("deadlock", ["a"])
    tasks = [task("a", writes=["x"], posts=[["c", 1]]), task("b", writes=["y"], waits=[["c", 1]])]
    ring = {"name": "r", "slots": 1, "fills": ["a", "b"], "releases": ["b", "b"]}
    found = verdict(tmp_path, plan(tasks, [["a", "b"]], rings=[ring]))
    assert (found["kind"], found["witness"]["cycle"]) == ("deadlock", ["b"])


def test_a_ticket_order_must_be_a_linear_extension(tmp_path):
    assert verdict(tmp_path, plan(CHAIN, [["b", "a", "c", "d"]], mode="ticket"))["kind"] == "deadlock"
    without = plan(CHAIN, None, mode="ticket")
    del without["workers"]
    assert verdict(tmp_path, without)["ok"]


def test_without_a_single_ticket_tickets_are_taken_in_program_order(tmp_path):
    tasks = [task(i, [], [["c", i]]) for i in range(200)]
    assert verdict(tmp_path, plan(tasks, [[i] for i in range(200)], mode="ticket"))["ok"]
    for queues in ([], [[], []]):
        assert verdict(tmp_path, plan(CHAIN, queues, mode="ticket"))["ok"]
        assert verdict(tmp_path, plan(CHAIN, queues))["kind"] == "once"
    assert verdict(tmp_path, plan(CHAIN, [["a"]], mode="ticket"))["kind"] == "once"


def test_a_description_beside_the_plan_is_ignored_and_a_misspelt_key_is_not(tmp_path):
    document = plan(CHAIN, [["a", "b", "c", "d"]])
    assert verdict(tmp_path, document | {"title": "a chain", "version": 1})["ok"]
    assert "unknown key: co_residents" in str(run(tmp_path, document | {"co_residents": 2}).exception)


def test_tickets_give_no_order_by_themselves(tmp_path):
    # One worker's queue orders b before c; by ticket another worker may run c while b still reads.
    tasks = [task("a", [], ["x"]), task("b", ["x"], ["y"]), task("c", [], ["x"])]
    assert verdict(tmp_path, plan(tasks, [["a", "b", "c"]]))["ok"]
    found = verdict(tmp_path, plan(tasks, [["a", "b", "c"]], mode="ticket"))
    assert (found["kind"], found["witness"]["pair"]) == ("race", ["b", "c"])


def test_an_overwrite_that_nothing_orders_after_the_reader_is_a_race(tmp_path):
    tasks = [task("a", [], ["x"]), task("b", ["x"], ["y"]), task("c", [], ["x"], after=["a"])]
    found = verdict(tmp_path, plan(tasks, [["a"], ["b"], ["c"]]))
    assert found["kind"] == "race"
    assert found["witness"] == {"pair": ["b", "c"], "hazard": "WAR", "tile": "x"}
    tasks[2]["after"] = ["b"]
    assert verdict(tmp_path, plan(tasks, [["a"], ["b"], ["c"]]))["ok"]


def test_rings_wait_for_the_release_they_name(tmp_path):
    tasks = [
        *(task(f"load{i}", [], [["w", i]]) for i in range(3)),
        *(task(f"use{i}", [["w", i]], [["y", i]]) for i in range(3)),
        task("also0", [["w", 0]], ["z"]),
    ]
    workers = [["load0", "load1", "load2"], ["use0", "use1", "use2"], ["also0"]]
    ring = {"name": "weights", "slots": 2, "fills": ["load0", "load1", "load2"], "releases": ["also0", "use1", "use2"]}
    # also0 frees the slot, but use0 may still read it.
    found = verdict(tmp_path, plan(tasks, workers, rings=[ring]))
    assert (found["kind"], found["witness"]["pair"]) == ("race", ["use0", "load2"])
    assert found["witness"]["slot"] == "weights slot 0"
    tasks[6]["after"] = ["use0"]
    assert verdict(tmp_path, plan(tasks, workers, rings=[ring]))["ok"]
    assert verdict(tmp_path, plan(tasks, workers, rings=[{**ring, "slots": 1}]))["ok"]
    both = [*tasks, task("both", [["w", 0], ["w", 1]], ["t"])]
    ring = {**ring, "slots": 1, "releases": ["both", "both", "use2"]}
    assert verdict(tmp_path, plan(both, [*workers, ["both"]], rings=[ring]))["kind"] == "deadlock"


def test_buffers_put_two_layers_activations_in_one_place(tmp_path):
    tasks = [
        task("up0", ["x"], ["act0"]),
        task("down0", ["act0"], ["y"]),
        task("side0", ["act0"], ["s"]),
        task("up1", ["y"], ["act1"]),
    ]
    workers = [["up0", "up1"], ["down0"], ["side0"]]
    assert verdict(tmp_path, plan(tasks, workers))["ok"]
    found = verdict(tmp_path, plan(tasks, workers, buffers={"act": ["act0", "act1"]}))
    assert (found["kind"], found["witness"]["pair"], found["witness"]["slot"]) == ("race", ["side0", "up1"], "act")


@pytest.mark.parametrize("count", [1, 3])
def test_a_wait_one_too_low_or_high_is_a_wrong_count(tmp_path, count):
    tasks = [task("a", [], ["x"]), task("b", [], ["y"]), task("c", ["x", "y"], ["z"], wait=2)]
    assert verdict(tmp_path, plan(tasks, [["a"], ["b"], ["c"]]))["ok"]
    tasks[2]["wait"] = count
    found = verdict(tmp_path, plan(tasks, [["a"], ["b"], ["c"]]))
    assert (found["kind"], found["witness"]["expected"], found["witness"]["got"]) == ("count", 2, count)


def test_counters_given_in_full_are_what_counts(tmp_path):
    def counted(value=2, amount=1, wait=True):
        return [
            task("a", [], ["x"], posts=[["k", amount]]),
            task("b", [], ["y"], posts=[{"counter": "k", "amount": 1}]),
            task("c", ["x", "y"], ["z"], waits=[["k", value]] if wait else []),
        ]

    workers = [["a"], ["b"], ["c"]]
    assert verdict(tmp_path, plan(counted(), workers))["ok"]
    for wrong in (counted(value=1), counted(value=3), counted(amount=2), counted(amount=0)):
        found = verdict(tmp_path, plan(wrong, workers))
        assert (found["kind"], found["witness"]["counter"]) == ("count", "k")
    found = verdict(tmp_path, plan(counted(wait=False), workers))
    assert (found["kind"], found["witness"]["hazard"]) == ("race", "RAW")


GOOD = plan([task("a", [], ["x"]), task("b", ["x"])], [["a", "b"]])
BAD = {
    "no JSON": "{",
    "empty": "",
    "a list": "[]",
    "no text": '"tasks"',
    "deep": "[" * 100_000,
    "deep tile": json.dumps(GOOD).replace('"x"', "[" * 900 + "]" * 900),
    "a digit too many": json.dumps(GOOD).replace("132", "9" * 5000),
    "tasks missing": {"workers": [], "co_resident": 1, "mode": "static"},
    "workers missing": {"tasks": [], "co_resident": 1, "mode": "static"},
    "co_resident missing": {"tasks": [], "workers": [], "mode": "static"},
    "tasks an object": {**GOOD, "tasks": {}},
    "a task a text": {**GOOD, "tasks": ["a"]},
    "no id": {**GOOD, "tasks": [{"reads": []}]},
    "id a list": {**GOOD, "tasks": [task(["a"])]},
    "id a truth": {**GOOD, "tasks": [task(True)]},
    "id a fraction": {**GOOD, "tasks": [task(1.5)]},
    "id twice": {**GOOD, "tasks": [task("a"), task("a")]},
    "reads a text": {**GOOD, "tasks": [{"id": "a", "reads": "x"}]},
    "a tile an object": {**GOOD, "tasks": [task("a", [{}])]},
    "a tile null": {**GOOD, "tasks": [task("a", [None])]},
    "after unknown": {**GOOD, "tasks": [task("a", after=["zz"])]},
    "after a list": {**GOOD, "tasks": [task("a", after=[["a"]])]},
    "workers unknown id": {**GOOD, "workers": [["a", "b", "zz"]]},
    "workers flat": {**GOOD, "workers": ["a", "b"]},
    "workers a number": {**GOOD, "workers": 2},
    "workers, more than machines have": {**GOOD, "workers": [["a", "b", "c", "d"]] + [[]] * 65_536},
    "co_resident a text": {**GOOD, "co_resident": "132"},
    "co_resident a fraction": {**GOOD, "co_resident": 1.5},
    "co_resident a truth": {**GOOD, "co_resident": True},
    "co_resident negative": {**GOOD, "co_resident": -1},
    "mode unknown": {**GOOD, "mode": "dynamic"},
    "mode a list": {**GOOD, "mode": []},
    "a key misspelt": {**GOOD, "tasks": [{"id": "a", "read": []}]},
    "a key twice": '{"tasks": [], "tasks": [], "workers": [], "co_resident": 1}',
    "wait a text": {**GOOD, "tasks": [task("a", wait="1"), task("b")]},
    "posts flat": {**GOOD, "tasks": [task("a", posts=["k", 1]), task("b")]},
    "both forms": {**GOOD, "tasks": [task("a", posts=[["k", 1]]), task("b", wait=1)]},
    "ring of no slots": {**GOOD, "rings": [{"name": "r", "slots": 0, "fills": [], "releases": []}]},
    "ring of other lengths": {**GOOD, "rings": [{"name": "r", "slots": 1, "fills": ["a"], "releases": []}]},
    "ring a number": {**GOOD, "rings": 1},
    "buffer of an unknown tile": {**GOOD, "buffers": {"b": ["zz"]}},
    "buffers overlap": {**GOOD, "buffers": {"b": ["x"], "c": ["x"]}},
}


@pytest.mark.parametrize("data", BAD.values(), ids=BAD.keys())
def test_a_bad_file_is_told_in_one_line(tmp_path, data):
    result = run(tmp_path, data)
    assert isinstance(result.exception, InvalidArgumentError)  # the command's main prints it and leaves with 2
    assert "\n" not in str(result.exception)
    assert len(str(result.exception)) < 600
    assert result.stdout == ""


PLAN = {"plan": "decode step", "model": "x", "config": "", "batch": 1, "weights": "16-bit", "queues": [[]]}
PLAN |= dict.fromkeys(("splits", "slices", "held", "ring", "flight", "sooner"), 1)


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("verify", '{"tasks": ['),
        ("verify", '{"tasks": [], "co_resident": 1}'),
        ("verify", '{"plan": "decode step"'),
        ("verify", json.dumps(PLAN | {"ring": -1})),
        ("verify", json.dumps(PLAN)),
        ("simulate", json.dumps(PLAN)),
        ("simulate notation", "tensor"),
        ("simulate notation", "\udcff"),
        ("timeline", "{}"),
        ("simulate gemm 64 64 64 --order", "[[0"),
    ],
)
def test_a_fault_in_a_file_names_the_file(onewave, tmp_path, command, text):
    file = tmp_path / "my.json"
    file.write_text(text, errors="surrogateescape")
    last = f"explicit:{file}" if command.endswith("--order") else str(file)
    done = onewave("tiles", *command.split(), last)
    assert (done.status, done.err.count("\n")) == (2, 1)
    assert str(file) in done.err


def test_files_that_cannot_be_read_are_told_in_one_line(tmp_path, monkeypatch):
    (tmp_path / "latin.json").write_bytes(b'{"tasks": "\xff"}')
    for path in (tmp_path, tmp_path / "latin.json", tmp_path / "missing.json", tmp_path / ("x" * 300)):
        result = CliRunner().invoke(tiles, ["verify", str(path), "--json"])
        assert isinstance(result.exception, InvalidArgumentError)
    monkeypatch.setattr(verify_file, "MAX_FILE_BYTES", 1000)
    result = CliRunner().invoke(tiles, ["verify", "/dev/zero"])
    assert "file size" in str(result.exception)


def test_without_json_a_person_reads_one_line(tmp_path):
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(plan(CHAIN, [["b", "c"], ["d", "a"]])))
    result = CliRunner().invoke(tiles, ["verify", str(file)])
    assert result.exit_code == 1
    assert result.stdout.startswith("rejected: deadlock: ")
    file.write_text(json.dumps(plan(CHAIN, [["a", "b"], ["c", "d"]])))
    assert CliRunner().invoke(tiles, ["verify", str(file)]).stdout.startswith("verified: 4 tasks on 2 workers")


def test_standard_input_is_read_as_a_file():
    result = CliRunner().invoke(tiles, ["verify", "-", "--json"], input=json.dumps(GOOD))
    assert json.loads(result.stdout)["ok"]


def test_a_file_of_a_hundred_thousand_tasks_is_judged_in_seconds(tmp_path):
    # Layers of 100 tasks; each reads two tiles of the layer before and all layers share two buffers in turn.
    width, depth = 100, 1000
    tasks = [
        task(
            f"t{layer}.{i}",
            [[(layer - 1) % 2, i], [(layer - 1) % 2, (i + 1) % width]] if layer else [],
            [[layer % 2, i]],
            [f"t{layer - 1}.{(i - 1) % width}"] if layer else [],
        )
        for layer in range(depth)
        for i in range(width)
    ]
    workers = [[t["id"] for t in tasks[w::width]] for w in range(width)]
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(plan(tasks, workers)))
    began = time.process_time()
    result = CliRunner().invoke(tiles, ["verify", str(file), "--json"])
    assert time.process_time() - began < 60
    assert json.loads(result.stdout)["ok"], result.stdout


def lowered(*arguments):
    return CliRunner().invoke(tiles, ["lower", *map(str, arguments)])


def interpreted(*arguments):
    return CliRunner().invoke(tiles, ["interpret", *map(str, arguments)])


CHAIN_SIZES = ("chain", 64, 32, 64, 64, "--tile", "32x32x32")


@pytest.mark.parametrize("name", ["table.npy", "table.bin"])
@pytest.mark.parametrize("queues", ["static", "ticket"])
def test_a_lowered_table_can_be_read_proved_and_run(tmp_path, name, queues):
    file = tmp_path / name
    result = lowered(*CHAIN_SIZES, "--sync", "row", "--queues", queues, "--workers", 3, "--out", file, "--json")
    facts = json.loads(result.stdout)
    table = TaskTable.load(file) if name.endswith("npy") else TaskTable.from_bytes(file.read_bytes())
    assert (facts["ok"], facts["tasks"], facts["words"]) == (True, 8, len(table.to_words()))
    assert facts["waits"] == len(table.waits.first)
    assert verify_table(table)
    found = json.loads(interpreted(file, "--runs", 50, "--epochs", 2, "--json").stdout)
    assert (found["ok"], found["finished"]) == (True, 50)


def test_a_persons_view_of_lower_and_interpret(tmp_path):
    file = tmp_path / "table.npy"
    result = lowered(*CHAIN_SIZES, "--order", "row-by-row", "--out", file)
    assert "8 tasks, 8 conflicting pairs, all ordered" in result.stdout
    assert interpreted(file).stdout == "100 runs of 8 tasks: 100 ended, 0 got stuck\n"


def test_lower_predicts_every_phase_and_every_workers_idle_time():
    result = lowered(*CHAIN_SIZES, "--workers", 3, "--json")
    found = json.loads(result.stdout)
    assert list(found["seconds"]) == ["build", "verify", "lower", "simulate"]
    predicted = found["prediction"]
    assert [(phase["phase"], phase["tasks"]) for phase in predicted["phases"]] == [("gemm0", 4), ("gemm1", 4)]
    idle, busy = predicted["idle"]["per_worker_ns"], sum(phase["busy_ns"] for phase in predicted["phases"])
    assert len(idle) == 3
    assert sum(idle) + busy == pytest.approx(3 * predicted["makespan_ns"])
    assert predicted["critical_path_ns"] <= predicted["makespan_ns"]
    text = lowered(*CHAIN_SIZES, "--workers", 3).stdout
    assert "idle us of each worker" in text
    assert "gemm1" in text
    assert json.loads(lowered(*CHAIN_SIZES, "--no-simulate", "--json").stdout)["prediction"] is None


def test_lower_runs_several_tokens_on_one_memory():
    once, twice = (json.loads(lowered(*CHAIN_SIZES, "--tokens", n, "--json").stdout) for n in (1, 2))
    assert twice["tasks"] == 2 * once["tasks"]
    # The second token's writers wait for the first one's readers as well.
    assert twice["waits"] > 2 * once["waits"]


@pytest.mark.parametrize(
    ("sizes", "most"), [(("gemm", 8192, 8192, 64), 976), (("gemm", 1024, 1024, 65536), 305)], ids=["tasks", "accesses"]
)
def test_lower_refuses_more_tokens_than_a_graph_has_room_for(sizes, most):
    tracemalloc.start()
    result = lowered(*sizes, "--tokens", 1000, "--no-simulate")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert isinstance(result.exception, InvalidArgumentError)
    assert f"repeated program: 1,000 times {'4,096' if most == 976 else '64'} tasks" in str(result.exception)
    assert f"Run it up to {most} times." in str(result.exception)
    assert peak < 100e6


def test_lower_refuses_more_workers_than_the_device_runs_at_once():
    result = lowered(*CHAIN_SIZES, "--queues", "static", "--workers", 200)
    assert (result.exit_code, result.stdout.startswith("rejected: residency")) == (1, True)
    assert lowered(*CHAIN_SIZES, "--queues", "static", "--workers", 200, "--resident", 200).exit_code == 0


def test_interpret_tells_what_a_broken_table_does(tmp_path):
    file = tmp_path / "table.npy"
    lowered(*CHAIN_SIZES, "--out", file)
    table = TaskTable.load(file)
    none = np.zeros(0, dtype=np.int64)
    broken = dataclasses.replace(table, waits=Csr.build(table.num_tasks, none, none, none))
    file.write_bytes(broken.to_npy())
    result = interpreted(file)
    assert result.exit_code == 1
    assert "went wrong: gemm1#" in result.stdout


BAD_LOWER = [
    *(("gemm", *sizes) for sizes in ((0, 4, 4), (4, 4), (10**9, 10**9, 10**9))),
    ("nothing", 4),
    *((*CHAIN_SIZES, "--workers", count) for count in (0, 10**9)),
    *((*CHAIN_SIZES, "--resident", count) for count in (0, -5, 3_000_000_000)),
    *((*CHAIN_SIZES, "--tokens", count) for count in (0, 10**9)),
    *((*CHAIN_SIZES, option, "nowhere") for option in ("--sync", "--order", "--queues")),
    (*CHAIN_SIZES, "--out", "/nowhere/table.npy"),
]


@pytest.mark.parametrize("arguments", BAD_LOWER)
def test_lower_refuses_bad_input_in_one_line(onewave, arguments):
    onewave("tiles", "lower", *arguments).error()


@pytest.mark.parametrize("name", ["table.npy", "table.bin"])
def test_a_table_that_can_not_be_written_leaves_the_file_that_was_there(tmp_path, monkeypatch, name):
    file = tmp_path / name
    file.write_text("kept")
    monkeypatch.setattr("onewave.tiles.proof.table.MAX_INT32", 10)
    result = lowered(*CHAIN_SIZES, "--out", file)
    assert "task table: a number above 31 bits" in str(result.exception)
    assert file.read_text() == "kept"
    monkeypatch.undo()
    assert lowered(*CHAIN_SIZES, "--out", file).exit_code == 0
    assert interpreted(file).exit_code == 0
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert lowered(*CHAIN_SIZES, "--out", "/dev/null").exit_code == 0


def test_interpret_refuses_bad_input_in_one_line(onewave, tmp_path):
    file = tmp_path / "table.npy"
    lowered(*CHAIN_SIZES, "--out", file)
    (tmp_path / "text.npy").write_text("no table")
    (tmp_path / "zip.npy").write_bytes(b"PK\x03\x04 and no more")
    (tmp_path / "torn.npy").write_bytes(npy_with("("))
    shape = f"({1 << 70},)"
    (tmp_path / "large.npy").write_bytes(npy_with(f"{{'descr': '<i4', 'fortran_order': False, 'shape': {shape}}}"))
    for name in ("missing.npy", "missing.bin", "text.npy", "zip.npy", "large.npy", "torn.npy"):
        onewave("tiles", "interpret", tmp_path / name).error()
    for arguments in (("--runs", 0), ("--runs", 10**9), ("--workers", 0), ("--workers", 10**9), ("--seed", -1)):
        onewave("tiles", "interpret", file, *arguments).error()
    assert str(interpreted(tmp_path / "missing.bin").exception).startswith("task table: ")


def npy_with(header: str) -> bytes:
    """A .npy file of version 1 with a header of one's own and no data."""
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode()


def test_a_closed_standard_input_is_bad_input(monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(InvalidArgumentError, match="standard input is closed"):
        verify_command("-")
