"""Kernels' PTX completed on its way through Triton's compilation: which, and that others' hooks stay."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from triton import knobs
from triton.backends.compiler import Language

from onewave.gpu.ptx import hook as ptx_hook
from onewave.gpu.ptx.hook import complete_ptx, completed


def make_ptx(source: str, metadata: dict[str, Any]) -> str:
    metadata["name"] = source  # as Triton does, which reads it from the text
    return "some text"


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of one whose text is to be completed."""
    monkeypatch.setattr(ptx_hook, "_completions", {})
    complete_ptx("streaming", str.upper)
    return "streaming"


def test_that_kernel_is_completed_and_a_hook_that_was_there_is_called(kernel: str) -> None:
    called: list[tuple[Any, ...]] = []
    stages: dict[str, Callable[..., str]] = {"ptx": make_ptx}
    given = ("a backend", stages, "options", Language.GLUON, 90)
    completed(lambda *arguments: called.append(arguments))(*given)
    assert called == [given]
    assert stages["ptx"](kernel, {}) == "SOME TEXT"
    assert stages["ptx"]("another", {}) == "some text"


@pytest.mark.parametrize("stages", [{}, {"ptx": make_ptx}])
def test_what_is_no_gluon_kernel_is_let_be(kernel: str, stages: dict[str, Callable[..., str]]) -> None:
    before = dict(stages)
    completed(None)("a backend", stages, "options", Language.TRITON, 90)
    assert stages == before


def test_a_compilation_without_ptx_is_let_be(kernel: str) -> None:
    stages: dict[str, Callable[..., str]] = {}
    completed(None)("a backend", stages, "options", Language.GLUON, None)
    assert stages == {}


def test_a_later_triton_is_told_what_the_hook_does() -> None:
    """From 3.7 on it calls the hook without arguments, before each launch and compilation."""
    key, digest = completed(None)()
    assert "onewave.gpu.ptx" in key
    assert len(digest) == 64
    assert completed(lambda: ("theirs", "1234"))() == (f"theirs{key}", f"1234{digest}")


def test_the_kernels_that_ask_for_it_are_completed() -> None:
    import onewave.ops.attention.fp8.kernel
    import onewave.ops.attention.hopper.kernel
    import onewave.ops.decode_attention.hopper.kernel
    import onewave.wave.kernel.kernel  # noqa: F401

    assert set(ptx_hook._completions) == {"wave_kernel", "stream_kernel", "attention_kernel", "fp8_kernel"}
    stages: dict[str, Callable[..., str]] = {"ptx": make_ptx}
    knobs.runtime.add_stages_inspection_hook("a backend", stages, "options", Language.GLUON, 90)
    assert stages["ptx"] is not make_ptx


def test_what_later_tritons_are_told_is_of_all_that_completes_ptx() -> None:
    rooms = Path(ptx_hook.__file__).parent
    own = {path.name for path in rooms.rglob("*.py") if re.search(r"complete_ptx|\(ptx: str", path.read_text())}
    assert own == set(ptx_hook._CHANGES)
