"""From which of the wave's functions an instruction comes, and what the kernel touches before it may."""

from __future__ import annotations

import ast
import linecache
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

HURRIED = (
    "multiply_block",
    "multiply_bytes",
    "add_product",
    "operand_a",
    "operand_b",
    "add_compact_tile",
    "add_compact_half",
    "words_of_half",
    "operand_of_numbers",
    "word_of_list",
    "add_listed",
    "hand_over",
    "give",
    "publish16",
    "load_activations",
    "load_merged",
    "attend_keys",
)
"""Functions between a product's end and whoever waits for it."""


def unwritten_barriers(ptx: str) -> list[str]:
    """Return where Triton puts a barrier of its own in functions between a product's end and whoever waits for it."""
    found = set[str]()
    for where, _ in _located(ptx, r"\bbar\.sync\s+\d"):
        text = linecache.getline(*where).strip()
        if (name := _function_at(*where)) in HURRIED and "thread_barrier" not in text:
            found.add(f"{name}: {text}")
    return sorted(found)


def places_of(ptx: str, pattern: str) -> list[str]:
    """Return the functions that have an instruction; an empty name for Triton's own."""
    return sorted({_function_at(*where) for where, _ in _located(ptx, pattern)})


def _located(ptx: str, pattern: str) -> Iterator[tuple[tuple[str, int], str]]:
    """Lines of PTX with a pattern, and the file and the line that each comes from."""
    files = dict(re.findall(r'\.file\s+(\d+)\s+"([^"]+)"', ptx))
    where = ("", 0)
    for line in ptx.splitlines():
        if place := re.match(r"\s*\.loc\s+(\d+)\s+(\d+)", line):
            where = files[place[1]], int(place[2])
        elif re.search(pattern, line):
            yield where, line


@lru_cache
def _functions(path: str) -> list[ast.FunctionDef]:
    if "triton" in Path(path).parts:  # Triton's own
        return []
    return [node for node in ast.parse(Path(path).read_text()).body if isinstance(node, ast.FunctionDef)]


def _function_at(path: str, line: int) -> str:
    return next((f.name for f in _functions(path) if f.lineno <= line <= (f.end_lineno or 0)), "")


def unwaited_for(text: str) -> list[str]:
    """Parameters whose memory is touched before the launch waits for the one before it, and inline assembly there,
    which could touch any."""
    before = text[: text.index("griddepcontrol.wait")].rsplit("\n", 1)[0]
    assert "ttg.warp_specialize" not in before
    found = {
        code for code in re.findall(r'elementwise_inline_asm "([^"]*)"', before) if "launch_dependents" not in code
    }
    bases = dict(re.findall(r"(%\w+) = tt.addptr (%\w+),", before))
    touched = re.findall(r"(?:tt\.load|tt\.store|tt\.atomic\w*.*?,|async_tma_copy_global_to_local) (%\w+)", before)
    for name in touched:
        while name in bases:
            name = bases[name]
        found.add(name.removeprefix("%"))
    return sorted(found)
