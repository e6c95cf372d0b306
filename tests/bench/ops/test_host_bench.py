"""Host time of eager calls: every operator of a forward pass has its turn, and figures are a ratio and ledger lines."""

import json

import torch

from kit.models.tiny_decoders import BASE as CONFIG
from onewave.bench.clock import summarize
from onewave.bench.ops.host import OURS, PEER, HostResult, HostTrial, host_trials, measure_host


def test_every_operator_has_as_many_turns_as_rounds() -> None:
    cpu = torch.device("cpu")
    trials = host_trials(CONFIG, cpu, torch.float32)
    assert {trial.operator for trial in trials} >= {"attention", "decode_attention", "rms_norm", "swiglu", "linear"}
    for result in measure_host(trials, cpu, rounds=2):
        assert list(result.seconds) == list(result.trial.calls)
        assert all(seconds.n == 2 and seconds.p20 > 0 for seconds in result.seconds.values())


def test_ours_and_the_peer_compute_the_same() -> None:
    for trial in host_trials(CONFIG, torch.device("cpu"), torch.float32):
        if PEER in trial.calls:
            ours, peer = (trial.calls[name]() for name in (OURS, PEER))
            ours = ours[0] if isinstance(ours, tuple) else ours
            torch.testing.assert_close(ours, peer, atol=1e-4, rtol=1e-4)


def test_a_result_is_a_ratio_and_a_line_for_each() -> None:
    trial = HostTrial("linear", "1x2x3", {OURS: print, PEER: print})
    result = HostResult(trial, {OURS: summarize([3e-6]), PEER: summarize([2e-6])})
    assert result.ratio == 1.5
    ours, peer = result.measurements("tiny", "float32")
    assert (ours.metric, ours.unit, round(ours.summary.p50, 6), peer.extra["implementation"]) == (
        "linear",
        "us",
        3.0,
        PEER,
    )
    assert HostResult(trial, {OURS: summarize([3e-6])}).ratio is None
    assert json.dumps(dict(ours.extra))
