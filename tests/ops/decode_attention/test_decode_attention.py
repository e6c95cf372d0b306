"""Decode attention: every cache layout, split and mask, against softmax(q k^T) v in float64.

Under the interpreter on the CPU, natively on a GPU. Whatever must not be read holds NaN.
"""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from kit.lanes import slow
from kit.operands.decode_calls import attend
from onewave.base.errors import InvalidArgumentError, ShapeError, UnsupportedError
from onewave.ops.decode_attention import decode_attention, op
from onewave.ops.decode_attention.reference import decode_attention as reference
from onewave.ops.decode_attention.triton.plan import DecodePlan, DecodeSizes, plan_decode

pytestmark = [pytest.mark.pairs, *([pytest.mark.gpu] if torch.cuda.is_available() else [])]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter miscomputes bf16.
LOW_DTYPES = [torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else [])


NAN = float("nan")


@dataclass
class Case:
    """Random operands: row i has lengths[i] keys, everything beyond is NaN."""

    lengths: list[int]
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    queries: int = 1
    capacity: int = 320
    dtype: torch.dtype = torch.float16
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rows = len(self.lengths)
        self.q = random(rows, self.heads, self.queries, self.head_dim, dtype=self.dtype, seed=0)
        self.k, self.v = (
            random(rows, self.kv_heads, self.capacity, self.head_dim, dtype=self.dtype, seed=seed) for seed in (1, 2)
        )
        for row, length in enumerate(self.lengths):
            self.k[row, :, max(length, 0) :] = float("nan")
            self.v[row, :, max(length, 0) :] = float("nan")
        self.seq_lens = torch.tensor(self.lengths, device=DEVICE)

    def check(self, out: Tensor, lse: Tensor) -> None:
        """The operators' rule on every row of length >= 0."""
        exact, exact_lse = reference(
            *(t.double() for t in (self.q, self.k, self.v)), self.seq_lens, **self.reference_options(torch.float64)
        )
        plain, _ = reference(self.q, self.k, self.v, self.seq_lens, **self.reference_options(torch.float32))
        kept = self.seq_lens >= 0
        allowed = 2 * (plain[kept].double() - exact[kept]).abs().max() + 1e-5
        assert (out[kept].double() - exact[kept]).abs().max() <= allowed
        empty = exact_lse[kept].isinf()
        assert torch.equal(lse[kept].isinf(), empty)
        torch.testing.assert_close(lse[kept][~empty].double(), exact_lse[kept][~empty], atol=2e-3, rtol=1e-3)

    def reference_options(self, dtype: torch.dtype) -> dict[str, Any]:
        known = {k: v for k, v in self.options.items() if k != "split_size"}
        return {k: v.to(dtype) if isinstance(v, Tensor) else v for k, v in known.items()}

    def run(self, **changes: Any) -> tuple[Tensor, Tensor]:
        operands = {"q": self.q, "k": self.k, "v": self.v, "seq_lens": self.seq_lens, **self.options, **changes}
        return kernel(**operands)


def random(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def kernel(q: Tensor, k: Tensor, v: Tensor, seq_lens: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """The Triton kernel, wherever it runs."""
    out = options.pop("out", torch.full(q.shape, float("nan"), dtype=q.dtype, device=q.device))
    lse = torch.full(q.shape[:3], float("nan"), device=q.device)
    return attend(q, k, v, seq_lens, out=out, lse=lse, **options)


@pytest.mark.parametrize("dtype", LOW_DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(1, 1, 16), (4, 4, 32), (7, 1, 40), (9, 3, 80), (4, 2, 128), (2, 1, 256)]
)
def test_any_heads_and_head_dim(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    case = Case([1, 63, 64, 65, 0, 300, 128], heads, kv_heads, head_dim, dtype=dtype)
    case.check(*case.run())


@pytest.mark.parametrize("queries", [2, 5, 8])
def test_several_new_tokens_a_row_see_one_key_more_each(queries: int) -> None:
    case = Case([queries, 1, 65, 131], 6, 2, 64, queries)
    case.check(*case.run())


def test_more_query_rows_than_a_tile_holds() -> None:
    case = Case([70, 9], 24, 1, 32, 8, capacity=96)
    case.check(*case.run())


@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize(("head_dim", "more"), [(40, 0), (40, 1), (64, 8), (64, 1)])
def test_rows_may_begin_anywhere(head_dim: int, more: int, queries: int) -> None:
    case = Case([5, 1, 65, 300], 8, 2, head_dim, queries)
    frames = [case.k.new_full((*cache.shape[:3], head_dim + more), NAN) for cache in (case.k, case.v)]
    k, v = (frame[..., :head_dim].copy_(cache) for frame, cache in zip(frames, (case.k, case.v), strict=True))
    case.check(*case.run(k=k, v=v))


def test_the_stride_of_an_axis_of_one_does_not_matter() -> None:
    case = Case([129], 8, 2, 64, 5)
    far = (case.k[0].numel() + 1, *case.k.stride()[1:])
    k, v = (cache.as_strided(cache.shape, far) for cache in (case.k, case.v))
    assert torch.equal(case.run(k=k, v=v)[0], case.run()[0])


@pytest.mark.parametrize(
    ("window", "queries"), [(1, 1), (64, 3), (100, 1), (1000, 3), *(slow(w, q) for w, q in [(1, 3), (64, 1), (100, 3)])]
)
def test_a_window_hides_older_keys(window: int, queries: int) -> None:
    case = Case([3, 100, 129, 300], queries=queries, options={"window": window})
    case.check(*case.run())
    # Keys that no query sees may hold anything.
    for row, length in enumerate(case.lengths):
        first = max(0, length - queries + 1 - window)
        case.k[row, :, :first] = case.v[row, :, :first] = float("nan")
    assert not case.run()[0].isnan().any()
    assert not reference(case.q, case.k, case.v, case.seq_lens, window=window)[0].isnan().any()


@pytest.mark.parametrize("queries", [1, 3])
def test_a_block_that_no_query_sees_need_not_exist(queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "checks_contents", lambda: True)
    q = random(1, 4, queries, 16, dtype=LOW_DTYPES[0], seed=0)
    k, v = (random(6, 2, 8, 16, dtype=LOW_DTYPES[0], seed=seed) for seed in (1, 2))
    table, length = (torch.tensor(x, device=DEVICE) for x in ([[3, 4, 5, 1, 2]], [36]))
    given: dict[str, Any] = {"window": 9, "backend": "reference"}
    expected = decode_attention(q, k, v, length, block_table=table, **given)
    hidden = (36 - 9 - (queries - 1)) // 8
    table[0, :hidden] = -1
    assert torch.equal(decode_attention(q, k, v, length, block_table=table, **given), expected)
    table[0, hidden] = -1
    with pytest.raises(InvalidArgumentError, match=rf"block_table\[0, {hidden}\]: -1"):
        decode_attention(q, k, v, length, block_table=table, **given)


@pytest.mark.parametrize("sinks", [False, True])
def test_a_row_that_sees_nan_is_nan_and_no_row_without_keys(sinks: bool) -> None:
    """Its LSE was once -inf, with which merge_attention left it out."""
    case = Case([10, 0, 300], options={"sinks": random(4, dtype=torch.float32, seed=9)} if sinks else {})
    case.k[0, :, 3] = float("nan")
    out, lse = case.run()
    assert out[0].isnan().all()
    assert lse[0].isnan().all()
    assert (lse[1] == -torch.inf).all()
    assert not lse[2].isnan().any()


@pytest.mark.parametrize("extras", ["softcap", "sinks", "scale"])
def test_softcap_sinks_and_scale(extras: str) -> None:
    values = {"softcap": 3.0, "sinks": random(4, dtype=torch.float32, seed=9), "scale": 0.5}
    case = Case([1, 65, 300, 0], options={extras: values[extras]})
    case.check(*case.run())


@pytest.mark.parametrize("split_size", [64, 100, 128, 320])
def test_every_split_size_gives_the_same_to_rounding(split_size: int) -> None:
    case = Case([1, 63, 64, 65, 127, 128, 129, 320], options={"split_size": split_size})
    case.check(*case.run())


def test_negative_scores_are_not_measured_against_zero() -> None:
    case = Case([5, 129])
    case.k.copy_(-case.q[:, ::2].mean(2, keepdim=True) * 8)
    case.check(*case.run())


@pytest.mark.parametrize("block_size", [16, 64, 128, 24, 1])
def test_paged_equals_plain_bit_for_bit(block_size: int) -> None:
    case = Case([1, 17, 64, 130, 200, 0])
    blocks = -(-case.capacity // block_size)
    order = torch.randperm(len(case.lengths) * blocks, generator=torch.Generator().manual_seed(3))
    table = order.view(len(case.lengths), blocks).to(torch.int32)
    paged = []
    for cache in (case.k, case.v):
        pages = torch.full(
            (table.numel() + 1, case.kv_heads, block_size, case.head_dim), float("nan"), dtype=case.dtype
        )
        padded = torch.nn.functional.pad(
            cache.cpu(), (0, 0, 0, blocks * block_size - case.capacity), value=float("nan")
        )
        pages[table.flatten().long()] = padded.unflatten(2, (blocks, block_size)).transpose(1, 2).flatten(0, 1)
        paged.append(pages.to(DEVICE))
    # Entries past a row's length may name no block at all.
    for row, length in enumerate(case.lengths):
        table[row, -(-length // block_size) :] = -7
    out, lse = case.run(k=paged[0], v=paged[1], block_table=table.to(DEVICE))
    case.check(out, lse)
    assert torch.equal(out, case.run()[0])
    expected, _ = reference(case.q, *paged, case.seq_lens, block_table=table.to(DEVICE))
    assert torch.equal(expected, reference(case.q, case.k, case.v, case.seq_lens)[0])


def test_numbered_slots_are_one_block_a_row() -> None:
    case = Case([5, 70, 131])
    slots = torch.tensor([2, 0, 1], device=DEVICE)
    order = torch.argsort(slots)
    out, _ = case.run(k=case.k[order], v=case.v[order], block_table=slots[:, None])
    assert torch.equal(out, case.run()[0])


def test_packed_keys_equal_plain_keys_bit_for_bit() -> None:
    case = Case([1, 70, 131])
    x = 16 // case.k.element_size()
    packed = case.k.unflatten(-1, (-1, x)).transpose(2, 3).contiguous()
    assert torch.equal(case.run(k=packed)[0], case.run()[0])
    with_packed, _ = reference(case.q, packed, case.v, case.seq_lens)
    assert torch.equal(with_packed, reference(case.q, case.k, case.v, case.seq_lens)[0])


@pytest.mark.parametrize("kind", [torch.int8] + ([torch.float8_e4m3fn] if DEVICE == "cuda" else []))
def test_quantised_caches_stand_for_their_numbers_times_the_scale(kind: torch.dtype) -> None:
    case = Case([1, 70, 131])
    scales = [torch.tensor([0.02, 0.05], device=DEVICE), torch.tensor([0.03, 0.01], device=DEVICE)]
    stored = []
    for cache, scale in zip((case.k, case.v), scales, strict=True):
        numbers = cache.float().nan_to_num() / scale[:, None, None]
        stored.append(
            numbers.round().clamp(-127, 127).to(kind) if kind is torch.int8 else numbers.clamp(-448, 448).to(kind)
        )
    out, _ = case.run(k=stored[0], v=stored[1], k_scale=scales[0], v_scale=scales[1])
    case.k, case.v = (
        (numbers.float() * scale[:, None, None]).double() for numbers, scale in zip(stored, scales, strict=True)
    )
    exact, _ = reference(case.q.double(), case.k, case.v, case.seq_lens)
    plain, _ = reference(case.q, *stored, case.seq_lens, k_scale=scales[0], v_scale=scales[1])
    assert (out.double() - exact).abs().max() <= 2 * (plain.double() - exact).abs().max() + 1e-5


def test_a_row_has_the_same_bits_alone_and_in_any_batch() -> None:
    case = Case([300, 5, 64, 299, 0, 130])
    out, lse = case.run()
    for row in range(len(case.lengths)):
        pick = slice(row, row + 1)
        alone, alone_lse = case.run(q=case.q[pick], k=case.k[pick], v=case.v[pick], seq_lens=case.seq_lens[pick])
        assert torch.equal(alone[0], out[row])
        assert torch.equal(alone_lse[0], lse[row])


def test_many_short_rows() -> None:
    generator = torch.Generator().manual_seed(5)
    case = Case(torch.randint(0, 90, (70,), generator=generator).tolist(), 2, 1, 16, capacity=96)
    case.check(*case.run())


def test_a_row_of_negative_length_is_left_alone() -> None:
    out, lse = Case([5, -1, 70]).run()
    assert out[1].isnan().all()
    assert lse[1].isnan().all()
    assert not out[[0, 2]].isnan().any()


def test_a_length_beyond_the_cache_reads_nothing_beyond_it() -> None:
    case = Case([64, 64], capacity=64)
    longer, _ = case.run(seq_lens=torch.tensor([64, 1000], device=DEVICE))
    assert torch.equal(longer, case.run()[0])


def test_strided_queries_and_caches() -> None:
    case = Case([5, 129], 4, 2, 32, 2)
    q = torch.empty(2, 2, 4, 65, dtype=case.dtype, device=DEVICE).transpose(1, 2)[..., :32].copy_(case.q)
    for columns in (72, 65):
        k, v = (
            torch.empty(2, 320, 2, columns, dtype=case.dtype, device=DEVICE).transpose(1, 2)[..., :32].copy_(t)
            for t in (case.k, case.v)
        )
        found = case.run(q=q, k=k, v=v)
        if columns % 8 == 0:
            assert torch.equal(found[0], case.run()[0])
        else:  # in smaller tiles
            case.check(*found)


def test_the_public_operator_takes_one_query_without_its_axis() -> None:
    case = Case([5, 70, 0])
    out, lse = decode_attention(case.q, case.k, case.v, case.seq_lens, return_lse=True)
    flat = decode_attention(case.q[:, :, 0], case.k, case.v, case.seq_lens)
    assert torch.equal(flat, out[:, :, 0])
    given = torch.empty_like(out)
    assert decode_attention(case.q, case.k, case.v, case.seq_lens, out=given) is given
    assert torch.equal(given, out)
    case.check(out, lse)


@pytest.mark.parametrize("window", [None, 7])
def test_the_cpu_loops_equal_the_reference(window: int | None) -> None:
    lengths = torch.tensor([5, 0, 33])
    q, k, v = (
        torch.randn(3, n, s, 24, generator=torch.Generator().manual_seed(n)) for n, s in ((6, 1), (3, 40), (3, 40))
    )
    slots = torch.tensor([[1], [0], [2]])
    out = decode_attention(q, k, v, lengths, block_table=slots, window=window, backend="cpu")
    # With out= as without: the same loops.
    given = torch.zeros(3, 6, 40)[..., :24]
    decode_attention(q[:, :, 0], k, v, lengths, block_table=slots, window=window, out=given)
    assert torch.equal(given, out[:, :, 0])
    right, _ = reference(q, k, v, lengths, block_table=slots, window=window)
    torch.testing.assert_close(out, right, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("window", "block_size"), [(None, 1), (7, 8), (None, 16), (17, 16)])
def test_the_cpu_loops_give_the_same_bits_from_blocks(window: int | None, block_size: int) -> None:
    lengths = torch.tensor([5, 0, 33, 48])
    q, k, v = (
        torch.randn(4, n, s, 24, generator=torch.Generator().manual_seed(n)) for n, s in ((6, 1), (3, 48), (3, 48))
    )
    expected = decode_attention(q, k, v, lengths, window=window, backend="cpu")
    table = torch.randperm(4 * 48 // block_size, generator=torch.Generator().manual_seed(0)).view(4, -1)
    pools = [torch.full((table.numel(), 3, block_size, 24), torch.nan) for _ in range(2)]
    for cache, pool in zip((k, v), pools, strict=True):
        pool[table] = cache.unflatten(2, (-1, block_size)).transpose(1, 2)
    found = decode_attention(q, *pools, lengths, block_table=table.int(), window=window, backend="cpu")
    assert torch.equal(found, expected)


def bad_calls() -> list[tuple[str, dict[str, Any], type[Exception], str]]:
    low = {"dtype": torch.float16, "device": DEVICE}
    return [
        ("rank", {"q": torch.zeros(2, 64, **low)}, ShapeError, "q: .2, 64"),
        ("heads", {"q": torch.zeros(2, 3, 1, 64, **low)}, ShapeError, "multiple of 2 heads"),
        ("queries", {"q": torch.zeros(2, 4, 9, 64, **low)}, ShapeError, "1 to 8 queries"),
        ("dtype", {"q": torch.zeros(2, 4, 1, 64, device=DEVICE, dtype=torch.int32)}, UnsupportedError, "dtype of q"),
        (
            "mixed",
            {"q": torch.zeros(2, 4, 1, 64, device=DEVICE, dtype=torch.bfloat16)},
            UnsupportedError,
            "cache dtype",
        ),
        ("rows", {"seq_lens": torch.zeros(3, device=DEVICE, dtype=torch.int64)}, ShapeError, "seq_lens"),
        ("table", {"block_table": torch.zeros(2, 3, device=DEVICE)}, ShapeError, "block_table"),
        ("window", {"window": 0}, InvalidArgumentError, "window: 0"),
        ("split", {"split_size": -1}, InvalidArgumentError, "split_size: -1"),
        ("backend", {"backend": "cuda"}, InvalidArgumentError, "backend: 'cuda'"),
        ("scales", {"k_scale": torch.ones(2, device=DEVICE)}, InvalidArgumentError, "both or none"),
        ("sinks", {"sinks": torch.ones(3, device=DEVICE)}, ShapeError, "sinks"),
        ("out", {"out": torch.zeros(2, 4, 2, 64, **low)}, ShapeError, "out"),
        ("devices", {"seq_lens": torch.zeros(2, device="meta", dtype=torch.int64)}, UnsupportedError, "one device"),
    ]


@pytest.mark.parametrize(("name", "changes", "error", "words"), bad_calls())
def test_bad_input_says_what_is_allowed(name: str, changes: dict[str, Any], error: type[Exception], words: str) -> None:
    case = Case([5, 6])
    arguments = {"q": case.q, "k_cache": case.k, "v_cache": case.v, "seq_lens": case.seq_lens, **changes}
    with pytest.raises(error, match=words):
        decode_attention(**arguments)


def test_an_odd_head_dim_is_refused_by_name() -> None:
    case = Case([5], head_dim=83)
    with pytest.raises(UnsupportedError, match="head_dim: 83; allowed: multiples of"):
        decode_attention(case.q, case.k, case.v, case.seq_lens)


def test_packed_keys_that_leave_a_part_of_a_head_are_refused() -> None:
    q = torch.zeros(2, 4, 40, dtype=LOW_DTYPES[0], device=DEVICE)
    k, v = (torch.zeros(shape, dtype=torch.int8, device=DEVICE) for shape in ((2, 2, 2, 8, 16), (2, 2, 8, 40)))
    with pytest.raises(ShapeError, match=r"head_dim 40 in torch\.int8; allowed: .* a multiple of 16\. Use the plain"):
        decode_attention(q, k, v, torch.ones(2, device=DEVICE, dtype=torch.int64))


def test_a_strided_head_is_refused() -> None:
    case = Case([5], head_dim=32)
    q = torch.zeros(1, 4, 1, 64, dtype=case.dtype, device=DEVICE)[..., ::2]
    with pytest.raises(ShapeError, match="contiguous last axis"):
        decode_attention(q, case.k, case.v, case.seq_lens)


def test_debug_mode_names_lengths_and_blocks_that_do_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onewave.ops.library.Settings.from_env", lambda: type("S", (), {"debug": True})())
    from onewave.ops import library

    library.is_debug.cache_clear()
    try:
        case = Case([5, 70], capacity=96)
        with pytest.raises(InvalidArgumentError, match="seq_lens: 97; allowed: up to 96"):
            decode_attention(case.q, case.k, case.v, torch.tensor([5, 97], device=DEVICE))
        table = torch.tensor([[0], [2]], device=DEVICE)
        with pytest.raises(InvalidArgumentError, match=r"block_table\[1, 0\]: 2; allowed: 0 to 1"):
            decode_attention(case.q, case.k, case.v, case.seq_lens, block_table=table)
    finally:
        monkeypatch.undo()
        library.is_debug.cache_clear()


def test_a_row_gives_at_most_so_many_splits_whatever_the_capacity() -> None:
    plans = [
        plan_decode(DecodeSizes(32, 8, 1, 128, capacity=capacity, kv_itemsize=2)) for capacity in (64, 4096, 131072)
    ]
    assert [plan.max_splits for plan in plans] == [1, 16, 64]
    assert len({(plan.smallest, plan.limits, plan.block_n) for plan in plans}) == 1


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "splits"),
    [
        # As many as are merged at once, up to four tiles of keys each; from there on twice as many.
        (14, 2, 64, {2000: 128, 2049: 256, 5000: 512, 16384: 512, 16385: 1024, 32768: 1024, 65537: 2048}),
        (10, 2, 64, {2000: 128, 5000: 512, 32768: 1024}),
        (28, 4, 128, {512: 64, 513: 128, 1025: 256, 5000: 512, 32768: 2048}),
        # 128 programs a row are enough.
        (32, 8, 128, {1024: 64, 4096: 256, 32768: 2048}),
    ],
)
def test_a_rows_splits_are_few_enough_to_be_merged_soon(
    heads: int, kv_heads: int, head_dim: int, splits: dict[int, int]
) -> None:
    sizes = DecodeSizes(heads, kv_heads, 1, head_dim, capacity=1 << 17, kv_itemsize=2)
    assert {keys: plan_decode(sizes).split_of(keys) for keys in splits} == splits
    # Four tokens have one token's splits.
    assert plan_decode(sizes._replace(num_queries=4)).limits == plan_decode(sizes).limits


def test_no_more_programs_share_a_rows_keys_than_a_full_row_has_splits() -> None:
    plan = plan_decode(DecodeSizes(14, 2, 1, 64, capacity=5000, kv_itemsize=2))
    assert [plan.shares(rows, num_sms=132) for rows in (1, 4, 16)] == [10, 40, 66]
    # A row of 2,048 keys has more.
    assert (plan.full_splits, plan.max_splits) == (10, 16)


def test_nine_to_fifteen_heads_of_64_a_kv_head_are_two_tiles_of_hopper_s_kernel() -> None:
    def tile(heads: int, queries: int = 1, head_dim: int = 64, itemsize: int = 2) -> tuple[int, int]:
        plan = plan_decode(DecodeSizes(heads, 1, queries, head_dim, capacity=4096, kv_itemsize=itemsize))
        return plan.block_m, plan.tiles

    assert [tile(heads) for heads in (8, 9, 15, 16, 17)] == [(8, 1), (8, 2), (8, 2), (16, 1), (32, 1)]
    assert tile(14, queries=2) == (32, 1)
    assert tile(14, head_dim=128) == (16, 1)
    assert tile(14, itemsize=1) == (8, 2)


@pytest.mark.parametrize("options", [{}, slow({"window": 300}), {"split_size": 128, "softcap": 5.0}])
def test_a_row_has_the_same_bits_however_many_programs_share_the_keys(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case([300, 723, -1, 0, 600], 2, 1, head_dim=32, capacity=768, options=options)
    results: list[tuple[Tensor, Tensor]] = []
    for shares in (1, 3, 4, 100):
        monkeypatch.setattr(DecodePlan, "shares", lambda *_, shares=shares, in_pairs=False: shares)
        results.append(case.run())
    case.check(*results[0])
    for out, lse in results[1:]:
        assert torch.equal(out.nan_to_num(7), results[0][0].nan_to_num(7))
        assert torch.equal(lse.nan_to_num(7), results[0][1].nan_to_num(7))


def test_offsets_beyond_32_bits_are_those_of_the_tensors() -> None:
    """Heads of the output and a row's queries, the third of which lies 2^31 numbers and more behind the first: only
    what is used is ever touched."""
    case = Case([70], 3, 3, queries=3)
    expected, _ = case.run()
    far = 2**30 + 64
    q, out = (torch.empty(3 * far, dtype=case.dtype, device=DEVICE) for _ in range(2))
    q = q.as_strided(case.q.shape, (0, 64, far, 1)).copy_(case.q)
    out = out.as_strided(case.q.shape, (0, far, 64, 1))
    assert torch.equal(case.run(q=q, out=out)[0], expected)
