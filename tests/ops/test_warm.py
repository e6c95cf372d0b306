"""Compiling kernels side by side. What comes out on a GPU: tests/gpu/engine/test_warm_gpu.py."""

import threading
from collections.abc import Callable
from functools import partial
from itertools import product

import pytest
import torch

from kit.no_device import DEVICE
from kit.recorder import record
from onewave.base.errors import InvalidArgumentError, UnsupportedError
from onewave.engine.load.choices import choose_device
from onewave.ops import warm as module_function
from onewave.ops.attention.hopper.plan import Work, schedule
from onewave.ops.warm import _HEADS, _LONG, _SHORT, _WINDOW, _call, _calls, side_by_side, warm

CPU = torch.device("cpu")


def test_the_package_has_the_function() -> None:
    assert module_function is warm


def test_calls_run_side_by_side_and_come_back_in_order() -> None:
    together = threading.Barrier(3, timeout=60)
    done = side_by_side(dict.fromkeys("cab", together.wait), CPU, threads=3)
    assert [each.name for each in done] == ["c", "a", "b"]
    assert all(each.seconds >= 0 for each in done)


def test_one_thread_makes_one_call_after_another() -> None:
    seen: list[str] = []
    side_by_side({name: lambda name=name: seen.append(name) for name in ("1", "2", "3")}, CPU, threads=1)
    assert seen == ["1", "2", "3"]


def test_an_error_is_raised_after_the_other_calls() -> None:
    seen: list[int] = []

    def refused() -> None:
        raise UnsupportedError("head_dim", got="84")

    with pytest.raises(UnsupportedError, match="84"):
        side_by_side({"bad": refused, "good": lambda: seen.append(1)}, CPU, threads=2)
    assert seen == [1]


def test_a_cpu_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="warm: cpu; allowed: a CUDA GPU"):
        warm("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_missing_gpu_is_named() -> None:
    with pytest.raises(UnsupportedError, match="no CUDA GPU"):
        warm()


def test_too_few_threads_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(InvalidArgumentError, match="threads: 0"):
        warm(threads=0)


@pytest.mark.parametrize("head_dim", [-8, 0, 8, 84, 264])
def test_a_head_dim_that_attention_does_not_take_is_refused_first(
    monkeypatch: pytest.MonkeyPatch, head_dim: int
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(
        UnsupportedError, match=f"warm: head_dim: {head_dim}; allowed: multiples of 8 from 16 to 256 on a GPU"
    ):
        warm("cuda:0", head_dims=(64, head_dim))


@pytest.mark.parametrize("num_sms", [78, 114, 132])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("left", [None, _WINDOW[0]])
def test_its_operands_reach_every_way_to_deal_tiles(num_sms: int, head_dim: int, left: int | None) -> None:
    def order(some: tuple[int, int], *, packed: bool) -> str:
        sequences, tokens = some
        rows = sequences * tokens if packed else tokens
        heads = _HEADS if packed else sequences * _HEADS
        work = Work(heads, 1, rows, rows, 0, left, 0, sequences if packed else None)
        return schedule(work, columns=head_dim, num_sms=num_sms, queue=True).order

    assert [order(_SHORT, packed=packed) for packed in (False, True)] == ["turns", "turns"]
    assert [order(_LONG, packed=packed) for packed in (False, True)] == ["table", "sorted"]


def test_every_adds_windows_full_packed_calls_and_sums() -> None:
    kinds = {
        f"{operator}, bfloat16, head_dim 128, {limits}{end}{lse}"
        for operator in ("attention", "attention_varlen")
        for limits in ("full", "causal", "window")
        for end in ([""] if (operator, limits) == ("attention", "full") else [", few tiles", ", many tiles"])
        for lse in ("", ", LSE")
    }
    assert set(_calls(torch.device("cpu"), (torch.bfloat16,), (128,), True)) == kinds
    common = _calls(torch.device("cpu"), (torch.bfloat16,), (128,), False)
    assert len(common) == 5
    assert set(common) < kinds


@pytest.mark.parametrize("head_dim", [64, 128])
def test_its_calls_have_every_kernel_of_common_calls(head_dim: int) -> None:
    def kernels(*calls: Callable[[], object]) -> set[str]:
        return {each.words() for call in calls for each in record(call)}

    attend = partial(_call, head_dim=head_dim, dtype=torch.bfloat16, device=DEVICE)
    shapes = product([(1, 77), (1, 1000), (2, 2000), (1, 3000), (30, 300)], [False, True], [False, True])
    calls = [partial(attend, some, packed=packed, causal=causal) for some, packed, causal in shapes if causal >= packed]
    assert kernels(*calls) <= kernels(*_calls(DEVICE, (torch.bfloat16,), (head_dim,), False).values())


def test_choosing_a_gpu_does_not_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the command could not fork what compiles."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: pytest.fail("the GPU is used"))
    assert [choose_device(name) for name in ("auto", "cuda", "cuda:1")] == [
        torch.device("cuda:0"),
        torch.device("cuda:0"),
        torch.device("cuda:1"),
    ]
