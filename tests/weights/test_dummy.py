"""DummyStore: random weights that are the same whatever is made before, after or beside them."""

import pytest
import torch

from onewave.base.errors import WeightsError
from onewave.weights.dummy import DummyStore

SHAPES = {"a.weight": (64, 96), "b.weight": (64, 96), "input_layernorm.weight": (96,)}


def store(seed=0, dtype=torch.float32, shapes=SHAPES):
    return DummyStore(shapes, dtype, seed, torch.device("cpu"))


def test_a_tensor_depends_on_its_seed_name_shape_and_dtype_alone():
    reference = store().load("a.weight")
    other = store()
    other.load("b.weight")
    assert torch.equal(other.load("a.weight"), reference)
    assert torch.equal(store(shapes={"a.weight": (64, 96)}).load("a.weight"), reference)
    assert not torch.equal(store().load("b.weight"), reference)
    assert not torch.equal(store(seed=1).load("a.weight"), reference)
    assert not torch.equal(store(shapes={"a.weight": (96, 64)}).load("a.weight").flatten(), reference.flatten())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_are_spread_as_in_a_trained_model(dtype):
    weights = store(dtype=dtype)
    matrix, norm = weights.load("a.weight"), weights.load("input_layernorm.weight")
    assert matrix.dtype is norm.dtype is dtype
    # Standard error of the standard deviation of 6144 draws: 0.02 / sqrt(2 * 6144) = 0.0002.
    assert abs(matrix.float().std().item() - 0.02) < 0.001
    assert abs(matrix.float().mean().item()) < 0.002
    assert 0.89 <= norm.min() < norm.max() <= 1.11


def test_tensors_are_described_without_being_made():
    tensors = store(dtype=torch.bfloat16, shapes={"huge.weight": (1 << 20, 1 << 20)}).tensors
    assert tensors["huge.weight"].nbytes == 1 << 41
    assert tensors["huge.weight"].dtype == "bfloat16"


def test_a_size_beyond_64_bits_is_told_as_it_is():
    assert store(shapes={"huge.weight": (1 << 38, 1 << 31)}).tensors["huge.weight"].nbytes == 1 << 71


def test_an_unknown_tensor_is_refused_by_name():
    with pytest.raises(WeightsError, match="no tensor 'c'"):
        store().load("c")
    assert store().load_quantized("a.weight") is None
