"""Tensors from a pool, and when they come back."""

import pytest
import torch

from onewave.base.errors import InvalidArgumentError
from onewave.memory.allocator import ALIGNMENT
from onewave.memory.tensors import TensorPool, pool_of

CPU = torch.device("cpu")


class Event:
    done = False

    def query(self) -> bool:
        return self.done


@pytest.mark.parametrize(
    ("shape", "dtype"), [((3, 5), torch.int64), ((1000,), torch.bfloat16), ((4, 0), torch.float32)]
)
def test_a_tensor_is_aligned_its_own_and_written_in_and_outside_of_inference_mode(shape, dtype):
    pool = TensorPool(CPU)
    with torch.inference_mode():
        first, second = pool.take(shape, dtype), pool.take(shape, dtype)
        first.fill_(1)
    second.fill_(2)
    assert first.shape == torch.Size(shape)
    assert (first == 1).all()
    assert all(each.data_ptr() % ALIGNMENT == 0 for each in (first, second))
    pool.give(first)
    pool.give(second)
    with pytest.raises(InvalidArgumentError, match="freed already"):
        pool.give(first)
    assert pool.allocator.statistics().requested_bytes == 0


def test_what_a_device_still_reads_is_nobody_elses_until_it_is_past_it():
    pool, event = TensorPool(CPU), Event()
    first = pool.take((64,), torch.float32)
    pool.give(first, event)
    with pytest.raises(InvalidArgumentError, match="twice"):
        pool.give(first, event)
    assert pool.take((64,), torch.float32).data_ptr() != first.data_ptr()
    event.done = True
    assert pool.take((64,), torch.float32).data_ptr() == first.data_ptr()


def test_a_device_has_one_pool():
    assert pool_of(CPU) is pool_of(torch.device("cpu"))
