"""Compile the common kinds of prefill attention into the package: `python -m onewave.ops.attention.prebuild_impl`.

To be run, without a card, after every change of these kernels, of what calls them or of Triton (`make kernels`;
decision 0011). What is not up to date is not taken, and a test says so.
"""
# pyright: reportMissingTypeStubs=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false, reportAttributeAccessIssue=false
# (Triton ships no type information.)

from __future__ import annotations

import hashlib
import json
import lzma
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend

from onewave.ops.attention import fp8_impl, gluon_impl
from onewave.ops.attention.masks import Options
from onewave.wave.launch_kernel import hash_in_order, launches_nowhere, without_collection
from onewave.wave.prebuilt import FOLDER, INDEX, Launch, compiled_from, key_of

__all__ = ["TARGET", "build", "launches", "prebuild"]

TARGET = GPUTarget("cuda", 90, 32)
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Where one program has all tiles: one is dealt in closed form, and a sequence of these by a table or, packed, sorted.
_FEW, _MANY = 16, 4096


@cache  # a process that builds several asks as often
def launches() -> dict[str, Launch]:
    """By name a launch of each kernel that comes compiled, of tensors that lie on no card; the first of those alike."""
    found: dict[str, Launch] = {}
    known: set[str] = set()
    for name, launch in _calls():
        hash_in_order(launch.function)
        key = key_of(*compiled_from(launch, TARGET), TARGET)
        if key not in known:
            known.add(key)
            found[name] = launch
    return found


def _calls() -> Iterator[tuple[str, Launch]]:
    for kind, dtype in _DTYPES.items():
        for head_dim in (64, 128, 256):
            full, few, many = (_dense(dtype, head_dim, *call) for call in ((_FEW, None), (_FEW, 0), (_MANY, 0)))
            yield f"attention-{kind}-{head_dim}", full[-1]
            yield f"attention-{kind}-{head_dim}-causal", few[-1]
            yield f"attention-{kind}-{head_dim}-causal-table", many[-1]
            few, many = (_packed(dtype, head_dim, tokens) for tokens in (_FEW, _MANY))
            yield f"attention-{kind}-{head_dim}-causal-packed", few[-1]
            yield f"attention-{kind}-{head_dim}-causal-packed-sorted", many[-1]
            yield f"order-{head_dim}-causal", many[0]
    for right, tokens, name in ((None, _FEW, ""), (0, _FEW, "-causal"), (0, _MANY, "-causal-table")):
        turning, product = _float8(right, tokens)
        yield f"fp8{name}", product
        yield f"fp8-values{name}", turning


def _dense(dtype: torch.dtype, head_dim: int, tokens: int, right: int | None) -> list[Launch]:
    q, wanted = torch.empty(1, 1, tokens, head_dim, dtype=dtype), Options(1.0, right=right)
    with launches_nowhere() as made:
        gluon_impl.attention(torch.empty_like(q), None, q, q, q, wanted)
    return made


def _packed(dtype: torch.dtype, head_dim: int, tokens: int) -> list[Launch]:
    rows = torch.empty(tokens, 1, head_dim, dtype=dtype).transpose(0, 1)[None]
    starts = torch.tensor([0, tokens], dtype=torch.int32)
    with launches_nowhere() as made:
        gluon_impl.attention(
            torch.empty_like(rows), None, rows, rows, rows, Options(1.0, right=0),
            starts_q=starts, starts_k=starts, longest=tokens,
        )  # fmt: skip
    return made


def _float8(right: int | None, tokens: int) -> list[Launch]:
    q = torch.empty(1, 1, tokens, 128, dtype=torch.float8_e4m3fn)
    one = torch.ones(1)
    with launches_nowhere() as made:
        out = torch.empty_like(q, dtype=torch.bfloat16)
        fp8_impl.attention(out, None, q, q, q, (one, one, one), Options(1.0, right=right))
    return made


def build(name: str) -> tuple[bytes, dict[str, Any]]:
    """Compile that kernel of `launches`. Returns its binary and its entry in the index.

    The binary has no debug information, which would name files of this machine; instructions are the same.
    """
    launch = launches()[name]
    source, options = compiled_from(launch, TARGET)
    with knobs.compilation.scope(), without_collection():
        knobs.compilation.always_compile = True
        compiled = triton.compile(source, target=TARGET, options=options.__dict__)
        knobs.compilation.disable_line_info = True  # of what the assembler writes, from here on
        binary = make_backend(TARGET).make_cubin(compiled.asm["ptx"], {}, options, TARGET.arch)
    asked, made = (json.loads(json.dumps(each, default=vars)) for each in (vars(options), compiled.metadata._asdict()))
    named_anew = ("hash", "target", "triton_version")
    metadata = {key: value for key, value in made.items() if key not in named_anew and asked.get(key, made) != value}
    digest = hashlib.sha256(binary).hexdigest()
    return binary, {"key": key_of(source, options, TARGET), "sha256": digest, "metadata": metadata}


def prebuild(folder: Path) -> dict[str, int]:
    """Compile all, in a process a processor, into a folder, where nothing else remains. Returns each one's bytes."""
    names = list(launches())
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        built = dict(zip(names, pool.map(build, names), strict=True))
    # All at once and at the end: whoever interrupts a compilation keeps what there was.
    for old in folder.glob("*.xz"):
        old.unlink()
    sizes: dict[str, int] = {}
    for name, (binary, _) in built.items():
        packed = lzma.compress(binary, preset=9 | lzma.PRESET_EXTREME)
        sizes[name] = (folder / f"{name}.xz").write_bytes(packed)
    index = {"triton": triton.__version__, "kernels": {name: entry for name, (_, entry) in built.items()}}
    (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n")
    return sizes


if __name__ == "__main__":
    made = prebuild(Path(__file__).with_name(FOLDER))
    print(f"{len(made)} kernels compiled, {sum(made.values()):,} bytes")
