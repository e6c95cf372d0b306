"""The benchmark of attention in float8: what its operands stand for, what a peer gets, and the command."""

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from onewave.bench.ops import attention_engines
from onewave.bench.ops.attention import AttentionShape, compare
from onewave.bench.ops.attention_fp8 import ByteOperands, fp8_engines
from onewave.cli import main

CPU = torch.device("cpu")


def test_bytes_times_scales_are_the_wide_operands_and_fill_the_range() -> None:
    made = ByteOperands.make(AttentionShape.parse("2,4/2,40,32"), True, CPU, torch.float32)
    for narrow, scale, wide in zip((made.q, made.k, made.v), made.scales, made.wide, strict=True):
        assert narrow.dtype is torch.float8_e4m3fn
        assert torch.equal(narrow.float() * scale.view(-1, 1, 1), wide)
        assert narrow.float().abs().amax((0, 2, 3)).tolist() == [448.0] * len(scale)
    assert made.nbytes == 3 * made.q.numel() + 2 * made.k.numel()


def test_a_peer_gets_bytes_and_a_scale_for_each_head(monkeypatch: pytest.MonkeyPatch) -> None:
    class Module:
        @staticmethod
        def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, causal: bool, **scales: Tensor) -> Any:
            assert (q.shape, k.shape, q.dtype) == ((2, 40, 4, 32), (2, 40, 2, 32), torch.float8_e4m3fn)
            assert {name: tuple(s.shape) for name, s in scales.items()} == dict.fromkeys(
                ("q_descale", "k_descale", "v_descale"), (2, 2)
            )
            return torch.zeros(q.shape), None

    monkeypatch.setattr(attention_engines, "flash_modules", lambda: ({"flash-attn 3": Module}, []))
    engines, _ = fp8_engines(CPU)
    shape = AttentionShape.parse("2,4/2,40,32")
    results = compare("attention_fp8", engines, lambda: ByteOperands.make(shape, True, CPU, torch.float32), rounds=1)
    ours = ["onewave", "onewave with LSE", "onewave 16 bits", "reference"]
    assert [r.engine for r in results] == [*ours, "flash-attn 3"]
    assert [r.failure for r in results] == [None] * 5
    assert all(r.difference is not None and r.difference < 0.05 for r in results[:4])
    assert all(r.error is not None and r.error < 0.01 for r in results[:4])
    # The peer gave zeros.
    assert results[4].error == pytest.approx(1.0)


def test_the_command_measures_it(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "ops", "attention-fp8", "--device", "cpu", "--dtype", "float32", "--reps", "1", "--json"]
    assert main.run([*arguments, "--shape", "1,2,30,16", "--causal"]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert {(r["operator"], r["shape"], r["dtype"]) for r in results} == {
        ("attention_fp8", "1,2,30,16", "float8_e4m3fn")
    }
    assert results[0]["ceiling_share"] > 0
    assert results[0]["rms_error"] < 0.01


def test_the_table_has_the_error_to_float32(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["--shape", "1,2,30,16", "--causal"]
    assert (
        main.run(["bench", "ops", "attention-fp8", "--device", "cpu", "--dtype", "float32", "--reps", "1", *shape]) == 0
    )
    out = capsys.readouterr().out
    assert "rms error" in out
    assert "onewave with LSE" in out
