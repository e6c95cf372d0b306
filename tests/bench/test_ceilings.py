"""Ceilings of the device that the tests run on."""

import pytest
import torch

from onewave.bench.ceilings import matmul_rate, read_bandwidth
from onewave.bench.clock import Summary

CPU = torch.device("cpu")


def test_the_read_ceiling_names_its_method_and_unit():
    ceiling = read_bandwidth(CPU, num_bytes=2**22, reps=3)
    assert ceiling.unit == "GB/s"
    assert ceiling.method.startswith("torch.")
    assert ceiling.value == ceiling.summary.p50 > 0
    assert ceiling.summary.p20 <= ceiling.summary.p50 <= ceiling.summary.p80


def test_the_read_ceiling_is_bytes_over_seconds(monkeypatch):
    half_a_second = Summary(n=3, p20=0.4, p50=0.5, p80=0.8, mean=0.5, sd=0.1)
    monkeypatch.setattr("onewave.bench.ceilings.time_calls", lambda *args, **options: half_a_second)
    ceiling = read_bandwidth(CPU, num_bytes=2**20)
    assert ceiling.value == pytest.approx(2**20 * 2e-9)
    assert ceiling.summary.p80 == pytest.approx(2**20 * 2.5e-9)
    assert ceiling.summary.sd == pytest.approx(ceiling.value * 0.2)


def test_the_matmul_ceiling_counts_two_operations_a_product():
    ceiling = matmul_rate(CPU, size=64, reps=2)
    assert ceiling.unit == "TFLOP/s"
    assert ceiling.value > 0
