"""Compiles the wave's attention and its combination as kernels of their own for sm_90; prints PTX, a JSON line each.

A script, as kernels under test run in Triton's interpreter, which compiles nothing. Argument: a JSON list of
["attend", D, GP, QKNORM, PAGE, FEW], ["combine", D, CH, KSPLITS] and ["merge", D, WORDS].
"""

from __future__ import annotations

import json
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from onewave.wave.kernel.attend.attend import attend, heads_memory
from onewave.wave.kernel.attend.combine import combine
from onewave.wave.kernel.attend.layouts import few_words, warps_rows
from onewave.wave.kernel.attend.merge import poll_merged
from onewave.wave.plan.layout import POINTERS, STEP_WORDS

_RECORD, _PLACES = gl.constexpr(STEP_WORDS), gl.constexpr(POINTERS)


@gluon.jit
def noted_at(words, COUNT: gl.constexpr):
    """So many words of device memory in shared memory, as the wave keeps a record and its places."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
    notes = gl.allocate_shared_memory(words.dtype.element_ty, [COUNT], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    notes.store(gl.load(words + gl.arange(0, COUNT, layout=LANES)))
    gl.thread_barrier()
    return notes


@gluon.jit
def attend_alone(
    record, ours, theirs, positions, slots, places, watch, batch,
    D: gl.constexpr, GP: gl.constexpr, QKNORM: gl.constexpr, PAGE: gl.constexpr, FEW: gl.constexpr,
):  # fmt: skip
    """One attention task, whose queries are there already (SYNC 1 loads them without a poll)."""
    heads = heads_memory(D, 8)
    xs = gl.allocate_shared_memory(gl.float32, [8, 8, D], warps_rows(D))
    none = batch * 0
    attend(
        noted_at(record, _RECORD), ours, theirs, positions, slots, noted_at(places, _PLACES), watch, none, none,
        batch, none, heads, xs, xs, xs, 0, xs,
        gl.float16, D, GP, QKNORM, 1e-5, D**-0.5, 1, 1, 8, FEW, PAGE, 0,
    )  # fmt: skip


@gluon.jit
def combine_alone(
    record, ours, theirs, positions, watch, batch, D: gl.constexpr, CH: gl.constexpr, KSPLITS: gl.constexpr
):  # fmt: skip
    """One combining task."""
    none = batch * 0
    noted = noted_at(record, _RECORD)
    combine(noted, ours, theirs, positions, watch, none, none, batch, none, gl.float16, D, CH, KSPLITS, 1, 8)


@gluon.jit
def merge_alone(first, lses, watch, out, batch, D: gl.constexpr, WORDS: gl.constexpr):
    """Merging `batch` splits of as many heads as 256 threads take at a time, WORDS words each, without a poll. There is
    a head less of them."""
    COUNT: gl.constexpr = WORDS * 256
    word = gl.arange(0, COUNT, layout=gl.BlockedLayout([4], [32], [8], [0]))
    head = word // (D // 2)
    real = head + 1 < COUNT // (D // 2)
    pointers = gl.where(real, (first + head * few_words(D) + word % (D // 2)).to(gl.int64), 0)
    lses = gl.where(real & (batch > 1), (lses + head * few_words(D)).to(gl.int64), 0)
    words = poll_merged(pointers, lses, real, batch, watch, 0, 0, gl.float16, D, WORDS, False)
    gl.store(out + word, words)


KERNELS = {"attend": attend_alone, "combine": combine_alone, "merge": merge_alone}


def compile_variant(name: str, *constants: int) -> dict[str, object]:
    kernel = KERNELS[name]
    names = kernel.arg_names
    types = dict.fromkeys(names, "*i32") | dict.fromkeys(("positions", "slots", "places"), "*i64") | {"batch": "i32"}
    given = dict(zip(names[-len(constants) :], constants, strict=True))
    types = {name: types[name] for name in names} | dict.fromkeys(given, "constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if types[name].startswith("*")}
    source = GluonASTSource(kernel, types, {(names.index(n),): v for n, v in given.items()}, aligned)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    return {"ptx": made.asm["ptx"], "shared": made.metadata.shared}


if __name__ == "__main__":
    for variant in json.loads(sys.argv[1]):
        print(json.dumps(compile_variant(*variant)), flush=True)
