"""The ledger: what is written can be read, what is wrong is refused, and every citation has its line."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kit.ledgers import read_ledger
from kit.paths import ROOT
from onewave.base.errors import InvalidArgumentError
from onewave.base.settings import Settings
from onewave.bench import ledger
from onewave.bench.ceilings import Ceiling
from onewave.bench.clock import summarize

# File name and line number, from 1.
CITATION = re.compile(r"ledger/([a-z0-9-]+\.jsonl):(\d+)")
LEDGERS = sorted((ROOT / "ledger").glob("*.jsonl"))
TEXTS = [
    path
    for pattern in ("README.md", "CHANGELOG.md", "docs/**/*.md", "src/**/*.py", "src/**/*.json")
    for path in sorted(ROOT.glob(pattern))
]
SETTINGS = Settings(cache_dir=Path("cache"), num_threads=2, commit="0123abc")


def record(**changes: object) -> dict[str, object]:
    summary = summarize([1.0, 2.0, 3.0])
    ceiling = Ceiling("read bandwidth", 10.0, "GB/s", "by hand", summary)
    measurement = ledger.Measurement("a-model", "decode_step", "ms", summary, ceiling, {"batch_size": 1})
    made = ledger.as_record(measurement, device_name="cpu", command="onewave bench latency", settings=SETTINGS)
    return made | changes


def test_a_record_survives_the_file(tmp_path):
    one, two = record(), record(model="b-model")
    assert ledger.append(tmp_path / "new", one) == "cpu.jsonl:1"
    assert ledger.append(tmp_path / "new", two) == "cpu.jsonl:2"
    assert list(read_ledger(tmp_path / "new" / "cpu.jsonl")) == [one, two]


def test_a_record_says_what_it_ran_on():
    made = record()
    assert made["device"] == "cpu"
    assert made["driver"] is None
    assert made["python"] == ".".join(map(str, sys.version_info[:3]))
    assert made["torch"]
    assert made["n"] == 3
    assert made["ceiling"] == {"name": "read bandwidth", "value": 10.0, "unit": "GB/s", "method": "by hand"}


def test_an_argument_that_is_not_utf8_is_written_escaped(tmp_path):
    command = os.fsdecode(b"onewave bench latency --ledger led\xff")
    ledger.append(tmp_path, record(command=command))
    assert [line["command"] for line in read_ledger(tmp_path / "cpu.jsonl")] == [command]


def test_where_a_line_does_not_fit_the_file_stays_as_it_was(tmp_path):
    one = record()
    ledger.append(tmp_path, one)
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    room = (tmp_path / "cpu.jsonl").stat().st_size + 10
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))  # as a full disk: the line's first 10 bytes fit
    try:
        with pytest.raises(InvalidArgumentError, match="can't be written"):
            ledger.append(tmp_path, record())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(read_ledger(tmp_path / "cpu.jsonl")) == [one]


@pytest.mark.parametrize("found", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_json_does_not_have_is_null(tmp_path, found):
    measured = ledger.Measurement("m", "x", "ms", summarize([1.0]), None, {"max_difference": found, "share": 0.5})
    ledger.append(tmp_path, ledger.as_record(measured, device_name="cpu", command="x", settings=SETTINGS))
    assert next(read_ledger(tmp_path / "cpu.jsonl"))["extra"] == {"max_difference": None, "share": 0.5}


def test_a_line_that_broke_off_does_not_swallow_the_next(tmp_path):
    ledger.append(tmp_path, record())
    path = tmp_path / "cpu.jsonl"
    path.write_bytes(path.read_bytes() + b'{"schema": 1, "comm')
    assert ledger.append(tmp_path, record()) == "cpu.jsonl:3"
    assert json.loads(path.read_text().splitlines()[2])["model"] == "a-model"


def test_processes_that_append_together_lose_nothing(tmp_path):
    (tmp_path / "record.json").write_text(json.dumps(record()))
    code = (
        "import json, sys; from pathlib import Path; from onewave.bench import ledger; d = Path(sys.argv[1]);"
        "r = json.loads((d / 'record.json').read_text()); [ledger.append(d, r) for _ in range(20)]"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path)]) for _ in range(2)]
    assert [writer.wait(60) for writer in writers] == [0, 0]
    assert len(list(read_ledger(tmp_path / "cpu.jsonl"))) == 40


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("schema", 2),
        ("n", 0),
        ("n", 1.5),
        ("commit", ""),
        ("commit", None),
        ("date", "yesterday"),
        ("p50", float("nan")),
        ("p50", "2"),
        ("p20", 99.0),
        ("sd", -1.0),
        ("ceiling", {"name": "read bandwidth"}),
        ("extra", []),
        ("surprise", 1),
    ],
)
def test_a_wrong_field_is_named(tmp_path, field, value):
    with pytest.raises(InvalidArgumentError, match=field):
        ledger.append(tmp_path, record(**{field: value}))
    assert not list(tmp_path.iterdir())


def test_a_missing_field_is_named():
    made = record()
    del made["torch"]
    with pytest.raises(InvalidArgumentError, match="torch"):
        ledger.validate(made, "here")


def test_a_directory_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidArgumentError, match="can't be written"):
        ledger.append(tmp_path / "file", record())


@pytest.mark.parametrize("path", LEDGERS, ids=lambda path: path.name)
def test_every_committed_line_is_valid(path):
    assert list(read_ledger(path))


def test_every_citation_points_at_a_line():
    lengths = {path.name: len(path.read_text().splitlines()) for path in LEDGERS}
    dangling = [
        f"{path.relative_to(ROOT)}: {found.group(0)}"
        for path in TEXTS
        for found in CITATION.finditer(path.read_text())
        if not 1 <= int(found.group(2)) <= lengths.get(found.group(1), 0)
        # The ledger's own description shows what a citation looks like.
        and path != ROOT / "src" / "onewave" / "bench" / "ledger.py"
    ]
    assert not dangling
