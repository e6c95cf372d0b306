"""What ptxas has made of a kernel that was compiled ahead of time."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def machine_code(compiled: Any) -> tuple[int, int, str]:
    """Registers of a thread at the launch, bytes of its stack, and the instructions as nvdisasm prints them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage, code = (
            subprocess.run([TOOLS / tool, option, file.name], capture_output=True, text=True, check=True).stdout
            for tool, option in (("cuobjdump", "-res-usage"), ("nvdisasm", "-c"))
        )
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    return int(found[1]), int(found[2]), code
