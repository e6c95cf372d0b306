"""The Profile page's questions: what bounds each part of a model's prompts and steps, predicted, with its roofline."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from onewave.base.gpus import GPUS, find_gpu
from onewave.base.weight_formats import WEIGHT_BYTES, find_format
from onewave.lab.fields import choice, whole
from onewave.models.config.read import builtin_config, builtin_models
from onewave.models.llama_plan import MAX_BATCH
from onewave.models.profile import DECODE, PREFILL, STEP, Part, Predictor, verdict
from onewave.models.roofline import roofline

_STAIRS = tuple(range(64, 2049, 32))
# Layers of a step that tell the time of all of them: those behind the first two.
_LAYERS = 4


def choices() -> dict[str, Any]:
    return {"models": list(builtin_models()), "gpus": list(GPUS), "weights": list(WEIGHT_BYTES)}


def profile(given: Mapping[str, Any]) -> dict[str, Any]:
    """Predict a prompt and a decode step on a GPU: a row a part, the roofline as SVG, the staircase of gate and up.

    Fields: model, gpu, tokens, batch, context, weights. Raises InvalidArgumentError.
    """
    config = builtin_config(choice(given, "model", "llama-3.2-1b", builtin_models()))
    gpu = find_gpu(choice(given, "gpu", "H200", GPUS))
    weight_format = find_format(choice(given, "weights", "compact", WEIGHT_BYTES))
    tokens, batch = whole(given, "tokens", 512, 1 << 20), whole(given, "batch", 1, MAX_BATCH)
    context = whole(given, "context", 512, 1_000_000, least=0)
    predictor = Predictor(config, gpu, weight_format)
    rows: list[dict[str, Any]] = []
    points: list[tuple[Part, float]] = []
    for phase, count, before in ((PREFILL, tokens, 0), (DECODE, batch, context)):
        seconds = _seconds(predictor, phase, count, before)
        for part in predictor.parts(phase, count, before):
            took = seconds.get(part.name, 0.0) or 1e-9
            judged = verdict(part, took, gpu)
            points.append((part, took))
            layers = 1 if part.name == "head" else config.num_layers
            named = {"phase": phase, "part": part.name, "us_a_layer": took * 1e6 / layers}
            shares = {"intensity": part.intensity, "compute": judged.compute, "memory": judged.memory}
            rows.append(named | shares | {"bound": judged.bound, "reason": judged.reason})
    stairs = [gpu.product_us(m, 2 * config.intermediate_size, config.hidden_size) for m in _STAIRS]
    return {"rows": rows, "roofline": roofline(gpu, points).svg, "m": list(_STAIRS), "us": stairs}


def _seconds(predictor: Predictor, phase: str, rows: int, context: int) -> dict[str, float]:
    """Predictor.seconds; of a wave by its first layers, so that the page need not wait for the whole step's plan."""
    config = predictor.config
    if not predictor.runs_as_wave(phase, rows):
        return predictor.seconds(phase, rows, context)
    few = min(_LAYERS, config.num_layers)
    found = replace(predictor, config=config.of_layers(few)).seconds(phase, rows, context)
    found = {name: took * (1 if name == "head" else config.num_layers / few) for name, took in found.items()}
    return found | {STEP: sum(took for name, took in found.items() if name != STEP)}
