"""launch_kernel: what it takes for the same call as before is the same to Triton, and what it then launches."""

import gc
import json
import os
import subprocess
import sys
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import CompiledKernel
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction, create_function_from_signature

from kit.processes import python
from onewave.gpu import launch as launches
from onewave.gpu.launch import launch_kernel, properties


def kernel(
    x, described, number, plain, real, nothing, flag, several, SIZE: tl.constexpr, TWICE: tl.constexpr = False
) -> None:
    pass


NAMES = ("x", "described", "number", "plain", "real", "nothing", "flag", "several", "SIZE", "TWICE")
FUNCTION = JITFunction(kernel, do_not_specialize=["plain"])


def tensor(dtype: torch.dtype = torch.bfloat16, *, off: int = 0) -> torch.Tensor:
    return torch.zeros(64, dtype=dtype)[off:]


def descriptor(rows: int = 8, dtype: torch.dtype = torch.bfloat16, swizzle: int = 128, size: int = 64) -> Any:
    layout = gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=16, rank=2)
    return TensorDescriptor(torch.zeros(size, 64, dtype=dtype), [size, 64], [64, 1], [rows, 64], layout)


NUMBERS = (
    *(0, 1, 2, 16, 17, 48, -16, -(1 << 31), (1 << 31) - 1, 1 << 31, (1 << 31) + 16),
    *(1 << 40, (1 << 63) + 16, 1 << 63, -(1 << 63)),
)
CHOICES: list[tuple[Any, ...]] = [
    (tensor(), tensor(off=1), tensor(off=8), tensor(torch.float16), tensor(torch.float16, off=1), tensor(torch.int32)),
    (descriptor(), descriptor(16), descriptor(dtype=torch.float16), descriptor(swizzle=64), descriptor(size=128)),
    NUMBERS,
    NUMBERS,
    (1.0, 2.5),
    (None,),
    (True, False),
    ((1, tensor()), (2, tensor()), (16, tensor()), (1, tensor(off=1)), (1, tensor(), 5), (1 << 31, tensor())),
    (64, 128),
    (False, True),
]


def test_what_is_one_call_here_is_one_to_triton() -> None:
    bind = create_function_from_signature(FUNCTION.signature, FUNCTION.params, CUDABackend(GPUTarget("cuda", 90, 32)))
    kinds = launches._Kernel(FUNCTION).kinds
    usual = [choice[0] for choice in CHOICES]
    for at, choice in enumerate(CHOICES):
        calls = [[*usual[:at], value, *usual[at + 1 :]] for value in choice]
        ours = [properties(values, kinds) for values in calls]
        theirs = [(bind(*values)[1], values[8:]) for values in calls]
        for (one, its), (other, the_others) in product(zip(ours, theirs, strict=True), repeat=2):
            assert one != other or its == the_others
    # And not of every value a call of its own.
    assert properties(usual, kinds) == properties([tensor(off=8), descriptor(size=128), 32, 17, 2.5, *usual[5:]], kinds)


class Compiled(CompiledKernel):
    def __init__(self, number: int, calls: list[Any]) -> None:
        self.number, self.calls = number, calls

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *values: self.calls.append((self.number, grid, values))

    def __del__(self) -> None:
        pass


def test_a_kernel_is_bound_by_triton_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    calls: list[Any] = []

    def run(self: object, *args: object, grid: tuple[int, ...], warmup: bool, **options: object) -> Compiled:
        made.append((grid, args, options))
        return Compiled(len(made), calls)

    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    function = JITFunction(kernel, do_not_specialize=["plain"])
    x, described = tensor(), descriptor()
    named = {"real": 0.5, "nothing": None, "flag": True, "several": (5, 1), "plain": 3, "SIZE": 64, "num_warps": 4}
    launch_kernel(function, (5,), x, described, 7, **named)
    values = (x, described, 7, 3, 0.5, None, True, (5, 1), 64, False)
    assert made == [((5,), values, {"num_warps": 4})]
    other = tensor(off=8)
    launch_kernel(function, (2, 3), other, described, 9, **named | {"plain": 1, "real": 2.0})
    assert len(made) == 1
    assert calls == [(1, (2, 3, 1), (other, described, 9, 1, 2.0, None, True, (5, 1), 64, False))]
    numbers = {"plain": 1 << 31}, {"number": 16}, {"several": (5, 2)}
    for changed in ({"num_warps": 8}, {"SIZE": 128}, {"TWICE": True}, {"x": x[1:]}, *numbers):
        before = len(made)
        mine = {"x": x, "described": described, "number": 7, **named, **changed}
        for _ in range(2):
            launch_kernel(function, (1,), **mine)
        assert len(made) == before + 1
        assert calls[-1][0] == len(made)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    before = len(made)
    launch_kernel(function, (5,), x, described, 7, **named)
    assert len(made) == before + 1


def test_what_triton_does_not_take_is_left_to_triton_to_refuse() -> None:
    assert properties([np.int64(3)], [2]) == [np.int64(3)]


def test_what_is_no_compiled_kernel_is_called_as_it_is() -> None:
    calls: list[Any] = []

    class Stand:
        def __getitem__(self, grid: object) -> Any:
            return lambda *args, **named: calls.append((grid, args, named))

    for _ in range(2):
        launch_kernel(Stand(), (1,), 2, A=3)
    assert calls == [((1,), (2,), {"A": 3})] * 2


class OnGpu(torch.Tensor):
    """A tensor that says it lies on GPU 3."""

    is_cuda = True

    def get_device(self) -> int:
        return 3


def test_a_launch_is_of_the_gpu_where_its_tensors_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    current, seen = [0], list[tuple[int, tuple[Any, ...]]]()

    class Guard:
        def __init__(self, gpu: int) -> None:
            self.gpu = gpu

        def __enter__(self) -> None:
            current.append(self.gpu)

        def __exit__(self, *_: object) -> None:
            current.pop()

    def run(self: object, *args: object, **options: object) -> None:
        seen.append((current[-1], args))

    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "device", Guard)
    function = JITFunction(kernel, do_not_specialize=["plain"])
    there = tensor().as_subclass(OnGpu)
    for first in (there, (5, there), tensor()):
        launch_kernel(function, (5,), first, there, 7, 3, 0.5, None, True, (5, 1), SIZE=64, TWICE=True, num_warps=4)
    launch_kernel(function, (5,), **dict(zip(NAMES, (*seen[0][1][:-2], 64, True), strict=True)), num_warps=4)
    assert [gpu for gpu, _ in seen] == [3, 3, 0, 3]
    assert all(args[1:] == (there, 7, 3, 0.5, None, True, (5, 1), 64, True) for _, args in seen)
    assert current == [0]


SHARING = {
    "onewave.ops.attention.hopper.kernel": "attention_kernel",
    "onewave.ops.attention.fp8.kernel": "fp8_kernel",
    "onewave.ops.ffn.chain.kernel": "chain_kernel",
    "onewave.ops.post_attention.chain.kernel": "post_attention_kernel",
    "onewave.ops.sampling.search_impl": "draw_limited_kernel",
    "onewave.wave.kernel.kernel": "wave_kernel",
}
SCRIPT = """
import importlib, json, sys
from onewave.gpu.hashes import all_hashes, hash_in_order, remember
remember(json.loads(sys.argv[2]))
for number, (module, name) in enumerate(json.loads(sys.argv[1])):
    kernel = getattr(importlib.import_module(module), name)
    hash_in_order(kernel)
    print(name, kernel.cache_key)
    if number == 0:
        print(json.dumps(all_hashes()), file=sys.stderr)
"""


def test_kernels_that_share_functions_have_one_name_in_tritons_cache_whichever_comes_first() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    found, remembered = set[str](), "{}"
    orders = [list(SHARING.items()), list(reversed(SHARING.items()))]
    # In the end some functions' hashes are remembered from the second process, of its first kernel, the wave's.
    for number, order in enumerate((*orders, orders[0])):
        command = [sys.executable, "-c", SCRIPT, json.dumps(order), remembered if number == 2 else "{}"]
        done = subprocess.run(command, env=environment, text=True, capture_output=True, check=True)
        found |= set(done.stdout.splitlines())
        remembered = done.stderr.splitlines()[-1]
    assert "wave_kernel" in remembered
    assert len(found) == len(SHARING)


NAMESAKES = """
import pkgutil, sys
from importlib import import_module
import onewave
from onewave.gpu.hashes import hash_in_order
from triton.runtime.jit import JITCallable
for found in pkgutil.walk_packages(onewave.__path__, "onewave."):
    if found.name.startswith("onewave.wave.") or found.name.endswith("_impl") or ".hopper." in found.name:
        import_module(found.name)
functions = {
    value for name, module in list(sys.modules.items()) if name.startswith("onewave.")
    for value in vars(module).values() if isinstance(value, JITCallable)
}
for function in functions:
    hash_in_order(function)
print(len(functions))
for function in functions:
    values = {}
    for (name, _), (value, _) in function.used_global_vals.items():
        values.setdefault(name, set()).add(str(value))
    for name, found in values.items():
        if len(found) > 1:
            print(function.__module__, function.__name__, name)
"""


def test_no_kernel_sees_constants_of_one_name_and_two_values() -> None:
    """Triton orders what it hashes of them by their modules' addresses, which differ from process to process."""
    count, *namesakes = python("-c", NAMESAKES).splitlines()
    assert int(count) > 200
    assert namesakes == []


def test_while_a_kernel_is_compiled_no_garbage_is_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    collects: list[bool] = []

    class Slow(JITFunction):
        def run(self, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
            collects.append(gc.isenabled())

    monkeypatch.setattr(launches, "_kernels", {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(launches, "hash_in_order", lambda _: None)
    launch_kernel(Slow(kernel), (1,), *[1] * 8, SIZE=4)
    assert collects == [False]
    assert gc.isenabled()


def test_garbage_is_collected_again_and_not_where_it_was_not_before() -> None:
    with launches.without_collection():
        with launches.without_collection():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), launches.without_collection():
        raise ZeroDivisionError
    assert gc.isenabled()
    gc.disable()
    try:
        with launches.without_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
