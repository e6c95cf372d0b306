"""The documents: links and ledger citations resolve, and the log keeps its form."""

import re
from functools import lru_cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
SOURCES = [file for room in ("src", "tests") for file in sorted((ROOT / room).rglob("*.py"))]
LOG = [file for file in sorted((ROOT / "docs" / "log").glob("*.md")) if file.name != "README.md"]

_LINK = re.compile(r"\]\(\s*(?!https?:|mailto:)([^)\s]+)\)")
_FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_NUMBER = r"\d+(?!\d|[.,]\d)"
_CITATION = re.compile(rf"(ledger/\w+\.jsonl):({_NUMBER}(?:(?:-|\s*,\s+(?:and\s+)?|\s+and\s+|\s+to\s+){_NUMBER})*)")
_ENTRY = re.compile(r"### (\d{4}-\d\d-\d\d) .+, (kept|not kept|finding)")
MAX_ENTRY_LINES = 8
MAX_LOG_LINES = 500
ELSEWHERE = {"docs/gguf.md"}  # ggml's own page of its format.


def _name(file: Path) -> str:
    return str(file.relative_to(ROOT))


def _anchor(heading: str) -> str:
    """GitHub's anchor of a heading: lower case, punctuation dropped, spaces as hyphens."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")


@lru_cache
def _anchors(page: Path) -> frozenset[str]:
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    return frozenset(_anchor(heading) for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE))


@lru_cache
def _ledger_lines(ledger: str) -> int:
    file = ROOT / ledger
    return len(file.read_text(encoding="utf-8").splitlines()) if file.exists() else 0


def broken_links(page: Path, text: str) -> list[str]:
    """Relative links of a page whose file, or whose heading in it, is not there."""
    found: list[str] = []
    for link in _LINK.findall(_FENCE.sub("", text)):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in _anchors(target)):
            found.append(link)
    return found


def wrong_citations(text: str) -> list[str]:
    """Ledger citations that name a line, or a file, that is not there."""
    return [
        f"{ledger}:{number}"
        for ledger, numbers in _CITATION.findall(text)
        for number in re.findall(r"\d+", numbers)
        if not 1 <= int(number) <= _ledger_lines(ledger)
    ]


def misshapen_entries(text: str) -> list[str]:
    """Entries of a log page that are too long, wrongly headed, or older than the next one."""
    found: list[str] = []
    dates: list[str] = []
    for block in re.split(r"^(?=### )", text, flags=re.MULTILINE)[1:]:
        lines = [line for line in block.splitlines() if line.strip()]
        heading = _ENTRY.fullmatch(lines[0])
        if heading is None or len(lines) < 2 or len(lines) > MAX_ENTRY_LINES:
            found.append(lines[0])
        elif dates and heading[1] > dates[-1]:
            found.append(f"out of order: {lines[0]}")
        if heading:
            dates.append(heading[1])
    return found


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_relative_link_resolves(page: Path) -> None:
    assert broken_links(page, page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_ledger_citation_names_a_line_that_exists(page: Path) -> None:
    assert wrong_citations(page.read_text(encoding="utf-8")) == []


def test_every_document_and_decision_that_code_names_exists() -> None:
    missing: list[str] = []
    for file in SOURCES:
        text = file.read_text(encoding="utf-8")
        if file.is_relative_to(ROOT / "src"):  # Tests also make up citations.
            missing += [f"{_name(file)}: {wrong}" for wrong in wrong_citations(text)]
        named = re.findall(r"(?<![\w/])docs/[\w/-]+\.md\b", text)
        missing += [f"{_name(file)}: {path}" for path in named if path not in ELSEWHERE and not (ROOT / path).exists()]
        missing += [
            f"{_name(file)}: decision {number}"
            for number in re.findall(r"\bdecision (\d{4})\b", text)
            if not list((ROOT / "docs" / "decisions").glob(f"{number}-*.md"))
        ]
    assert missing == []


@pytest.mark.parametrize("page", LOG, ids=_name)
def test_the_log_is_in_short_entries_newest_first(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert misshapen_entries(text) == []
    assert len(text.splitlines()) <= MAX_LOG_LINES
    assert f"]({page.name})" in (page.parent / "README.md").read_text(encoding="utf-8")


def test_broken_links_citations_and_entries_are_found() -> None:
    page = ROOT / "docs" / "log" / "README.md"
    assert broken_links(page, "[a](wave.md) [b](gone.md) [c](wave.md#gone) [d](#log)") == ["gone.md", "wave.md#gone"]
    last = _ledger_lines("ledger/cpu.jsonl")
    assert wrong_citations(f"(ledger/cpu.jsonl:1, 0 and {last} to {last + 1}; ledger/none.jsonl:1)") == [
        "ledger/cpu.jsonl:0",
        f"ledger/cpu.jsonl:{last + 1}",
        "ledger/none.jsonl:1",
    ]
    assert wrong_citations("(ledger/cpu.jsonl:1 and 99.5 us, 1,234 before)") == []
    entries = ["### 2026-01-01 A, kept\n- x\n", "### 2026-01-02 B, kept\n- x\n", "### C, kept\n- x\n"]
    long = "### 2026-01-01 D, finding\n" + "- x\n" * MAX_ENTRY_LINES
    assert misshapen_entries("".join([*entries, long])) == [
        "out of order: ### 2026-01-02 B, kept",
        "### C, kept",
        "### 2026-01-01 D, finding",
    ]
