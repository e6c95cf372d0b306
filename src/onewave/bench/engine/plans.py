"""Plans of one decode step side by side, on one cache: measured in turns, predicted, and compared bit by bit."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onewave.bench.clock import recorded, time_in_rounds
from onewave.bench.engine.latency import decode_weight_bytes, kv_bytes_read
from onewave.bench.engine.wave import WaveCase, WaveResult, random_step, traced_step
from onewave.engine.load.self_check import self_check
from onewave.engine.load.streamed import StreamedModel
from onewave.models.decode_wave import DecodeWave
from onewave.models.llama_plan import DecodePlan, DecodeStep, hand_offs
from onewave.models.wave_prediction import kept_costs, predict_plan
from onewave.tiles.sim.trace import Trace
from onewave.wave.plan.program import WaveProgram

OWN = "the wave's own"
"""The name of the plan that the wave makes by itself."""


@dataclass(frozen=True)
class ProvedPlan:
    """program: what the kernel runs. predicted: seconds of a step of it, by simulation."""

    program: WaveProgram
    predicted: float


def prove_and_predict(plan: Callable[[], DecodePlan]) -> ProvedPlan:
    """Prove a step's plan and predict it: seconds of a CPU, for another process."""
    made = plan()
    return ProvedPlan(made.program, predict_plan(made, kept_costs()).makespan * 1e-9)


@torch.inference_mode()
def measure_plans(
    load: Callable[[WaveProgram], StreamedModel],
    plans: Mapping[str, ProvedPlan],
    case: WaveCase,
    *,
    rounds: int,
    show: Callable[[str], None] = lambda text: None,
) -> tuple[list[WaveResult], dict[str, Trace]]:
    """Time one decode step by each plan, in turns, and say whether its logits are bitwise those of the first.

    load: a model packed for a plan's program. plans: OWN among them and first. Returns the results and, where the case
    is traced, a trace of each.
    """
    batch, context = case.batch, case.context
    runs: dict[str, tuple[Callable[[], object], int]] = {}
    found: dict[str, tuple[Tensor, float, StreamedModel]] = {}
    waves: dict[str, DecodeWave] = {}
    shared = None
    for name, plan in plans.items():
        show(f"loading for {name}")
        made = load(plan.program)
        model, device = made.model, made.model.device
        wave = waves[name] = DecodeWave(model, batch=batch, stream=made.stream)
        difference = self_check(model, wave, batch)
        wave.wave.check()
        kv, inputs = shared = shared or random_step(model, batch, context)
        wave.bind_cache(kv)
        logits = wave(*inputs).clone()
        found[name] = logits, difference, made
        out = torch.empty_like(logits)

        runs[name] = recorded([partial(wave.wave.decode, *inputs, out)], device), 1
    assert shared is not None
    show("timing the plans")
    first, _, made = next(iter(found.values()))
    device, config = made.model.device, made.model.config
    seconds = time_in_rounds(runs, device, rounds=rounds)
    weight_format = made.stream.weight_format
    kv_bytes = batch * kv_bytes_read(config, made.model.dtype, context)
    hops = hand_offs(DecodeStep(config, batch, weight_format), context=context)
    results = [
        WaveResult(
            "wave",
            batch,
            context,
            seconds[name],
            decode_weight_bytes(each.model.weights, unpacked=False, stream=each.stream) + kv_bytes,
            difference=difference,
            weights=None if weight_format is None else weight_format.name,
            hops=hops,
            plan=name,
            predicted=plans[name].predicted,
            same_bits=bool(torch.equal(logits, first)),
        )
        for name, (logits, difference, each) in found.items()
    ]
    traces = {}
    if case.traced:
        logits = torch.empty_like(first)
        traces = {name: traced_step(wave, *shared[1], logits) for name, wave in waves.items()}
    for wave in waves.values():
        wave.wave.check()
    return results, traces


def rank_correlation(results: Sequence[WaveResult]) -> float | None:
    """Spearman's correlation of predicted and measured time, equal times with their mean rank; None for fewer than
    three plans, and where all are predicted to take as long."""
    times = np.array([[result.predicted or 0.0, result.seconds.p50] for result in results])
    if len(results) < 3 or np.ptp(times, axis=0).min() == 0:
        return None
    ranks: NDArray[np.float64] = (np.sign(times[:, None] - times) + 1).sum(axis=1) / 2
    return float(np.corrcoef(ranks, rowvar=False)[0, 1])
