"""Plan, prove and lower the built-in models' steps into the package; no GPU is needed.

`python tools/programs.py` (`make kernels` runs it too) after a change of what a program follows from
(`plan_cache.PLANNING_SOURCES`): some minutes on two cores. A test fails until it has run. A load then reads a step's
program in hundredths of a second instead of planning it for several seconds.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path

from onewave.base.device import H200_SMS
from onewave.base.weight_formats import COMPACT, NIBBLES, ROUNDINGS, WeightFormat, mixed
from onewave.bench.engine.random_codes import q4_k_m
from onewave.engine.load.plan_cache import SHIPPED, save_program, shipped_path
from onewave.models.config.model_config import ModelConfig
from onewave.models.config.read import builtin_config
from onewave.models.llama_plan import DecodeStep, plan_program, unsupported_because, workers_for

BATCHES = (1, 8, 16)
_DEMO = "smollm2-135m-instruct"
MODELS = ("llama-3.1-8b", "llama-3.2-1b", "qwen3-8b", _DEMO)
"""Built-in models that one GPU holds, and the one that documents begin with."""


def config_of(model: str) -> ModelConfig:
    """Return the shape of one of MODELS."""
    if model != _DEMO:
        return builtin_config(model)
    return replace(
        builtin_config("llama-3.2-1b").of_layers(1), vocab_size=49152, hidden_size=576, intermediate_size=1536,
        num_layers=30, layer_windows=(None,) * 30, num_heads=9, num_kv_heads=3, max_position=8192,
    )  # fmt: skip


def formats(model: str) -> tuple[WeightFormat, ...]:
    """List the formats of weights, besides 16 bits, that ship for a model: those that a load rounds to, and that of a
    GGUF file of Q4_K_M. Of the demonstration's there is one file, of Q4_1 with a head of Q8_0."""
    if model == _DEMO:
        return (replace(mixed(NIBBLES[32, True], {"head": 2}), name="q4_1"),)
    return COMPACT, *ROUNDINGS.values(), q4_k_m(config_of(model))


def steps() -> Iterator[DecodeStep]:
    """List the steps whose programs ship. Those of one size have the same, but for activations in digits and matrices
    that are wider."""
    for name, batch in product(MODELS, BATCHES):
        config, own = config_of(name), formats(name)
        if unsupported_because(config, batch) is None:
            found = [DecodeStep(config, batch, form) for form in (own if name == _DEMO else (None, *own))]
            yield from {(step.weight_bytes, step.digits, step.widths): step for step in found}.values()


def place_of(step: DecodeStep) -> tuple[Path, int]:
    """Return where the package keeps a step's program, and its workers on an H100 or H200."""
    workers = workers_for(step, available=H200_SMS)
    return shipped_path(step, workers=workers), workers


def plan_into(folder: Path, step: DecodeStep) -> int:
    """Write a step's program into a folder. Returns its bytes."""
    path, workers = place_of(step)
    made = folder / path.name
    if not save_program(plan_program(step, workers=workers), made, keep_all=True):
        raise SystemExit(f"{made} can't be written")
    return made.stat().st_size


def main() -> None:
    """Plan what is not there; nothing else remains."""
    wanted = {place_of(step)[0].name: step for step in steps()}
    missing = [step for name, step in wanted.items() if not (SHIPPED / name).exists()]
    SHIPPED.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as work, ProcessPoolExecutor(os.cpu_count()) as pool:
        made = [pool.submit(plan_into, Path(work), step) for step in missing]
        total = sum(each.result() for each in made)
        # All at once and at the end: whoever interrupts this keeps what there was.
        for old in SHIPPED.iterdir():
            if old.name not in wanted:
                old.unlink()
        for new in Path(work).iterdir():
            shutil.move(new, SHIPPED / new.name)
    print(f"{len(missing)} of {len(wanted)} programs planned, {total:,} bytes")


if __name__ == "__main__":
    main()
