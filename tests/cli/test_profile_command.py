"""onewave profile, as a person runs it without a GPU."""

import csv
import json

import pytest

from onewave.weights.fetch.sources import BUILTIN_DIR


@pytest.fixture
def config(tmp_path):
    facts = json.loads((BUILTIN_DIR / "llama-3.2-1b.json").read_text()) | {"num_hidden_layers": 1}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(facts))
    return file


def test_the_rows_are_printed_and_written_as_csv_and_drawn(onewave, config, tmp_path):
    table, drawn = tmp_path / "rows.csv", tmp_path / "roofline.svg"
    sizes = ["--input-len", "64,256", "--batch-size", "1", "--staircase"]
    done = onewave(
        "profile", str(config), "--gpu", "A40", *sizes, "--csv", str(table), "--roofline", str(drawn), "--json"
    )
    assert (done.status, done.err) == (0, "")
    found = json.loads(done.out)
    assert (found["gpu"], found["measured"]) == ("A40", False)
    assert len(found["rows"]) == 2 * 8 + 7
    assert [row["part"] for row in csv.DictReader(table.open())] == [row["part"] for row in found["rows"]]
    assert drawn.read_text().count("<circle") > len(found["rows"])
    assert [stair["m"] for stair in found["staircase"]][:2] == [64, 128]
    assert all(stair["measured_us"] is None for stair in found["staircase"])
    printed = onewave("profile", str(config), "--gpu", "A40", "--input-len", "64").out
    assert "PREDICTED, not measured" in " ".join(printed.split())  # the title wraps where a path is long
    assert "measured us" not in printed
    assert "prefill attention" in printed


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--gpu", ""], "gpu: ''; allowed: H200"),
        (["--gpu", "B200"], "gpu: 'B200'; allowed: H200"),
        (["--gpu", "A40", "--counters"], "--counters: --gpu A40; allowed: on a CUDA GPU"),
        (["--gpu", "A40", "--energy"], "--energy: --gpu A40; allowed: on a CUDA GPU"),
        (["--cluster", "2"], "--cluster: 2; allowed: with --dispatch"),
        (["--input-len", "x"], "--input-len"),
        (
            ["--input-len", "0", "--batch-size", "0"],
            "--input-len, --batch-size: 0; allowed: prompts, decode steps or both",
        ),
        (["--gpu", "A40", "--context", "1" + "0" * 400], "; allowed: 0 to 1,073,741,824"),
        (["--weight-format", "int3"], "--weight-format: 'int3'"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(onewave, config, options, says):
    done = onewave("profile", str(config), *options)
    assert done.status == 2
    assert says in done.err
    assert done.err.count("\n") == 1
