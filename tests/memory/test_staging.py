"""Steps' results in pooled host memory."""

import pytest
import torch

from onewave.memory import staging as module
from onewave.memory.staging import Staging
from onewave.memory.tensors import TensorPool

CPU = torch.device("cpu")


class Event:
    done = False

    def query(self) -> bool:
        return self.done


@pytest.fixture
def staging(monkeypatch):
    """One whose host memory is not pinned, which needs a GPU; with its pool."""
    pool = TensorPool(CPU)
    monkeypatch.setattr(module, "pool_of", lambda device, pinned: pool)
    return Staging(CPU), pool


def test_steps_of_one_shape_take_turns_in_the_same_blocks(staging):
    staging, pool = staging
    parts = [torch.arange(8), torch.rand(8, 3), torch.empty(8, 0)]
    places, ahead = set(), staging.copy(parts)
    for _ in range(10):
        behind, ahead = ahead, staging.copy(parts)
        assert all(torch.equal(host, part) for host, part in zip(behind.parts, parts, strict=True))
        assert [view.tolist() for view in behind.views] == [part.tolist() for part in parts]
        places.add(behind.parts[0].data_ptr())
        staging.give(behind)
    assert len(places) == 2
    assert pool.allocator.statistics().num_allocations == 6


def test_blocks_of_another_shape_and_of_dropped_steps_go_back_to_the_pool(staging):
    staging, pool = staging
    staging.give(staging.copy([torch.arange(8)]))
    kept = staging.copy([torch.arange(9)])
    assert pool.allocator.statistics().requested_bytes == 9 * 8
    event = Event()
    staging.clear([(kept, event)])
    assert staging.copy([torch.arange(9)]).parts[0].data_ptr() != kept.parts[0].data_ptr()
    event.done = True
    assert staging.copy([torch.arange(9)]).parts[0].data_ptr() == kept.parts[0].data_ptr()


def test_an_end_leaves_nothing_in_use(staging):
    staging, pool = staging
    for number in range(3):
        staging.give(staging.copy([torch.arange(8 + number)]))
    staging.clear()
    assert pool.allocator.statistics().used_bytes == 0
