"""attention(backend="mma") without a GPU: its source in NumPy against float64, and what it takes and refuses."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kit.attention_oracle import oracle, within_rule
from kit.numpy_gpu import mma_in_numpy
from kit.numpy_gpu.mma_launches import record
from kit.operands.random import randn_half as randn
from onewave.base.device import Device
from onewave.base.errors import UnsupportedError
from onewave.ops.attention.masks import Options
from onewave.ops.attention.mma.plan import mma_refusal, mma_tile, plan_mma
from onewave.ops.attention.op import attention, attention_varlen
from onewave.ops.attention.plan import Facts
from onewave.ops.explain import explain

NAN = float("nan")
OPTIONS = ("causal", "align", "window", "softcap", "scale", "sinks")


def framed(*shape: int, seed: int, edge: int = 8) -> Tensor:
    """Random [batch, heads, seq, head_dim], tokens before heads, NaN around."""
    batch, heads, length, head_dim = shape
    frame = torch.full((batch, length + 2, heads + 1, head_dim + edge), NAN).half()
    return frame[:, 1 : length + 1, :heads, :head_dim].transpose(1, 2).copy_(randn(*shape, seed=seed))


def run(
    monkeypatch: pytest.MonkeyPatch, q: Tensor, k: Tensor, v: Tensor, *, narrow: bool = False, **options: Any
) -> Any:
    """(out, log-sums) of one call."""
    recorder = record(monkeypatch, num_sms=10_000 if narrow else 1)
    out = framed(*q.shape, seed=7, edge=8 if q.stride(2) % 8 == 0 else 3)
    _, lse = attention(q, k, v, out=out, return_lse=True, backend="mma", **options)
    for launch in recorder.launches:
        mma_in_numpy.run(launch)
    return out, lse


def check(monkeypatch: pytest.MonkeyPatch, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> None:
    out, lse = run(monkeypatch, q, k, v, **options)
    options.pop("narrow", None)
    doubles = {name: x.double() if isinstance(x, Tensor) else x for name, x in options.items()}
    exact, exact_lse = oracle(q.double(), k.double(), v.double(), **doubles)
    assert within_rule(out, exact, oracle(q, k, v, **options)[0])
    assert not (out * (lse == float("-inf"))[..., None]).any()
    torch.testing.assert_close(lse.double(), exact_lse, atol=2e-5, rtol=1e-5)


LENGTHS = [(1, 1), (1, 17), (63, 64), (64, 63), (113, 203), (130, 1), (65, 128), (0, 5), (5, 0), (31, 97)]
HEADS = [(1, 1), (2, 2), (3, 1), (6, 3), (4, 2)]
MASKS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"causal": True, "align": "top-left"},
    {"window": 33},
    {"window": (40, 5), "softcap": 3.0},
    {"causal": True, "window": 7, "scale": 0.3},
]
# Every pair of lengths meets each mask once, with heads, head_dims and tiles going round.
SWEEP = [
    (
        *lengths,
        *HEADS[(i + j) % len(HEADS)],
        (16, 40, 64, 80, 128, 24, 256)[(2 * i + j) % 7],
        MASKS[j],
        (i + j) % 2 == 0,
    )
    for i, lengths in enumerate(LENGTHS)
    for j in range(len(MASKS))
]


@pytest.mark.parametrize(("num_queries", "num_keys", "heads", "kv_heads", "head_dim", "mask", "narrow"), SWEEP)
def test_every_length_and_mask_meets_the_error_rule(
    num_queries: int, num_keys: int, heads: int, kv_heads: int, head_dim: int, mask: dict[str, Any], narrow: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    q = framed(1, heads, num_queries, head_dim, seed=0)
    k, v = (framed(1, kv_heads, num_keys, head_dim, seed=seed) for seed in (1, 2))
    check(monkeypatch, q, k, v, narrow=narrow, **mask)


@pytest.mark.parametrize("head_dim", [32, 96, 112, 192])
def test_other_head_dims_meet_the_error_rule(head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    q, (k, v) = framed(2, 2, 30, head_dim, seed=0), (framed(2, 1, 70, head_dim, seed=seed) for seed in (1, 2))
    check(monkeypatch, q, k, v, causal=True)


@pytest.mark.parametrize(("num_queries", "num_keys"), [(70, 70), (3, 130), (66, 50)])
def test_sinks_and_scales_of_any_sign_meet_the_error_rule(
    num_queries: int, num_keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    q = framed(2, 4, num_queries, 32, seed=0)
    k, v = (framed(2, 2, num_keys, 32, seed=seed) for seed in (1, 2))
    check(monkeypatch, q, k, v, causal=True, sinks=randn(4, seed=3))
    check(monkeypatch, q, k, v, sinks=randn(4, seed=3).float(), window=20)
    check(monkeypatch, q, k, v, causal=True, scale=-0.5)
    check(monkeypatch, q, k, v, scale=0.0)


def test_rows_that_are_no_whole_pieces_and_expanded_axes_are_read_as_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    odd = [framed(2, 2, n, 40, seed=n, edge=3) for n in (70, 90, 91)]
    check(monkeypatch, odd[0], odd[1], odd[2][:, :, :90], causal=True)
    k = framed(1, 1, 33, 64, seed=1).expand(2, 3, -1, -1)
    check(monkeypatch, framed(2, 6, 40, 64, seed=0), k, k, window=(9, 9))
    one_key = framed(1, 1, 1, 64, seed=1).expand(1, 2, 70, -1)
    check(monkeypatch, framed(1, 2, 5, 64, seed=0), one_key, one_key)


def test_logits_that_rise_and_a_huge_last_key_stay_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (framed(1, 2, n, 64, seed=n) for n in (66, 200, 201))
    v = v[:, :, :200]
    rise = torch.linspace(0.1, 6, 200).half()[:, None]
    check(monkeypatch, q.abs(), k.abs() * rise, v)
    check(monkeypatch, q.abs(), k.abs() * rise.flip(0), v, causal=True)
    k[:, :, -1] *= 30
    check(monkeypatch, q, k, v)


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("mask", [MASKS[1], MASKS[3], {"causal": True, "window": 9}])
def test_keys_that_no_query_sees_may_hold_nan(
    mask: dict[str, Any], narrow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = (framed(1, 2, n, 64, seed=n) for n in (20, 300, 301))
    v = v[:, :, :300]
    top = {**mask, "align": "top-left"}
    exact, _ = run(monkeypatch, q, k, v, narrow=narrow, **top)
    hidden = slice(20, None) if mask.get("causal") else slice(0, 0)
    k[:, :, hidden], v[:, :, hidden] = NAN, NAN
    assert torch.equal(run(monkeypatch, q, k, v, narrow=narrow, **top)[0], exact)
    if mask.get("window"):
        q, k, v = (framed(1, 2, n, 64, seed=n) for n in (20, 300, 301))
        v = v[:, :, :300]
        exact, _ = run(monkeypatch, q, k, v, narrow=narrow, **mask)
        hidden = slice(0, 280 - mask["window"] + 1)
        k[:, :, hidden], v[:, :, hidden] = NAN, NAN
        assert torch.equal(run(monkeypatch, q, k, v, narrow=narrow, **mask)[0], exact)


def test_a_rows_bits_depend_neither_on_the_tile_nor_on_other_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (framed(2, n, 100, 64, seed=n) for n in (3, 1, 1))
    for mask in ({"causal": True}, {"causal": True, "window": 40}):
        whole, lse = run(monkeypatch, q, k, v, **mask)
        few, few_lse = run(monkeypatch, q, k, v, narrow=True, **mask)
        assert torch.equal(few, whole)
        assert torch.equal(few_lse, lse)
        # Nineteen queries, whose three heads share a tile.
        part, part_lse = run(monkeypatch, q[1:, :, 81:], k[1:], v[1:], **mask)
        assert torch.equal(part, whole[1:, :, 81:])
        assert torch.equal(part_lse, lse[1:, :, 81:])


@pytest.mark.parametrize("mask", [MASKS[0], MASKS[1], MASKS[2], {"causal": True, "window": 20, "softcap": 5.0}])
def test_packed_sequences_equal_each_alone_bit_for_bit(mask: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, key_lengths = [3, 0, 90, 64, 5], [130, 5, 0, 64, 5]
    starts, key_starts = (torch.tensor([0, *n]).cumsum(0).int() for n in (lengths, key_lengths))
    q = randn(sum(lengths) + 4, 4, 64)
    k, v = (randn(sum(key_lengths) + 60, 2, 64, seed=seed) for seed in (1, 2))
    k[sum(key_lengths) :], v[sum(key_lengths) :] = NAN, NAN
    for longest in (90, 70):
        recorder = record(monkeypatch)
        out = torch.full_like(q, 7.0)
        _, lse = attention_varlen(
            q, k, v, starts, key_starts, longest, 130, out=out, return_lse=True, backend="mma", **mask
        )  # fmt: skip
        mma_in_numpy.run(recorder.launches[-1])
        assert (out[sum(lengths) :] == 7.0).all()
        for row, (n, m) in enumerate(zip(lengths, key_lengths, strict=True)):
            at, key_at, written = int(starts[row]), int(key_starts[row]), min(n, longest)
            keys = slice(key_at, key_at + m)
            alone = [t.transpose(0, 1)[None] for t in (q[at : at + n], k[keys], v[keys])]
            one, one_lse = run(monkeypatch, *alone, **mask)
            assert torch.equal(out[at : at + written], one[0].transpose(0, 1)[:written])
            assert torch.equal(lse[:, at : at + written], one_lse[0][:, :written])
            assert (out[at + written : at + n] == 7.0).all()


def test_no_sequences_and_no_queries_launch_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = record(monkeypatch)
    q, k = randn(1, 2, 0, 64), randn(1, 2, 9, 64)
    assert attention(q, k, k, backend="mma").shape == q.shape
    none = torch.zeros(1).int()
    attention_varlen(randn(3, 2, 64), randn(5, 2, 64), randn(5, 2, 64), none, none, 0, 0, backend="mma")
    assert not recorder.launches


def test_what_it_does_not_take_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    q = randn(1, 2, 5, 64)
    with pytest.raises(UnsupportedError, match=r"backend=mma\).*tensors on a CPU"):
        attention(q, q, q, backend="mma")
    record(monkeypatch)
    for given in ({"bias": torch.zeros(5, 5)}, {"alibi_slopes": torch.zeros(2)}):
        with pytest.raises(UnsupportedError, match="neither ALiBi nor bias"):
            attention(q, q, q, backend="mma", **given)
    for capability in ((7, 5), (10, 0), (12, 0)):
        record(monkeypatch, capability)
        with pytest.raises(
            UnsupportedError, match=f"for sm_80 to sm_90, and this is sm_{capability[0]}{capability[1]}"
        ):
            attention(q, q, q, backend="mma")
    facts = Facts("attention", "mma", Device((8, 9), 128), torch.float16, Options(1.0), 1, 2, 2, 5, 5, 64)
    assert mma_refusal(facts) is None
    assert "Gluon: gone" in str(mma_refusal(facts._replace(missing="gone")))


def test_explain_tells_its_tile_and_auto_never_takes_it() -> None:
    shapes = (16, 8, 4096, 128), (16, 2, 4096, 128)
    found = explain("attention", *shapes, device="cuda:sm_80", dtype="fp16", backend="mma", causal=True)
    assert found.backend == "mma"
    assert "attention/mma/kernel.py: mma_kernel" in found.kernel
    assert str(found.tile).startswith("64 query rows x 32 keys x 128, 4 warps")
    few = explain("attention", (1, 8, 1024, 128), (1, 8, 1024, 128), device="cuda:sm_90", dtype="fp16", backend="mma")
    assert str(few.tile).startswith("32 query rows x 32 keys")
    assert any("few registers" in reason for reason in few.why)
    for device in ("cuda:sm_80", "cuda:sm_89", "cuda:sm_90"):
        assert explain("attention", *shapes, device=device, dtype="bf16").backend != "mma"
    with pytest.raises(UnsupportedError, match="sm_100"):
        explain("attention", *shapes, device="cuda:sm_100", dtype="bf16", backend="mma")
    with pytest.raises(UnsupportedError, match="a CPU"):
        explain("attention", *shapes, device="cpu", dtype="fp32", backend="mma")


def test_heads_of_a_group_share_a_tile_that_their_queries_do_not_fill() -> None:
    facts = Facts("attention", "mma", Device((9, 0), 132), torch.float16, Options(1.0), 3, 32, 8, 5, 5, 128)
    few = plan_mma(facts)
    assert (few.packed_heads, few.tiles, few.num_programs) == (4, 1, 24)
    many = plan_mma(facts._replace(num_queries=500))
    assert (many.packed_heads, many.tiles, many.num_programs) == (1, 8, 768)
    assert many.block_m == mma_tile(128).queries


@pytest.mark.parametrize("head_dim", [16, 32, 64, 80, 128, 192, 256])
def test_the_tiles_of_a_head_dim_differ_in_queries_and_registers_alone(head_dim: int) -> None:
    wide, narrow = mma_tile(head_dim), mma_tile(head_dim, narrow=True)
    assert (wide.keys, wide.width, wide.warps) == (narrow.keys, narrow.width, narrow.warps)
    assert narrow.queries <= wide.queries
    assert narrow.registers <= wide.registers <= 168
    if head_dim <= 128:
        # Q stays in registers; K alone stands for "Q and K in at most 12 KiB".
        assert 2 * wide.keys * wide.width <= 12 << 10
