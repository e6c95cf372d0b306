"""List what loading a GGUF file of a shape that ships, and its answers, launch that is not prebuilt; without a GPU.

`python kept_alone.py MODEL ...`: one JSON object, kernels by model and sequences; without models all that ship. Not
under Triton's interpreter: TRITON_INTERPRET must be unset, and PYTHONPATH hold tools/.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import torch

from kit.no_device import DEVICE, pretended_device
from onewave.base.group_rounding import GroupedRows
from onewave.engine.load.options import LoadOptions
from onewave.engine.load.plan_cache import load_program
from onewave.engine.load.self_check import self_check
from onewave.engine.load.sketches import sketch
from onewave.engine.load.streamed import layer_matrices
from onewave.engine.prompt.passes import BUCKETS, PromptChunk, PromptPasses
from onewave.gpu.hashes import hash_in_order
from onewave.gpu.launch import distinct, launches_nowhere
from onewave.gpu.prebuilt import INDEX, Launch, compiled_from, folder_of, key_of
from onewave.models.config.model_config import ModelConfig
from onewave.models.decode_wave import DecodeWave
from onewave.models.llama import Llama
from onewave.wave.weights.pack import WeightStream
from onewave.wave.weights.row_table import RowTable
from prebuild import TARGET
from programs import BATCHES, MODELS, config_of, formats, place_of

_CONTEXT = 4096


def table(config: ModelConfig) -> RowTable:
    """The embedding: tied ones take eight bits, as Q6_K and Q8_0 do, others are Q4_K."""
    bits = 8 if config.tie_word_embeddings else 4
    rows, cols = 64, config.hidden_size
    scales = torch.zeros(rows, cols // (32 if bits == 8 else 128), dtype=torch.float16, device=DEVICE)
    codes, steps = (torch.zeros(rows, n, device=DEVICE) for n in (cols, cols // 32 * 2))
    steps = steps.char().view(rows, -1, 2)
    return RowTable(
        GroupedRows(codes.byte(), scales, scales.clone(), torch.zeros(rows, device=DEVICE), steps), bits, torch.bfloat16
    )


def loaded(config: ModelConfig, stream: WeightStream) -> Llama:
    """The model as `stream_kept` makes it, of nothing."""
    stream.gains_apart = True
    model, shapes = sketch(config, stream, max_model_len=_CONTEXT), layer_matrices(config)
    layers = (
        replace(layer, **{name: stream.matrix(f"{name}{at}", *shape) for name, shape in shapes.items()})
        for at, layer in enumerate(model.weights.layers)
    )
    head = stream.matrix("head", config.vocab_size, config.hidden_size)
    model.weights = replace(model.weights, embedding=table(config), layers=tuple(layers), head=head)
    return model


@torch.inference_mode()
def launched(name: str, batch: int) -> list[Launch]:
    config = config_of(name)
    # As such a file has it, in float32.
    config = replace(config, rms_norm_eps=float(np.float32(config.rms_norm_eps)))
    options = LoadOptions(torch.bfloat16, DEVICE, batch, weight_format=formats(name)[-1])
    program = load_program(place_of(options.step(config))[0])
    assert program is not None
    model = loaded(config, stream := WeightStream(program, torch.bfloat16, DEVICE, options.weight_format))
    with launches_nowhere() as found:
        wave = DecodeWave(model, batch=batch, stream=stream)
        self_check(model, wave, batch)
        kv = model.new_row_cache(num_slots=batch + 1, capacity=_CONTEXT)
        wave.bind_cache(kv)
        for rows in range(1, batch + 1):
            wave(*torch.zeros(3, 16, dtype=torch.int64, device=DEVICE)[:, :rows])
        passes = PromptPasses(model, kv, spare_slot=batch, use_graphs=False)
        for size in BUCKETS:
            passes.run([PromptChunk(0, [0] * size)])
    return found


def missing(name: str, batch: int) -> Iterator[str]:
    for launch in distinct(launched(name, batch)):
        hash_in_order(launch.function)
        index = folder_of(launch.function) / INDEX
        kept = json.loads(index.read_text())["kernels"].values() if index.exists() else ()
        if key_of(*compiled_from(launch, TARGET), TARGET) not in {each["key"] for each in kept}:
            yield launch.function.__name__


if __name__ == "__main__":
    with pretended_device():
        wanted = product(sys.argv[1:] or MODELS, BATCHES)
        found = {f"{name} {batch}": list(missing(name, batch)) for name, batch in wanted}
    print(json.dumps(found))
