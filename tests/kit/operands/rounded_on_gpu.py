"""Models with rounded or compact weights on a GPU: one step of them, and what an engine holds and generates."""

import gc
from dataclasses import replace
from typing import Any

import torch

from kit.operands.on_gpu import GPU
from onewave import LLM, SamplingParams
from onewave.base.settings import Settings
from onewave.base.weight_formats import WeightFormat
from onewave.engine.load.checkpoint import open_parts
from onewave.engine.load.options import LoadOptions
from onewave.engine.load.streamed import StreamedModel, stream_model
from onewave.models.config.model_config import ModelConfig
from onewave.models.config.read import load_config
from onewave.models.decode_wave import DecodeWave
from onewave.models.llama_plan import DecodeStep, plan_decode
from onewave.weights.fetch.sources import resolve

CAPACITY = 600
LENGTHS = (299, 1, 40, 512, 17, 128, 3, 300, 5, 6, 7, 8, 9, 10, 11, 12)
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, detokenize=False)
PROMPTS = [{"prompt_token_ids": [7 * i % 1000 + 3 for i in range(n)]} for n in (1, 5, 40, 300)]


def two_layers(**changes: Any) -> ModelConfig:
    location = resolve("llama-3.2-1b", Settings.from_env(), load_format="dummy")
    config = load_config(location)
    return replace(config, num_layers=2, layer_windows=config.layer_windows[:2], **changes)


def streamed(
    weight_format: WeightFormat | None,
    batch: int,
    workers: int,
    config: ModelConfig,
    dtype: torch.dtype = torch.bfloat16,
) -> StreamedModel:
    """Dummy weights packed in a format for a wave of `workers`."""
    location = resolve("llama-3.2-1b", Settings.from_env(), load_format="dummy")
    program = plan_decode(DecodeStep(config, batch, weight_format), workers=workers).program
    options = LoadOptions(dtype=dtype, device=GPU, load_format="dummy")
    with open_parts(location, config, options) as parts:
        return stream_model(
            parts, config, program, replace(options, max_model_len=CAPACITY, weight_format=weight_format)
        )


@torch.inference_mode()
def step(made: StreamedModel, batch: int, rows: range) -> torch.Tensor:
    """A step of some of `batch` sequences on random caches, 20 times the same."""
    wave = DecodeWave(made.model, batch=batch, stream=made.stream)
    kv = made.model.new_cache(num_slots=batch, capacity=CAPACITY)
    dice = torch.Generator(GPU).manual_seed(0)
    kv.k.normal_(generator=dice)
    kv.v.normal_(generator=dice)
    wave.bind_cache(kv)
    slots = torch.tensor(rows, device=GPU)
    positions = torch.tensor([LENGTHS[row] for row in rows], device=GPU)
    found = [wave(slots + 5, positions, slots) for _ in range(20)]
    wave.wave.check()
    assert all(torch.equal(each, found[0]) for each in found)
    return found[0]


def held_and_tokens(name: str | None, **more: object) -> tuple[int, list[list[int]]]:
    given = {"load_format": "dummy", "device": "cuda", "max_model_len": 512, "max_num_seqs": 4}
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with LLM("llama-3.2-1b", quantization=name, decode="wave", **given, **more) as model:
        gc.collect()
        held = torch.cuda.memory_allocated() - before
        together = [list(output.outputs[0].token_ids) for output in model.generate(PROMPTS, GREEDY)]
        for prompt, expected in zip(PROMPTS, together, strict=True):
            assert list(model.generate(prompt, GREEDY)[0].outputs[0].token_ids) == expected
    return held, together
