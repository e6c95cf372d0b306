"""docs/related.md: every command on the page runs and prints what the page says it prints."""

import re
import shlex

import pytest

from kit.paths import ROOT
from onewave.cli import main
from onewave.tiles.search.panels import strip_snake_loads
from onewave.tiles.search.search import search_panels

PAGE = (ROOT / "docs" / "related.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^ *```console\n(.*?)^ *```$", PAGE, re.DOTALL | re.MULTILINE)
WORKS = ("Chimera", "TileFlow", "Welder", "Souffle", "Optimus", "MAESTRO", "BPT", "Stream-K", "cuSync")


def plain(line):
    return " ".join(line.split())


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: plain(block.splitlines()[0])[2:90])
def test_a_command_of_the_page_prints_what_the_page_says(block, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    command, *expected = block.splitlines()
    words = shlex.split(command.strip().removeprefix("$"))
    assert words[0] == "onewave"
    assert expected
    assert main.run(words[1:]) == 0
    printed = [plain(line) for line in capsys.readouterr().out.splitlines()]
    at = 0
    for line in expected:
        assert plain(line) in printed[at:], printed
        at += printed[at:].index(plain(line)) + 1


def test_every_work_has_a_section_with_a_command():
    sections = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE))
    for work in WORKS:
        [body] = [body for title, body in sections.items() if title.startswith(f"{work}:")]
        assert "$ onewave tiles " in body


def test_the_table_of_least_loads_is_what_the_search_proves():
    rows = re.findall(r"^\| (\d)x\d \| (\w+) \|(.+)\|$", PAGE, re.MULTILINE)
    assert len(rows) == 6
    for side, policy, cells in rows:
        for capacity, cell in enumerate(cells.split("|"), start=2):
            size, loads = int(side), int(cell)
            if policy == "formula":
                assert loads == strip_snake_loads(size, size, capacity)
            else:
                found = search_panels(size, size, capacity, policy)
                assert (found.loads, found.proven) == (loads, True)
