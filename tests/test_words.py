"""The field's words, one for each thing: what the glossary bans stands in no source, test or page of the docs."""

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
    r"\bwhat (?:was|is) noted\b|\bnoted\b": "task record",
    r"\blikeliest\b": "greedy (argmax), most likely",
    r"\bcompany\b": "batch, batch-mates",
    r"\bvisits\b|\bvisited\b": "split, KV tiles that a task reads",
    r"\btokens? (?:that )?(?:is|are|was|were|may be|can be) drawn\b|\brows (?:that are )?drawn\b": "sampled",
    r"\blaunches of several\b|\bseveral tokens a launch\b": "multi-token launch",
    r"\btells? the others\b|\bwho is told\b": "a hand-off, with its kind",
    r"\bwhat is added up\b": "residual stream, partial sums",
    r"\bread otherwise\b": "dequantise, unpack",
    r"\bsees? its batch\b|\bkeeps? its bits\b": "batch-invariant, bitwise equal",
    r"\bcomes? compiled\b": "prebuilt kernels",
}
IN_DOCS = {r"\b(?:somebody|everybody|anybody|nobody)\b": "thread block, warp, partition, caller"}
IN_CODE = EVERYWHERE | {r'(?m:^\s*)(?:"""|# )(?-i:Of|What|Whose?) ': "what the thing is or does, first"}
IN_SOURCE = IN_DOCS | {
    r"\bwho(?:ever|m)?\b": "the subject itself: thread block, warp, caller, request",
    r"\b_?(?:MOST|FEW)(?:_\w+)?\b|\b_?(?:most|few)_(?!common\b|likely\b)[a-z]\w*": "MAX_X, NUM_X, max_x, num_x",
    r"\btaken apart\b": "unpack, widen",
    r"\beasy_\w+|\b\w+_easy\b|\beas(?:y|ily)\b": "slack",
}
IN_WAVE = {r"\bnotes?\b|\bnotebooks?\b": "task record"}
STORY = (
    "bay, where the fog was slowly lifting, and tried to remember whose boat it was and who had taken it out during "
)
# (file, the line's text) -> why it stands.
ALLOWED = {
    ("src/onewave/bench/engine/peers.py", f'"{STORY}"'): "a text that every peer continues",
    (
        "tests/lab/test_page_views.py",
        'assert "waves at M = 1,024" in page.locator("section.card", has text="Latency staircase").inner text()',
    ): "a class of the page's style sheet",
}


def banned(text: str, words: dict[str, str]) -> Iterator[tuple[int, str, str]]:
    """Each (line number, line, what to say) of a text with a banned word. Identifiers are matched with their case."""
    here = {p: w for p, w in words.items() if re.search(p, text, re.NOFLAG if "MOST" in p else re.IGNORECASE)}
    for number, line in enumerate(text.splitlines() if here else [], 1):
        for pattern, better in here.items():
            if re.search(pattern, line, re.NOFLAG if "MOST" in pattern else re.IGNORECASE):
                yield number, line.strip(), better


def pages() -> Iterator[tuple[Path, dict[str, str], str]]:
    """Each (file, words that are banned there, its text). The names of tests are sentences: they are read as such."""
    for file in sorted((ROOT / "src").rglob("*.py")):
        more = IN_WAVE if (ROOT / "src" / "onewave" / "wave") in file.parents else {}
        yield file, IN_CODE | IN_SOURCE | more, file.read_text(encoding="utf-8")
    for file in sorted({*(ROOT / "tests").rglob("*.py"), *(ROOT / "tools").glob("*.py")} - {Path(__file__)}):
        yield file, IN_CODE, file.read_text(encoding="utf-8").replace("_", " ")
    for file in (
        *sorted((ROOT / "docs").rglob("*.md")),
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "Makefile",
    ):
        yield file, EVERYWHERE | IN_DOCS, file.read_text(encoding="utf-8")


def found() -> dict[tuple[str, str], str]:
    return {
        (str(file.relative_to(ROOT)), line): f"{file.relative_to(ROOT)}:{number}: say {better}: {line}"
        for file, words, text in pages()
        for number, line, better in banned(text, words)
    }


def test_no_banned_word_stands_in_source_or_docs() -> None:
    places = found()
    assert [text for place, text in places.items() if place not in ALLOWED] == []
    assert ALLOWED.keys() - places.keys() == set(), "lines that are no longer there"


@pytest.mark.parametrize(
    "line", ["# on this card", "of a Multiprocessor", "MOST_TILES = 3", "few_words = 1", "whoever waits", "its company",
     "tokens that are drawn", "its visits", "its notes", "easily", "nobody reads it", '    """Of a tile."""',
     "x = 1\n# Whose rows these are."],
)  # fmt: skip
def test_a_banned_word_is_found(line: str) -> None:
    assert [*banned(line, IN_CODE | IN_SOURCE | IN_WAVE)]


@pytest.mark.parametrize(
    "line", ["whose rows", "discard", "at most 3", "most_common()", "most_likely", "cardinal", "is drawn", "# of it"]
)
def test_other_words_are_not(line: str) -> None:
    assert not [*banned(line, IN_CODE | IN_SOURCE)]
