"""Weights in a checkpoint's own bits on a GPU that the wave runs on: the same bits in any batch, and plain operators'
logits."""

from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from kit.operands.nested import float_rows, nested_rows
from kit.operands.on_gpu import GPU, ON_WAVE
from kit.operands.rounded_on_gpu import CAPACITY, step, two_layers
from onewave.base.group_rounding import GroupedRows
from onewave.base.weight_formats import NESTED, NIBBLES, SIX_BITS, MixedFormat, mixed
from onewave.engine.load.self_check import self_check
from onewave.engine.load.sketches import sketch
from onewave.engine.load.streamed import StreamedModel, layer_matrices
from onewave.models.decode_wave import DecodeWave
from onewave.models.llama import LayerWeights, Llama, LlamaWeights
from onewave.models.llama_plan import DecodeStep, plan_decode
from onewave.ops.linear import linear
from onewave.wave.launch.launch import co_resident
from onewave.wave.weights.pack import WeightStream
from onewave.wave.weights.row_table import RowTable

pytestmark = ON_WAVE
CONFIG = two_layers(vocab_size=4096)
_WIDE = {"qkv0": 2, "o1": SIX_BITS, "gate_up1": SIX_BITS, "down0": 2, "down1": SIX_BITS, "head": SIX_BITS}
FORMS = {
    "nested": mixed(NESTED, _WIDE),
    "fp8": mixed(NIBBLES[128, False], {f"{name}{layer}": 2 for name in layer_matrices(CONFIG) for layer in (0, 1)}
                 | {"head": 2}, floats=True),
}  # fmt: skip
BOTH = pytest.mark.parametrize("name", FORMS)


def on_gpu(rows: GroupedRows) -> GroupedRows:
    parts: dict[str, Any] = {field.name: getattr(rows, field.name) for field in fields(rows)}
    return replace(rows, **{name: part.to(GPU) for name, part in parts.items() if part is not None})


def held(form: MixedFormat, batch: int, workers: int) -> StreamedModel:
    """A model of random rows in a wave's stream, and with nested groups its embedding too."""
    program = plan_decode(DecodeStep(CONFIG, batch, form), workers=workers).program
    stream = WeightStream(program, torch.bfloat16, GPU, form)
    sizes = {f"{name}{layer}": shape for name, shape in layer_matrices(CONFIG).items() for layer in (0, 1)}
    sizes["head"] = (CONFIG.vocab_size, CONFIG.hidden_size, 1)
    for seed, (name, (height, cols, count)) in enumerate(sizes.items()):
        bits = {1: 4, 2: 8, SIX_BITS: 6}[dict(form.widths).get(name, 1)]
        rows = float_rows(height * count, cols, seed=seed) if form.floats else None
        stream.put_rows(name, on_gpu(rows or nested_rows(height * count, cols, bits, seed=seed)))
    made = sketch(CONFIG, stream).weights
    embedding = torch.randn(CONFIG.vocab_size, CONFIG.hidden_size, device=GPU).bfloat16()
    table = RowTable(on_gpu(nested_rows(CONFIG.vocab_size, CONFIG.hidden_size, 4)), 4, torch.bfloat16)
    ones = torch.ones_like(made.norm)

    def layer(index: int) -> LayerWeights:
        parts = {name: stream.matrix(f"{name}{index}", *shape) for name, shape in layer_matrices(CONFIG).items()}
        return replace(made.layers[index], input_norm=ones, post_norm=ones, **parts)

    head = stream.matrix("head", CONFIG.vocab_size, CONFIG.hidden_size)
    weights = LlamaWeights(embedding if form.floats else table, (layer(0), layer(1)), ones, head)
    return StreamedModel(Llama(CONFIG, weights, max_model_len=CAPACITY), stream)


@pytest.mark.values
@BOTH
@pytest.mark.parametrize("batch", [1, 4, 16])
def test_neither_workers_nor_batch_mates_change_a_bit(name: str, batch: int) -> None:
    torch.manual_seed(0)
    first = step(held(FORMS[name], batch, co_resident(GPU)), batch, range(batch))
    torch.manual_seed(0)
    made = held(FORMS[name], batch, 64)
    assert torch.equal(step(made, batch, range(batch)), first)
    assert torch.equal(step(made, batch, range(batch - 1, batch))[0], first[-1])


@BOTH
@pytest.mark.parametrize("batch", [1, 8])
def test_a_step_agrees_with_the_plain_operators_on_the_same_weights(name: str, batch: int) -> None:
    made = held(FORMS[name], batch, co_resident(GPU))
    assert self_check(made.model, DecodeWave(made.model, batch=batch, stream=made.stream), batch) < 0.03


@BOTH
def test_the_gpus_kernel_unpacks_as_plain_indexing_does(name: str) -> None:
    stream = held(FORMS[name], 8, co_resident(GPU)).stream
    for matrix, (height, cols, count) in (
        ("qkv0", layer_matrices(CONFIG)["qkv"]),
        ("down1", layer_matrices(CONFIG)["down"]),
        ("o0", layer_matrices(CONFIG)["o"]),
    ):
        found = stream.unpack(stream.matrix(matrix, height, cols, count), 0, height)
        blocks = -(-height // stream.shape.rows)
        assert torch.equal(found, stream.read_blocks(matrix, cols, 0, blocks)[:height])


@BOTH
def test_products_of_a_prompts_tokens_agree_with_unpacked_weights_and_keep_a_tokens_bits(name: str) -> None:
    stream = held(FORMS[name], 8, co_resident(GPU)).stream
    for matrix, (height, cols, count) in {f"{each}0": size for each, size in layer_matrices(CONFIG).items()}.items():
        if count > 1:
            continue
        tiles = stream.matrix(matrix, height, cols)
        x = torch.randn(300, cols, device=GPU).bfloat16()
        full, ref = linear(x, tiles), x.double() @ tiles.dense().double().t()
        assert (full - ref).abs().max() <= 0.01 * ref.abs().max(), matrix
        for tokens in (2, 17, 65, 129):
            assert torch.equal(linear(x[7 : 7 + tokens], tiles), full[7 : 7 + tokens]), (matrix, tokens)
