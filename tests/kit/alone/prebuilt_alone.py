"""Prebuilt kernels, without a GPU: `python prebuilt_alone.py`, one JSON line. Not under Triton's interpreter:
TRITON_INTERPRET must be unset, TRITON_CACHE_DIR an empty directory, and PYTHONPATH hold tools/."""

import hashlib
import json
import lzma
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import triton
from triton import knobs
from triton.backends.nvidia import driver as driver_module
from triton.runtime import driver

from kit.paths import ROOT
from launchers import launchers_of
from onewave.base.weight_formats import COMPACT
from onewave.engine.load.plan_cache import shipped_launchers
from onewave.gpu import prebuilt
from onewave.gpu.prebuilt import FOLDER, INDEX, Launch, archive_of, compiled_from, folder_of, key_of, take_prebuilt
from onewave.gpu.ptx.passes import PASSES
from onewave.models.config.read import builtin_config
from onewave.models.llama_plan import DecodeStep
from prebuild import TARGET, build, launches

KEPT = ROOT / "src" / "onewave" / "ops" / "attention" / FOLDER
SMALL = "attention-128-bfloat16/causal-packed-many-sort_slots"


def instructions(cubin: bytes) -> list[str]:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True).stdout
    return [re.sub(r"\.L_\w+", "label", line) for line in text.splitlines() if re.search(r"/\*[0-9a-f]{4,}\*/", line)]


def in_triton(launch: Launch) -> tuple[str, Any]:
    """How Triton came by a launch's kernel."""
    source, options = compiled_from(launch, TARGET)
    how: list[bool] = []
    knobs.compilation.listener = lambda *, cache_hit, **others: how.append(cache_hit)
    kernel = triton.compile(source, target=TARGET, options=options.__dict__)
    return "found" if how == [True] else "compiled", kernel


def taken_or_not(launch: Launch) -> dict[str, bool]:
    """Whether a launch's kernel is taken: as it is, of another kind, and where somebody wants it otherwise."""
    seen = {"another constant": take_prebuilt(replace(launch, named={**launch.named, "OTHERS": 64}))}
    seen["another option"] = take_prebuilt(replace(launch, named={**launch.named, "num_warps": 8}))
    with knobs.compilation.scope():
        knobs.compilation.always_compile = True
        seen["always compiled"] = take_prebuilt(launch)
    version, triton.__version__ = triton.__version__, "3.7.0"
    prebuilt._compiled.cache_clear()
    seen["another Triton"] = take_prebuilt(launch)
    triton.__version__ = version
    prebuilt._compiled.cache_clear()
    driver.set_active(SimpleNamespace(get_current_target=lambda: replace(TARGET, arch=100)))
    seen["another GPU"] = take_prebuilt(launch)
    driver.set_active(SimpleNamespace(get_current_target=lambda: TARGET))
    ours = knobs.runtime.add_stages_inspection_hook
    knobs.runtime.add_stages_inspection_hook = lambda *given: ours(*given)
    seen["another's hook"] = take_prebuilt(launch)
    knobs.runtime.add_stages_inspection_hook = ours
    change = PASSES.pop(("onewave.ops.attention.fp8.kernel", "fp8_kernel"))
    seen["another change of its PTX"] = take_prebuilt(launches(1)["attention-128-float8_e4m3fn/full"])
    PASSES["onewave.ops.attention.fp8.kernel", "fp8_kernel"] = change
    os.environ |= {"ONEWAVE_PREBUILT": "0"}
    seen["unwanted"] = take_prebuilt(launch)
    del os.environ["ONEWAVE_PREBUILT"]
    os.environ |= {"ONEWAVE_NUM_THREADS": "many"}  # is no business of a launch
    seen["as it is"] = take_prebuilt(launch)
    del os.environ["ONEWAVE_NUM_THREADS"]
    seen["taken away"] = moved_away(launch)
    return seen


def moved_away(launch: Launch) -> bool:
    """Whether it is not there after all where the cache's files have moved since, whose paths Triton keeps whole."""
    cache = Path(os.environ["TRITON_CACHE_DIR"])
    elsewhere = cache.with_name(f"{cache.name}-moved")
    cache.rename(elsewhere)
    os.environ |= {"TRITON_CACHE_DIR": str(elsewhere)}
    taken = take_prebuilt(launch)
    how, _ = in_triton(launch)
    knobs.compilation.listener = None
    return not (taken and how == "found")


def of_damaged_files(launch: Launch) -> list[str]:
    """Messages for a binary that is cut short, changed or missing, and for such an index; none of them is taken."""
    said: list[str] = []
    whole = (KEPT / archive_of(SMALL)).read_bytes()
    code = launch.function.fn.__code__
    with tempfile.TemporaryDirectory() as elsewhere:
        path = Path(elsewhere) / FOLDER / archive_of(SMALL)
        path.parent.mkdir()
        path.with_name(INDEX).write_text((KEPT / INDEX).read_text())
        launch.function.fn.__code__ = code.replace(co_filename=f"{elsewhere}/hopper/kernels.py")
        for contents in (whole[:1000], lzma.compress(b"other"), None):
            path.unlink(missing_ok=True)
            prebuilt._unpacked.cache_clear()
            if contents is not None:
                path.write_bytes(contents)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                assert not take_prebuilt(launch)
            said += [str(warning.message).replace(elsewhere, "") for warning in caught]
        index = (KEPT / INDEX).read_text()
        older, worse = index.replace('"at":', '"of":'), index.replace('"at": ', '"at": "?", "or": ')
        for contents in ('{"triton": "3.6.0"', '{"triton": "3.6.0"}', "[]", older, worse):
            path.with_name(INDEX).write_text(contents)
            prebuilt._compiled.cache_clear()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                assert not take_prebuilt(launch)
            said += [str(warning.message).replace(elsewhere, "") for warning in caught]
    launch.function.fn.__code__ = code
    return said


def launchers(wanted: dict[str, Launch], index: dict[str, Any]) -> dict[str, bool]:
    """Whether the launchers that ship for a model's load are today's, and what Triton makes of its kernels."""
    config = builtin_config("llama-3.1-8b")
    shipped = shipped_launchers(DecodeStep(config, 1, COMPACT))
    made: set[str] = {driver_module.make_launcher({}, dict(enumerate(types)), None) for types in shipped}
    own = [name for name in wanted if name.endswith("llama-3.1-8b-1-compact") and name in index]
    sources = [compiled_from(wanted[name], TARGET)[0] for name in own]
    metas = [index[name]["metadata"]["tensordesc_meta"] for name in own]
    return {
        "today's": launchers_of("llama-3.1-8b", 1, COMPACT) == json.loads(json.dumps(shipped)),
        "Triton's": len(own) > 5
        and all(
            driver_module.make_launcher(source.constants, source.signature, meta) in made
            for source, meta in zip(sources, metas, strict=True)
        ),
    }


def found(compiled: list[str]) -> dict[str, Any]:
    driver.set_active(SimpleNamespace(get_current_target=lambda: TARGET))
    every = "--every" in compiled  # otherwise one model's load stands for all
    wanted = launches(None if every else 1)
    folders = sorted({folder_of(launch.function) for launch in wanted.values()})
    index: dict[str, Any] = {}
    for folder in folders:
        index |= json.loads((folder / INDEX).read_text())["kernels"]
    kept = {entry["key"] for entry in index.values()}  # of several models' loads a kernel has the first one's name
    keys = {name: key_of(*compiled_from(launch, TARGET), TARGET) for name, launch in wanted.items()}
    archives = {path.name: lzma.decompress(path.read_bytes()) for folder in folders for path in folder.glob("*.xz")}
    binaries = {n: archives[archive_of(n)][e["at"] : e["at"] + e["bytes"]] for n, e in index.items()}
    sizes = Counter[str]()
    for name, entry in index.items():
        sizes[archive_of(name)] += entry["bytes"]
    report: dict[str, Any] = {
        "stale": [name for name, key in keys.items() if key not in kept],
        "unknown": [name for name in index if every and name not in keys],
        "nothing more": {n: len(a) for n, a in archives.items()} == sizes,
        "damaged": [n for n, b in binaries.items() if hashlib.sha256(b).hexdigest() != index[n]["sha256"]],
        "paths": [n for n, binary in binaries.items() if b".py" in binary or b"/src" in binary],
        "said": of_damaged_files(wanted[SMALL]),
        "launchers": launchers(wanted, index),
        "taken": taken_or_not(wanted[SMALL]),
    }
    for name in compiled[every:]:
        taken = take_prebuilt(wanted[name])
        how, kernel = in_triton(wanted[name])
        binary, entry = build(name)
        report[name] = {
            "taken": taken,
            "how": how,
            "binary": kernel.asm["cubin"] == binaries[name] == binary,
            "entry": entry.items() <= index[name].items(),
            "metadata": all(getattr(kernel.metadata, key) == value for key, value in entry["metadata"].items()),
        }
        knobs.compilation.listener = None
        with knobs.compilation.scope():
            knobs.compilation.always_compile = True
            source, options = compiled_from(wanted[name], TARGET)
            anew = triton.compile(source, target=TARGET, options=options.__dict__)
        report[name]["instructions"] = instructions(binaries[name]) == instructions(anew.asm["cubin"])
        report[name]["same metadata"] = anew.metadata._asdict() == kernel.metadata._asdict()
    return report


if __name__ == "__main__":
    json.dump(found(sys.argv[1:]), sys.stdout)
