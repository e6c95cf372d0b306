"""Prepared calls launch what the operators launch otherwise: the same kernels, arguments and addresses.

`pytest --noconftest` of this file, without Triton's interpreter.
"""

import gc
import random
from collections.abc import Callable, Generator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from kit.calls.prepared_calls import KINDS, OPERATORS, Call, Calls, forms_of, sampling
from kit.calls.stand_in_launches import launches_kept
from kit.no_device import pretended_device
from onewave import ops
from onewave.base.errors import InvalidArgumentError
from onewave.engine.sampler import Sampler
from onewave.gpu import prepared as gpu_prepared
from onewave.ops import prepared as ops_prepared
from onewave.ops.library import is_debug

Kept = list[tuple[Any, ...]]
CALLS = Calls()


def empty(*shape: int) -> Tensor:
    return CALLS.tensor(*shape)


@pytest.fixture(autouse=True)
def kept() -> Generator[Kept]:
    for operator in OPERATORS:
        forms_of(operator).clear()
    with pretended_device(), launches_kept() as launches, torch.no_grad():
        yield launches


def tensors_of(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def launched(call: Call, kept: Kept, *, prepared: bool) -> tuple[list[Any], list[Any]]:
    """A call's launches and results; in place of addresses of new results their number, of the kernel its name."""
    operator, args, named = call
    before = len(kept)
    result = (operator if prepared else operator.__wrapped__)(*args, **named)
    given = [value.data_ptr() for value in (*args, *named.values()) if isinstance(value, Tensor)]
    found = [tensor for tensor in tensors_of(result) if tensor.data_ptr() not in given]
    names = {tensor.data_ptr(): f"result {at}" for at, tensor in enumerate(found)}

    def plain(value: Any) -> Any:
        if isinstance(value, tuple) and value and value[0] == "descriptor":
            return ("descriptor", names.get(value[1], value[1]), *map(repr, value[2:]))
        return names.get(value, value) if type(value) is int else repr(value)

    shapes = [
        (tensor.shape, tensor.stride(), tensor.dtype, tensor.data_ptr() in given) for tensor in tensors_of(result)
    ]
    return [[plain(value) for value in launch] for launch in kept[before:]], shapes


@pytest.mark.parametrize("kind", KINDS)
def test_a_prepared_call_launches_what_an_unprepared_one_does(kind: Callable[..., Call], kept: Kept) -> None:
    r = random.Random(5)
    hits = 0
    for _ in range(12):
        seed = r.random()
        for _ in range(5):
            call = kind(CALLS, random.Random(seed))  # operands elsewhere each time
            forms = forms_of(call[0])
            found = launched(call, kept, prepared=True)
            # Operands that are copied on the way lie elsewhere even in two unprepared calls.
            if isinstance([*forms.values()][-1], gpu_prepared.Prepared):
                assert found == launched(call, kept, prepared=False)
                hits += 1
        forms.clear()
    assert hits > 20


def test_greedy_choices_from_one_place_are_launches_alone_and_two_in_a_row_have_results_apart(kept: Kept) -> None:
    logits = CALLS.tensor(3, 5000, dtype=torch.float32)
    sampler = Sampler(num_slots=3, vocab_size=5000, device=torch.device("cpu"))
    expected = launched((sampling.greedy_of_pieces, (logits,), {}), kept, prepared=False)[0]
    sampler.greedy(logits)  # makes the call ready
    before, chosen = len(kept), [sampler.greedy(logits) for _ in range(4)]
    assert chosen[0] is chosen[2] is not chosen[1] is chosen[3]
    for at, (tokens, highest) in enumerate(chosen):
        names = {tokens.data_ptr(): "result 0", highest.data_ptr(): "result 1"}
        ours = [[names.get(value, repr(value)) for value in run] for run in kept[before + 2 * at :][:2]]
        assert ours == [[value if type(value) is str else repr(value) for value in run] for run in expected]
    assert len({tensor.data_ptr() for pair in chosen for tensor in pair}) == 4


def test_operands_that_were_one_tensor_need_not_be_again(kept: Kept) -> None:
    packed = empty(1, 300, 12, 64)
    views = [view.transpose(1, 2) for view in packed.split((4, 4, 4), 2)]
    twice = [views[0], views[0], views[0]]
    apart = [empty(1, 300, 12, 64)[:, :, :4].transpose(1, 2) for _ in range(3)]
    for first in (views, twice):
        forms_of(ops.attention).clear()
        for operands in (first, first, apart, views, twice):
            call: Call = (ops.attention, tuple(operands), {"causal": True, "window": 100})
            assert launched(call, kept, prepared=True) == launched(call, kept, prepared=False)
        assert [type(each) for each in forms_of(ops.attention).values()] == [gpu_prepared.Prepared]


def test_a_given_out_is_returned_itself() -> None:
    q, k, v = (empty(1, 4, 300, 64) for _ in "qkv")
    for _ in range(4):
        out = torch.empty_like(q)
        assert ops.attention(q, k, v, out=out) is out
        found, lse = ops.attention(q, k, v, out=out, return_lse=True)
        assert found is out
        assert lse.shape == (1, 4, 300)


def test_weights_of_modules_are_prepared_too() -> None:
    x, weight = empty(3, 256), torch.nn.Parameter(empty(256))
    for _ in range(3):
        assert not ops.rms_norm(x, weight, 1e-5).requires_grad
    assert [type(found) for found in forms_of(ops.rms_norm).values()] == [gpu_prepared.Prepared]
    with torch.enable_grad():
        assert ops.rms_norm(x, weight, 1e-5).requires_grad


def test_bad_input_is_refused_whatever_was_prepared() -> None:
    q, k, v = (empty(1, 4, 300, 64) for _ in "qkv")
    for _ in range(3):
        ops.attention(q, k, v, causal=True, window=1)
    with pytest.raises(InvalidArgumentError, match="window"):
        ops.attention(q, k, v, causal=True, window=True)
    with pytest.raises(InvalidArgumentError, match="q"):
        ops.attention(None, k, v, causal=True)


@pytest.mark.parametrize("reason", ["grad", "vmap", "capture", "debug", "hooks", "device", "dispatch mode"])
def test_what_more_than_the_form_decides_is_not_prepared(
    reason: str, monkeypatch: pytest.MonkeyPatch, kept: Kept
) -> None:
    x, weight = empty(3, 256), empty(256)
    for _ in range(3):
        ops.rms_norm(x, weight, 1e-5)
    calls = list[object]()
    monkeypatch.setattr(gpu_prepared.Prepared, "__call__", lambda *given: calls.append(given))
    with torch.enable_grad():
        ops.rms_norm(x, weight, 1e-5)
    assert len(calls) == 1
    if reason == "grad":
        with torch.enable_grad():
            assert ops.rms_norm(x.clone().requires_grad_(), weight, 1e-5) is not None
    elif reason == "vmap":
        torch.vmap(lambda each: ops.rms_norm(each, weight, 1e-5))(x[:, None])
    elif reason == "dispatch mode":
        from torch.utils.flop_counter import FlopCounterMode

        with FlopCounterMode(display=False):
            ops.rms_norm(x, weight, 1e-5)
    else:
        if reason == "capture":
            monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        elif reason == "device":
            current = [1]
            monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
            monkeypatch.setattr(torch.cuda, "device", lambda gpu: nullcontext(current.insert(0, gpu)))
        elif reason == "debug":
            monkeypatch.setattr(ops_prepared, "is_debug", lambda: not is_debug())
        else:
            monkeypatch.setattr(gpu_prepared.knobs.runtime.launch_enter_hook, "calls", [lambda _: None])
        ops.rms_norm(x, weight, 1e-5)
    assert len(calls) == 1


def test_each_stream_has_memory_of_its_own(monkeypatch: pytest.MonkeyPatch, kept: Kept) -> None:
    call = CALLS.a_decode_step(random.Random(0))
    for _ in range(3):
        call[0](*call[1], **call[2])
    (found,) = forms_of(call[0]).values()
    blocks = list[frozenset[int]]()
    for stream in (1, 2, 1):
        monkeypatch.setattr(torch.cuda.current_stream(), "cuda_stream", stream)
        monkeypatch.setattr(found, "_stream_of", lambda _, stream=stream: stream)
        at = len(kept)
        again = launched(call, kept, prepared=True), launched(call, kept, prepared=False)
        assert again[0][0][0][:3] == again[1][0][0][:3]
        assert again[0][0][0][4:] == again[1][0][0][4:]
        assert kept[at][3] == stream
        blocks.append(frozenset(found._known[stream][0]))
    assert blocks[0] == blocks[2]
    assert not blocks[0] & blocks[1]


def test_many_forms_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch, kept: Kept) -> None:
    monkeypatch.setattr(ops_prepared, "_MAX_FORMS", 8)
    monkeypatch.setattr(gpu_prepared, "_MAX_MAPS", 16)
    r, sizes = random.Random(1), list[int]()
    shapes = [CALLS.of_rows, CALLS.a_product]
    for round in range(3):
        for _ in range(400):
            operator, args, named = r.choice(shapes)(random.Random(r.randrange(40)))
            operator(*args, **named)
        kept.clear()
        gc.collect()
        sizes.append(len(gc.get_objects()))
        assert all(len(forms_of(operator)) <= 8 for operator in OPERATORS), round
        assert len(gpu_prepared._maps) <= 16
    assert sizes[2] - sizes[1] < 1000
