"""onewave tiles search, as a person runs it."""

import json
import time

import pytest

from kit.processes import count_looks
from onewave.models import plan_search
from onewave.tiles.search import local, search, tree
from onewave.tiles.search.panels import panel_loads
from onewave.weights.fetch.sources import BUILTIN_DIR

SEARCH = ["tiles", "search", "gemm"]
GRID = ["512", "512", "512", "--tile", "128x128x64"]


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """Time limits are numbers of looks at the clock: 1000 a second, of plans ten."""
    count_looks(monkeypatch, 1e-3, local, search, tree)
    count_looks(monkeypatch, 0.1, plan_search)


def test_search_as_json_has_loads_bound_proof_and_an_order_that_replays(onewave):
    done = onewave(*SEARCH, *GRID, "--cache-panels", "4", "--json")
    assert (done.status, done.err) == (0, "")
    found = json.loads(done.out)
    assert (found["loads"], found["bound"], found["proven"]) == (10, 10, True)
    assert found["order"][0] == [0, 0]
    assert sorted(found["order"]) == [[row, col] for row in range(4) for col in range(4)]
    assert panel_loads(4, 4, found["order"], 4, "belady") == 10


def test_sizes_are_elements_and_ragged_edges_count_as_tiles(onewave):
    done = onewave(*SEARCH, "300", "520", "64", "--tile", "100x130x64", "--cache-panels", "3", "--json")
    found = json.loads(done.out)
    assert (found["rows"], found["cols"]) == (3, 4)
    assert (
        onewave(*SEARCH, "301", "521", "64", "--tile", "100x130", "--cache-panels", "3", "--json").out.count("[") > 20
    )


@pytest.mark.parametrize("method", ["exact", "beam", "local", "auto"])
def test_every_method_and_policy_is_reachable(onewave, method):
    options = ["--policy", "LRU", "--start", "3,1", "--method", method, "--time-limit", "0.3"]
    found = json.loads(onewave(*SEARCH, *GRID, "--cache-panels", "5", *options, "--json").out)
    assert (found["policy"], found["method"], found["order"][0]) == ("lru", method, [3, 1])
    assert found["bound"] <= found["loads"] == panel_loads(4, 4, found["order"], 5, "lru")


def test_people_get_the_proof_the_history_and_the_path(onewave):
    done = onewave(*SEARCH, *GRID, "--cache-panels", "4", "--policy", "opt")
    assert (done.status, done.err) == (0, "")
    for words in ("4 x 4 tiles, room for 4 panels", "10, proven least", "strip snake", "A*", "when each tile is"):
        assert words in done.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([*GRID], "--cache-panels"),
        ([*GRID, "--cache-panels", "three"], "'three' is not a valid int"),
        ([*GRID, "--cache-panels", "3", "--policy", "fifo"], "belady, lru"),
        ([*GRID, "--cache-panels", "3", "--start", "4,0"], "inside the 4 x 4 grid"),
        ([*GRID, "--cache-panels", "3", "--start", "1"], "ROW,COLUMN"),
        (["512", "512", "--cache-panels", "3"], "gemm M N K"),
        (["0", "512", "512", "--cache-panels", "3"], "1 or more"),
        (["512", "512", "512", "--tile", "128x0x64", "--cache-panels", "3"], "tile"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_gets_one_clear_line(onewave, arguments, words):
    assert words in onewave(*SEARCH, *arguments).error()


def test_only_products_are_searched(onewave):
    assert "gemm" in onewave("tiles", "search", "ffn", "1", "2", "3", "--cache-panels", "3").error()


def test_a_4x4_grid_is_proven_in_five_seconds_of_one_core(onewave):
    began = time.process_time()
    done = onewave(*SEARCH, *GRID, "--cache-panels", "3", "--policy", "lru", "--json")
    assert time.process_time() - began < 5
    found = json.loads(done.out)
    assert (found["loads"], found["proven"]) == (17, True)


RELATED = {
    "fuse": ["ffn", "256", "128", "256", "--cache", "1MB"],
    "place": ["ffn", "256", "128", "256", "--level", "smem=64KiB:private", "--level", "L2=1MB"],
    "sync": ["ffn", "256", "128", "256", "--workers", "3"],
    "reuse": ["block", "256", "2", "64", "256", "--order", "bpt"],
    "chimera": ["256", "64", "64", "256", "--cache", "64KiB"],
}


@pytest.mark.parametrize(("command", "arguments"), RELATED.items(), ids=RELATED)
def test_related_searches_print_tables_and_json(onewave, command, arguments):
    done = onewave("tiles", command, *arguments)
    assert (done.status, done.err) == (0, "")
    assert len(done.out.splitlines()) > 5
    found = json.loads(onewave("tiles", command, *arguments, "--json").out)
    numbers = {
        "fuse": found.get("moved_bytes"),
        "place": sum(found.get("traffic_bytes", {}).values()) == found.get("unplaced_bytes"),
        "sync": found.get("syncs") == len(found.get("before", "")),
        "reuse": found.get("live_peak_bytes"),
        "chimera": found.get("best", {}).get("simulated_bytes"),
    }
    assert numbers[command]


def test_a_chain_of_too_many_blocks_is_counted_but_not_simulated(onewave):
    found = json.loads(onewave("tiles", "chimera", *["8192"] * 4, "--cache", "8KiB", "--json").out)
    assert found["best"]["simulated_bytes"] is None
    assert found["best"]["predicted_bytes"] <= found["closed_form"]["predicted_bytes"]
    assert "not run" in onewave("tiles", "chimera", *["8192"] * 4, "--cache", "8KiB").out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["fuse", "nothing", "1"], "gemm, chain"),
        (["fuse", "ffn", "256", "128", "256", "--cache", "1B"], "largest tile"),
        (["fuse", "ffn", "256", "128", "256", "--policy", "luck"], "lru, fifo, belady"),
        (["fuse", "decode", "llama-3.2-1b"], "up to 12"),
        (["place", "ffn", "256", "128", "256", "--level", "smem"], "NAME=SIZE[:private]"),
        (["place", "ffn", "256", "128", "256", "--level", "a=1MB", "--level", "a=2MB"], "different names"),
        (["place", "ffn", "256", "128", "256", "--workers", "0"], "workers"),
        (["sync", "ffn", "256", "128", "256", "--map", "luck"], "follow, deal, row, column"),
        (["sync", "ffn", "256", "128"], "ffn M HIDDEN INTERMEDIATE"),
        (["reuse", "gemm", "256", "256", "256", "--order", "luck"], "snake"),
        (["chimera", "256", "256", "256", "0"], "L"),
        (["chimera", "256", "256", "256", "256", "--cache", "100B"], "or more"),
        (["chimera", "256", "256", "256", "256", "--dtype", "fp1"], "bf16"),
        (["chimera", "99999999", "256", "256", "256"], "65,536"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_to_related_searches_gets_one_clear_line(onewave, arguments, words):
    assert words in onewave("tiles", *arguments).error()


def test_search_decode_writes_plans_and_refuses_the_other_programs_options(onewave, tmp_path):
    config, out = tmp_path / "config.json", tmp_path / "plans"
    facts = json.loads((BUILTIN_DIR / "llama-3.2-1b.json").read_text())
    config.write_text(json.dumps(facts | {"num_hidden_layers": 1, "vocab_size": 640}))
    command = ["tiles", "search", "decode", str(config), "--workers", "8", "--time-limit", "2", "--keep", "1"]
    done = onewave(*command, "--out", str(out), "--json")
    assert (done.status, done.err) == (0, "")
    assert [plan["plan"] for plan in json.loads(done.out)["plans"]] == ["plan1"]
    assert "verified: a step of" in onewave("tiles", "verify", str(out / "plan1.json")).out
    assert "a step, by costs fitted" in onewave("tiles", "simulate", str(out / "plan1.json")).out
    for wrong in ([*command, "--cache-panels", "4"], [*SEARCH, *GRID, "--cache-panels", "4", "--batch-size", "2"]):
        assert onewave(*wrong).status == 2
    for limit in ("0", "nan", "inf"):
        assert "--time-limit" in onewave(*command, "--time-limit", limit).error()
    assert "--apart" in onewave(*command, "--apart", "nan").error()
    assert f"--out: {out / 'plan1.json'}" in onewave(*command, "--out", str(out)).error()
    assert f"--out: {config}: File exists" in onewave(*command, "--out", str(config)).error()
