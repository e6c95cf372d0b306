"""Counters by ncu: what is made of its report, and of a machine that has none."""

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch

from onewave.base.errors import UnsupportedError
from onewave.bench import counters
from onewave.bench.counters import Counters, collect, parse
from onewave.bench.ops import ffn_counters
from onewave.bench.ops.ffn import FFNShape
from onewave.bench.ops.ffn_counters import CountedFFN, count_ffn

# As ncu 2025 on an H200 wrote them, of the first parts of a prompt.
RECORDED = """\
==PROF== Connected to process 608 (/usr/bin/python3.12)
==WARNING== Note: Running with uncontrolled GPU caches. Profiling results may be inconsistent.
==PROF== Disconnected from process 608
"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Device","CC","Section Name","Metric Name","Metric Unit","Metric Value"
"0","608","python3.12","127.0.0.1","range","1","n/a","0","9.0","Command line profiler metrics","dram__bytes_read.sum","byte","54,556,160"
"0","608","python3.12","127.0.0.1","range","1","n/a","0","9.0","Command line profiler metrics","dram__bytes_write.sum","byte","13,400,320"
"0","608","python3.12","127.0.0.1","range","1","n/a","0","9.0","Command line profiler metrics","lts__t_sector_hit_rate.pct","%","46.02"
"1","608","python3.12","127.0.0.1","range","1","n/a","0","9.0","Command line profiler metrics","dram__bytes_read.sum","byte","6,416,896"
"1","608","python3.12","127.0.0.1","range","1","n/a","0","9.0","Command line profiler metrics","dram__bytes_write.sum","byte","0"
"1","608","python3.12","127.0.0.1","range","1","n/a","0","9.0","Command line profiler metrics","lts__t_sector_hit_rate.pct","%","54.34"
"""  # noqa: E501
HEADER = '"ID","Process ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value"'
CPU = torch.device("cpu")


def lines(number: int, read: str, written: str, hits: str) -> list[str]:
    values = zip(counters._METRICS, (read, written, hits), strict=True)
    return [f'"{number}","7","range","Command line profiler metrics","{key}","u","{value}"' for key, value in values]


def report(*ranges: list[str]) -> str:
    return "\n".join(["==PROF== Connected to process 7", HEADER, *(line for each in ranges for line in each)])


RANGES = report(lines(0, "1,200,000", "3,000", "25.5"), lines(1, "5", "0", "100"), ["==PROF== Bye"])


def test_every_range_gives_one_set_in_its_order() -> None:
    assert parse(RANGES) == [Counters(1.2e6, 3e3, 0.255), Counters(5.0, 0.0, 1.0)]
    assert parse(RANGES)[0].dram_bytes == 1_203_000


def test_what_ncu_wrote_of_a_prompt_is_read() -> None:
    found = [(each.dram_read_bytes, each.dram_write_bytes, each.l2_hit_rate) for each in parse(RECORDED)]
    assert found[0] == pytest.approx((54_556_160, 13_400_320, 0.4602))
    assert found[1] == pytest.approx((6_416_896, 0, 0.5434))


def test_a_range_without_all_counters_is_no_set() -> None:
    assert parse(report(lines(0, "n/a", "3", "25"), lines(1, "5", "0", "50"))) == [Counters(5.0, 0.0, 0.5)]
    assert parse("==ERROR== nothing") == []


@pytest.fixture
def fake_ncu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An `ncu` that writes a given report and notes what it was asked to run."""

    def make(text: str, *, says: str = "", status: int = 0) -> Path:
        (tmp_path / "text").write_text(text)
        script = tmp_path / "ncu"
        script.write_text(
            f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/asked\necho "{says}"\n'
            f'while [ $# -gt 0 ]; do [ "$1" = --log-file ] && cp {tmp_path}/text "$2"; shift; done\nexit {status}\n'
        )
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        return tmp_path / "asked"

    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return make


def test_the_module_runs_under_ncu_with_caches_and_clocks_left_alone(fake_ncu: Any) -> None:
    asked = fake_ncu(RANGES)
    assert len(collect("a.module", ["one", "two"])) == 2
    words = asked.read_text().splitlines()
    assert words[-4:] == ["-m", "a.module", "one", "two"]
    for option, value in (("--replay-mode", "app-range"), ("--cache-control", "none"), ("--clock-control", "none")):
        assert words[words.index(option) + 1] == value


def test_a_machine_without_ncu_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UnsupportedError, match=r"no ncu on the PATH.*Install NVIDIA Nsight Compute"):
        collect("a.module", [])


def test_a_refusal_of_the_driver_and_a_failure_are_one_line_each(fake_ncu: Any) -> None:
    fake_ncu("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission")
    with pytest.raises(UnsupportedError, match="no permission to read the counters"):
        collect("a.module", [])
    fake_ncu("", says="onewave: out of luck", status=3)
    with pytest.raises(UnsupportedError, match="status 3: onewave: out of luck"):
        collect("a.module", [])
    fake_ncu("==ERROR== Unexpected number of profiled kernels.\n==WARNING== See the guide", status=1)
    with pytest.raises(UnsupportedError, match="status 1: ==ERROR== Unexpected number"):
        collect("a.module", [])


def counted(ran: list[list[str]], found: list[Counters], monkeypatch: pytest.MonkeyPatch) -> list[CountedFFN]:
    """count_ffn with a made-up run: the names that it would have written down, the counters that ncu would have."""
    shapes = [FFNShape(16), FFNShape(4096, gated=True)]

    def run(module: str, arguments: list[str], **_: object) -> list[Counters]:
        asked = json.loads(arguments[0])
        assert (module, asked["reps"], asked["dtype"]) == ("onewave.bench.ops.ffn_counters", 2, "bfloat16")
        assert [FFNShape(**each) for each in asked["shapes"]] == shapes
        Path(asked["names"]).write_text(json.dumps(ran))
        return found

    monkeypatch.setattr(ffn_counters, "collect", run)
    monkeypatch.setattr(ffn_counters, "check_gpu", lambda device: None)
    return count_ffn(shapes, CPU, torch.bfloat16, reps=2)


def test_repetitions_belong_to_their_arrangement_and_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [Counters(float(i), 1.0, i / 10) for i in range(6)]
    results = counted([["wave", "cuBLAS"], ["chain"]], found, monkeypatch)
    assert [(each.shape.rows, each.implementation) for each in results] == [
        *((16, "wave"), (16, "cuBLAS"), (4096, "chain")),
    ]
    assert results[1].median == Counters(2.5, 1.0, 0.25)
    line = results[2].measurement("bfloat16")
    assert (line.summary.n, line.summary.p50, line.unit) == (2, 5.5, "bytes")
    assert line.extra["l2_hit_rate"] == pytest.approx(0.45)


def test_a_range_that_ncu_lost_is_not_given_to_its_neighbour(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedError, match="5 counted ranges of 6"):
        counted([["wave", "cuBLAS"], ["chain"]], [Counters(1.0, 1.0, 0.5)] * 5, monkeypatch)


def test_the_least_is_weights_and_rows_in_and_out() -> None:
    shape = FFNShape(16)
    assert shape.least_bytes == 2 * (2 * 4096 * 14336 + 2 * 16 * 4096)
    assert CountedFFN(shape, "x", (Counters(shape.least_bytes, shape.least_bytes, 0.5),)).times_least == 2.0
