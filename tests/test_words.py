"""The field's words, one for each thing: what the glossary bans stands in no source file and on no page of the docs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EVERYWHERE = {
    r"\bcards?\b": "GPU, device",
    r"\bmultiprocessors?\b": "SM",
    r"\b(?:second|first)-level caches?\b": "L2, L1",
    r"\bcopy engines?\b": "TMA",
    r"\bproducts' unit\b": "wgmma, tensor cores",
    r"\bnotebook of\b|\bwhat was noted\b|\bnoted\b": "task record",
    r"\blikeliest\b": "greedy (argmax), most likely",
    r"\bcompany\b": "batch, batch-mates",
    r"\bvisits\b": "split, KV tiles that a task reads",
    r"\btells? the others\b|\bwho is told\b": "a hand-off, with its kind",
    r"\bwhat is added up\b": "residual stream, partial sums",
    r"\bread otherwise\b": "dequantise, unpack",
    r"\bsees? its batch\b|\bkeeps? its bits\b": "batch-invariant, bitwise equal",
    r"\bcomes? compiled\b": "prebuilt kernels",
}
IN_SOURCE = {
    r"\b(?:somebody|everybody|anybody|nobody)\b": "thread block, warp, partition, caller",
    r"\bwho(?:ever|m)?\b": "the subject itself: thread block, warp, caller, request",
    r"\b_?(?:MOST|FEW)_\w+|\b_?(?:most|few)_(?!common\b|likely\b)[a-z]\w*": "MAX_X, NUM_X, max_x, num_x",
    r"\btaken apart\b": "unpack, widen",
    r"\beasy_\w+|\b\w+_easy\b": "slack",
}
STORY = (
    "bay, where the fog was slowly lifting, and tried to remember whose boat it was and who had taken it out during "
)
# (file, the line's text) -> why it stands.
ALLOWED = {("src/onewave/bench/engine/peers.py", f'"{STORY}"'): "a text that every peer continues"}


def banned(text: str, words: dict[str, str]) -> Iterator[tuple[int, str, str]]:
    """Each (line number, line, what to say) of a text with a banned word. Identifiers are matched with their case."""
    for number, line in enumerate(text.splitlines(), 1):
        for pattern, better in words.items():
            if re.search(pattern, line, re.NOFLAG if "MOST" in pattern else re.IGNORECASE):
                yield number, line.strip(), better


def pages() -> Iterator[tuple[Path, dict[str, str]]]:
    yield from ((file, EVERYWHERE | IN_SOURCE) for file in sorted((ROOT / "src").rglob("*.py")))
    yield from ((file, EVERYWHERE) for file in sorted((ROOT / "docs").rglob("*.md")))
    yield from ((ROOT / name, EVERYWHERE) for name in ("README.md", "CONTRIBUTING.md"))


def found() -> dict[tuple[str, str], str]:
    return {
        (str(file.relative_to(ROOT)), line): f"{file.relative_to(ROOT)}:{number}: say {better}: {line}"
        for file, words in pages()
        for number, line, better in banned(file.read_text(encoding="utf-8"), words)
    }


def test_no_banned_word_stands_in_source_or_docs() -> None:
    assert [text for place, text in found().items() if place not in ALLOWED] == []


def test_every_allowed_line_is_still_there() -> None:
    assert ALLOWED.keys() - found().keys() == set()


@pytest.mark.parametrize(
    "line", ["# on this card", "of a Multiprocessor", "MOST_TILES = 3", "few_words = 1", "whoever waits", "its company"]
)
def test_a_banned_word_is_found(line: str) -> None:
    assert [*banned(line, EVERYWHERE | IN_SOURCE)]


@pytest.mark.parametrize("line", ["whose rows", "discard", "at most 3", "most_common()", "most_likely", "cardinal"])
def test_other_words_are_not(line: str) -> None:
    assert not [*banned(line, EVERYWHERE | IN_SOURCE)]
