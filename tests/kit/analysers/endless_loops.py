"""Which loops of a kernel ask nothing that changes.

Triton's passes take a variable of a loop for one that never changes if it begins as the same value as another and takes
the other's value of the turn before (docs/log/compilers.md, "A loop without an end"). The condition is then made
before the loop.
"""

from __future__ import annotations

import re


def endless_loops(ttgir: str) -> list[str]:
    """The conditions of loops that are neither made in the turn nor a variable of the loop."""
    found: list[str] = []
    variables: set[str] = set()
    for line in ttgir.splitlines():
        begins = re.search(r"scf\.while(?: \((.*?)\) :)?", line)
        asked = re.search(r"scf\.condition\((%[\w$.-]+)", line)
        if begins:
            variables = set(re.findall(r"(%[\w$.-]+) =", begins[1] or ""))
        elif asked:
            if asked[1] not in variables:
                found.append(asked[1])
        else:
            made, equals, _ = line.partition(" = ")
            variables |= set(re.findall(r"%[\w$.-]+", made)) if equals else set()
    return found
