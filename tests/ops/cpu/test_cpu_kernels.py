"""The float32 CPU kernels against their references in float64."""

import numpy as np
import pytest
import torch
from torch import Tensor

from kit.operands.random import randn
from kit.processes import python
from onewave.ops.decode_attention import decode_attention
from onewave.ops.decode_attention import reference as decode_reference
from onewave.ops.rms_norm import add_rms_norm, rms_norm
from onewave.ops.rms_norm import reference as rms_norm_reference
from onewave.ops.swiglu import reference as swiglu_reference
from onewave.ops.swiglu import swiglu


def assert_close(out: Tensor, exact: Tensor, baseline: Tensor) -> None:
    """The operators' rule: error at most twice PyTorch's own at the same dtype."""
    assert (out - exact).abs().max() <= 2 * (baseline - exact).abs().max() + 1e-5


def test_exp_is_right_to_two_units_in_the_last_place() -> None:
    from numba import njit

    from onewave.ops.cpu.math_impl import exp

    @njit
    def each(x):
        out = np.empty_like(x)
        for i in range(x.size):
            out[i] = exp(x[i])
        return out

    x = np.concatenate((np.linspace(-87, 87, 100_001), np.linspace(-1, 1, 10_001), [0.0])).astype(np.float32)
    exact = np.exp(x.astype(np.float64))
    assert np.max(np.abs(each(x) - exact) / exact) < 2 * 2.0**-23
    assert each(np.array([-np.inf, -1e30], np.float32)).max() < 1e-37


@pytest.mark.parametrize(("rows", "hidden"), [(1, 1), (1, 576), (3, 577)])
def test_rms_norm(rows: int, hidden: int) -> None:
    x, residual, weight = randn(rows, hidden), randn(rows, hidden, seed=1), randn(hidden, seed=2)
    exact = rms_norm_reference.rms_norm(x.double(), weight.double(), 1e-5)
    assert_close(rms_norm(x, weight, 1e-5), exact, rms_norm_reference.rms_norm(x, weight, 1e-5))
    out, total = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    exact = rms_norm_reference.rms_norm(total.double(), weight.double(), 1e-5)
    assert_close(out, exact, rms_norm_reference.rms_norm(total, weight, 1e-5))


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (1, 1536), (3, 513)])
def test_swiglu(rows: int, width: int) -> None:
    gate_up = 10 * randn(rows, 2 * width)
    gate, up = gate_up.double().chunk(2, -1)
    assert_close(swiglu(gate_up), torch.nn.functional.silu(gate) * up, swiglu_reference.swiglu(gate_up))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(4, 4, 64), (9, 3, 80), (7, 1, 16), (4, 2, 20), (2, 1, 4), (2, 2, 2)]
)
@pytest.mark.parametrize("window", [None, 1, 100])
def test_decode_attention(heads: int, kv_heads: int, head_dim: int, window: int | None) -> None:
    lengths = [1, 63, 64, 65, 300]
    caches = []
    for seed in (1, 2):
        cache = randn(len(lengths), kv_heads, 320, head_dim, seed=seed)
        for slot, length in enumerate(lengths):
            cache[slot, :, length:] = float("nan")
        caches.append(cache)
    q = 3 * randn(len(lengths), heads, head_dim)
    q = q[:, :, None]
    seq_lens = torch.tensor(lengths)
    out = decode_attention(q, *caches, seq_lens, window=window)
    exact, _ = decode_reference.decode_attention(
        q.double(), caches[0].double(), caches[1].double(), seq_lens, window=window
    )
    assert_close(out, exact, decode_reference.decode_attention(q, *caches, seq_lens, window=window)[0])
    for row in range(len(lengths)):
        one = slice(row, row + 1)
        alone = decode_attention(q[one], *(cache[one] for cache in caches), seq_lens[one], window=window)
        assert torch.equal(alone[0], out[row])


def test_attention_holds_its_room_until_it_ends():
    """A thread's first memory is handed out again at once: what is used after it was freed breaks the heap."""
    program = """if True:
        import threading, torch
        from onewave import ops
        q, k, v = (torch.randn(40, heads, 80) for heads in (4, 2, 2))
        starts, lengths = torch.tensor([0, 40], dtype=torch.int32), torch.tensor([2000] * 2, dtype=torch.int32)
        cache = torch.randn(2, 2, 2048, 80)
        found = []
        def attend():
            found.append(ops.attention_varlen(q, k, v, starts, starts, 40, 40, causal=True))
            found.append(ops.decode_attention(q[:2], cache, cache, lengths))
        for _ in range(20):
            thread = threading.Thread(target=attend)
            thread.start()
            thread.join()
        print(all(torch.equal(out, found[i % 2]) for i, out in enumerate(found)))
    """
    assert python("-c", program) == "True\n"
