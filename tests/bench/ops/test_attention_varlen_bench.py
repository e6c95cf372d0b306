"""The benchmark of packed sequences: lengths that fill the tokens, work counted per sequence, peers in their layout."""

import json

import pytest
import torch

from onewave.bench.ops import attention_engines, attention_varlen
from onewave.bench.ops.attention import AttentionShape, compare
from onewave.bench.ops.attention_varlen import PackedOperands, ragged_lengths, varlen_engines
from onewave.cli import main

CPU = torch.device("cpu")


@pytest.mark.parametrize("text", [*attention_varlen.VARLEN_SHAPES, "4,4/2,300,64", "3,2,3,16", "5,2,3,16"])
def test_lengths_fill_the_tokens_exactly_and_are_the_same_in_every_run(text):
    shape = AttentionShape.parse(text)
    lengths = ragged_lengths(shape)
    assert (len(lengths), sum(lengths)) == (shape.batch, shape.length)
    assert min(lengths) >= min(1, shape.length // shape.batch)
    assert lengths == ragged_lengths(shape)


def test_a_mix_of_requests_is_uneven():
    lengths = ragged_lengths(AttentionShape.parse("64,16,65536,128"))
    assert max(lengths) > 4 * 1024 > 64 > 0
    assert sorted(lengths)[32] < 1024


def test_work_is_that_of_each_sequence_with_itself():
    full, causal = (
        PackedOperands.make(AttentionShape.parse("3,4/2,40,16"), mask, CPU, torch.float32) for mask in (False, True)
    )
    squares = sum(n * n for n in full.lengths)
    assert full.flops == 4 * 4 * 16 * squares
    assert causal.flops == full.flops / 2
    assert full.starts.tolist() == [0, full.lengths[0], full.lengths[0] + full.lengths[1], 40]


def test_a_peer_gets_packed_tensors_and_both_longest_lengths(monkeypatch):
    class Module:
        @staticmethod
        def flash_attn_varlen_func(q, k, v, starts_q, starts_k, longest_q, longest_k, causal):
            assert (q.shape, k.shape) == ((40, 4, 16), (40, 2, 16))
            assert longest_q == longest_k == int((starts_q[1:] - starts_k[:-1]).max())
            return attention_varlen.attention_varlen(q, k, v, starts_q, starts_k, 40, 40, causal=causal), None

    monkeypatch.setattr(attention_engines, "flash_modules", lambda: ({"flash-attn 3": Module}, []))
    engines, _ = varlen_engines(CPU)
    shape = AttentionShape.parse("3,4/2,40,16")
    results = compare(
        "attention_varlen", engines, lambda: PackedOperands.make(shape, True, CPU, torch.float32), rounds=1
    )
    assert [r.engine for r in results] == ["onewave", "reference", "flash-attn 3"]
    assert [r.failure for r in results] == [None] * 3
    assert all(r.difference < 1e-5 for r in results)


def test_the_command_measures_it(capsys):
    arguments = ["bench", "ops", "attention-varlen", "--device", "cpu", "--dtype", "float32", "--reps", "1", "--json"]
    assert main.run([*arguments, "--shape", "2,2,30,16", "--causal"]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert {(r["operator"], r["shape"], r["causal"]) for r in results} == {("attention_varlen", "2,2,30,16", True)}
    assert results[0]["ceiling_share"] > 0
