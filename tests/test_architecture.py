"""The house's rules, read from its sources."""

import ast
import json
import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from kit.models.dummy import write_config
from kit.processes import python

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "onewave"
FILES = sorted(PACKAGE.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))

# base <- {weights, memory, tiles}; memory <- gpu; tiles, gpu <- wave <- ops <- models <- engine <- {server, bench} <-
# cli; compat stands on ops; lab on tiles and what plans a decode step (WITHOUT_TORCH). Each room with the rooms it may
# import from.
BELOW = {
    "base": set(),
    "tiles": {"base"},
    "weights": {"base"},
    "memory": {"base"},
    "lab": {"base", "tiles"},
    "gpu": {"base", "memory"},
    "wave": {"base", "tiles", "gpu"},
    "ops": {"base", "tiles", "gpu", "wave"},
    "compat": {"base", "tiles", "gpu", "wave", "ops"},
    "models": {"base", "tiles", "gpu", "wave", "ops", "weights", "memory"},
    "engine": {"base", "tiles", "gpu", "wave", "ops", "weights", "memory", "models"},
    "server": {"base", "tiles", "gpu", "wave", "ops", "weights", "memory", "models", "engine"},
    "bench": {"base", "tiles", "gpu", "wave", "ops", "compat", "weights", "memory", "models", "engine"},
}
BELOW["cli"] = {*BELOW}

# Modules that plan a decode step, from config.json to the launch's words, load no torch: the lab may import them.
_OF_MODELS = ("config", "llama_plan", "step_plan", "wave_prediction", "profile", "roofline")
WITHOUT_TORCH = ("onewave.wave.plan", *(f"onewave.models.{name}" for name in _OF_MODELS))

KERNEL_LANGUAGES = {"triton", "numba", "llvmlite"}
# Rooms and folders whose files hold kernels or launch them; elsewhere a kernel stands in a file named *_impl.py.
IMPLEMENTATIONS = {"gpu", "wave", "triton", "hopper", "fp8", "mma", "split", "chain"}
PICKLES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
MAX_LINES, MAX_MODULES = 500, 15
# Modules of base that have torch, for those above it that do.
_OF_BASE = ("device", "rounding", "group_rounding", "grouped", "blocks")
WITH_TORCH = {PACKAGE / "base" / f"{name}.py" for name in _OF_BASE}


@dataclass(frozen=True)
class Import:
    """One import: the module's full name, what is taken from it ("" for the module itself), and where."""

    module: str
    name: str
    line: int


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def imports(tree: ast.AST, file: Path = PACKAGE / "any.py") -> Iterator[Import]:
    """Every import of a file, wherever it stands, and imports by a name given as text."""
    package = ["onewave", *file.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, "", node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*parents, *([node.module] if node.module else [])])
            yield from (Import(module, alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__", "importorskip"):
                yield Import(str(node.args[0].value), "", node.lineno)


@cache
def imports_of(file: Path) -> list[Import]:
    return list(imports(tree_of(file), file))


def public_homes() -> dict[str, str]:
    """The room of every name that `import onewave` offers."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("onewave."):
            found |= {alias.name: node.module.split(".")[1] for alias in node.names}
    return found


def room_of(imported: Import, homes: dict[str, str]) -> str | None:
    """The room that an import reaches into; None for other packages and for facts about onewave itself."""
    parts = imported.module.split(".")
    if parts[0] != "onewave":
        return None
    if len(parts) > 1:
        return parts[1]
    return homes.get(imported.name, imported.name if imported.name in BELOW else None)


def violations(file: Path, found_in_it: Iterable[Import], homes: dict[str, str]) -> list[str]:
    """Imports of a file that run up, as lines for a message."""
    where = file.relative_to(PACKAGE)
    room = where.parts[0]
    if len(where.parts) == 1:  # onewave itself: its names are loaded when used
        return []
    found = []
    for imported in found_in_it:
        target = room_of(imported, homes)
        if room == "lab" and f"{imported.module}.".startswith(tuple(f"{name}." for name in WITHOUT_TORCH)):
            continue
        if target is not None and target != room and target not in BELOW[room]:
            found.append(f"{where}:{imported.line}: {room} imports from {target}")
    return found


def test_every_file_lives_in_a_known_room():
    rooms = {file.relative_to(PACKAGE).parts[0] for file in FILES if file.parent != PACKAGE}
    assert rooms <= BELOW.keys()


def test_imports_run_down_only():
    homes = public_homes()
    assert not [line for file in FILES for line in violations(file, imports_of(file), homes)]


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("weights/x.py", "from onewave.models.config.model_config import ModelConfig"),
        ("ops/x.py", "def f():\n    import onewave.weights.store"),
        ("base/x.py", "from ..engine import llm"),
        ("models/x.py", "from onewave import LLM"),
        ("lab/x.py", "from importlib import import_module\nimport_module('onewave.ops')"),
        ("lab/x.py", "from onewave.models.llama import Llama"),
        ("lab/x.py", "from onewave.models.llama_plan_of_old import plan"),
        ("lab/x.py", "from onewave.wave.launch.launch import Wave"),
        ("engine/x.py", "from onewave import bench"),
    ],
)
def test_an_import_that_runs_up_is_found(file, source):
    place = PACKAGE / file
    assert violations(place, imports(ast.parse(source), place), public_homes())


def test_an_import_that_runs_down_is_allowed():
    source = "import onewave\nfrom onewave import LLM, __version__\nfrom onewave.ops import linear\nimport torch\n"
    place = PACKAGE / "bench" / "x.py"
    assert not violations(place, imports(ast.parse(source), place), public_homes())


def test_kernel_languages_stay_in_kernel_files():
    found = [
        f"{file.relative_to(PACKAGE)}:{imported.line}: {imported.module}"
        for file in FILES
        if not file.name.endswith("_impl.py") and not IMPLEMENTATIONS & {*file.relative_to(PACKAGE).parts[:-1]}
        for imported in imports_of(file)
        if imported.module.split(".")[0] in KERNEL_LANGUAGES
    ]
    assert not found


def test_the_lab_and_the_tiles_need_no_torch():
    found = [
        f"{file.relative_to(PACKAGE)}:{imported.line}"
        for file in FILES
        if file.relative_to(PACKAGE).parts[0] in ("base", "tiles", "lab") and file not in WITH_TORCH
        for imported in imports_of(file)
        if imported.module.split(".")[0] == "torch"
    ]
    assert not found


@pytest.mark.parametrize(
    "code",
    [
        "import onewave.lab.app",
        "from onewave.cli.main import run; run(['tiles', 'lower', 'decode', CONFIG, '--no-simulate', '--out', OUT])",
        "from onewave.cli.main import run; run(['tiles', 'simulate', 'decode', CONFIG, '--batch-size', '2'])",
    ],
)
def test_a_decode_step_is_planned_without_torch(code, tmp_path):
    config = json.loads((PACKAGE / "models" / "builtin" / "llama-3.2-1b.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1, "vocab_size": 256}))
    names = f"CONFIG, OUT = {str(tmp_path / 'config.json')!r}, {str(tmp_path / 'step.npz')!r}"
    printed = python("-c", f"{names}; {code}; import sys, json; print(json.dumps(list(sys.modules)))")
    loaded = set(json.loads(printed.splitlines()[-1]))
    assert not loaded & {"torch", "triton", "numba", "gguf"}
    assert loaded > {"onewave.models.llama_plan", "onewave.wave.plan.program"}


def test_no_pickle_is_opened_anywhere():
    found = []
    for file in FILES:
        tree = tree_of(file)
        where = file.relative_to(PACKAGE)
        found += [f"{where}:{i.line}: {i.module}" for i in imports_of(file) if i.module.split(".")[0] in PICKLES]
        for node in ast.walk(tree):
            named = isinstance(node, ast.Attribute) and node.attr in ("load", "allow_pickle")
            text = ast.unparse(node) if named else ""
            if text in ("torch.load", "torch.serialization.load") or "allow_pickle" in text:
                found.append(f"{where}:{node.lineno}: {text}")
            if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                found.append(f"{where}:{node.value.lineno}: allow_pickle")
    assert not found


def test_only_the_settings_read_the_environment():
    found = []
    for file in FILES:
        if file == PACKAGE / "base" / "settings.py":
            continue
        tree = tree_of(file)
        found += [
            f"{file.relative_to(PACKAGE)}:{node.lineno}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute)
            and node.attr in ("environ", "getenv", "putenv")
            and ast.unparse(node.value) == "os"
        ]
        found += [
            f"{file.relative_to(PACKAGE)}:{imported.line}"
            for imported in imports_of(file)
            if imported.module == "os" and imported.name in ("environ", "getenv", "putenv")
        ]
    assert not found


def test_a_file_is_one_sitting():
    lengths = {str(file.relative_to(ROOT)): len(file.read_text().splitlines()) for file in (*FILES, *TESTS)}
    assert not {name: length for name, length in lengths.items() if length > MAX_LINES}


def test_git_keeps_no_file_that_it_is_told_to_ignore():
    if not (ROOT / ".git").exists():
        pytest.skip("no working tree of git")
    command = ["git", "ls-files", "--cached", "--ignored", "--exclude-standard"]
    assert subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout == ""


def test_a_file_has_no_settings_of_checkers_of_its_own():
    headers = ("# pyright:", "# ruff:")
    settings = [file for file in FILES if any(line.startswith(headers) for line in file.read_text().splitlines())]
    assert not [str(file.relative_to(ROOT)) for file in settings], "a folder's settings stand in pyproject.toml"


def test_only_the_init_of_a_room_lists_names():
    lists = [file for file in (*FILES, *TESTS) if file.name != "__init__.py" and "\n__all__" in file.read_text()]
    assert not [str(file.relative_to(ROOT)) for file in lists]


def test_a_folder_holds_at_most_fifteen_modules():
    modules = [file for file in (*FILES, *TESTS) if file.name != "__init__.py"]
    counts = Counter(str(file.parent.relative_to(ROOT)) for file in modules)
    assert not {folder: count for folder, count in counts.items() if count > MAX_MODULES}


def test_no_two_files_of_tests_have_one_name():
    names = Counter(file.name for file in TESTS if file.name.startswith("test_"))
    assert not [name for name, count in names.items() if count > 1]


def test_tests_import_helpers_from_the_kit_alone():
    found = []
    for file in TESTS:
        source = file.read_text()
        found += [f"{file.relative_to(ROOT)}: sys.path"] * ("sys.path.insert" in source and file != Path(__file__))
        for imported in imports(ast.parse(source)):
            if imported.module.startswith("test_") and not imported.module.startswith("test_."):
                found.append(f"{file.relative_to(ROOT)}:{imported.line}: {imported.module}")
    assert not found


def test_importing_onewave_loads_no_heavy_package():
    loaded = set(json.loads(python("-c", "import onewave, sys, json; print(json.dumps(list(sys.modules)))")))
    assert not loaded & {"torch", "numpy", "transformers", "gguf", "tokenizers", "numba", "triton", "rich", "typer"}


@pytest.mark.slow
def test_importing_onewave_takes_less_than_a_fifth_of_a_second():
    code = "import time; t = time.perf_counter(); import onewave; print(time.perf_counter() - t)"
    # The fastest: whatever else the machine does only adds.
    assert min(float(python("-c", code)) for _ in range(5)) < 0.2


EVERY_COMMAND = """
import json, sys, typer
from onewave.cli.main import app
def every(group):
    for name in group.list_commands(None):
        command = group.get_command(None, name)
        yield command.name
        yield from every(command) if hasattr(command, "list_commands") else ()
names = list(every(typer.main.get_command(app)))
print(json.dumps([names, list(sys.modules)]))
"""


CPU_RUN = """
import json, sys
from onewave import LLM, SamplingParams
for quantization in (None, "int8"):
    with LLM(sys.argv[1], load_format="dummy", device="cpu", quantization=quantization) as llm:
        assert llm.generate([[3, 4]], SamplingParams(max_tokens=4, ignore_eos=True))[0].outputs[0].token_ids
print(json.dumps(list(sys.modules)))
"""


def test_a_run_on_a_cpu_imports_neither_the_wave_nor_tiles(tmp_path: Path):
    loaded = json.loads(python("-c", CPU_RUN, str(write_config(tmp_path))).splitlines()[-1])
    assert "onewave.engine.thread" in loaded
    assert [name for name in loaded if re.match(r"onewave\.(wave|tiles)\b", name)] == []


def test_no_command_loads_torch_before_it_needs_it():
    names, loaded = json.loads(python("-c", EVERY_COMMAND))
    assert len(names) > 20
    assert not set(loaded) & {"torch", "transformers", "gguf", "tokenizers", "numba", "triton"}


@pytest.mark.parametrize("arguments", [["--help"], ["bench", "--help"], ["tiles", "--help"], ["bench", "waev"]])
def test_help_imports_no_command(arguments):
    code = f"from onewave.cli.main import run; import sys, json; run({arguments}); print(json.dumps(list(sys.modules)))"
    loaded = json.loads(python("-c", code).splitlines()[-1])
    ours = {name.removeprefix("onewave.cli.") for name in loaded if name.startswith("onewave.cli.")}
    assert ours <= {"main", "commands", "bench", "bench.commands", "tiles", "tiles.commands"}


def test_arguments_sampling_parameters_and_the_scheduler_need_no_torch():
    engine = "onewave.engine.arguments, onewave.engine.output, onewave.engine.params, onewave.engine.request"
    modules = f"{engine}, onewave.engine.scheduler.scheduler, onewave.weights.fetch.sources, onewave.lab.serve"
    loaded = set(json.loads(python("-c", f"import {modules}, sys, json; print(json.dumps(list(sys.modules)))")))
    assert "torch" not in loaded
