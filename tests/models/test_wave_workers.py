"""How many blocks a decode step's launch takes of those that a GPU runs side by side."""

from dataclasses import replace

import numpy as np
import pytest

from kit.models.tiny_decoders import BASE as SMALL
from onewave.models.llama_plan import DecodeStep, plan_decode, unsupported_because, workers_for
from onewave.wave.plan.steps import Flag, Word

BASE = replace(SMALL, vocab_size=9000)


@pytest.mark.parametrize("available", [1, 7, 8, 61, 114, 132])
def test_one_or_two_sequences_take_all_and_more_nearly_all(available: int) -> None:
    for batch in (1, 2):
        assert workers_for(DecodeStep(BASE, batch), available=available) == available
    taken = workers_for(DecodeStep(BASE, 8), available=available)
    assert available * 15 // 16 <= taken <= available


def _busiest(workers: int) -> dict[str, int]:
    plan = plan_decode(DecodeStep(BASE, 8), workers=workers)
    found: dict[str, int] = {}
    for queue in plan.table.queues:
        for task in (plan.graph.tasks[int(plan.table.task[row])] for row in queue):
            if task.name.startswith(("qkv", "o", "gate_up", "down")):
                found[task.name] = max(found.get(task.name, 0), task.index[1])
    return found


@pytest.mark.parametrize("available", [7, 8, 16, 61])
def test_nobody_of_fewer_blocks_has_more_of_a_layer_than_the_busiest_of_all(available: int) -> None:
    assert _busiest(workers_for(DecodeStep(BASE, 8), available=available)) == _busiest(available)


@pytest.mark.parametrize(("batch", "rows"), [(1, 8), (2, 16), (8, 16), (16, 32)])
def test_every_block_has_a_part_of_the_head(batch: int, rows: int) -> None:
    blocks = -(-SMALL.vocab_size // rows)
    taken = workers_for(DecodeStep(SMALL, batch), available=132)
    assert blocks * 15 // 16 <= taken <= blocks
    plan = plan_decode(DecodeStep(SMALL, batch), workers=taken)
    makes_logits = (plan.program.steps[:, Word.FLAGS] & Flag.LOGITS) > 0
    worker = np.repeat(np.arange(taken), plan.program.lanes[:, 3])
    assert (np.bincount(worker[makes_logits], minlength=taken) == 1).all()


def test_wide_models_take_sixteen_sequences() -> None:
    wide = replace(SMALL, hidden_size=2112)
    assert unsupported_because(wide, 16) is None
    program = plan_decode(DecodeStep(wide, 16), workers=2).program
    heads = program.steps[[name.startswith("head") for name in program.names], Word.BLOCKS]
    assert heads.max() == program.shape.group == 2
    huge = replace(wide, hidden_size=5120, intermediate_size=27648, num_layers=64, layer_windows=(None,) * 64)
    assert "tasks" in str(unsupported_because(huge, 8))
    assert unsupported_because(huge, 4) is None
    assert "columns fit" in str(unsupported_because(replace(SMALL, hidden_size=1 << 15), 2))
