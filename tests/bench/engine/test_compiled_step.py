"""The step that torch.compile gets computes what the plain one does."""

import shutil
from dataclasses import replace

import pytest
import torch

from kit.models.tiny_decoders import BASE, FAMILIES, in_float32, random_model
from onewave.base.errors import UnsupportedError
from onewave.bench.engine.compiled_step import compiled_step
from onewave.memory.kv_cache import KVCache
from onewave.models.batch import Batch
from onewave.models.config.model_config import RopeConfig
from onewave.models.llama import Llama

ALL = FAMILIES | {"part of a head rotates": replace(BASE, rope=RopeConfig("default", 500.0, 16))}
# Each layer more takes the compiler seconds.
SHALLOW = {
    family: config if family == "a sliding window" else replace(config, num_layers=1, layer_windows=(None,))
    for family, config in ALL.items()
}


def filled(model: Llama, sequences: int, context: int) -> KVCache:
    kv = model.new_cache(num_slots=sequences, capacity=context + 5)
    dice = torch.Generator().manual_seed(3)
    kv.k.normal_(generator=dice)
    kv.v.normal_(generator=dice)
    return kv


@pytest.mark.parametrize(("family", "sequences", "context"), [*((family, 3, 20) for family in ALL), ("llama", 1, 0)])
@torch.inference_mode()
def test_logits_are_the_plain_steps_for_one_token_after_the_other(family: str, sequences: int, context: int) -> None:
    model = in_float32(random_model(SHALLOW[family]))
    kv = filled(model, sequences, context)
    step = compiled_step(model, kv, context, backend="aot_eager")
    positions = torch.full((sequences,), context)
    for first in (0, 40):  # the second one in the first one's place
        tokens = first + torch.arange(sequences)
        expected = model.forward(Batch.decode(tokens, positions, torch.arange(sequences)), kv)
        torch.testing.assert_close(step(tokens, positions), expected, rtol=2e-4, atol=2e-4)


@pytest.mark.skipif(shutil.which("g++") is None, reason="PyTorch's compiler needs one for C++ on a CPU")
@torch.inference_mode()
def test_the_compiler_copies_no_cache() -> None:
    model = in_float32(random_model(SHALLOW["llama"]))
    step = compiled_step(model, filled(model, 3, 20), 20)
    # Imported here: whoever collects these tests would wait two seconds for it.
    from torch._inductor.utils import run_and_get_code

    _, (code,) = run_and_get_code(step, torch.arange(3), torch.full((3,), 20))
    allocated = [line for line in code.splitlines() if "= empty_strided_cpu(" in line]
    assert allocated, code
    assert not [line for line in allocated if "(3, 2, 21, 32)" in line]


def test_more_shapes_than_pytorch_recompiles_for_are_compiled() -> None:
    model = in_float32(random_model(SHALLOW["llama"]))
    with torch.inference_mode():
        for context in range(10):
            step = compiled_step(model, filled(model, 1, context), context, backend="eager")
            assert step(torch.tensor([5]), torch.tensor([context])).isfinite().all()


def test_packed_weights_are_refused() -> None:
    model = in_float32(random_model(BASE))
    packed = replace(model.weights.layers[0], o=object())
    model.weights = replace(model.weights, layers=(packed, *model.weights.layers[1:]))
    with pytest.raises(UnsupportedError, match="packed weights"):
        compiled_step(model, model.new_cache(num_slots=1, capacity=1), 0)
