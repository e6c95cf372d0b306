"""The timing protocol."""

import numpy as np
import pytest
import torch

from onewave.bench import clock
from onewave.bench.clock import Summary, recorded, summarize, time_calls, time_in_rounds

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


def test_what_is_compared_takes_turns_and_every_round_has_an_order_of_its_own(monkeypatch):
    turns = []

    def timed(runs, device, *, reps, warmup, graph):
        turns.append(runs[0]())
        return summarize([{"a": 2.0, "b": 6.0}[turns[-1]]])

    monkeypatch.setattr(clock, "time_calls", timed)
    found = time_in_rounds({"a": (lambda: "a", 1), "b": (lambda: "b", 3)}, CPU, rounds=12)
    assert found == {"a": Summary(12, 2.0, 2.0, 2.0, 2.0, 0.0), "b": Summary(12, 2.0, 2.0, 2.0, 2.0, 0.0)}
    rounds = ["".join(turns[at : at + 2]) for at in range(2, len(turns), 2)]
    assert len(rounds) == 12
    assert set(rounds) == {"ab", "ba"}


def test_what_is_far_too_slow_for_its_turn_gets_fewer(monkeypatch):
    monkeypatch.setattr(clock, "_SECONDS_A_TURN", {"cpu": 0.05})
    asked = []

    def timed(runs, device, *, reps, warmup, graph):
        asked.append((runs[0](), reps, warmup))
        return summarize([{"slow": 1.0, "quick": 0.01}[asked[-1][0]]])

    monkeypatch.setattr(clock, "time_calls", timed)
    found = time_in_rounds({"slow": (lambda: "slow", 1), "quick": (lambda: "quick", 1)}, CPU, rounds=8)
    assert (found["slow"].n, found["quick"].n) == (3, 8)
    # Half a turn goes by untimed: its clock is that of whoever came before.
    assert {(reps, warmup) for name, reps, warmup in asked[2:] if name == "quick"} == {(5, 2)}


def test_without_a_gpu_what_is_recorded_makes_the_calls():
    made = []
    recorded([lambda: made.append(1), lambda: made.append(2)], CPU)()
    assert made == [1, 2]
