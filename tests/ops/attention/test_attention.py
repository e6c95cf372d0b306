"""attention and attention_varlen as their users call them, on a CPU: meaning, choices of backend, refusals."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from kit.attention_oracle import oracle, within_rule
from kit.operands.random import randn
from onewave.base.device import Device
from onewave.base.errors import InvalidArgumentError, OnewaveError, ShapeError, UnsupportedError
from onewave.ops.attention.call import like
from onewave.ops.attention.choose import choose, describe
from onewave.ops.attention.op import attention, attention_varlen
from onewave.ops.choice import Asked
from onewave.ops.decode_attention.op import decode_attention

NAN = float("nan")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def qkv(
    queries: int, keys: int, heads: int = 4, kv_heads: int = 2, head_dim: int = 32, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    rest = (randn(2, kv_heads, keys, head_dim, seed=seed, dtype=dtype) for seed in (1, 2))
    return randn(2, heads, queries, head_dim, dtype=dtype), *rest


def with_lse(*tensors: Any, **given: Any) -> tuple[Tensor, Tensor]:
    function = attention_varlen if len(tensors) > 3 else attention
    return function(*tensors, return_lse=True, **given)


MASKS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"causal": True, "align": "top-left"},
    {"window": 9},
    {"window": (7, 3)},
    {"window": (-1, 4), "align": "top-left"},
    {"causal": True, "window": 5, "scale": 0.3},
    {"softcap": 2.0, "causal": True},
]
LENGTHS = [(1, 1), (1, 17), (63, 64), (64, 63), (113, 203), (239, 1), (0, 5), (5, 0)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_every_mask_meets_the_error_rule_at_every_length(mask: dict[str, Any], dtype: torch.dtype) -> None:
    for queries, keys in LENGTHS:
        q, k, v = qkv(queries, keys, dtype=dtype)
        exact, exact_lse = oracle(q.double(), k.double(), v.double(), **mask)
        baseline, _ = oracle(q, k, v, **mask)
        out, lse = with_lse(q, k, v, **mask)
        for result in (out, attention(q, k, v, **mask)):
            assert result.dtype is dtype
            assert within_rule(result, exact, baseline)
        torch.testing.assert_close(lse.double(), exact_lse, atol=2e-4, rtol=1e-5)
        blind = exact_lse == float("-inf")
        assert not out[blind].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [2, 4, 6, 20, 254])
def test_a_cpu_takes_any_even_head_dim(head_dim: int, dtype: torch.dtype) -> None:
    q, k, v = qkv(13, 29, head_dim=head_dim, dtype=dtype)
    exact, exact_lse = oracle(q.double(), k.double(), v.double(), causal=True)
    out, lse = with_lse(q, k, v, causal=True)
    starts = torch.tensor([0, 13]), torch.tensor([0, 29])
    rows = (tensor[0].transpose(0, 1) for tensor in (q, k, v))
    packed = attention_varlen(*rows, *(each.int() for each in starts), 13, 29, causal=True)
    for result, right in ((out, exact), (attention(q, k, v, causal=True), exact), (packed.transpose(0, 1), exact[0])):
        assert within_rule(result, right, oracle(q, k, v, causal=True)[0] if right is exact else out[0])
    torch.testing.assert_close(lse.double(), exact_lse, atol=2e-4, rtol=1e-5)


@pytest.mark.parametrize("head_dim", [1, 3, 258])
def test_other_head_dims_are_refused(head_dim: int) -> None:
    with pytest.raises(UnsupportedError, match=f"head_dim: {head_dim}; allowed: multiples of 2 from 2 to 256"):
        attention(*qkv(3, 3, head_dim=head_dim))


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("mask", MASKS[1:7], ids=str)
def test_keys_that_no_query_sees_may_hold_nan(mask: dict[str, Any], backend: str) -> None:
    for queries, keys in [(1, 17), (3, 40), (40, 64), (64, 40)]:
        q, k, v = qkv(queries, keys)
        right = attention(q, k, v, backend="reference", **mask)
        # With equal scores every key that is seen has some weight.
        weights, _ = oracle(
            torch.zeros(1, 1, queries, 8), torch.zeros(1, 1, keys, 8), torch.eye(keys)[None, None], **mask
        )
        unseen = (weights[0, 0] == 0).all(0)
        k[:, :, unseen], v[:, :, unseen] = NAN, NAN
        torch.testing.assert_close(attention(q, k, v, backend=backend, **mask), right, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("causal", [False, True])
def test_keys_that_a_bias_hides_from_every_query_may_hold_nan(causal: bool, backend: str) -> None:
    q, k, v = qkv(5, 9)
    # Key 3 of the first KV head alone, and key 6 of both: what one query head of a group sees is seen.
    mask = torch.ones(1, 4, 5, 9, dtype=torch.bool)
    mask[:, :2, :, 3] = mask[:, 2, :, 4] = mask[..., 6] = False
    right = attention(q, k, v, bias=mask, causal=causal, backend="reference")
    k[:, 0, 3], v[:, 0, 3] = NAN, NAN
    k[:, :, 6], v[:, :, 6] = NAN, NAN
    biases = [mask] if causal else [mask, torch.where(mask, 0.0, -torch.inf)]
    for bias in biases:
        found = attention(q, k, v, bias=bias, causal=causal, backend=backend)
        torch.testing.assert_close(found, right, atol=1e-5, rtol=1e-5)


def test_a_bias_of_fixed_shape_meets_sizes_that_are_symbols() -> None:
    q, k, v = qkv(5, 7)
    bias = torch.randn(5, 7, generator=torch.Generator().manual_seed(9))
    compiled = torch.compile(partial(attention, bias=bias), backend="eager", fullgraph=True, dynamic=True)
    torch.testing.assert_close(compiled(q, k, v), attention(q, k, v, bias=bias))


def test_sinks_alibi_and_biases_meet_the_error_rule() -> None:
    q, k, v = qkv(33, 50)
    seen = torch.rand(2, 1, 33, 50, generator=torch.Generator().manual_seed(3)) > 0.5
    seen[:, :, 4] = False
    cases: list[dict[str, Any]] = [
        {"sinks": randn(4, seed=4)},
        {"alibi_slopes": randn(4, seed=5).abs(), "causal": True},
        {"alibi_slopes": randn(2, 4, seed=5).abs(), "sinks": randn(4, seed=4)},
        {"bias": randn(33, 50, seed=6), "causal": True},
        {"bias": randn(4, 1, 50, seed=6), "softcap": 3.0},
        {"bias": seen, "window": 20},
        {"bias": torch.zeros(2, 1, 33, 50).masked_fill(~seen, float("-inf")), "sinks": randn(4, seed=4)},
    ]
    for given in cases:
        doubles = {n: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in given.items()}
        exact, exact_lse = oracle(q.double(), k.double(), v.double(), **doubles)
        out, lse = with_lse(q, k, v, **given)
        assert within_rule(out, exact, oracle(q, k, v, **given)[0])
        torch.testing.assert_close(lse.double(), exact_lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mask", MASKS[:4], ids=str)
def test_packed_sequences_equal_each_alone(mask: dict[str, Any]) -> None:
    lengths = [(3, 60), (0, 4), (31, 31), (5, 0)]
    cu = [torch.tensor([0, *(n[i] for n in lengths)]).cumsum(0).int() for i in (0, 1)]
    q, k, v = randn(39, 4, 16), randn(99, 2, 16, seed=1), randn(99, 2, 16, seed=2)
    k[95:], v[95:] = NAN, NAN
    out, lse = with_lse(q, k, v, *cu, 31, 60, **mask)
    for row, (queries, keys) in enumerate(lengths):
        parts = [t[s : s + n] for t, s, n in ((q, cu[0][row], queries), (k, cu[1][row], keys), (v, cu[1][row], keys))]
        starts = [torch.tensor([0, n], dtype=torch.int32) for n in (queries, keys)]
        alone, alone_lse = with_lse(*parts, *starts, queries, keys, **mask)
        at = slice(int(cu[0][row]), int(cu[0][row]) + queries)
        assert torch.equal(out[at], alone)
        assert torch.equal(lse[:, at], alone_lse)
        whole, whole_lse = with_lse(*(part.transpose(0, 1)[None] for part in parts), **mask)
        torch.testing.assert_close(alone, whole[0].transpose(0, 1), atol=2e-6, rtol=0)
        torch.testing.assert_close(alone_lse, whole_lse[0], atol=2e-6, rtol=0)


def test_tokens_outside_every_sequence_are_not_written() -> None:
    q, k, v = (randn(10, 2, 32, seed=seed) for seed in range(3))
    starts = torch.tensor([1, 5, 5, 8], dtype=torch.int32)
    given = torch.full_like(q, 77.0)
    assert attention_varlen(q, k, v, starts, starts, 3, 4, out=given) is given
    # The first and the last tokens are nobody's, and the first sequence is longer than was said.
    assert (given == 77.0).all(-1).all(-1).nonzero().flatten().tolist() == [0, 4, 8, 9]
    fresh = attention_varlen(q, k, v, starts, starts, 3, 4)
    assert not fresh[[0, 4, 8, 9]].any()
    whole = attention_varlen(q, k, v, starts, starts, 4, 4)
    rows = [1, 2, 3, 5, 6, 7]
    assert torch.equal(given[rows], whole[rows])


def test_packed_sequences_are_checked_and_gaps_zero_where_autograd_or_a_compiler_looks_on() -> None:
    q, k, v = (randn(10, 2, 32, seed=seed) for seed in range(3))
    starts = torch.tensor([1, 5, 5, 8], dtype=torch.int32)
    run = torch.compile(partial(attention_varlen, max_seqlen_q=4, max_seqlen_k=4), backend="eager", fullgraph=True)
    expected = attention_varlen(q, k, v, starts, starts, 4, 4)
    for out in (run(q, k, v, starts, starts), attention_varlen(q.requires_grad_(), k, v, starts, starts, 4, 4)):
        assert torch.equal(out, expected)
    impossible = torch.tensor([1, 5, 4, 8], dtype=torch.int32)
    for call in (run, partial(attention_varlen, max_seqlen_q=4, max_seqlen_k=4)):
        with pytest.raises(InvalidArgumentError, match="cu_seqlens_k"):
            call(q, k, v, starts, impossible)
    pages = randn(1, 16, 2, 32, seed=3)
    with pytest.raises(InvalidArgumentError, match="block_table"):
        attention_varlen(q, pages, pages, starts, starts, 4, 4, block_table=torch.full((3, 1), 7, dtype=torch.int32))


def test_an_output_whose_rows_overlap_is_refused() -> None:
    q, k, v = qkv(4, 4)
    rows = torch.zeros(q.numel())
    for strides in ((0, 0, 32, 1), (512, 128, 16, 1), (64, 128, 32, 1)):
        with pytest.raises(ShapeError, match="elements of their own"):
            attention(q, k, v, out=rows.as_strided(q.shape, strides))
    spread = torch.zeros(4096).as_strided(q.shape, (2048, 40, 320, 1))
    attention(q, k, v, out=spread)
    assert torch.equal(spread, attention(q, k, v))


def test_biases_of_any_strides_with_grouped_heads() -> None:
    q, k, v = qkv(5, 7)
    bias = randn(4, 7, 5, seed=3).transpose(1, 2)
    for kind in (bias, bias > 0):
        assert torch.equal(
            attention(q, k, v, bias=kind, causal=True),
            attention(q, k, v, bias=kind.contiguous(), causal=True),
        )


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("scale", [0.0, -0.3])
def test_a_scale_of_any_sign(scale: float, backend: str) -> None:
    q, k, v = qkv(5, 5)
    out = attention(q, k, v, causal=True, scale=scale, backend=backend)
    exact, _ = oracle(q.double(), k.double(), v.double(), causal=True, scale=scale)
    torch.testing.assert_close(out.double(), exact, atol=1e-5, rtol=1e-5)


def test_out_is_written_in_place_with_any_strides() -> None:
    q, k, v = qkv(20, 30)
    frame = torch.full((2, 20, 4, 40), 7.0)
    inner = frame[..., 4:36].transpose(1, 2)
    assert attention(q, k, v, causal=True, out=inner) is inner
    assert torch.equal(inner, attention(q, k, v, causal=True))
    assert (frame[..., :4] == 7).all()
    assert (frame[..., 36:] == 7).all()


def test_the_result_lies_in_memory_as_q_does() -> None:
    q, k, v = (tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in qkv(20, 30))
    for given in ({}, {"causal": True}, {"softcap": 1.0}):
        assert attention(q, k, v, **given).stride() == q.stride()


def test_expanded_heads_and_odd_rows_are_taken() -> None:
    q, k, v = qkv(20, 30, kv_heads=1)
    wide = [torch.cat((tensor, tensor[..., :1]), -1)[..., :32].expand(-1, 4, -1, -1) for tensor in (k, v)]
    torch.testing.assert_close(attention(q, *wide, causal=True), attention(q, k, v, causal=True))


def test_a_cpu_builds_no_mask_that_pytorchs_flag_can_say(monkeypatch: pytest.MonkeyPatch) -> None:
    masks: list[object] = []
    plain = torch.nn.functional.scaled_dot_product_attention

    def watch(*tensors: Tensor, **given: Any) -> Tensor:
        masks.append(given.get("attn_mask"))
        return plain(*tensors, **given)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watch)
    attention(*qkv(30, 30), causal=True)
    attention(*qkv(30, 30), causal=True, window=30)
    attention(*qkv(1, 30), causal=True)
    attention(*qkv(20, 30))
    assert masks == [None] * 4
    attention(*qkv(20, 30), causal=True)
    assert isinstance(masks[4], Tensor)
    attention(*qkv(20, 30), causal=True, return_lse=True)
    assert len(masks) == 5


BAD: list[tuple[str, Any, type[OnewaveError], str]] = [
    ("rank", lambda q, k, v: attention(q[0], k, v), ShapeError, r"attention: q.*\[batch, heads, seq, head_dim\]"),
    ("heads", lambda q, k, v: attention(q[:, :3], k, v), ShapeError, "3 query heads, 2 KV heads"),
    ("v", lambda q, k, v: attention(q, k, v[:, :, :9]), ShapeError, "k and v of one shape"),
    ("batch", lambda q, k, v: attention(q[:1], k, v), ShapeError, "batch and head_dim of q"),
    ("264", lambda q, k, v: attention(*(x.repeat(1, 1, 1, 9)[..., :264] for x in (q, k, v))), UnsupportedError, "256"),
    ("last axis", lambda q, k, v: attention(q, k[..., ::2].repeat(1, 1, 1, 2).mT.contiguous().mT, v), ShapeError,
     "contiguous last axis"),
    ("float64", lambda q, k, v: attention(q.double(), k.double(), v.double()), UnsupportedError, "float64"),
    ("dtypes", lambda q, k, v: attention(q, k.half(), v), UnsupportedError, "one dtype"),
    ("devices", lambda q, k, v: attention(q, k.to("meta"), v), UnsupportedError, "cpu and meta"),
    ("sinks", lambda q, k, v: attention(q, k, v, sinks=torch.zeros(3)), ShapeError, r"\[4\]"),
    ("slopes", lambda q, k, v: attention(q, k, v, alibi_slopes=torch.zeros(4).half()), ShapeError, "float32"),
    ("bias", lambda q, k, v: attention(q, k, v, bias=torch.zeros(20, 31)), ShapeError, r"\[2, 4, 20, 30\]"),
    ("bias int", lambda q, k, v: attention(q, k, v, bias=torch.zeros(20, 30).int()), UnsupportedError, "bool"),
    ("out", lambda q, k, v: attention(q, k, v, out=q[:, :, :5].clone()), ShapeError, "out"),
    ("window", lambda q, k, v: attention(q, k, v, window=0), InvalidArgumentError, "at least 1"),
    ("sides", lambda q, k, v: attention(q, k, v, window=(3, -2)), InvalidArgumentError, "-1 for no limit"),
    ("softcap", lambda q, k, v: attention(q, k, v, softcap=0.0), InvalidArgumentError, "greater than 0"),
    ("large cap", lambda q, k, v: attention(q, k, v, softcap=1e6), InvalidArgumentError, "None changes scores"),
    ("nested", lambda q, k, v: attention(torch.nested.nested_tensor([q[0]]), k, v), UnsupportedError, "nested"),
    ("align", lambda q, k, v: attention(q, k, v, align="left"), InvalidArgumentError, "bottom-right, top-left"),
    ("backend", lambda q, k, v: attention(q, k, v, backend="cudnn"), InvalidArgumentError, "auto, triton, gluon"),
    ("triton", lambda q, k, v: attention(q, k, v, backend="triton"), UnsupportedError, "tensors on a CPU"),
    ("gluon", lambda q, k, v: attention(q, k, v, backend="gluon"), UnsupportedError, "tensors on a CPU"),
    ("torch", lambda q, k, v: attention(q, k, v, backend="torch", softcap=1.0), UnsupportedError, "softcap"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "says"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_bad_input_is_refused_in_one_line(call: Any, error: type[OnewaveError], says: str) -> None:
    with pytest.raises(error, match=says) as caught:
        call(*qkv(20, 30))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("starts", "longest", "error", "says"),
    [
        (torch.tensor([0, 20]), (20, 30), ShapeError, "int32"),
        (torch.tensor([[0, 20]]).int(), (20, 30), ShapeError, r"sequences \+ 1"),
        (torch.tensor([0, 9, 20]).int(), (20, 30), ShapeError, "one length"),
        (torch.tensor([0, 20]).int(), (-1, 30), InvalidArgumentError, "max_seqlen_q"),
    ],
)
def test_wrong_cu_seqlens_are_refused(
    starts: Tensor, longest: tuple[int, int], error: type[OnewaveError], says: str
) -> None:
    with pytest.raises(error, match=says):
        attention_varlen(
            randn(20, 4, 32), randn(30, 2, 32), randn(30, 2, 32), starts, torch.tensor([0, 30]).int(), *longest
        )


def test_the_plan_depends_on_the_row_alone_where_bits_do() -> None:
    for head_dim in (16, 64, 80, 128, 256):
        for capability in ((8, 0), (8, 6), (9, 0)):
            plans = [
                choose(
                    describe(
                        Asked(
                            "attention",
                            ((batch, heads, queries, head_dim), (batch, 2, 500, head_dim)),
                            Device(capability, 132),
                            torch.bfloat16,
                            {},
                        )
                    )
                )
                for batch in (1, 64)
                for heads in (2, 16)
                for queries in (1, 40, 5000)
            ]
            assert len({(plan.block_n, plan.width) for plan in plans}) == 1
            assert all(plan.tiles * plan.block_m >= 1 for plan in plans)


def test_queries_that_overlap_have_results_of_their_own() -> None:
    """As windows over one row do: another axis than the last steps by one element, too."""
    q = randn(400).as_strided((1, 2, 5, 16), (0, 100, 1, 1))
    k, v = (randn(1, 2, 7, 16, seed=seed) for seed in (1, 2))
    out, lse = with_lse(q, k, v)
    assert out.stride(-1) == 1
    torch.testing.assert_close((out, lse), with_lse(q.contiguous(), k, v))
    for mask in ({}, {"causal": True}, {"window": 3}):
        for given in (q, randn(400).bfloat16().as_strided(q.shape, q.stride()), randn(1, 2, 20).unfold(-1, 16, 1)):
            keys, values = (each.to(given.dtype) for each in (k, v))
            out = attention(given, keys, values, **mask)
            assert out.stride(-1) == 1
            expected = attention(given.clone(memory_format=torch.contiguous_format), keys, values, **mask)
            torch.testing.assert_close(out, expected)
    starts = torch.tensor([0, 5], dtype=torch.int32)
    tokens = q[0].transpose(0, 1)
    packed = attention_varlen(tokens, k[0, :, :5].transpose(0, 1), v[0, :, :5].transpose(0, 1), starts, starts, 5, 5)
    assert packed.stride(-1) == 1
    assert like(q).stride() == (160, 80, 16, 1)
    assert like(q.transpose(1, 2)).stride(-1) == 1
    lies = randn(1, 5, 2, 16).transpose(1, 2)
    assert like(lies).stride() == lies.stride()


def test_a_bias_may_be_as_short_as_the_rows_that_are_kept() -> None:
    """Sequences longer than max_seqlen_q keep their rows beyond it unwritten."""
    q, starts = randn(7, 2, 16), torch.tensor([0, 5, 7], dtype=torch.int32)
    bias = randn(2, 2, 5, 5, seed=3)
    whole = attention_varlen(q, q, q, starts, starts, 5, 5, bias=bias)
    short = attention_varlen(q, q, q, starts, starts, 3, 5, bias=bias[:, :, :3])
    kept = torch.tensor([0, 1, 2, 5, 6])
    assert torch.equal(short[kept], whole[kept])


def test_autocast_changes_no_result() -> None:
    """It once had float32 queries give bfloat16, and the reference's sums rounded."""
    q, k, v = qkv(20, 30)
    calls = [
        lambda: attention(q, k, v, causal=True),
        lambda: attention(q, k, v, return_lse=True),
        lambda: attention(q.half(), k.half(), v.half(), window=7),
        lambda: decode_attention(q[:, :, :2], k, v, torch.tensor([30, 9])),
    ]
    for call in calls:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = call()
        torch.testing.assert_close(found, call(), atol=0, rtol=0)


@pytest.mark.parametrize("keys", [1, 3])
def test_a_bias_may_have_no_rows_where_nobody_has_queries(keys: int) -> None:
    q, k, starts = randn(2, 4, 16), randn(3, 4, 16), torch.tensor([0, 2], dtype=torch.int32)
    starts_k = torch.tensor([0, 3], dtype=torch.int32)
    out = attention_varlen(q, k, k, starts, starts_k, 0, 3, bias=torch.zeros(1, 1, 0, keys))
    assert torch.equal(out, torch.zeros_like(q))
