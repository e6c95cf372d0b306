"""Compiling a decode step's kernel before its program is planned.

What the kernel is compiled for does not depend on how many layers or words of vocabulary there are. So one layer of
the model with a few words, all zeros, is planned in a moment and launched once, while the real step is being planned:
Triton then finds its kernel compiled.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from onewave.models.config import ModelConfig
from onewave.models.llama import LayerWeights, Llama, LlamaWeights, MatrixWeight
from onewave.models.llama_plan import DecodeWave, plan_decode
from onewave.models.streamed import layer_matrices
from onewave.wave.byte_formats import Rounding
from onewave.wave.layout import Word
from onewave.wave.pack import StreamMatrix, WeightStream
from onewave.wave.program import WaveProgram

__all__ = ["compile_ahead", "one_layer", "sketch"]

_WORDS = 64
_CAPACITY = 16


def one_layer(config: ModelConfig) -> ModelConfig:
    """A model of one layer and a few words whose decode step is compiled as the whole model's."""
    return replace(config, num_layers=1, layer_windows=config.layer_windows[:1], vocab_size=_WORDS)


class _NoWeights(WeightStream):
    """A stream of one tile of zeros: a launch reads zeros beyond a tensor's end as well."""

    def __init__(
        self, program: WaveProgram, dtype: torch.dtype, device: torch.device, rounding: Rounding | None = None
    ):
        super().__init__(replace(program, stream={}, stream_tiles=1), dtype, device, rounding)
        steps = program.steps.copy()
        steps[:, Word.AHEAD_TILES] = 0  # what brings tiles nearer goes by their addresses
        self.program = replace(program, steps=steps)
        assert self.images.nbytes == program.shape.tile_bytes


def sketch(config: ModelConfig, stream: WeightStream) -> Llama:
    """A model of zeros, with what a decode step's setup looks at; its matrices lie in the stream."""
    device, dtype, dim = stream.device, stream.dtype, config.head_dim

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    parts: dict[str, Any] = {name: StreamMatrix(stream, name, *shape) for name, shape in layer_matrices(config).items()}
    parts |= {"input_norm": zeros(config.hidden_size), "post_norm": zeros(config.hidden_size)}
    parts |= {"o_bias": None, "gate_up_bias": None, "down_bias": None}
    parts["qkv_bias"] = zeros(parts["qkv"].height) if config.qkv_bias else None
    parts |= {name: zeros(dim) if config.qk_norm else None for name in ("q_norm", "k_norm")}
    layers = tuple(LayerWeights(**parts) for _ in range(config.num_layers))
    head: MatrixWeight = StreamMatrix(stream, "head", config.vocab_size, config.hidden_size)
    weights = LlamaWeights(zeros(config.vocab_size, config.hidden_size), layers, zeros(config.hidden_size), head)
    return Llama(config, weights, max_model_len=_CAPACITY)


@torch.inference_mode()
def compile_ahead(
    config: ModelConfig,
    *,
    batch: int,
    dtype: torch.dtype,
    device: torch.device,
    rounding: Rounding | None = None,
) -> None:
    """Compile the kernel of a model's decode step and launch it once on zeros. Raises UnsupportedError."""
    from onewave.wave.launch import co_resident

    small = one_layer(config)
    with torch.cuda.device(device):
        width = dtype.itemsize if rounding is None else 1
        program = plan_decode(small, batch=batch, workers=co_resident(device), weight_bytes=width).program
        stream = _NoWeights(program, dtype, device, rounding)
        model = sketch(small, stream)
        wave = DecodeWave(model, batch=batch, stream=stream)
        wave.bind_cache(model.new_cache(num_slots=batch, capacity=_CAPACITY))
        numbers = torch.zeros(batch, dtype=torch.int64, device=device)
        wave(numbers, numbers, torch.arange(batch, device=device))
        _compile_packing(stream)
        torch.cuda.synchronize(device)


def _compile_packing(stream: WeightStream) -> None:
    """Compile what packs and unpacks a model's matrices, on a tile of zeros."""
    from onewave.wave.pack_impl import pack_tiles, unpack_bytes, unpack_tiles

    shape, place = stream.shape, torch.zeros(1, dtype=torch.int32, device=stream.device)
    if stream.rounding is not None:  # what rounds and packs is PyTorch's
        assert stream.scales is not None
        out = torch.empty(shape.rows, shape.cols, dtype=stream.dtype, device=stream.device)
        for count in (1, 2):
            halves = out.view(count, -1, shape.cols)
            number = stream.rounding.number
            unpack_bytes(stream.images, place, stream.scales, halves, count, 0, 0, 1, shape, number)
        return
    gain = torch.ones(shape.cols, dtype=stream.dtype, device=stream.device)
    for count, gained in ((1, gain), (1, None), (2, gain)):
        zeros = torch.zeros(shape.rows, shape.cols, dtype=stream.dtype, device=stream.device)
        matrices = zeros.chunk(count)
        pack_tiles(stream.images, place, matrices, gained, shape)
        unpack_tiles(stream.images, place, zeros.view(count, -1, shape.cols), count, 0, 0, 1, shape)
