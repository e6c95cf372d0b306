"""The read ceiling and the timing protocol on a GPU."""

import pytest
import torch

from onewave.base.errors import ShapeError
from onewave.bench.ceilings import matmul_rate, read_bandwidth
from onewave.bench.clock import time_calls
from onewave.ops.stream_read import op, reference, stream_read

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


@pytest.mark.parametrize("granules", [1, 3, 1000])
def test_every_element_is_read_once(granules):
    generator = torch.Generator(CUDA).manual_seed(granules)
    size = (granules * op.GRANULE,)
    buffer = torch.randint(-(2**31), 2**31 - 1, size, generator=generator, device=CUDA, dtype=torch.int32)
    total = stream_read(buffer).sum(dtype=torch.int64).to(torch.int32)
    assert total == reference.stream_read(buffer)[0]


def test_a_length_that_needs_a_mask_is_refused():
    with pytest.raises(ShapeError, match="multiple of"):
        stream_read(torch.zeros(op.GRANULE + 1, dtype=torch.int32, device=CUDA))


def test_the_streaming_sum_reads_faster_than_pytorchs():
    buffer = torch.ones(2**28, dtype=torch.int32, device=CUDA)
    pytorch = time_calls([lambda: buffer.sum()], CUDA, reps=5, graph=False)
    assert read_bandwidth(CUDA, num_bytes=2**30).value * 1e9 > buffer.nbytes / pytorch.p50


def test_a_graph_replay_is_timed_per_call():
    buffers = [torch.zeros(2**24, device=CUDA) for _ in range(4)]
    one = time_calls([lambda: buffers[0].add_(1)], CUDA, reps=5)
    four = time_calls([lambda b=b: b.add_(1) for b in buffers], CUDA, reps=5)
    assert 0.3 < four.p50 / one.p50 < 3


def test_the_matmul_ceiling_is_that_of_a_tensor_core():
    assert matmul_rate(CUDA, size=4096, reps=5).value > 10
