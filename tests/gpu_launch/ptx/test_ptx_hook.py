"""Passes over PTX: which kernels get them, by module and name, and that others' hooks and kernels stay as they are."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from triton import knobs
from triton.backends.compiler import Language

from onewave.gpu.ptx import hook as ptx_hook
from onewave.gpu.ptx import passes as ptx_passes
from onewave.gpu.ptx import ptx_pass
from onewave.gpu.ptx.hook import passes_for, run_passes_after
from onewave.gpu.ptx.passes import PASSES, describe_passes, passes_of
from onewave.gpu.ptx.ptx_pass import PtxPass

HERE = (__name__, "streaming")


def mlir(kernel: str, file: str) -> str:
    """Triton's text for the first stage: an entry function with its location."""
    return f"""#loc1 = loc("{file}":9:0)
#loc4 = loc("p"(#loc1))
module attributes {{"ttg.num-warps" = 4 : i32}} {{
  tt.func public @{kernel}(%p: !tt.ptr<i32> loc("p"(#loc1))) attributes {{noinline = false}} {{
    tt.return loc(#loc3)
  }} loc(#loc1)
}} loc(#loc)
#loc = loc(unknown)
#loc3 = loc("{file}":10:4)
"""


def stages_of(ptx: str = "some text") -> dict[str, Callable[..., str]]:
    return {"ttgir": lambda source, metadata: source, "ptx": lambda source, metadata: ptx}


def compiled(stages: dict[str, Callable[..., str]], text: str) -> str:
    return stages["ptx"](stages["ttgir"](text, {}), {})


@pytest.fixture
def upper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel of this file whose PTX is to become upper case."""
    monkeypatch.setitem(PASSES, HERE, (PtxPass("upper", "3.6", str.upper),))


@pytest.mark.usefixtures("upper")
def test_that_kernel_is_changed_and_a_hook_that_was_there_is_called() -> None:
    called: list[tuple[Any, ...]] = []
    stages = stages_of()
    given = ("a backend", stages, "options", Language.GLUON, 90)
    run_passes_after(lambda *arguments: called.append(arguments))(*given)
    assert called == [given]
    assert compiled(stages, mlir("streaming", __file__)) == "SOME TEXT"


@pytest.mark.usefixtures("upper")
@pytest.mark.parametrize(
    ("kernel", "file"), [("streaming", "/somebody/else.py"), ("another", __file__), ("streaming", "")]
)
def test_a_strangers_kernel_of_the_same_name_stays_as_it_is(kernel: str, file: str) -> None:
    stages = stages_of()
    run_passes_after(None)("a backend", stages, "options", Language.GLUON, 90)
    assert compiled(stages, mlir(kernel, file)) == "some text"
    assert passes_for("no MLIR at all") == ()


@pytest.mark.usefixtures("upper")
@pytest.mark.parametrize(
    ("stages", "language"), [(stages_of(), Language.TRITON), ({}, Language.GLUON), ({}, Language.TRITON)]
)
def test_what_is_no_gluon_kernel_or_makes_no_ptx_is_let_be(
    stages: dict[str, Callable[..., str]], language: Language
) -> None:
    before = dict(stages)
    run_passes_after(None)("a backend", stages, "options", language, 90)
    assert stages == before


@pytest.mark.usefixtures("upper")
def test_a_pass_is_left_out_with_a_triton_it_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [each.name for each in passes_of(*HERE)] == ["upper"]
    monkeypatch.setattr(ptx_pass.triton, "__version__", "3.7.0")
    assert passes_of(*HERE) == ()
    assert describe_passes(*HERE) == "none"


def test_a_later_triton_is_told_what_the_hook_does() -> None:
    """From 3.7 on it calls the hook without arguments, before each launch and compilation."""
    key, digest = run_passes_after(None)()
    assert ptx_hook.__name__ in key
    assert len(digest) == 64
    assert run_passes_after(lambda: ("theirs", "1234"))() == (f"theirs{key}", f"1234{digest}")


@pytest.mark.parametrize(("module", "kernel"), PASSES)
def test_the_table_names_kernels_that_exist_and_installs_the_hook(module: str, kernel: str) -> None:
    found = import_module(module)
    assert passes_for(mlir(kernel, str(found.__file__))) == passes_of(module, kernel) != ()
    assert getattr(found, kernel).fn.__module__ == module
    stages = stages_of()
    knobs.runtime.add_stages_inspection_hook("a backend", stages, "options", Language.GLUON, 90)
    assert stages.keys() == {"ttgir", "ptx"}
    assert ptx_hook.is_in_front()


def test_every_file_of_the_room_is_in_the_digest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    files = sorted(Path(ptx_pass.__file__).parent.glob("*.py"))
    for file in files:
        (tmp_path / file.name).write_bytes(file.read_bytes())
    monkeypatch.setattr(ptx_pass, "__file__", str(tmp_path / "ptx_pass.py"))
    digest = ptx_pass.sources_digest.__wrapped__
    before = digest()
    for file in files:
        copy = tmp_path / file.name
        copy.write_bytes(file.read_bytes() + b"#")
        assert digest() != before, file.name
        copy.write_bytes(file.read_bytes())
    assert digest() == before == ptx_passes.sources_digest()


STRANGER = """
import sys
from triton.backends.compiler import GPUTarget
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
import triton
from onewave.gpu.ptx.hook import install
from onewave.gpu.ptx.passes import PASSES
from onewave.gpu.ptx.ptx_pass import PtxPass
install()

@gluon.jit
def stream_kernel(p, N: gl.constexpr):
    gl.store(p, N)

def ptx(value):
    source = GluonASTSource(stream_kernel, {"p": "*i32", "N": "constexpr"}, {(1,): value}, {})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["ptx"]

mark = PtxPass("mark", "3.6", lambda text: text + "// seen")
PASSES["onewave.ops.decode_attention.hopper.kernel", "stream_kernel"] = (mark,)
print("seen" in ptx(7))
PASSES["__main__", "stream_kernel"] = (mark,)
print("seen" in ptx(8))
"""


def test_a_real_compilation_changes_the_kernel_of_that_module_alone(tmp_path: Path) -> None:
    script = tmp_path / "stranger.py"
    script.write_text(STRANGER)
    environment = {"PATH": "/usr/bin:/bin", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.split() == ["False", "True"], done.stderr
