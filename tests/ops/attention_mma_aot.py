"""Compile the m16n8k16 kernel without a card: `python attention_mma_aot.py '[{"head_dim": 128}]'`, a line a variant.

Each JSON line: registers, stack and shared (bytes), programs an SM, how often instructions occur, and ptx. A variant
holds resources_impl.mma's arguments. Not under Triton's interpreter: TRITON_INTERPRET must be unset.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

INSTRUCTIONS = ("HMMA.16816.F32", "LDSM.16.M88.4", "LDSM.16.MT88.4", "LDGSTS", "MOVM", "STL", "LDL")


def compiled(variants: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Reports of all variants, compiled in a process of their own."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, __file__, json.dumps(variants)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def report(variant: dict[str, Any]) -> dict[str, Any]:
    from onewave.ops.attention.resources_impl import mma

    found = mma(**variant)
    sizes = {"registers": found.registers, "stack": found.stack, "shared": found.shared, "ptx": found.ptx}
    counts = {word: found.count(word) for word in INSTRUCTIONS}
    return sizes | {"programs": found.programs_an_sm, "threads": found.threads} | counts


if __name__ == "__main__":
    for each in json.loads(sys.argv[1]):
        print(json.dumps(report(each)), flush=True)
