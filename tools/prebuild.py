"""Compile into the package nearly all kinds of prefill attention, the product of several rows, and all that loading a
model of a built-in shape launches (decisions 0011, 0013 and 0016); no GPU is needed.

`PYTHONPATH=tests python tools/prebuild.py` (`make kernels`) compiles what is not there or was made of other sources:
run it after a change of what these kernels do, or of Triton. With `--rekey` it computes the keys again and keeps the
binaries: after a change of source text that leaves the compiled code as it is. It compiles a sample first, one kernel
of each archive and function, and refuses if a binary differs. Names of rooms behind it (`attention`, `linear`, `ops`,
`wave`) leave the others alone. A test fails until one of the two has run.
"""

import hashlib
import json
import lzma
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache, partial
from itertools import chain, islice, product
from pathlib import Path
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend

from kit.no_device import DEVICE, pretended_device
from onewave.base.device import Device
from onewave.base.gpus import TILES
from onewave.base.weight_formats import WeightFormat
from onewave.engine.load.first_load import launches_of_load
from onewave.engine.load.options import LoadOptions
from onewave.engine.load.plan_cache import load_program
from onewave.engine.load.sketches import blank_stream
from onewave.engine.load.streamed import layer_matrices
from onewave.engine.prompt.passes import BUCKETS, MAX_SEQUENCES
from onewave.gpu.hashes import hash_in_order
from onewave.gpu.launch import launches_nowhere, without_collection
from onewave.gpu.prebuilt import INDEX, Launch, archive_of, compiled_from, folder_of, key_of
from onewave.ops.attention.call import AttentionCall, Extras, Packed
from onewave.ops.attention.choose import choose
from onewave.ops.attention.fp8 import launch as fp8_impl
from onewave.ops.attention.fp8.call import Fp8Call
from onewave.ops.attention.fp8.choose import choose as choose_fp8
from onewave.ops.attention.hopper import launch as hopper_impl
from onewave.ops.attention.hopper.plan import PAGE_SIZES
from onewave.ops.attention.masks import Options
from onewave.ops.attention.split import launch as split_impl
from onewave.ops.attention.split.plan import MIN_KEYS
from onewave.ops.linear import linear, linear_swiglu
from onewave.ops.linear.choose import GATED_COLUMNS, LinearCall, ProductChoice
from onewave.ops.linear.hopper import launch as linear_impl
from programs import BATCHES, MODELS, config_of, formats, place_of

TARGET = GPUTarget("cuda", 90, 32)
# Where one program has all tiles, few tokens reach each way to deal them.
_DEVICE = Device((9, 0), 1)
_TENSORS = (*product((torch.bfloat16, torch.float16), (64, 128, 192, 256)), (torch.float8_e4m3fn, 128))
# Where one program has all tiles: one is dealt in closed form, and a sequence of these by a table or, packed, sorted.
# Heads of 64 have two tiles: that of few rows takes 16 and 1,024 tokens, the other one 4,096 and 16,384.
_TOKENS = {"": 16, "-many": 4096, "-some": 1024, "-most": 16384}
_LIMITS = {"full": (None, None), "causal": (None, 0), "window": (1024, 0)}


@cache  # a process that builds several asks as often
def launches(loads: int | None = None) -> dict[str, Launch]:
    """A launch of each prebuilt kernel, by name, of tensors that lie on no GPU; the first of those alike.

    loads: how many models' loads are looked at; None for all.
    """
    found: dict[str, Launch] = {}
    known: set[str] = set()
    for name, launch in chain(_products(torch.bfloat16), _attention(), _loads(loads), _prompts(loads)):
        hash_in_order(launch.function)
        key = key_of(*compiled_from(launch, TARGET), TARGET)
        if key not in known:
            known.add(key)
            unused, at = name, 2
            while unused in found:
                unused, at = f"{name}-{at}", at + 1
            found[unused] = launch
    return found


def _attention() -> Iterator[tuple[str, Launch]]:
    for dtype, head_dim in _TENSORS:
        archive = f"attention-{head_dim}-{str(dtype).removeprefix('torch.')}"
        for name, (*before, own) in _kinds(dtype, head_dim):
            yield f"{archive}/{name}", own
            for launch in before:
                yield f"{archive}/{name}-{launch.function.__name__}", launch
    for launch in _split():
        yield f"attention-split/{launch.function.__name__}", launch


def _split() -> list[Launch]:
    """The launches of few queries over many keys."""
    q, k = torch.empty(16, 1, 128, dtype=torch.bfloat16), torch.empty(8, 128, 1, 128, dtype=torch.bfloat16)
    starts, table = torch.tensor([0, 16], dtype=torch.int32), torch.zeros(1, 8, dtype=torch.int32)
    lengths = Packed(starts, starts, len(q), MIN_KEYS, table)
    call = AttentionCall(q, k, k, Extras(), Options(1.0, None, 0), "gluon", lengths, described=_DEVICE)
    with launches_nowhere() as made:
        split_impl.run(call, choose(call))
    return made


def _kinds(dtype: torch.dtype, head_dim: int) -> Iterator[tuple[str, list[Launch]]]:
    for (limits, (left, right)), packed, (many, tokens) in product(_LIMITS.items(), (False, True), _TOKENS.items()):
        name = f"{limits}{'-packed' * packed}{many}"
        wanted = Options(1.0, left, right)
        make = partial(_launches_of, dtype, head_dim, tokens, packed=packed)
        yield name, make(wanted)
        yield f"{name}-lse", make(wanted, with_lse=True)
        if dtype == torch.float8_e4m3fn or limits == "full":
            continue
        yield f"{name}-softcap", make(replace(wanted, softcap=1.0))
        yield f"{name}-sinks", make(wanted, sinks=True)
        for page_size in PAGE_SIZES if packed and limits == "causal" else ():
            yield f"{name}-pages-{page_size}", make(wanted, page_size=page_size)


def _launches_of(
    dtype: torch.dtype, head_dim: int, tokens: int, wanted: Options, *, packed: bool, with_lse: bool = False,
    sinks: bool = False, page_size: int | None = None,
) -> list[Launch]:  # fmt: skip
    """The launches of a call of that many tokens, or as many in pages, on a GPU of one SM."""
    rows = keys = torch.empty(tokens, 1, head_dim, dtype=dtype)
    lse = torch.empty(1, tokens) if with_lse else None
    lengths, table = None, None
    if page_size is not None:
        pages = -(-tokens // page_size)
        keys = torch.empty(pages, page_size, 1, head_dim, dtype=dtype)
        table = torch.zeros(1, pages, dtype=torch.int32)
    if packed:
        starts = torch.tensor([0, tokens], dtype=torch.int32)
        lengths = Packed(starts, starts, tokens, tokens, table)
    else:
        rows = keys = rows.transpose(0, 1)[None]
        lse = None if lse is None else lse[None]
    extras = Extras(torch.empty(1) if sinks else None)
    given = (rows, keys, keys, extras, wanted, "gluon", lengths, None, lse)
    with launches_nowhere() as made:
        if dtype == torch.float8_e4m3fn:
            call = Fp8Call(*given, with_lse=with_lse, described=_DEVICE)
            fp8_impl.run(call, choose_fp8(call))
        else:
            call = AttentionCall(*given, described=_DEVICE)
            hopper_impl.run(call, choose(call))
    return made


def _products(dtype: torch.dtype) -> Iterator[tuple[str, Launch]]:
    """The product of several rows: all tiles, with and without a bias; gated; and float32 results of few rows."""
    for (warpgroups, columns), box_rows, rows in product(TILES, (16, 32, 64), (1, 2)):
        if box_rows < 64 and (warpgroups, rows) != (1, 1):
            continue
        name = f"linear-{str(dtype).removeprefix('torch.')}/{warpgroups}x{columns}-{box_rows}"
        name += "-many" * (rows > 1)
        for kind, gated, to_map, biased in (
            ("", False, True, False), ("-bias", False, True, True), ("-gated", True, True, False),
            ("-float32", False, False, False),
        ):  # fmt: skip
            if (gated and columns not in GATED_COLUMNS) or (not to_map and rows > 1):
                continue
            choice = ProductChoice(
                "gluon", "hopper.launch", "", (), warpgroups, columns, box_rows, rows, 1, 1, to_map, gated
            )
            width = columns * (2 if gated else 1)
            x, w = (torch.empty(n, 128, dtype=dtype) for n in (box_rows if rows == 1 else 256, width))
            bias = torch.empty(width, dtype=dtype) if biased else None
            with launches_nowhere() as made:
                linear_impl.run(LinearCall(x, w, bias, None if to_map else torch.float32, gated), choice)
            yield name + kind, made[0]


def _models() -> Iterator[tuple[str, int, WeightFormat]]:
    """Each built-in model, for so many sequences and in each format."""
    for model, sequences in product(MODELS, BATCHES):
        yield from ((model, sequences, form) for form in formats(model))


def _loads(limit: int | None) -> Iterator[tuple[str, Launch]]:
    """Launches of loading each built-in model, for so many sequences and in each format; of the first ones alone."""
    for model, sequences, kept in islice(_models(), limit):
        config, options = config_of(model), LoadOptions(torch.bfloat16, DEVICE, sequences, weight_format=kept)
        program = load_program(place_of(options.step(config))[0])
        with pretended_device():
            made = launches_of_load(config, options, program)
        for launch in made:
            kernel = launch.function.__name__
            archive = f"wave-{model}" if kernel == "wave_kernel" else f"load-{folder_of(launch.function).parent.name}"
            yield f"{archive}/{kernel}-{model}-{sequences}-{kept.name}", launch


def _prompts(limit: int | None) -> Iterator[tuple[str, Launch]]:
    """The products of each built-in model's prompts with a stream of each format, in all sizes of passes."""
    for model, sequences, kept in islice(_models(), limit):
        config, options = config_of(model), LoadOptions(torch.bfloat16, DEVICE, sequences, weight_format=kept)
        program = load_program(place_of(options.step(config))[0])
        with pretended_device(), launches_nowhere() as made:
            stream = blank_stream(config, options, program)
            shapes, layers = layer_matrices(config), range(config.num_layers)
            every = [stream.matrix(f"{name}{at}", *shapes[name]) for at, name in product(layers, shapes)]
            matrices = {(each.shape, stream.format_of(each.name)): each for each in every}.values()
            for tokens, matrix in product(BUCKETS, matrices):
                x = torch.empty(tokens, matrix.cols, dtype=torch.bfloat16)
                linear_swiglu(x, matrix) if matrix.count > 1 else linear(x, matrix)
            x = torch.empty(MAX_SEQUENCES, config.hidden_size, dtype=torch.bfloat16)
            linear(x, stream.matrix("head", config.vocab_size, config.hidden_size), out_dtype=torch.float32)
        for launch in made:
            yield f"{kept.name}-bfloat16/{model}-{sequences}", launch


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
    """Compile a folder's, in a process a processor; nothing else remains there. Returns archives' sizes.

    A binary whose key is today's is kept.
    """
    own = {name: launch for name, launch in launches().items() if folder_of(launch.function) == folder}
    built, before = dict[str, tuple[bytes, dict[str, Any]]](), _kept(folder)
    for name, launch in own.items():
        key = key_of(*compiled_from(launch, TARGET), TARGET)
        if key in before:
            built[name] = before[key]
    missing = [name for name in own if name not in built]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        built |= dict(zip(missing, pool.map(build, missing), strict=True))
    print(f"{folder.parent.name}: {len(missing)} of {len(own)} compiled")
    archives: dict[str, bytes] = {}
    entries: dict[str, dict[str, Any]] = {}
    for name in own:
        (binary, entry), others = built[name], archives.get(archive_of(name), b"")
        entries[name] = {**entry, "at": len(others), "bytes": len(binary)}
        archives[archive_of(name)] = others + binary
    # All at once and at the end: whoever interrupts a compilation keeps what there was.
    for old in folder.glob("*.xz"):
        old.unlink()
    for archive, binaries in archives.items():
        (folder / archive).write_bytes(lzma.compress(binaries, preset=9 | lzma.PRESET_EXTREME))
    (folder / INDEX).write_text(json.dumps({"triton": triton.__version__, "kernels": entries}, indent=1) + "\n")
    return {archive: (folder / archive).stat().st_size for archive in archives}


def _kept(folder: Path) -> dict[str, tuple[bytes, dict[str, Any]]]:
    """By key the binaries of a folder, with their entries in the index."""
    if not (folder / INDEX).exists():
        return {}
    index = json.loads((folder / INDEX).read_text())
    if index["triton"] != triton.__version__:
        return {}
    archives = {file.name: lzma.decompress(file.read_bytes()) for file in folder.glob("*.xz")}
    found: dict[str, tuple[bytes, dict[str, Any]]] = {}
    for name, entry in index["kernels"].items():
        binary = archives[archive_of(name)][entry["at"] : entry["at"] + entry["bytes"]]
        if hashlib.sha256(binary).hexdigest() == entry["sha256"]:
            found[entry["key"]] = binary, {key: entry[key] for key in ("key", "sha256", "metadata")}
    return found


def rekey(folder: Path) -> int:
    """Write today's keys into the index and keep the binaries, but for kernels that nothing launches any more.
    Returns the number of kernels.

    Raises SystemExit if a binary of the sample differs from the one kept.
    """
    index = json.loads((folder / INDEX).read_text())
    own = {name: launch for name, launch in launches().items() if folder_of(launch.function) == folder}
    kept = index["kernels"] = {name: entry for name, entry in index["kernels"].items() if name in own}
    own = {name: launch for name, launch in own.items() if name in kept}
    sample = {(archive_of(name), launch.function.__name__): name for name, launch in own.items()}
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for name, (binary, _) in zip(sample.values(), pool.map(build, sample.values()), strict=True):
            if hashlib.sha256(binary).hexdigest() != kept[name]["sha256"]:
                raise SystemExit(f"{name} compiles to another binary: run make kernels")
    for name, launch in own.items():
        kept[name]["key"] = key_of(*compiled_from(launch, TARGET), TARGET)
    (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n")
    print(f"{len(sample)} kernels compiled to the binaries that are kept")
    return len(kept)


if __name__ == "__main__":
    asked = [argument for argument in sys.argv[1:] if argument != "--rekey"]
    for where in sorted({folder_of(launch.function) for launch in launches().values()}):
        if asked and where.parent.name not in asked:
            continue
        if "--rekey" in sys.argv:
            print(f"{where.parent.name}: {rekey(where)} kernels keyed anew")
        else:
            where.mkdir(exist_ok=True)
            made = prebuild(where)
            print(f"{where.parent.name}: {sum(made.values()):,} bytes in {', '.join(made)}")
