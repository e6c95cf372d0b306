"""A missing wait, an early arrival or a missing fence in Hopper's attention kernels is found, whatever the timing was.

Kernels run in NumPy (attention_in_numpy) with one fault planted in their source. `mbarrier.luck` waits as long as a
wait does, and orders nothing: a wait that is missing where the timing happens to be right.
"""

from typing import Any

import pytest
import torch

from kit.numpy_gpu.attention_in_numpy import NumpyKernel, kernels_in_numpy
from kit.numpy_gpu.gluon_in_numpy import Fault
from kit.numpy_gpu.happens_before import Race
from kit.operands.random import randn_bf16 as randn
from onewave.ops.attention.fp8.op import attention_fp8
from onewave.ops.attention.op import attention, attention_varlen

LUCK = "mbarrier.luck("


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> dict[str, NumpyKernel]:
    """One program, so that it has tiles enough to use every buffer again."""
    return kernels_in_numpy(monkeypatch, programs=1)


def attend(head_dim: int, **options: Any) -> None:
    q, k, v = (randn(1, heads, 400, head_dim, seed=heads) for heads in (3, 1, 1))
    attention(q, k, v, causal=True, backend="gluon", return_lse=True, **options)


FREE = "mbarrier.wait(bq.index(QS * W + b + w)"
WAITED = "o = output_comes(problem, o, PENDING)\n    "
GONE = "mbarrier.arrive(problem.bv.index(problem.V_STAGES + v), count=1)\n    "
FAULTS = {
    "the loading warp does not wait for Q's buffers": (
        Fault("post_next", FREE, FREE.replace("mbarrier.wait(", LUCK)),
        r"load_all \(2\) writes what (consume|store_all) \(.\) read",
    ),
    "the loading warp does not wait for a free place of K": (
        Fault("load_keys", "mbarrier.wait(problem.bk", LUCK + "problem.bk"),
        "a copy by TMA writes what products of consume",
    ),
    **{
        f"a warpgroup does not wait for K, in {step}": (
            Fault(step, "mbarrier.wait(bk", LUCK + "bk"), "products of consume .* reads what a copy by TMA wrote"
        )
        for step in ("step_with_max", "whole_step")
    },
    **{
        f"a warpgroup does not wait for V, in {step}": (
            Fault(step, f"mbarrier.wait({bv}", LUCK + bv), "products of consume .* reads what a copy by TMA wrote"
        )
        for step, bv in (("both_products", "problem.bv"), ("consume", "bv"))
    },
    "V goes before its product has ended": (
        Fault("end", WAITED + GONE, GONE + WAITED),
        "a copy by TMA writes what products of consume",
    ),
    "the storing warp does not wait for outputs": (
        Fault("store_all", "mbarrier.wait(problem.bo", LUCK + "problem.bo"),
        "stores of store_all .* reads what consume .* wrote",
    ),
    "Q's buffer goes before the output has left it": (
        Fault("store_all", "tma.store_wait(0)", "pass"), "a copy by TMA writes what stores of store_all"
    ),
    "a post is read after its slot went back": (
        Fault("store_all", "        tile += 1\n", "        posted(problem.posts, slot, ROWS, 1)\n        tile += 1\n"),
        r"load_all \(2\) writes what store_all|store_all .* reads what load_all",
    ),
    "an output that was not fenced": (
        Fault("hand_over", "fence_async_shared()", "pass"), "stores of store_all .* reads what consume .* wrote"
    ),
    "a post that is written after the arrival": (
        Fault("post_next", "found = 1\n", "found = 1\n            post(problem.posts, slot, ROWS, rows)\n"),
        r"load_all \(2\) writes what|reads what load_all \(2\) wrote",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str, kernels: dict[str, NumpyKernel]) -> None:
    fault, complaint = FAULTS[name]
    kernel = kernels["attention_kernel"]
    kernel.planted.append(fault)
    with pytest.raises(Race, match=complaint):
        attend(128, window=300)  # steps whose keys it cuts, and whole ones


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_without_a_fault_nothing_is_found(head_dim: int, kernels: dict[str, NumpyKernel]) -> None:
    attend(head_dim, window=150)
    assert kernels["attention_kernel"].launches == 1


def test_keys_that_go_before_their_step_is_computed_again_are_found(kernels: dict[str, NumpyKernel]) -> None:
    q, k, v = (randn(1, 1, length, 128, seed=length) for length in (128, 1500, 1500))
    k[:, :, :900] *= 40  # read last
    attention(q, k, v, backend="gluon")
    again = "mbarrier.arrive(problem.bk.index(KS + j % KS), count=1)"  # else they would go twice, and a phase never end
    kernels["attention_kernel"].planted += [
        Fault("whole_step", ", pred=exceeded == 0", ""),
        Fault("step_again", again, "pass"),
    ]
    either = r"a copy by TMA writes what products of consume|products of consume .* reads what a copy by TMA wrote"
    with pytest.raises(Race, match=either):
        attention(q, k, v, backend="gluon")


def test_zeros_that_were_not_fenced_are_found(kernels: dict[str, NumpyKernel]) -> None:
    starts, keys = torch.tensor([0, 130, 300]).int(), torch.tensor([0, 230, 600]).int()
    q, k, v = (randn(n, heads, 128, seed=heads) for n, heads in ((300, 2), (600, 1), (600, 1)))
    given: dict[str, Any] = {"causal": True, "window": 40, "backend": "gluon"}
    attention_varlen(q, k, v, starts, keys, 170, 370, **given)
    kernels["attention_kernel"].planted.append(Fault("load_all", "fence_async_shared()", "pass"))
    with pytest.raises(Race, match=r"products of consume .* reads what load_all \(2\) wrote"):
        attention_varlen(q, k, v, starts, keys, 170, 370, **given)


@pytest.mark.parametrize(
    ("fault", "complaint"),
    [
        (
            Fault("load_bytes", "mbarrier.wait(bk.index(KS + s)", LUCK + "bk.index(KS + s)"),
            "a copy by TMA writes what products of consume_bytes",
        ),
        (Fault("consume_bytes", "mbarrier.wait(bv", LUCK + "bv"), "products of consume_bytes .* reads what a copy"),
        (
            Fault("consume_bytes", "tma.store_wait(0)\n            gl", "gl"),
            "consume_bytes .* writes what stores of consume_bytes .* read",
        ),
        (Fault("consume_bytes", "fence_async_shared()", "pass"), "stores of consume_bytes .* reads what consume_bytes"),
    ],
    ids=["a free place of K", "V", "the output before", "the output's fence"],
)
def test_float8s_planted_faults_are_found(fault: Fault, complaint: str, kernels: dict[str, NumpyKernel]) -> None:
    q, k, v = (randn(1, heads, 600, 64, seed=heads).to(torch.float8_e4m3fn) for heads in (3, 1, 1))
    kernels["fp8_kernel"].planted.append(fault)
    with pytest.raises(Race, match=complaint):
        attention_fp8(q, k, v, backend="gluon")
