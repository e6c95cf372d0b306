"""merge_attention: partial results over disjoint keys become the whole, in any tree of merges."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kit.operands.random import DEVICE
from kit.operands.random import randn_here as randn
from kit.processes import python
from onewave.base.device import Device
from onewave.base.errors import InvalidArgumentError, ShapeError, UnsupportedError
from onewave.ops.merge_attention import merge_attention, op, triton_impl
from onewave.ops.merge_attention import reference as merge_reference
from onewave.ops.merge_attention.call import MergeCall
from onewave.ops.merge_attention.choose import choose

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
# The interpreter miscomputes bf16.
DTYPES = [torch.float16, torch.float32] + ([torch.bfloat16] if DEVICE == "cuda" else [])
INF = float("inf")


def kernel(outs: list[Tensor] | Tensor, lses: list[Tensor] | Tensor) -> tuple[Tensor, Tensor]:
    """Run the operator as on a GPU, under the interpreter elsewhere."""
    call = MergeCall(op._as_parts(outs), op._as_parts(lses), described=Device((9, 0), 132))
    return triton_impl.run(call, choose(call))


def close(out: Tensor, exact: Tensor, baseline: Tensor) -> bool:
    return (out.double() - exact).abs().max() <= 2 * (baseline.double() - exact).abs().max() + 1e-5


def attention_with_lse(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("parts", "shape"), [(1, (2, 3, 1, 16)), (3, (1, 2, 5, 80)), (9, (2, 7, 40)), (2, (3, 24))])
@pytest.mark.parametrize("stacked", [True, False])
def test_the_kernel_equals_the_reference(parts, shape, stacked, dtype):
    outs, lses = randn(parts, *shape, dtype=dtype), randn(parts, *shape[:-1], seed=1) * 20
    exact, exact_lse = merge_reference.merge_attention(outs.double(), lses.double())
    baseline, baseline_lse = merge_reference.merge_attention(outs, lses)
    arguments = (outs, lses) if stacked else (list(outs.unbind()), list(lses.unbind()))
    out, lse = kernel(*arguments)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    assert close(out, exact, baseline)
    assert close(lse, exact_lse, baseline_lse)


def test_parts_of_the_keys_merge_into_attention_over_all_of_them():
    q, k, v = (randn(2, 3, n, 16, seed=i).double() for i, n in enumerate((4, 37, 37)))
    whole, whole_lse = attention_with_lse(q, k, v)
    cuts = [0, 1, 20, 37]
    pieces = [attention_with_lse(q, k[:, :, a:b], v[:, :, a:b]) for a, b in pairwise(cuts)]
    outs, lses = [o.float() for o, _ in pieces], [s.float() for _, s in pieces]
    for merge in (merge_attention, kernel):
        out, lse = merge(outs, lses)
        torch.testing.assert_close(out.double(), whole, rtol=0, atol=1e-6)
        torch.testing.assert_close(lse.double(), whole_lse, rtol=0, atol=1e-6)


@pytest.mark.parametrize("merge", [merge_attention, kernel])
def test_a_part_without_keys_contributes_nothing_even_if_it_holds_nan(merge):
    outs, lses = randn(3, 1, 2, 4, 16), randn(3, 1, 2, 4, seed=1)
    lses[1, :, :, :2] = -INF
    outs[1, :, :, :2] = float("nan")
    out, lse = merge(outs, lses)
    without, without_lse = merge(outs[[0, 2]], lses[[0, 2]])
    assert torch.equal(out[:, :, :2], without[:, :, :2])
    assert torch.equal(lse[:, :, :2], without_lse[:, :, :2])
    assert not out.isnan().any()


@pytest.mark.parametrize("merge", [merge_attention, kernel])
def test_a_row_without_keys_in_any_part_gives_zero_and_minus_infinity(merge):
    outs, lses = torch.full((4, 1, 1, 3, 8), float("nan"), device=DEVICE), torch.full((4, 1, 1, 3), -INF, device=DEVICE)
    out, lse = merge(outs, lses)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full_like(lse, -INF))


@pytest.mark.parametrize("merge", [merge_attention, kernel])
def test_one_part_is_returned_as_it_is_and_far_apart_parts_do_not_overflow(merge):
    out, lse = randn(1, 2, 3, 16), randn(1, 2, 3, seed=1) * 1e4
    same, same_lse = merge([out], [lse])
    assert torch.equal(same, out)
    assert torch.equal(same_lse, lse)
    far, far_lse = merge([out, -out], [lse + 1e4, lse - 1e4])
    assert torch.equal(far, out)
    assert torch.equal(far_lse, lse + 1e4)


@st.composite
def merge_trees(draw: st.DrawFn) -> tuple[int, list[int], int]:
    """A number of parts, which pair to merge at each step, and a seed."""
    parts = draw(st.integers(2, 7))
    return parts, [draw(st.integers(0, n - 2)) for n in range(parts, 1, -1)], draw(st.integers(0, 2**16))


@settings(max_examples=25)
@given(merge_trees())
def test_any_tree_of_merges_equals_one_merge_to_rounding(tree):
    parts, pairs, seed = tree
    outs, lses = randn(parts, 1, 2, 3, 16, seed=seed), randn(parts, 1, 2, 3, seed=seed + 1) * 5
    lses[randn(*lses.shape, seed=seed + 2) > 0.8] = -INF
    for merge in (merge_attention, kernel):
        whole, whole_lse = merge(outs, lses)
        rest = list(zip(outs.unbind(), lses.unbind(), strict=True))
        for at in pairs:
            (a, a_lse), (b, b_lse) = rest[at : at + 2]
            rest[at : at + 2] = [merge([a, b], [a_lse, b_lse])]
        torch.testing.assert_close(rest[0][0], whole, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(rest[0][1], whole_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("merge", [merge_attention, kernel])
def test_strides_are_honoured(merge):
    outs, lses = randn(2, 1, 5, 3, 16).transpose(2, 3), randn(2, 1, 5, 3, seed=1).transpose(2, 3)
    wide = torch.full((2, 1, 3, 5, 65), float("nan"), device=DEVICE)
    wide[..., :16] = outs
    want = merge(outs.contiguous(), lses.contiguous())
    for got in (
        merge(outs, lses),
        merge(wide[..., :16], lses),
        merge(list(wide[..., :16].unbind()), list(lses.unbind())),
    ):
        assert torch.equal(got[0], want[0])
        assert torch.equal(got[1], want[1])


@pytest.mark.parametrize("merge", [merge_attention, kernel])
def test_no_queries_give_an_empty_result(merge):
    out, lse = merge(randn(2, 1, 2, 0, 16), randn(2, 1, 2, 0))
    assert out.shape == (1, 2, 0, 16)
    assert lse.shape == (1, 2, 0)


@pytest.mark.parametrize("merge", [merge_attention, kernel])
@pytest.mark.parametrize("stacked", [True, False])
def test_outputs_without_numbers_have_a_sum_of_exponentials(merge, stacked):
    outs, lses = randn(3, 1, 2, 5, 0), randn(3, 1, 2, 5, seed=1)
    lses[:, :, :, 0] = -INF
    out, lse = merge(outs, lses) if stacked else merge(list(outs), list(lses))
    assert out.shape == (1, 2, 5, 0)
    torch.testing.assert_close(lse, lses.logsumexp(0))


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (lambda o, s: ([], []), ShapeError, "at least one"),
        (lambda o, s: (list(o), list(s)[:1]), ShapeError, "2 outs, 1 lses"),
        (lambda o, s: (o, s[..., :2]), ShapeError, "in each part"),
        (lambda o, s: (o.int(), s), UnsupportedError, "bfloat16, float16, float32"),
        (lambda o, s: (o, s.half()), UnsupportedError, "float32 for its lse"),
        (lambda o, s: (o.transpose(-1, -2).contiguous().transpose(-1, -2), s), ShapeError, "contiguous last axis"),
        (lambda o, s: ([o[0], o[1].half()], list(s)), UnsupportedError, "dtypes"),
    ],
)
def test_bad_input_is_refused_with_what_is_allowed(change, error, says):
    outs, lses = change(randn(2, 1, 2, 3, 16), randn(2, 1, 2, 3))
    with pytest.raises(error, match=says):
        merge_attention(outs, lses)


def test_a_backend_that_is_not_there_is_refused():
    outs, lses = randn(2, 1, 2, 3, 16), randn(2, 1, 2, 3)
    with pytest.raises(InvalidArgumentError, match="reference"):
        merge_attention(outs, lses, backend="cudnn")
    with pytest.raises(UnsupportedError, match="cuda"):
        merge_attention(outs.cpu(), lses.cpu(), backend="triton")


AHEAD_OF_TIME = """
from kit.build import build
from kit.calls import CALLS
from kit.recorder import record
for capability in ((8, 0), (9, 0)):
    [launch] = record(CALLS["merge_attention"].make, capability)
    built = build(launch)
    print(built.stack == 0 and built.registers <= 128)
"""


def test_the_kernel_compiles_for_sm_80_and_sm_90_without_spilling():
    assert python("-c", AHEAD_OF_TIME).split() == ["True", "True"]


@pytest.mark.parametrize("stacked", [True, False])
def test_vmap_merges_as_a_call_for_each_does(stacked):
    outs, lses = randn(2, 4, 3, 5, 16), randn(2, 3, 4, 5, seed=1)

    def merged(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
        return merge_attention(outs, lses) if stacked else merge_attention([*outs], [*lses])

    found = torch.vmap(merged, in_dims=(2, 1))(outs, lses)
    expected = [merged(outs[:, :, i].contiguous(), lses[:, i]) for i in range(3)]
    for each, right in zip(found, zip(*expected, strict=True), strict=True):
        torch.testing.assert_close(each, torch.stack(right))


def test_vmap_over_one_of_the_parts_keeps_the_other():
    outs, lses = randn(3, 4, 5, 16), randn(4, 5, seed=1)
    found = torch.vmap(lambda out: merge_attention([out, outs[0]], [lses, lses * 2]))(outs)
    expected = [merge_attention([out, outs[0]], [lses, lses * 2]) for out in outs]
    for each, right in zip(found, zip(*expected, strict=True), strict=True):
        torch.testing.assert_close(each, torch.stack(right))
