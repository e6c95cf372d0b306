"""Kernels that are launched before their predecessor has ended touch no memory before they wait for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

AHEAD_OF_TIME = """
import json, re, subprocess, tempfile
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from onewave.ops.append_kv.triton_impl import append_kv_kernel
from onewave.ops.linear.triton_impl import row_kernel, tile_kernel
from onewave.ops.rms_norm.triton_impl import rms_norm_kernel
from onewave.ops.swiglu.triton_impl import swiglu_kernel

TYPES = {"eps": "fp32", "slots_ptr": "*i64", "positions_ptr": "*i64", "table_ptr": "*i32", "rotary_ptr": "*fp32",
         "k_scale_ptr": "*fp32", "v_scale_ptr": "*fp32"}
WATCHED = {"LD", "LDG", "LDGSTS", "ST", "STG", "ATOM", "ATOMG", "RED", "UBLKPF", "ACQBULK", "PREEXIT"}
CASES = {
    "norm": (rms_norm_kernel, {"ADD": False, "BLOCK": 2048}),
    "add, norm": (rms_norm_kernel, {"ADD": True, "BLOCK": 2048}),
    "swiglu": (swiglu_kernel, {"BLOCK": 512}),
    "append": (append_kv_kernel, dict.fromkeys(
        ["HAS_BIAS", "Q_NORM", "K_NORM", "PAGED", "HAS_K_SCALE", "HAS_V_SCALE"], True
    ) | {"INTERLEAVED": False, "KIND": 0, "CHUNK": 128, "BLOCK": 128}),
    "row": (row_kernel, {"cols": 2048, "HAS_BIAS": True, "BLOCK_N": 4, "BLOCK_K": 1024, "AHEAD": 2112,
                         "AHEAD_BYTES": 4096}),
    "tile": (tile_kernel, {"HAS_BIAS": True, "BLOCK_T": 16, "BLOCK_N": 128, "BLOCK_K": 128, "EVEN": True}),
}
tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
for name, (kernel, constants) in CASES.items():
    for capability in (80, 90):
        early = capability >= 90
        fixed = constants | {"PDL": early} | ({"AHEAD": 0} if "AHEAD" in constants and not early else {})
        names = kernel.arg_names
        types = {n: TYPES.get(n, "*bf16" if n.endswith("_ptr") else "i32") for n in names}
        types |= dict.fromkeys(fixed, "constexpr")
        hints = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n.endswith("_ptr")}
        source = ASTSource(kernel, types, {(names.index(n),): value for n, value in fixed.items()}, hints)
        options = {"num_warps": 8 if name == "tile" else 4} | ({"launch_pdl": True} if early else {})
        binary = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm["cubin"]
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(binary)
            file.flush()
            sass = subprocess.run([tools / "cuobjdump", "-sass", file.name], capture_output=True, text=True).stdout
        opcodes = re.findall(r"^\\s+/\\*[0-9a-f]+\\*/\\s+(?:@!?U?P\\w+ )?([A-Z]+)", sass, re.MULTILINE)
        print(json.dumps([name, capability, [opcode for opcode in opcodes if opcode in WATCHED]]))
"""


@pytest.fixture(scope="module")
def instructions() -> dict[tuple[str, int], list[str]]:
    """Of each kernel and capability: what touches memory or orders launches, in the order of the code."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", AHEAD_OF_TIME], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {(name, capability): words for name, capability, words in lines}


def test_nothing_but_a_request_of_the_cache_comes_before_the_wait(instructions: dict[tuple[str, int], list[str]]):
    early = {name: words for (name, capability), words in instructions.items() if capability == 90}
    assert len(early) == 6
    for name, words in early.items():
        before = words[: words.index("ACQBULK")]
        assert before == (["UBLKPF"] if name == "row" else []), name
        # Nobody leaves without having waited, and the next kernel is let in by this one's first programs.
        assert words[len(before) + 1] == "PREEXIT", name
        assert {"STG"} & set(words[len(before) :]), name


def test_older_cards_know_nothing_of_it(instructions: dict[tuple[str, int], list[str]]):
    for (name, capability), words in instructions.items():
        if capability == 80:
            assert not {"ACQBULK", "PREEXIT", "UBLKPF"} & set(words), name
            assert "STG" in words, name
