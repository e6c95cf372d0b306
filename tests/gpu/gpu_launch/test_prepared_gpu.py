"""Prepared calls on a GPU: the results of unprepared ones, bit for bit, and nothing left behind."""

import gc
import random
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from kit.calls.prepared_calls import KINDS, OPERATORS, WITH_MEMORY, Call, Calls, forms_of
from kit.operands.on_gpu import GPU
from onewave import ops
from onewave.gpu.prepared import Prepared
from onewave.ops import prepared as ops_prepared

pytestmark = pytest.mark.gpu


def result_of(call: Call, *, prepared: bool) -> list[Tensor]:
    """A call's results, and the caches that it writes to."""
    operator, args, named = call
    if operator is ops.append_kv:
        args = (*args[:2], args[2].clone(), args[3].clone(), *args[4:])
    result = (operator if prepared else operator.__wrapped__)(*args, **named)
    found = [*result] if isinstance(result, tuple) else [result]
    return [tensor.clone() for tensor in found] + ([*args[2:4]] if operator is ops.append_kv else [])


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(
        torch.equal(a.nan_to_num().view(torch.uint8), b.nan_to_num().view(torch.uint8))
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("kind", [*KINDS, *WITH_MEMORY])
def test_ten_thousand_calls_give_what_unprepared_ones_give(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache of forms is full again and again."""
    monkeypatch.setattr(ops_prepared, "_MAX_FORMS", 4)
    for operator in OPERATORS:
        forms_of(operator).clear()
    r, calls, sizes, hits = random.Random(3), Calls(str(GPU)), list[tuple[int, int]](), 0
    with torch.inference_mode():
        for at in range(424):
            seed = r.randrange(5)
            for _ in range(4):
                call = kind(calls, random.Random(seed))
                result = result_of(call, prepared=True)
            assert same(result, result_of(call, prepared=False)), (call[0].__name__, seed)
            hits += any(isinstance(form, Prepared) for form in forms_of(call[0]).values())
            if at in (200, 423):
                del call, result
                gc.collect()
                sizes.append((torch.cuda.memory_allocated(GPU), len(gc.get_objects())))
    assert hits > 100
    assert sizes[0][0] == sizes[1][0]
    assert sizes[1][1] - sizes[0][1] < 5000


def test_threads_and_streams_have_their_own_results() -> None:
    calls, failed = Calls(str(GPU)), list[Any]()

    def work(seed: int) -> None:
        r = random.Random(seed)
        with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream(GPU)):
            for _ in range(200):
                call = r.choice([*KINDS, *WITH_MEMORY])(calls, random.Random(r.randrange(3)))
                if not same(result_of(call, prepared=True), result_of(call, prepared=False)):
                    failed.append(call[0].__name__)
            torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert failed == []


def test_a_graph_holds_what_it_held_before() -> None:
    calls = Calls(str(GPU))
    q, k, v = (calls.tensor(1, heads, 1000, 128) for heads in (8, 2, 2))
    stream = torch.cuda.Stream(GPU)
    with torch.inference_mode(), torch.cuda.stream(stream):
        for _ in range(3):
            expected = ops.attention(q, k, v, causal=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out = ops.attention(q, k, v, causal=True)
        for _ in range(2):
            q.copy_(torch.randn_like(q))
            graph.replay()
            expected = ops.attention(q, k, v, causal=True)
            assert torch.equal(out, expected)
