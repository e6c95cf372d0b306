"""bench ops attention --resources: what the kernels take of an SM, side by side."""

from __future__ import annotations

import json

import pytest

from onewave.cli import main
from onewave.ops.attention import resources_impl
from onewave.ops.attention.resources_impl import Resources


def compiled(kernel: str, capability: int, **sizes: int) -> Resources:
    whole = {"threads": 128, "registers": 168, "stack": 0, "shared": 100 << 10} | sizes
    return Resources(kernel, capability, seconds=1.5, **whole)


@pytest.mark.parametrize(
    ("sizes", "programs"),
    [
        ({}, 2),
        ({"shared": 0}, 3),
        ({"shared": 0, "registers": 161}, 3),
        ({"shared": 0, "registers": 32}, 16),
        ({"threads": 384, "shared": 227 << 10}, 1),
        ({"threads": 32, "registers": 8, "shared": 0}, 32),
    ],
)
def test_the_scarcest_of_registers_shared_memory_and_threads_bounds_the_programs(sizes, programs):
    found = compiled("x", 90, **sizes)
    assert found.programs_an_sm == programs
    assert found.occupancy == programs * found.threads / 2048


def test_the_command_shows_each_kernel_for_each_head_dim_and_mask(monkeypatch, capsys):
    asked = []

    def hopper(head_dim, **given):
        asked.append((head_dim, given))
        return compiled("Hopper's", 90, threads=384)

    monkeypatch.setattr(resources_impl, "hopper", hopper)
    monkeypatch.setattr(resources_impl, "portable", lambda head_dim, sm=90, **given: compiled("portable", sm, stack=8))
    names = {False: "mma x 64", True: "mma x 32"}
    monkeypatch.setattr(resources_impl, "mma", lambda _, sm, narrow=False, **given: compiled(names[narrow], sm))
    arguments = ["bench", "ops", "attention", "--resources", "--shape", "1,2,64,96", "--shape", "2,2,64,96"]
    assert main.run([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["resources"]
    assert asked == [(96, {"causal": False}), (96, {"causal": True})]
    assert [(r["kernel"], r["capability"], r["causal"]) for r in found[7:]] == [
        ("Hopper's", 90, True),
        ("portable", 90, True),
        ("mma x 64", 90, True),
        ("mma x 32", 90, True),
        ("portable", 80, True),
        ("mma x 64", 80, True),
        ("mma x 32", 80, True),
    ]
    assert found[0]["programs_an_sm"] == 1
    assert main.run(arguments) == 0
    assert "96 causal" in capsys.readouterr().out


def test_what_has_no_resources_is_refused(capsys, tmp_path):
    assert main.run(["bench", "ops", "attention", "--resources", "--shape", "1,2,16,320"]) == 2
    assert "--shape: head_dim 320; allowed: at most 256" in capsys.readouterr().err
    assert main.run(["bench", "ops", "attention", "--resources", "--ledger", str(tmp_path / "new")]) == 2
    assert "--ledger: --resources, which measures no time" in capsys.readouterr().err


@pytest.mark.parametrize("names", [["decode-attention"], ["attention", "decode-attention"]])
def test_other_operators_have_no_resources_to_show(names, capsys):
    assert main.run(["bench", "ops", *names, "--resources"]) == 2
    assert "attention alone" in capsys.readouterr().err
