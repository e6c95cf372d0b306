"""Hopper's attention kernel without a device: how its tiles are dealt, what it takes and refuses."""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kit.device import H200, pretend
from onewave.base.device import Device
from onewave.base.errors import UnsupportedError
from onewave.gpu import descriptors as descriptors_impl
from onewave.ops.attention import choose as choose_impl
from onewave.ops.attention.call import AttentionCall, Extras, Packed
from onewave.ops.attention.choose import choose
from onewave.ops.attention.fp8 import launch as fp8_impl
from onewave.ops.attention.fp8 import plan as fp8_plan
from onewave.ops.attention.hopper import choose as hopper_choose
from onewave.ops.attention.hopper import launch as gluon_impl
from onewave.ops.attention.hopper import plan as gluon_plan
from onewave.ops.attention.hopper import tiles as gluon_tiles_impl
from onewave.ops.attention.hopper.choose import refusal, undescribable
from onewave.ops.attention.hopper.plan import Work, busiest, schedule
from onewave.ops.attention.hopper.plan import dealt as dealt_table
from onewave.ops.attention.masks import Options, visible_keys
from onewave.ops.attention.mma import launch as mma_impl
from onewave.ops.attention.plan import Facts
from onewave.ops.explain import explain

# A call that the Hopper kernel takes.
FACTS = Facts("attention", "auto", H200, torch.bfloat16, Options(1.0), 1, 2, 2, 5, 5, 128)


@pytest.fixture
def covered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if a sweep on a GPU had covered bfloat16 with head_dim 64 and 128."""
    monkeypatch.setattr(hopper_choose, "swept", lambda dtype, head_dim: dtype == "bfloat16" and head_dim in (64, 128))
    choose_impl._on_gpu.cache_clear()
    yield
    choose_impl._on_gpu.cache_clear()


@pytest.mark.parametrize(
    ("kernel", "others"),
    [
        (gluon_impl.attention_kernel, "q k v out lse sinks starts_q starts_k order block_table scale_log2 inner outer"),
        (
            fp8_impl.fp8_kernel,
            "q k v out q_scale k_scale v_scale lse sinks starts_q starts_k order scale_log2 inner outer",
        ),
        (
            mma_impl.mma_kernel,
            "q_ptr k_ptr v_ptr out_ptr lse_ptr sinks_ptr starts_q_ptr starts_k_ptr scale_log2 inner outer",
        ),
    ],
)
def test_no_length_and_no_stride_compiles_a_kernel_anew(kernel: Any, others: str) -> None:
    """Triton would for every size that 16 divides or that is 1."""
    sizes = [p for p in kernel.params if not p.is_constexpr and p.name not in others.split()]
    assert len(sizes) > 10
    assert [p.name for p in sizes if not p.do_not_specialize] == []


class Gpu(SimpleNamespace):
    """The language as gluon_tiles_impl uses it, for numbers: its functions then run as plain Python."""

    def __init__(self, program: int, programs: int, memory: dict[int, int]) -> None:
        super().__init__(
            program_id=lambda _: program, num_programs=lambda _: programs, minimum=min, maximum=max,
            where=lambda condition, yes, no: yes if condition else no, load=memory.__getitem__,
        )  # fmt: skip


def dealt(
    monkeypatch: pytest.MonkeyPatch, *, heads: int, group: int, lengths: list[tuple[int, int]], columns: int,
    wanted: Options, packed: bool, processors: int = 132,
) -> tuple[list[list[tuple[int, ...]]], int, int]:  # fmt: skip
    """Every program's tiles as the kernel's own code finds them: (batch, head, first row, ..), and rows and keys."""
    num_queries, num_keys = (sum(n) for n in zip(*lengths, strict=True)) if packed else lengths[0]
    shift = 0 if packed else wanted.shift(num_queries, num_keys)
    if wanted.right is not None and not packed:
        num_keys = max(min(num_keys, num_queries + shift + wanted.right), 1)
    all_heads, sequences = (heads, len(lengths)) if packed else (heads * len(lengths), None)
    work = Work(all_heads, group, num_queries, num_keys, shift, wanted.left, wanted.right, sequences)
    plan = schedule(work, columns=columns, num_sms=processors)
    rows, keys = plan.rows, plan.keys
    memory: dict[int, int] = {}
    order, rounds = 0, plan.turns
    if plan.order == "table" and wanted.right is not None:
        order = 1
        table = dealt_table(plan)
        rounds = len(table[0])
        memory |= {10**6 + at: value for at, value in enumerate(value for row in table for value in row)}
    starts = [[sum(pair[side] for pair in lengths[:i]) for i in range(len(lengths) + 1)] for side in (0, 1)]
    memory |= {1000 * side + at: value for side, row in enumerate(starts) for at, value in enumerate(row)}
    problem = SimpleNamespace(
        starts_q=0, starts_k=1000, num_heads=heads, group=group, section=plan.section, num_queries=num_queries,
        num_keys=num_keys, sequences=len(lengths), search_steps=len(lengths).bit_length() + 1, slots=plan.slots,
        tiles=plan.tiles, rounds=rounds, order=10**6, ORDER=order, shift=shift, left=wanted.left or 0,
        right=wanted.right or 0, BN=keys,
        WARPGROUPS=rows // 64, RAGGED=packed, TOP_LEFT=wanted.top_left, LEFT=wanted.left is not None,
        RIGHT=wanted.right is not None,
    )  # fmt: skip
    found: list[list[tuple[int, ...]]] = []
    for program in range(plan.programs):
        monkeypatch.setattr(gluon_tiles_impl, "gl", Gpu(program, plan.programs, memory))
        places = [gluon_tiles_impl.position_of.fn(problem, turn) for turn in range(rounds)]
        tiles = [gluon_tiles_impl.tile_at.fn(problem, place) for place in places]
        found.append([tile for tile in tiles if tile[-1]])
    return found, rows, keys


def random_calls(count: int) -> Iterator[dict[str, Any]]:
    draw = random.Random(0)
    for at in range(count):
        packed, group = at % 2 == 1, draw.choice([1, 1, 4, 7])
        lengths = [(draw.choice([0, 1, 5, 127, 128, 129, 500]), draw.choice([0, 1, 64, 300, 900])) for _ in range(9)]
        first = (draw.choice([1, 63, 128, 129, 700, 1500]), draw.choice([1, 64, 300, 900, 1500]))
        right = draw.choice([None, None, 0, 0, 33])
        left = draw.choice([None, 5, 200])
        wanted = Options(1.0, left, right, draw.random() < 0.5)
        heads = group * draw.choice([1, 2, 3])
        sizes = lengths[: draw.randint(1, 9)] if packed else [first] * draw.randint(1, 3)
        yield {
            "heads": heads, "group": group, "lengths": sizes, "columns": draw.choice([64, 128, 256]), "wanted": wanted,
            "packed": packed, "processors": draw.choice([1, 7, 132]),
        }  # fmt: skip


def test_every_row_of_every_head_is_one_programs_and_its_keys_are_all_those_it_sees(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for call in random_calls(60):
        programs, rows, keys = dealt(monkeypatch, **call)
        tiles = Counter((batch, head, first) for program in programs for batch, head, first, *_ in program)
        expected = {
            (batch, head, first)
            for batch, (num_queries, _) in enumerate(call["lengths"])
            for head in range(call["heads"])
            for first in range(0, num_queries, rows)
        }
        assert tiles == Counter(expected), call
        for batch, _, first, start_q, _, start_k, num_keys, shift, begin, count, _ in (t for p in programs for t in p):
            num_queries, all_keys = call["lengths"][batch]
            if call["packed"]:
                assert start_q == sum(n for n, _ in call["lengths"][:batch])
                assert start_k == sum(n for _, n in call["lengths"][:batch])
            assert shift == call["wanted"].shift(num_queries, all_keys)
            seen = visible_keys(call["wanted"], num_queries, all_keys, torch.device("cpu"))
            part = torch.ones(1, all_keys) if seen is None else seen[first : first + rows]
            any_row = part.any(0).nonzero()
            assert count >= 1
            if len(any_row):
                assert begin * keys <= int(any_row[0]), call
                assert int(any_row[-1]) < min((begin + count) * keys, num_keys), call
                assert (begin + count - 1) * keys <= int(any_row[-1]), call


@pytest.mark.parametrize(
    ("batch", "heads", "group", "length", "head_dim"),
    [
        (4, 16, 1, 4096, 128), (2, 16, 1, 8192, 128), (1, 16, 1, 16384, 128), (1, 32, 4, 8192, 128),
        (4, 32, 1, 4096, 64), (8, 16, 1, 1024, 128),
    ],
)  # fmt: skip
def test_no_program_has_much_more_causal_work_than_another(
    monkeypatch: pytest.MonkeyPatch, batch: int, heads: int, group: int, length: int, head_dim: int
) -> None:
    """On an H200 the turns and the sections of heads once kept step: one program got the longest tile of each."""
    programs, _, _ = dealt(
        monkeypatch, heads=heads, group=group, lengths=[(length, length)] * batch, columns=head_dim,
        wanted=Options(1.0, right=0), packed=False,
    )  # fmt: skip
    cost = gluon_plan._table()["head_dims"][str(head_dim)]["tile_cost"]
    work = [sum(tile[9] + cost for tile in program) for program in programs]
    # The table of the shape with head_dim 64 is 1.4 % from even: with 8 heads in turn, not 32, it was faster by more.
    # That of 1,024 tokens was 3 % from even before its last sections were dealt as one.
    assert max(work) <= 1.014 * sum(work) / 132


@pytest.mark.parametrize(
    ("heads", "length", "full", "causal"),
    [
        # On an H200 each was the faster one, or even (docs/log/prefill-attention.md).
        (1024, 128, 128, 128), (512, 256, 128, 128), (384, 384, 192, 128), (256, 512, 192, 128), (128, 768, 192, 192),
        (128, 1024, 192, 128), (16, 1024, 128, 128), (64, 2048, 192, 192), (128, 4096, 192, 192),
    ],
)  # fmt: skip
def test_heads_of_64_have_the_tile_that_ends_first(heads: int, length: int, full: int, causal: int) -> None:
    work = Work(heads, 1, length, length)
    rows = [schedule(replace(work, right=right), columns=64, num_sms=132).rows for right in (None, 0)]
    assert rows == [full, causal]
    # Packed lengths are not known.
    assert schedule(replace(work, sequences=9), columns=64, num_sms=132).rows == 192


@pytest.mark.parametrize(("batch", "heads", "group", "length"), [(1, 16, 1, 16384), (4, 16, 1, 4096), (1, 32, 4, 8192)])
def test_float8s_tiles_of_192_rows_come_out_even(batch: int, heads: int, group: int, length: int) -> None:
    """They were 7.1, 2.6 and 1.4 % from even with a section at a time to the end, of half as many heads."""
    plan = fp8_plan.deal(Work(batch * heads, group, length, length, right=0), 132)
    table = dealt_table(plan)
    across = plan.section * plan.slots
    first = [[plan.rows * (plan.slots - 1 - at % across // plan.section) for at in row if at >= 0] for row in table]
    assert Counter(at for row in first for at in row) == dict.fromkeys(range(0, length, plan.rows), batch * heads)
    work = [sum(-(-min(at + plan.rows, length) // plan.keys) + plan.tile_cost for at in row) for row in first]
    assert max(work) <= 1.008 * sum(work) / 132


def test_what_a_table_is_chosen_by_is_what_it_gives() -> None:
    draw = random.Random(1)
    for _ in range(40):
        tiles = [draw.randint(1, 40) + draw.choice([1.0, 1.5, 2.5]) for _ in range(draw.randint(1, 30))]
        section, sections, programs = draw.randint(1, 5), draw.randint(1, 12), draw.choice([1, 7, 132])
        heads = section * sections
        cost = [n for n in tiles for _ in range(section)]
        shares = dict(gluon_plan._shares(tiles, heads, section, programs, 8))
        assert list(shares) == list(range(1, min(8, sections) + 1))
        for last, share in shares.items():
            rows = gluon_plan._deal(tiles, heads, section, last, programs)
            assert sorted(at for row in rows for at in row) == list(range(heads * len(tiles)))
            work = [sum(cost[at % len(cost)] for at in row) for row in rows]
            assert max(work) / sum(work) == share


@pytest.mark.parametrize(
    ("heads", "length", "columns", "programs"),
    [(64, 4096, 128, 128), (16, 16384, 128, 128), (60, 2048, 128, 120), (128, 4096, 64, 128), (133, 128, 128, 132)],
)
def test_programs_that_as_many_turns_do_not_need_are_left_out_where_they_are_few(
    heads: int, length: int, columns: int, programs: int
) -> None:
    plan = schedule(Work(heads, 1, length, length), columns=columns, num_sms=132)
    assert plan.programs == programs
    # As many turns as with all 132.
    assert plan.turns == -(-plan.slots * heads // 132)


def test_the_busiest_program_of_a_bad_order_is_found_out() -> None:
    work = [n + 1.5 for n in range(32, 0, -1)]
    assert busiest(work, 64, 8, 132) > 1.5 * busiest(work, 64, 8, 128)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert busiest(work, 64, 8, 128) == pytest.approx(1 / 128, rel=0.01)
    finally:
        torch.set_default_dtype(before)


def test_a_packed_sequences_descriptor_ends_with_the_sequence() -> None:
    """Addresses as TMA computes them, modulo 2^64: a row of a sequence is its row in memory, the next is outside."""
    tokens, heads, head_dim = 40, 3, 64
    packed = torch.zeros(tokens, heads, head_dim, dtype=torch.bfloat16).transpose(0, 1)[None]
    found = descriptors_impl.describe(packed, 64, 64, packed=True)
    problem = SimpleNamespace(RAGGED=True)
    for start, length, row, head in ((0, 40, 39, 0), (7, 11, 0, 2), (7, 11, 10, 1), (7, 11, 11, 1), (39, 1, 0, 2)):
        at = [int(x) for x in gluon_tiles_impl.place.fn(problem, 0, head, start, length, row)]
        address = 2 * sum(x * step for x, step in zip(at, found.strides, strict=True)) % 2**64
        assert address == 2 * ((start + row) * heads + head) * head_dim
        assert all(x < bound for x, bound in zip(at, found.shape, strict=True)) == (row < length)


@pytest.mark.usefixtures("covered")
def test_what_it_does_not_take_is_told_and_asking_by_name_needs_no_sweep() -> None:
    assert refusal(FACTS) is None
    others: list[tuple[dict[str, Any], str]] = [
        ({"device": Device((8, 0), 108)}, "needs sm_90, and this is sm_80"),
        ({"alibi": True}, "neither ALiBi nor bias"),
        ({"options": Options(-1.0)}, "positive scale"),
        ({"tokens": 9, "page_size": 48}, "pages of 16, 32, 64, 128, 256 keys, not of 48"),
        ({"strides": "odd"}, "odd"),
        ({"missing": "no module named gluon"}, "needs Triton 3.6's Gluon: no module"),
    ]
    for change, words in others:
        assert words in str(refusal(FACTS._replace(backend="gluon", **change)))
    narrow = FACTS._replace(dtype=torch.float16, head_dim=32)
    assert "below 40 the Hopper kernel, which pads to 64, gains nothing" in str(refusal(narrow))
    assert refusal(narrow._replace(backend="gluon")) is None


@pytest.mark.usefixtures("covered")
def test_what_no_sweep_has_covered_is_left_to_the_portable_kernel_unless_asked_for() -> None:
    unswept = FACTS._replace(dtype=torch.float16, head_dim=80)
    assert "sweep on a GPU has not covered float16 with head_dim 80" in str(refusal(unswept))
    assert refusal(unswept._replace(backend="gluon")) is None


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_auto_takes_it_for_every_head_dim_from_40_on(dtype: str) -> None:
    for head_dim in range(16, 257, 8):
        found = explain("attention", (2, 8, 500, head_dim), (2, 2, 500, head_dim), device="cuda:sm_90", dtype=dtype)
        assert found.backend == ("gluon" if head_dim >= 40 else "triton")


@pytest.mark.usefixtures("covered")
def test_packed_sequences_and_single_ones_go_to_the_same_kernel_whatever_their_lengths() -> None:
    for options in ({}, {"causal": True}, {"causal": True, "window": 100}, {"softcap": 5.0}, {"bias": 1}):
        backends = {
            (
                explain("attention_varlen", (n, 8, 128), (m, 2, 128), device="cuda:sm_90", **options)
                if packed
                else explain("attention", (2, 8, n, 128), (2, 2, m, 128), device="cuda:sm_90", **options)
            ).backend
            for n, m in ((1, 1), (1, 9000), (500, 500), (4096, 17))
            for packed in (False, True)
        }
        assert len(backends) == 1, options


def test_strides_that_tma_cannot_address_are_named() -> None:
    q = torch.zeros(2, 4, 50, 64, dtype=torch.bfloat16)
    assert undescribable(q, q.transpose(1, 2), q[:, :1], q[:, :, 3:]) is None
    for odd in (q[:, :1].expand_as(q), torch.zeros(2, 4, 50, 65, dtype=torch.bfloat16)[..., :64]):
        assert "strides" in str(undescribable(q, odd))


@pytest.mark.parametrize("capability", [(9, 0), (8, 0)])
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.usefixtures("covered")
def test_on_a_gpu_auto_runs_it_where_it_can_and_the_portable_kernel_elsewhere(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], fails: bool
) -> None:
    def load(_: str, module: str) -> Any:
        assert module == "hopper.launch"
        if fails:
            raise ImportError("no gluon here")
        return gluon_impl

    monkeypatch.setattr(choose_impl, "load", load)
    choose_impl._missing.cache_clear()
    pretend(monkeypatch, capability)
    q = torch.zeros(1, 2, 5, 128, dtype=torch.bfloat16)
    odd = torch.zeros(1, 2, 5, 129, dtype=torch.bfloat16)[..., :128]
    starts = torch.tensor([0, 5], dtype=torch.int32)

    def backend(k: Tensor, backend: str = "auto", **extras: Tensor) -> str:
        return choose(AttentionCall(q, k, q, Extras(**extras), Options(0.1, right=0), backend)).backend

    def packed() -> str:
        one = q[0].transpose(0, 1)
        return choose(
            AttentionCall(one, one, one, Extras(), Options(0.1, right=0), "auto", Packed(starts, starts, 5, 5))
        ).backend

    can = "gluon" if capability == (9, 0) and not fails else "triton"
    try:
        assert backend(q) == packed() == can
        assert backend(q, "triton") == backend(odd) == backend(q, alibi_slopes=torch.zeros(2)) == "triton"
        if can == "triton":
            with pytest.raises(UnsupportedError, match=r"sm_80|Triton 3.6's Gluon: no gluon here"):
                backend(q, "gluon")
    finally:
        choose_impl._missing.cache_clear()
