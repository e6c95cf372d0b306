"""The Profile page's questions: what bounds each part of a model's prompts and steps, predicted, with its roofline."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from onewave.base.gpus import GPUS, find_gpu
from onewave.base.weight_formats import WEIGHT_BYTES
from onewave.lab.fields import choice, whole
from onewave.models.config.read import builtin_config, builtin_models
from onewave.models.llama_plan import MAX_BATCH
from onewave.models.profile import DECODE, PREFILL, Part, Predictor, parts, verdict
from onewave.models.roofline import roofline

_STAIRS = tuple(range(64, 2049, 32))


def choices() -> dict[str, Any]:
    """What the page offers."""
    return {"models": list(builtin_models()), "gpus": list(GPUS), "weights": list(WEIGHT_BYTES)}


def profile(given: Mapping[str, Any]) -> dict[str, Any]:
    """Predict a prompt and a decode step on a GPU: a row a part, the roofline as SVG, the staircase of gate and up.

    Fields: model, gpu, tokens, batch, context, weights. Raises InvalidArgumentError.
    """
    config = builtin_config(choice(given, "model", "llama-3.2-1b", builtin_models()))
    gpu = find_gpu(choice(given, "gpu", "H200", GPUS))
    width = WEIGHT_BYTES[choice(given, "weights", "compact", WEIGHT_BYTES)]
    tokens, batch = whole(given, "tokens", 512, 1 << 20), whole(given, "batch", 1, MAX_BATCH)
    context = whole(given, "context", 512, 1_000_000, least=0)
    # Of a decode step two layers tell the time of all, and the page need not wait for the whole step's plan.
    few = replace(config, num_layers=2, layer_windows=config.layer_windows[:2])
    rows: list[dict[str, Any]] = []
    points: list[tuple[Part, float]] = []
    for phase, count, before in ((PREFILL, tokens, 0), (DECODE, batch, context)):
        model = config if phase == PREFILL else few
        seconds = Predictor(model, gpu, width).seconds(phase, count, before)
        for part in parts(model, phase, count, before, weight_bytes=2 if phase == PREFILL else width):
            took = seconds.get(part.name, 0.0) or 1e-9
            judged = verdict(part, took, gpu)
            points.append((part, took))
            layers = 1 if part.name == "head" else model.num_layers
            named = {"phase": phase, "part": part.name, "us_a_layer": took * 1e6 / layers}
            shares = {"intensity": part.intensity, "compute": judged.compute, "memory": judged.memory}
            rows.append(named | shares | {"bound": judged.bound, "reason": judged.reason})
    stairs = [gpu.product_us(m, 2 * config.intermediate_size, config.hidden_size) for m in _STAIRS]
    return {"rows": rows, "roofline": roofline(gpu, points).svg, "m": list(_STAIRS), "us": stairs}
