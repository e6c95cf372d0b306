"""The streaming read: every element counted once."""

import pytest
import torch

from onewave.base.errors import ShapeError, UnsupportedError
from onewave.ops.stream_read import reference, stream_read, triton_impl


@pytest.mark.parametrize(("num_blocks", "programs_per_sm"), [(1, 1), (2, 1), (7, 3), (5, 8)])
def test_partial_sums_add_up_to_the_whole(num_blocks, programs_per_sm):
    generator = torch.Generator().manual_seed(num_blocks)
    # Small numbers: Triton's interpreter does not wrap sums.
    buffer = torch.randint(-1000, 1000, (num_blocks * 1024,), generator=generator, dtype=torch.int32)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    partial = triton_impl.launch(buffer.to(device), block=1024, programs_per_sm=programs_per_sm)
    assert partial.dtype == torch.int32
    assert torch.equal(partial.cpu().sum(dtype=torch.int64).to(torch.int32), reference.stream_read(buffer)[0])


def test_on_the_cpu_it_is_the_reference():
    assert stream_read(torch.arange(1000, dtype=torch.int32)).tolist() == [499500]


def test_sums_wrap_at_32_bits():
    assert stream_read(torch.full((3,), 2**31 - 1, dtype=torch.int32)).tolist() == [2**31 - 3]


@pytest.mark.parametrize("buffer", [torch.zeros(2, 2, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)[::2]])
def test_only_flat_buffers_are_read(buffer):
    with pytest.raises(ShapeError):
        stream_read(buffer)


def test_only_int32_is_read():
    with pytest.raises(UnsupportedError, match=r"torch\.float32"):
        stream_read(torch.zeros(8))
