"""List the launches of measuring a decode step that are not compiled ahead, on a GPU that is not there.

`python ahead_alone.py`: one JSON object, kernels by format. TRITON_INTERPRET must be unset.
"""

import json
from dataclasses import replace

import torch

from kit.models.tiny_decoders import BASE
from kit.no_device import DEVICE, pretended_device
from onewave.base.weight_formats import COMPACT, NIBBLES, WeightFormat
from onewave.bench.engine.ahead import launches_of_cases
from onewave.bench.engine.random_codes import q4_k_m
from onewave.bench.engine.wave import WaveCase, cache_of, in_pages, unpacked
from onewave.engine.load.first_load import launches_of_load
from onewave.engine.load.options import LoadOptions
from onewave.engine.load.self_check import self_check
from onewave.engine.load.sketches import sketch
from onewave.engine.load.streamed import layer_matrices
from onewave.gpu.launch import distinct, launches_nowhere
from onewave.models.batch import Batch
from onewave.models.decode_wave import DecodeWave
from onewave.models.llama_plan import plan_program, workers_for
from onewave.wave.weights.pack import WeightStream

MODEL = replace(
    BASE, num_layers=3, layer_windows=(None,) * 3, num_heads=2, num_kv_heads=1, head_dim=64,
    rope=replace(BASE.rope, rotary_dim=64),
)  # fmt: skip
CASES: dict[str, tuple[WeightFormat, int, int | None]] = {
    "compact": (COMPACT, 8, None),
    "int4": (NIBBLES[128, False], 1, 64),
    "q4_k_m": (q4_k_m(replace(MODEL, num_layers=32)), 2, None),
}


@torch.inference_mode()
def missing(form: WeightFormat, batch: int, page: int | None) -> list[str]:
    """Kernels that are not compiled ahead. page: keys of a page, of a cache that is also measured."""
    options = LoadOptions(torch.bfloat16, DEVICE, batch, max_model_len=513, weight_format=form)
    case, step = WaveCase(batch, 512, page), options.step(MODEL)
    known = [*launches_of_load(MODEL, options, None), *launches_of_cases(MODEL, options, [case])]
    program = plan_program(step, workers=workers_for(step, available=132))
    stream = WeightStream(program, torch.bfloat16, DEVICE, form)
    model, shapes = sketch(MODEL, stream, max_model_len=513), layer_matrices(MODEL)
    model.weights = replace(
        model.weights,
        layers=tuple(
            replace(layer, **{name: stream.matrix(f"{name}{index}", *shape) for name, shape in shapes.items()})
            for index, layer in enumerate(model.weights.layers)
        ),
    )
    with launches_nowhere() as later:
        wave = DecodeWave(model, batch=batch, stream=stream)
        self_check(model, wave, batch)
        tokens, kv = torch.arange(batch, device=DEVICE), cache_of(model, case)
        inputs = tokens, torch.full_like(tokens, 512), tokens
        for cache in (kv, kv if page is None else in_pages(kv, page)):
            wave.bind_cache(cache)
            wave(*inputs)
        unpacked(model).forward(Batch.decode(*inputs), kv)
    found = [launch.function.__name__ for launch in distinct([*known, *later])[len(distinct(known)) :]]
    return [name for name in found if name != "gemm_kernel"]  # of which all tiles come prebuilt


if __name__ == "__main__":
    with pretended_device():
        print(json.dumps({name: missing(*case) for name, case in CASES.items()}))
