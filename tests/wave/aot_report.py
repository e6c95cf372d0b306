"""Compiles the wave kernel for sm_90 without a card and prints what came out, a JSON line a variant.

A script of its own, as kernels under test run in Triton's interpreter, which compiles nothing. Arguments: a JSON list
of constants a variant.
"""

from __future__ import annotations

import ast
import inspect
import json
import linecache
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from onewave.wave.kernel.kernel import wave_kernel
from onewave.wave.plan.layout import COMPACT_BYTES, LIST_WORDS, STEP_WORDS, TILE_BYTES, TOGETHER, held_tiles, tile_shape
from onewave.wave.plan.pace import in_flight
from onewave.wave.plan.resources import kernel_resources

sys.path.insert(0, str(Path(__file__).parents[1] / "ops"))
from endless_loops import endless_loops
from lost_buffers import lost_buffers
from machine_code import machine_code
from ptx_arrivals import early_arrivals

RECORDS = gl.NVMMASharedLayout(0, 32, 2)
INTEGERS = ("row_step", "slack_words", "task_words", "batch", "source_stride", "out_stride", "set_words", "skipped")
SOURCES = Path(inspect.getfile(wave_kernel.fn)).parent
LONGS = ("tokens", "positions", "slots")
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


def compile_variant(batch: int, dtype: str = "bf16", **changes: object) -> dict[str, object]:
    head_dim = int(str(changes.get("D", 0)))
    size = {0: 2, 1: 1, 2: 1, 3: COMPACT_BYTES}[int(str(changes.get("FORMAT", 0)))]
    images = int(str(changes.get("IMAGES", 2 if size < 2 else 1)))
    rows = int(str(changes["R"])) if "R" in changes else None
    shape = tile_shape(batch, rows=rows, head_dim=head_dim, weight_bytes=size, images=images)
    if shape.held and int(str(changes.get("SPLITS", 1))) > 1:
        shape = replace(shape, held=held_tiles(shape.batch, head_dim, crowded=True))
    streams = head_dim in (64, 128) and shape.tile_bytes >= TILE_BYTES and "PAGE" not in changes
    constants: dict[str, object] = {
        "DTYPE": gl.bfloat16 if dtype == "bf16" else gl.float16,
        "FORMAT": 0,
        "IMAGES": images,
        "NB": shape.batch,
        "R": shape.rows,
        "G": shape.group,
        "S": shape.ring,
        "XS": shape.slots,
        "PC": shape.chunk * images,
        "SPLITS": 1,
        "ACT": 1,
        "GATED": True,
        "SYNC": 0,
        "FLIGHT": in_flight(shape, attends=head_dim > 0, merges=bool(changes.get("FEW"))),
        "TEST": 0,
        "TRACE": False,
        "XW": 8,
        **kernel_resources(shape, head_dim, paged="PAGE" in changes, streams=streams),
        "D": 0,
        "GP": 1,
        "CH": 1,
        "FEW": 0,
        "KSPLITS": 1,
        "QKNORM": False,
        "EPS": 1e-5,
        "SCALE": 0.125,
        "PAGE": 0,
        "STREAMS": int(streams),
        "MULTIPLIERS": shape.multipliers,
    } | changes
    names = wave_kernel.arg_names
    types = dict.fromkeys(names, "*i32") | dict.fromkeys(INTEGERS, "i32") | dict.fromkeys(LONGS, "*i64")
    types["lists"] = f"tensordesc<i32[1, {LIST_WORDS}],{RECORDS!r}>" if size == COMPACT_BYTES else "*i32"
    box = images * 32 if size == COMPACT_BYTES else shape.tile_rows
    types["lasts"] = f"tensordesc<{dtype}[{images * 8}, 64],{gl.NVMMASharedLayout(0, 16, 2)!r}>"
    types["weights"] = f"tensordesc<{dtype}[{box}, 64],{gl.NVMMASharedLayout(128, 16, 2)!r}>"
    keys = f"tensordesc<{dtype}[8, 16, 64],{gl.NVMMASharedLayout(128, 16, 3)!r}>"
    types |= dict.fromkeys(("keys", "values"), keys)
    types["records"] = f"tensordesc<i32[{TOGETHER}, {STEP_WORDS}],{RECORDS!r}>"
    types |= dict.fromkeys(constants, "constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if types[name].startswith("*")}
    values = {(names.index(name),): value for name, value in constants.items()}
    source = GluonASTSource(wave_kernel, types, values, aligned)
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    registers, stack, code = machine_code(kernel)
    counts = {
        name: len(re.findall(name, code)) for name in ("HGMMA", "HMMA", "LDSM", "UTMALDG", "USETMAXREG", "STL", "LDL")
    }
    ttgir = kernel.asm["ttgir"]
    found = {
        "torn": torn_reductions(ttgir),
        "lost": lost_buffers(ttgir),
        "endless": endless_loops(ttgir),
        "unwaited": unwaited_for(ttgir),
        "early": early_arrivals(kernel.asm["ptx"]),
        "unwritten": unwritten_barriers(kernel.asm["ptx"]),
        "marked": places_of(kernel.asm["ptx"], r"cp\.async\.bulk\.tensor\S*L2::cache_hint"),
        "unmarked": places_of(kernel.asm["ptx"], r"cp\.async\.bulk\.tensor\S*bytes \["),
        "alone": places_of(kernel.asm["ptx"], r"st\.global\.b32"),
    }
    return {"registers": registers, "stack": stack, "shared": kernel.metadata.shared, **found, **counts}


def unwritten_barriers(ptx: str) -> list[str]:
    """Where Triton puts a barrier of its own, of functions between a product's end and whoever waits for it."""
    found = set[str]()
    for where, _ in located(ptx, r"\bbar\.sync\s+\d"):
        text = linecache.getline(*where).strip()
        if (name := _function_at(*where)) in HURRIED and "thread_barrier" not in text:
            found.add(f"{name}: {text}")
    return sorted(found)


def places_of(ptx: str, pattern: str) -> list[str]:
    """The functions that have an instruction."""
    return sorted({_function_at(*where) for where, _ in located(ptx, pattern)})


def located(ptx: str, pattern: str) -> Iterator[tuple[tuple[str, int], str]]:
    """Lines of PTX with a pattern, and the file and the line that each comes from."""
    # By name alone: what was compiled before, from another copy of the same source, says where that one lay.
    places = {path.name: str(path) for path in SOURCES.rglob("*.py")}
    files = {number: places.get(name, name) for number, name in re.findall(r'\.file\s+(\d+)\s+".*?([^/"]+)"', ptx)}
    where = ("", 0)
    for line in ptx.splitlines():
        if place := re.match(r"\s*\.loc\s+(\d+)\s+(\d+)", line):
            where = files[place[1]], int(place[2])
        elif re.search(pattern, line):
            yield where, line


@lru_cache
def _functions(path: str) -> list[ast.FunctionDef]:
    if not Path(path).exists():  # Triton's own
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


def torn_reductions(text: str) -> list[str]:
    """Types that are reduced over bits of a lane's number that are no neighbours, which Triton 3.6 does wrongly."""
    layouts = {
        name: ast.literal_eval(lanes)
        for name, lanes in re.findall(
            r"^(#linear\d*) = #ttg.linear<\{register = .*?, lane = (\[.*?\]), warp = ", text, re.M
        )
    }
    found: list[str] = []
    for axis, operand in re.findall(r'"tt.reduce".*?axis = (\d+) : i32.*?\}\) : \((tensor<.*?>)\) -> ', text, re.S):
        name = re.search(r"#linear\d*", operand)
        if name is None:
            continue  # of a blocked layout and a product's they always are
        axes = list(range(len(layouts[name[0]][0])))
        for gone in reversed(re.findall(r"dim = (\d+)", operand)):
            del axes[int(gone)]
        bits = [at for at, base in enumerate(layouts[name[0]]) if base[axes[int(axis)]]]
        if bits and bits[-1] - bits[0] >= len(bits):
            found.append(operand)
    return found


if __name__ == "__main__":
    for variant in json.loads(sys.argv[1]):
        print(json.dumps(compile_variant(**variant)), flush=True)
