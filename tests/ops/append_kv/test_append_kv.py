"""append_kv on every cache layout against a loop over single numbers: the reference, the kernel, the CPU's loops."""

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from kit.operands.random import DEVICE
from kit.operands.random import randn_here as randn
from onewave.base.device import Device
from onewave.base.errors import InvalidArgumentError, ShapeError, UnsupportedError
from onewave.ops.append_kv import append_kv, op
from onewave.ops.append_kv.call import AppendCall
from onewave.ops.append_kv.call import check as check_call
from onewave.ops.append_kv.choose import choose
from onewave.ops.kv_layout import pack_k, unpack_k

pytestmark = [pytest.mark.pairs, *([pytest.mark.gpu] if DEVICE == "cuda" else [])]
ENGINES = ["reference", "kernel"]
# The interpreter miscomputes bf16; a GPU takes no float32.
DTYPES = [torch.float16, torch.bfloat16] if DEVICE == "cuda" else [torch.float16, torch.float32]
FP8 = torch.float8_e4m3fn
NAN = float("nan")


def run(engine: str, *args: Any, rotary_style: str = "neox", **options: Any) -> Tensor:
    name = {"reference": "reference", "kernel": "triton_impl", "loops": "numba_impl"}[engine]
    options = {"bias": None, "q_norm": None, "k_norm": None, "eps": 1e-6, **options}
    call = AppendCall(*args, interleaved=rotary_style == "interleaved", **options, described=Device((8, 9), 1))
    return op.load("append_kv", name).run(call, choose(call))


@pytest.mark.pairs
@pytest.mark.parametrize("tokens", [64, 67])
@pytest.mark.parametrize("kind", ["interleaved", "in halves", "in halves, int8", "a part turns"])
@pytest.mark.parametrize("paged", [False, True])
def test_tokens_in_blocks_get_the_bits_that_each_gets_alone(tokens: int, kind: str, paged: bool) -> None:
    """Prompts run in blocks of tokens; the last block may be a part, and some tokens may not be stored."""
    dtype, cached = DTYPES[0], torch.int8 if kind.endswith("int8") else DTYPES[0]
    num_heads, kv_heads, dim, turned = (4, 2, 32, 32) if kind.startswith("in halves") else (1, 1, 24, 16)
    heads = num_heads + 2 * kv_heads
    qkv, bias = randn(tokens, heads * dim, seed=1, dtype=dtype), randn(heads * dim, seed=2, dtype=dtype)
    rotary = randn(tokens, turned, seed=3)
    slots, positions = torch.arange(tokens, device=DEVICE) % 3, torch.arange(tokens, device=DEVICE) // 3
    positions[5] = -1
    table = torch.randperm(3 * 6, generator=torch.Generator().manual_seed(4)).view(3, 6).int().to(DEVICE)
    shape = (18, kv_heads, 4, dim) if paged else (3, kv_heads, 24, dim)
    options: dict[str, Any] = {"num_heads": num_heads, "bias": bias, "block_table": table if paged else None}
    options["rotary_style"] = "interleaved" if kind == "interleaved" else "neox"
    if cached is torch.int8:
        scales = 0.01 + randn(2, kv_heads, seed=5).abs()
        options |= {"k_scale": scales[0], "v_scale": scales[1]}
    empty = 77 if cached is torch.int8 else NAN

    def run_of(at: Tensor) -> tuple[Tensor, Tensor]:
        """The queries of these tokens, and both caches as [2, slots, heads, capacity, head_dim]."""
        k, v = (torch.full(shape, empty, dtype=cached, device=DEVICE) for _ in "kv")
        q = run("kernel", qkv[at], rotary[at], k, v, slots[at], positions[at], **options)
        return q, torch.stack([Layout(paged).plain(cache, options["block_table"]) for cache in (k, v)])

    every = torch.arange(tokens, device=DEVICE)
    alone = every[::7]  # one token a program; each place in a block
    (q, caches), (q_alone, caches_alone) = run_of(every), run_of(alone)
    torch.testing.assert_close(q[alone], q_alone, atol=0, rtol=0)
    at = slots[alone], slice(None), positions[alone]
    torch.testing.assert_close(caches[:, *at], caches_alone[:, *at], atol=0, rtol=0)
    stored = positions >= 0
    caches[:, slots[stored], :, positions[stored]] = empty
    torch.testing.assert_close(caches, torch.full_like(caches, empty), atol=0, rtol=0, equal_nan=True)


def test_the_queries_never_lie_in_what_was_projected() -> None:
    qkv, place = randn(1, 4 * 16, seed=0, dtype=DTYPES[0]), torch.tensor([0], device=DEVICE)
    k_cache, v_cache = qkv.new_zeros(2, 1, 1, 8, 16)
    q = append_kv(qkv, None, k_cache, v_cache, place, place, num_heads=2)
    kept = q.clone()
    qkv.zero_()
    assert torch.equal(q, kept)


def test_a_float8_cache_keeps_a_number_that_is_none() -> None:
    """It was once stored as -448, which the reference does not."""
    cache = torch.zeros(2, 1, 1, 4, 16).to(FP8)
    qkv = randn(1, 3 * 16, seed=0)
    qkv[0, 16] = qkv[0, 33] = NAN
    place = torch.tensor([0])
    op.load("append_kv", "reference").append_kv(qkv.cpu(), None, cache[0], cache[1], place, place, num_heads=1)
    assert cache[0, 0, 0, 0].float().isnan().tolist() == [True] + [False] * 15
    assert cache[1, 0, 0, 0].float().isnan().tolist() == [False, True] + [False] * 14


@pytest.mark.skipif(DEVICE == "cuda", reason="of the interpreter's kernel and the reference")
def test_norms_of_another_dtype_are_rounded_to_the_projections() -> None:
    qkv, place = randn(1, 3 * 16, seed=0, dtype=torch.float16), torch.tensor([0])
    norms = {name: 1 + randn(16, seed=seed) for seed, name in enumerate(("q_norm", "k_norm"), 1)}
    found = []
    for engine in ENGINES:
        caches = torch.zeros(2, 1, 1, 4, 16, dtype=torch.float16)
        q = run(engine, qkv.clone(), None, caches[0], caches[1], place, place, num_heads=1, **norms)
        found.append((q, caches))
    torch.testing.assert_close(found[0], found[1], atol=0, rtol=0)


def appended(
    qkv: Tensor, rotary: Tensor | None, kv_heads: int, num_heads: int, head_dim: int, options: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of each token [tokens, heads, head_dim] in float64, number by number."""
    x = qkv.cpu().double().view(len(qkv), num_heads + 2 * kv_heads, head_dim)
    if options.get("bias") is not None:
        x = (x + options["bias"].cpu().double().view(1, -1, head_dim)).to(qkv.dtype).double()
    for part, norm in ((slice(0, num_heads), "q_norm"), (slice(num_heads, num_heads + kv_heads), "k_norm")):
        if options.get(norm) is not None:
            unit = x[:, part] / (x[:, part].square().mean(-1, keepdim=True) + 1e-6).sqrt()
            x[:, part] = (unit.to(qkv.dtype) * options[norm].cpu()).double()
    q, k, v = x[:, :num_heads], x[:, num_heads : num_heads + kv_heads], x[:, num_heads + kv_heads :]
    if rotary is not None:
        half = rotary.shape[1] // 2
        for heads in (q.numpy(), k.numpy()):
            for token in range(len(x)):
                for i in range(half):
                    a, b = (2 * i, 2 * i + 1) if options.get("rotary_style") == "interleaved" else (i, i + half)
                    cos, sin = float(rotary[token, i]), float(rotary[token, half + i])
                    first, second = heads[token, :, a].copy(), heads[token, :, b].copy()
                    heads[token, :, a] = first * cos - second * sin
                    heads[token, :, b] = second * cos + first * sin
    return q, k, v


@dataclass(frozen=True)
class Layout:
    """caches: filled with NaN or 77, and a block table. plain: back to [slots, heads, capacity, head_dim]."""

    paged: bool = False
    packed: bool = False
    strided: bool = False

    def caches(
        self, slots: int, heads: int, capacity: int, dim: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        block_size = 4
        per_row = capacity // block_size
        shape = (slots * per_row + 1, heads, block_size, dim) if self.paged else (slots, heads, capacity, dim)
        empty = 77 if dtype is torch.int8 else NAN
        k, v = (torch.full(shape, empty, device=DEVICE).to(dtype) for _ in "kv")
        if self.strided:
            k, v = (c.transpose(1, 2).contiguous().transpose(1, 2) for c in (k, v))
            v = torch.full((*shape[:3], dim + 8), empty, device=DEVICE).to(dtype)[..., :dim]
        table = None
        if self.paged:
            order = torch.randperm(slots * per_row, generator=torch.Generator().manual_seed(1))
            table = order.view(slots, per_row).to(torch.int32).to(DEVICE)
        return pack_k(k) if self.packed else k, v, table

    def plain(self, cache: Tensor, table: Tensor | None) -> Tensor:
        cache = unpack_k(cache) if cache.ndim == 5 else cache
        if table is None:
            return cache
        return cache.view(torch.uint8)[table.long()].view(cache.dtype).transpose(1, 2).flatten(2, 3)


LAYOUTS = {
    "plain": Layout(),
    "strided": Layout(strided=True),
    "packed": Layout(packed=True),
    "paged": Layout(paged=True),
    "paged and packed": Layout(paged=True, packed=True),
}
SLOTS, POSITIONS = [2, 0, 2, 1, 1], [11, 0, 5, -1, 4]


def check(
    engine: str, layout: Layout, dtype: torch.dtype, heads: tuple[int, int, int], rotary_dim: int, **options: Any
) -> None:
    num_heads, kv_heads, dim = heads
    qkv = randn(len(SLOTS), (num_heads + 2 * kv_heads) * dim, seed=0, dtype=dtype)
    angles = randn(len(SLOTS), rotary_dim // 2, seed=3) * 9
    rotary = torch.cat((angles.cos(), angles.sin()), 1) if rotary_dim else None
    k_cache, v_cache, table = layout.caches(3, kv_heads, 12, dim, dtype)
    slots, positions = (torch.tensor(x, device=DEVICE) for x in (SLOTS, POSITIONS))
    places = qkv.clone(), rotary, k_cache, v_cache, slots, positions
    q = run(engine, *places, num_heads=num_heads, block_table=table, **options)
    right = appended(qkv, rotary, kv_heads, num_heads, dim, options)
    tolerance = (
        {"atol": 1e-6, "rtol": 2 * torch.finfo(dtype).eps}
        if not options.get("q_norm") is not None
        else {"atol": 4 * torch.finfo(dtype).eps, "rtol": 4 * torch.finfo(dtype).eps}
    )
    torch.testing.assert_close(q.cpu().double(), right[0], **tolerance)
    for cache, numbers in ((k_cache, right[1]), (v_cache, right[2])):
        expected = torch.full((3, kv_heads, 12, dim), NAN, dtype=torch.float64)
        for token, (slot, position) in enumerate(zip(SLOTS, POSITIONS, strict=True)):
            if position >= 0:
                expected[slot, :, position] = numbers[token]
        torch.testing.assert_close(layout.plain(cache, table).cpu().double(), expected, equal_nan=True, **tolerance)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_block_table_may_be_a_part_of_a_wider_one(engine: str) -> None:
    qkv, positions = randn(5, 4 * 32, seed=0, dtype=DTYPES[0]), torch.tensor(POSITIONS, device=DEVICE)
    caches = [Layout(paged=True).caches(3, 1, 12, 32, DTYPES[0]) for _ in range(2)]
    slots, table = torch.tensor(SLOTS, device=DEVICE), caches[0][2]
    # The same numbers, with others between them.
    for (k, v, _), given in zip(caches, (table, torch.stack((table, table * 0), -1)[..., 0]), strict=True):
        run(engine, qkv, None, k, v, slots, positions, num_heads=2, block_table=given)
    for right, found in zip(caches[0][:2], caches[1][:2], strict=True):
        torch.testing.assert_close(found, right, equal_nan=True, atol=0, rtol=0)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("style", ["neox", "interleaved"])
def test_every_layout_and_both_rotations_equal_the_loop(engine, layout, dtype, style):
    bias = randn(8 * 32, seed=4, dtype=dtype)
    check(engine, layout, dtype, (4, 2, 32), 24, bias=bias, rotary_style=style)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("heads", "rotary_dim"), [((9, 3, 80), 80), ((3, 1, 16), 0), ((2, 2, 256), 64), ((4, 4, 40), 40)]
)
@pytest.mark.parametrize("style", ["neox", "interleaved"])
def test_any_heads_and_partial_rotation_with_norms(engine, heads, rotary_dim, style):
    norms = {name: randn(heads[2], seed=5, dtype=DTYPES[0]) for name in ("q_norm", "k_norm")}
    check(engine, LAYOUTS["plain"], DTYPES[0], heads, rotary_dim, rotary_style=style, **norms)


@pytest.mark.skipif(DEVICE == "cuda", reason="of a CPU")
@pytest.mark.parametrize(
    ("heads", "rotary_dim"), [((9, 3, 80), 80), ((3, 1, 16), 8), ((4, 2, 20), 6), ((2, 1, 4), 4), ((2, 2, 2), 2)]
)
@pytest.mark.parametrize("extras", [False, True])
def test_the_loops_of_a_cpu_take_any_heads_and_partial_rotation(heads, rotary_dim, extras):
    num_heads, kv_heads, dim = heads
    lengths = {"bias": (num_heads + 2 * kv_heads) * dim, "q_norm": dim, "k_norm": dim} if extras else {}
    given = {name: randn(length, seed=seed) for seed, (name, length) in enumerate(lengths.items(), 4)}
    check("loops", LAYOUTS["plain"], torch.float32, heads, rotary_dim, **given)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("kind", [torch.int8, FP8])
def test_quantised_caches_hold_rounded_and_saturated_multiples_of_the_scale(engine, layout, kind):
    if kind is FP8 and engine == "kernel" and DEVICE == "cpu":
        pytest.skip("the interpreter has no float8")
    k_scale, v_scale = torch.tensor([0.5, 0.01], device=DEVICE), torch.tensor([0.25, 0.003], device=DEVICE)
    # Halves of the scale are ties; the second head's numbers pass the range on both sides.
    numbers = torch.arange(-80, 80).view(5, 32) / 8
    qkv = numbers.repeat(1, 5)
    k_cache, v_cache, table = layout.caches(3, 2, 12, 32, kind)
    slots, positions = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (SLOTS, POSITIONS))
    before = [layout.plain(c, table).clone() for c in (k_cache, v_cache)]
    run(
        engine, qkv.to(DTYPES[0]).to(DEVICE), None, k_cache, v_cache, slots, positions, num_heads=1, block_table=table,
        k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip
    for cache, scale, old in ((k_cache, k_scale, before[0]), (v_cache, v_scale, before[1])):
        expected = old.cpu().float()
        for token, (slot, position) in enumerate(zip(SLOTS, POSITIONS, strict=True)):
            if position < 0:
                continue
            for head in range(2):
                x = [float(torch.tensor(float(n)) / scale[head].cpu()) for n in numbers[token]]
                if kind is torch.int8:
                    expected[slot, head, position] = torch.tensor([float(min(max(round(n), -128), 127)) for n in x])
                else:
                    expected[slot, head, position] = (
                        torch.tensor([math.copysign(min(abs(n), 448.0), n) for n in x]).to(FP8).float()
                    )
        assert torch.equal(layout.plain(cache, table).cpu().float().nan_to_num(-1e9), expected.nan_to_num(-1e9))


def test_a_bias_of_another_dtype_leaves_the_queries_theirs():
    qkv, bias = randn(3, 8 * 16, seed=0, dtype=torch.bfloat16), randn(8 * 16, seed=1)
    k, v = (torch.zeros(1, 2, 4, 16, dtype=torch.bfloat16, device=DEVICE) for _ in "kv")
    slots, positions = torch.zeros(3, dtype=torch.int64, device=DEVICE), torch.arange(3, device=DEVICE)
    q = append_kv(qkv.clone(), None, k, v, slots, positions, num_heads=4, bias=bias)
    exact = (qkv.float() + bias.float()).bfloat16().view(3, 8, 16)
    assert torch.equal(q, exact[:, :4])
    assert torch.equal(k[0, :, :3].transpose(0, 1), exact[:, 4:6])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int8])
@pytest.mark.parametrize("head_dim", [16, 80, 128])
def test_packing_keys_and_unpacking_them_changes_no_bit(dtype, head_dim):
    noise = torch.randint(-128, 128, (2, 3, 5, head_dim * dtype.itemsize), dtype=torch.int8, device=DEVICE)
    k = noise.view(dtype)
    packed = pack_k(k)
    x = 16 // dtype.itemsize
    assert packed.shape == (2, 3, head_dim // x, 5, x)
    assert packed.is_contiguous()
    assert torch.equal(unpack_k(packed).view(torch.int8), noise)
    assert torch.equal(packed[1, 2, head_dim // x - 1, 4].view(torch.int8), k[1, 2, 4, -x:].view(torch.int8))
    assert torch.equal(
        pack_k(k.transpose(1, 2)).view(torch.int8), pack_k(k.transpose(1, 2).contiguous()).view(torch.int8)
    )


def test_packing_refuses_what_does_not_divide():
    with pytest.raises(ShapeError, match=r"pack_k: k: \(1, 1, 2, 20\); allowed: .*a multiple of 8"):
        pack_k(torch.zeros(1, 1, 2, 20, dtype=torch.float16))
    with pytest.raises(ShapeError, match="unpack_k: packed"):
        unpack_k(torch.zeros(1, 1, 2, 5, 4, dtype=torch.float16))


LOW = {"dtype": torch.float16, "device": DEVICE}


def bad_calls() -> dict[str, tuple[dict[str, Any], type[Exception], str]]:
    wide, index = {"device": DEVICE}, {"dtype": torch.int64, "device": DEVICE}
    cache83 = torch.zeros(2, 2, 8, 83, **LOW)
    return {
        "rank": ({"qkv": torch.zeros(3, 8, 32, **LOW)}, ShapeError, "qkv"),
        "width": (
            {"qkv": torch.zeros(3, 7 * 32, **LOW)},
            ShapeError,
            r"\(3, 224\) with 4 query heads; allowed: .tokens, 256",
        ),
        "heads": ({"num_heads": 3, "qkv": torch.zeros(3, 7 * 32, **LOW)}, ShapeError, "a multiple of 2"),
        "head_dim": (
            {"qkv": torch.zeros(3, 8 * 83, **LOW), "k_cache": cache83, "v_cache": cache83, "rotary": None},
            UnsupportedError,
            "head_dim: 83; allowed: multiples of",
        ),
        "integers": ({"qkv": torch.zeros(3, 256, **wide).int()}, UnsupportedError, "dtype of qkv: torch.int32"),
        "mixed dtypes": ({"qkv": torch.zeros(3, 256, **wide).bfloat16()}, UnsupportedError, "cache dtype"),
        "k and v": ({"k_cache": torch.zeros(2, 2, 8, 40, **LOW)}, ShapeError, "k_cache"),
        "k and v dtypes": ({"k_cache": torch.zeros(2, 2, 8, 32, **wide)}, UnsupportedError, "cache dtypes"),
        "last axis": ({"v_cache": torch.zeros(2, 2, 8, 64, **LOW)[..., ::2]}, ShapeError, "contiguous last axis"),
        "packed": ({"k_cache": torch.zeros(2, 2, 8, 8, 4, **LOW)}, ShapeError, "k_cache"),
        "packed, head_dim": (
            {
                "qkv": torch.zeros(3, 8 * 40, **LOW), "rotary": None,
                "k_cache": torch.zeros(2, 2, 2, 8, 16, **wide).char(),
                "v_cache": torch.zeros(2, 2, 8, 40, **wide).char(),
            },
            ShapeError,
            "k_cache: packed, head_dim 40 in torch.int8; allowed: a head_dim that is a multiple of 16",
        ),
        "no keys in a block": (
            {
                "k_cache": torch.zeros(2, 2, 0, 32, **LOW), "v_cache": torch.zeros(2, 2, 0, 32, **LOW),
                "block_table": torch.zeros(2, 2, **index),
            },
            ShapeError,
            "block_size: 0; allowed: at least 1",
        ),
        "float8 bias": ({"bias": torch.zeros(256, **wide).to(FP8)}, UnsupportedError, "dtype of bias: torch.float8"),
        "float8 norm": ({"k_norm": torch.ones(32, **wide).to(FP8)}, UnsupportedError, "dtype of k_norm: torch.float8"),
        "slots": ({"slots": torch.zeros(2, **index)}, ShapeError, r"slots: \(2,\); allowed: \(3,\)"),
        "slots' dtype": ({"slots": torch.zeros(3, **wide)}, UnsupportedError, "int32, int64"),
        "rotary": ({"rotary": torch.zeros(3, 34, **wide)}, ShapeError, "an even rotary_dim up to 32"),
        "rotary's dtype": ({"rotary": torch.zeros(3, 32, **LOW)}, UnsupportedError, "float32"),
        "bias": ({"bias": torch.zeros(32, **LOW)}, ShapeError, r"bias: \(32,\); allowed: \(256,\)"),
        "norm": ({"q_norm": torch.zeros(64, **LOW)}, ShapeError, "q_norm"),
        "scale": ({"k_scale": torch.ones(2, **wide)}, InvalidArgumentError, "allowed: int8"),
        "table": ({"block_table": torch.zeros(2, 2, **wide)}, ShapeError, "block_table"),
        "style": ({"rotary_style": "gptj"}, InvalidArgumentError, "neox, interleaved"),
        "backend": ({"backend": "cuda"}, InvalidArgumentError, "backend"),
        "wrong backend": ({"backend": "cpu"}, UnsupportedError, 'Use backend="auto"'),
        "devices": ({"slots": torch.zeros(3, device="meta").long()}, UnsupportedError, "one device"),
    }  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "words"), bad_calls().values(), ids=bad_calls().keys())
def test_bad_input_says_what_is_allowed(changes, error, words):
    index = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    arguments = {
        "qkv": torch.zeros(3, 256, **LOW), "rotary": torch.zeros(3, 32, device=DEVICE),
        "k_cache": torch.zeros(2, 2, 8, 32, **LOW), "v_cache": torch.zeros(2, 2, 8, 32, **LOW), "slots": index,
        "positions": index, "num_heads": 4,
    }  # fmt: skip
    append_kv(**arguments)  # right, and remembered as right
    with pytest.raises(error, match=words):
        append_kv(**(arguments | changes))


def test_a_gpu_takes_no_float32():
    caches, qkv = torch.zeros(2, 1, 2, 8, 32, device=DEVICE).unbind(0), torch.zeros(1, 256, device=DEVICE)
    index = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    call = AppendCall(qkv, None, *caches, index, index, 4, described=Device((9, 0), 1))
    with pytest.raises(UnsupportedError, match=r"dtype of qkv: torch\.float32 on cuda.*; allowed: bfloat16, float16"):
        check_call(call, "neox")


@pytest.mark.parametrize("per_row", [0, 2])
def test_no_tokens_fit_blocks_of_no_keys(monkeypatch, per_row):
    monkeypatch.setattr(op, "checks_contents", lambda: True)
    caches = [torch.zeros(2, 2, 0, 32, **LOW) for _ in "kv"]
    none, table = torch.zeros(0, device=DEVICE).long(), torch.zeros(2, per_row, device=DEVICE).long()
    q = append_kv(torch.zeros(0, 256, **LOW), None, *caches, none, none, num_heads=4, block_table=table)
    assert q.shape == (0, 4, 32)


@pytest.mark.parametrize(
    ("slot", "position", "block", "words"),
    [
        (3, 0, 0, "slots: 3; allowed: 0 to 2"),
        (0, 8, 0, "positions: 8; allowed: 0 to 7"),
        (0, 7, 9, "block_table: 9; allowed: 0 to 5"),
    ],
)
def test_debug_mode_names_what_lies_outside_the_cache(monkeypatch, slot, position, block, words):
    monkeypatch.setattr(op, "checks_contents", lambda: True)
    caches = [torch.zeros(6, 2, 4, 32, **LOW) for _ in "kv"]
    table = torch.tensor([[0, block], [2, 3], [4, 5]], device=DEVICE)
    slots, positions = torch.tensor([1, slot], device=DEVICE), torch.tensor([1, position], device=DEVICE)
    with pytest.raises(InvalidArgumentError, match=words):
        append_kv(torch.zeros(2, 256, **LOW), None, *caches, slots, positions, num_heads=4, block_table=table)


@pytest.mark.parametrize("name", ["qkv", "rotary", "bias", "q_norm"])
def test_backward_is_refused_and_the_cache_is_in_no_graph(name):
    given = {
        "qkv": randn(2, 4 * 16, seed=0, dtype=DTYPES[-1]),
        "rotary": randn(2, 16, seed=1),
        "bias": randn(4 * 16, seed=2, dtype=DTYPES[-1]),
        "q_norm": randn(16, seed=3, dtype=DTYPES[-1]),
    }
    given[name].requires_grad_()
    caches = [torch.zeros(2, 1, 8, 16, dtype=DTYPES[-1], device=DEVICE) for _ in "kv"]
    places = torch.arange(2, device=DEVICE)
    q = append_kv(
        given["qkv"], given["rotary"], *caches, places, places, num_heads=2, bias=given["bias"], q_norm=given["q_norm"]
    )
    assert all(cache.any() and not cache.requires_grad for cache in caches)
    with pytest.raises(UnsupportedError, match="append_kv: backward; allowed: forward only"):
        q.float().sum().backward()


def test_vmap_over_caches_is_refused_by_name():
    qkv, rotary = randn(3, 2, 4 * 16, seed=0, dtype=DTYPES[-1]), randn(2, 16, seed=1)
    caches = [torch.zeros(3, 2, 1, 8, 16, dtype=DTYPES[-1], device=DEVICE) for _ in "kv"]
    places = torch.arange(2, device=DEVICE)

    def append(qkv: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        return append_kv(qkv, rotary, k_cache, v_cache, places, places, num_heads=2)

    with pytest.raises(UnsupportedError, match=r"append_kv: torch.vmap"):
        torch.vmap(append)(qkv, *caches)
