"""The timing protocol."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from onewave.bench.clock import summarize, time_calls

CPU = torch.device("cpu")


def test_statistics_are_numpys():
    samples = np.random.default_rng(0).exponential(size=37)
    summary = summarize(samples.tolist())
    expected = np.percentile(samples, [20, 50, 80])
    assert [summary.p20, summary.p50, summary.p80] == pytest.approx(expected)
    assert (summary.mean, summary.sd) == pytest.approx((samples.mean(), samples.std(ddof=1)))
    assert summary.n == 37


def test_one_sample_has_no_deviation():
    summary = summarize([3.0])
    assert (summary.p20, summary.p50, summary.p80, summary.sd) == (3.0, 3.0, 3.0, 0.0)


def test_a_summary_changes_its_unit():
    scaled = summarize([1.0, 2.0, 4.0]).scaled(1000)
    assert (scaled.p50, scaled.n) == (2000.0, 3)


def test_warm_up_runs_are_not_counted():
    calls = []
    summary = time_calls([lambda: calls.append(0), lambda: calls.append(1)], CPU, reps=4, warmup=2)
    assert calls == [0, 1] * 6
    assert summary.n == 4


def test_a_repetition_is_shared_by_its_calls(monkeypatch):
    now = iter(range(100))
    monkeypatch.setattr("onewave.bench.clock.time.perf_counter", lambda: float(next(now)))
    assert time_calls([lambda: None, lambda: None], CPU, reps=3, warmup=0).p50 == 0.5
