"""A model of random codes in a stream of groups: what `bench wave` times where no checkpoint is there to be rounded."""

from dataclasses import replace
from typing import Any

import torch

from onewave.base.group_rounding import GroupedRows
from onewave.base.weight_formats import NESTED, SIX_BITS, GroupRounding, MixedFormat, mixed
from onewave.engine.load.options import LoadOptions
from onewave.engine.load.sketches import sketch
from onewave.engine.load.streamed import StreamedModel, layer_matrices
from onewave.models.config.model_config import ModelConfig
from onewave.models.llama import LayerWeights, Llama
from onewave.wave.plan.program import WaveProgram
from onewave.wave.weights.pack import WeightStream

Q4_K_M = "q4_k_m"


def q4_k_m(config: ModelConfig) -> MixedFormat:
    """Return the stream's form of llama.cpp's Q4_K_M: half of the layers' value and `down` matrices, and the head, are
    Q6_K, all others Q4_K. A layer's queries, keys and values are one matrix here: of both types it has eight bits.

    Source: llama.cpp's llama-quant.cpp, use_more_bits.
    """
    layers = config.num_layers
    eighth = layers // 8
    more = [i for i in range(layers) if i < eighth or i >= 7 * layers // 8 or (i - eighth) % 3 == 2]
    widths = {f"qkv{index}": 2 for index in more} | {f"down{index}": SIX_BITS for index in more} | {"head": SIX_BITS}
    return replace(mixed(NESTED, widths), name=Q4_K_M)


@torch.inference_mode()
def random_codes(config: ModelConfig, program: WaveProgram, options: LoadOptions) -> StreamedModel:
    """A model of uniform codes, about as large as a model's weights, in the options' format of groups."""
    form = options.weight_format
    assert isinstance(form, GroupRounding | MixedFormat)
    stream = WeightStream(program, options.dtype, options.device, form)
    dice = torch.Generator(stream.device).manual_seed(options.seed)
    shapes = layer_matrices(config)
    sizes = {f"{name}{i}": shape for i in range(config.num_layers) for name, shape in shapes.items()}
    for name, (height, cols, count) in (*sizes.items(), ("head", (config.vocab_size, config.hidden_size, 1))):
        stream.put_rows(name, _rows(height * count, cols, form, program.widths.get(name, 1), dice))
    made = sketch(config, stream).weights
    ones = torch.ones_like(made.norm)

    def layer(index: int) -> LayerWeights:
        own = made.layers[index]
        parts: dict[str, Any] = {name: stream.matrix(f"{name}{index}", *shape) for name, shape in shapes.items()}
        norms = {name: getattr(own, name) for name in ("input_norm", "post_norm", "q_norm", "k_norm")}
        parts |= {name: None if norm is None else torch.ones_like(norm) for name, norm in norms.items()}
        return replace(own, **parts)

    layers = tuple(map(layer, range(config.num_layers)))
    embedding = torch.empty(config.vocab_size, config.hidden_size, dtype=stream.dtype, device=stream.device)
    weights = replace(made, embedding=embedding.normal_(generator=dice), layers=layers, norm=ones)
    return StreamedModel(Llama(config, weights, max_model_len=options.positions(config)), stream)


def _rows(count: int, cols: int, form: GroupRounding | MixedFormat, width: int, dice: torch.Generator) -> GroupedRows:
    """Rows of codes around zero, of a standard deviation of about 0.02."""
    nibbles = form.nibbles if isinstance(form, MixedFormat) else form
    assert width < 4

    def whole(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=dice, device=dice.device, dtype=torch.uint8)

    group = (32 if width == 2 else 128) if nibbles.nested else nibbles.group
    scales = torch.rand(count, -(-cols // group), generator=dice, device=dice.device).add_(0.5).half()
    row_scales = torch.full((count,), 2.0 ** (-13 if nibbles.nested else -8), device=dice.device)
    if width > 1:
        steps = whole(32, 64, count, -(-cols // 32), 2).view(torch.int8)
        zero, minima = (32, None) if width == SIX_BITS else (128, torch.zeros_like(scales))
        return GroupedRows(whole(zero - 32, zero + 32, count, cols), scales, minima, row_scales / 4, steps)
    steps = whole(32, 64, count, -(-cols // 32), 1).view(torch.int8).expand(-1, -1, 2) if nibbles.nested else None
    minima = scales * -7.5 if nibbles.minima else None
    return GroupedRows(whole(0, 16, count, cols), scales, minima, row_scales, steps)
