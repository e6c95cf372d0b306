"""masked_multihead_attention: mistakes that must not be repeated, refusals, and PyTorch's view of it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kit.operands.mmha import DTYPES, ENGINES, EXACTEST, Case
from kit.operands.random import DEVICE
from kit.operands.random import randn_here as randn
from onewave.base.errors import InvalidArgumentError, ShapeError, UnsupportedError
from onewave.ops.kv_layout import pack_k
from onewave.ops.masked_multihead_attention import masked_multihead_attention, op

pytestmark = [pytest.mark.pairs, *([pytest.mark.gpu] if DEVICE == "cuda" else [])]
LOW = {"dtype": torch.float16, "device": DEVICE}


def changed(a: Tensor, b: Tensor) -> set[tuple[int, int]]:
    """(row, head) where two results differ."""
    return {(row, head) for row, head in (a != b).any(-1).nonzero().tolist()}


@pytest.mark.parametrize("engine", ENGINES)
def test_a_kv_head_of_one_row_is_read_by_its_own_group_of_that_row_alone(engine):
    case = Case([5, 5, 5], heads=6, kv_heads=2)
    before, _, _ = case.run(engine)
    case.k[1, 1, :5] += 1
    case.v[1, 1, :5] += 1
    assert changed(before, case.run(engine)[0]) == {(1, 3), (1, 4), (1, 5)}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["bias", "qkv_out_scale"])
@pytest.mark.parametrize(
    ("head", "heads"), [(4, {4}), (5, {5}), (6, {0, 1, 2}), (7, {3, 4, 5}), (8, {0, 1, 2}), (9, {3, 4, 5})]
)
def test_a_channel_of_the_projection_belongs_to_its_real_head(engine, name, head, heads):
    case = Case([5, 9], heads=6, kv_heads=2).with_everything(integers=True)
    before, _, _ = case.run(engine)
    case.options[name] = case.options[name].clone()
    case.options[name][head] *= 3
    assert changed(before, case.run(engine)[0]) == {(row, h) for row in range(2) for h in heads}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["out_shift", "out_smooth"])
def test_a_channel_of_the_epilogue_belongs_to_its_query_head(engine, name):
    case = Case([5, 9], heads=6, kv_heads=2).with_everything()
    before, _, _ = case.run(engine)
    case.options[name] = case.options[name].clone()
    case.options[name][4] += 3
    assert changed(before, case.run(engine)[0]) == {(0, 4), (1, 4)}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("heads", [1, 6])
def test_a_mask_belongs_to_its_row_and_head(engine, heads):
    case = Case([5, 9], heads=6, kv_heads=2, options={"src_mask": torch.zeros(2, heads, 1, 24, device=DEVICE)})
    before, _, _ = case.run(engine)
    case.options["src_mask"][1, heads - 1, 0, 2] = 4
    assert changed(before, case.run(engine)[0]) == {(1, h) for h in ([5] if heads == 6 else range(6))}


@pytest.mark.parametrize("engine", ENGINES)
def test_scores_far_below_zero_are_not_measured_against_zero(engine):
    case = Case([1, 22, 130], 2, 1, 16, capacity=131, dtype=EXACTEST)
    direction = torch.ones(16, device=DEVICE, dtype=case.dtype)
    case.qkv[:, :2] = -20 * direction
    case.qkv[:, 2] = 20 * direction
    case.k.copy_(torch.where(case.k.isnan(), case.k, 20 * direction))
    # Every score is -1600: the result is the mean of the values, which zeros among the keys would swamp.
    out, _, v = case.run(engine)
    for row, history in enumerate(case.histories):
        mean = v[row, 0, : history + 1].double().mean(0)
        torch.testing.assert_close(out[row].double(), mean.expand(2, -1), atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("history", [1, 63])
def test_the_weights_of_ones_are_ones(engine, history):
    # An epsilon in the denominator, or a key too many, would show: equal scores, values that are all 1.
    case = Case([history], 1, 1, 16, capacity=64, dtype=EXACTEST)
    case.qkv[:, :2] = 0
    case.qkv[:, 2] = 1
    case.v[:, :, :history] = 1
    assert case.run(engine)[0].eq(1).all()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_row_masked_in_its_first_tiles_is_not_nan(engine):
    mask = torch.zeros(1, 1, 1, 260, device=DEVICE)
    mask[..., :200] = -float("inf")
    Case([250], 2, 1, 16, capacity=260, options={"src_mask": mask}).check(engine, steps_per_block=128)


@pytest.mark.parametrize("engine", ["reference"] if DEVICE == "cpu" else ENGINES)
def test_bfloat16_does_not_pass_through_float16(engine):
    case = Case([0, 3], dtype=torch.bfloat16)
    case.qkv[:, 8:] = 1e30
    case.v[1, :, :3] = 1e30
    out, _, _ = case.run(engine)
    assert torch.isfinite(out.float()).all()
    assert torch.allclose(out.float(), torch.tensor(1e30, device=DEVICE), rtol=1e-2)


def test_no_rows_give_no_rows():
    out = masked_multihead_attention(
        torch.zeros(0, 10, 32, **LOW),
        *torch.zeros(2, 0, 2, 8, 32, **LOW).unbind(0),
        torch.zeros(0, device=DEVICE).long(),
    )
    assert out.shape == (0, 6, 32)


def bad_calls() -> dict[str, tuple[dict[str, Any], type[Exception], str]]:
    wide = {"device": DEVICE}
    odd, int8 = torch.zeros(2, 2, 8, 83, **LOW), torch.zeros(2, 2, 8, 32, **wide).char()
    return {
        "rank": ({"qkv": torch.zeros(320, **LOW)}, ShapeError, "qkv"),
        "second axis": ({"qkv": torch.zeros(2, 2, 10, 32, **LOW)}, ShapeError, "qkv"),
        "heads": ({"qkv": torch.zeros(2, 9, 32, **LOW)}, ShapeError, "a multiple of 2 query heads"),
        "no query heads": ({"qkv": torch.zeros(2, 4, 32, **LOW)}, ShapeError, "a multiple of 2 query heads"),
        "flat width": ({"qkv": torch.zeros(2, 321, **LOW)}, ShapeError, "each of 32"),
        "head_dim": (
            {"qkv": torch.zeros(2, 10, 83, **LOW), "cache_k": odd, "cache_v": odd},
            UnsupportedError,
            "head_dim: 83; allowed: multiples of",
        ),
        "no head_dim": (
            {"qkv": torch.zeros(2, 0, **LOW), "cache_k": odd[..., :0], "cache_v": odd[..., :0]},
            ShapeError,
            "each of 0",
        ),
        "float8 bias": (
            {"bias": torch.zeros(10, 32, **wide).to(torch.float8_e4m3fn)},
            UnsupportedError,
            "dtype of bias: torch.float8_e4m3fn; allowed: bfloat16",
        ),
        "float8 src_mask": (
            {"src_mask": torch.zeros(2, 1, 1, 8, **wide).to(torch.float8_e4m3fn)},
            UnsupportedError,
            "dtype of src_mask: torch.float8_e4m3fn; allowed: bfloat16",
        ),
        "dtype": ({"qkv": torch.zeros(2, 10, 32, **wide).double()}, UnsupportedError, "dtype of qkv: torch.float64"),
        "mixed": ({"qkv": torch.zeros(2, 10, 32, **wide).bfloat16()}, UnsupportedError, "allowed: float16, int32"),
        "int8 cache": ({"cache_k": int8, "cache_v": int8}, UnsupportedError, "cache dtype: torch.int8"),
        "no scale": ({"qkv": torch.zeros(2, 10, 32, **wide).int()}, InvalidArgumentError, "qkv_out_scale: None"),
        "scale without int32": ({"qkv_out_scale": torch.ones(10, 32, **wide)}, InvalidArgumentError, "qkv_out_scale"),
        "caches": ({"cache_k": torch.zeros(2, 2, 9, 32, **LOW)}, ShapeError, "k_cache"),
        "cache rows": ({"qkv": torch.zeros(3, 10, 32, **LOW)}, ShapeError, "cache rows: 2; allowed: 3"),
        "last axis": ({"cache_v": torch.zeros(2, 2, 8, 64, **LOW)[..., ::2]}, ShapeError, "contiguous last axis"),
        "seq_lens": ({"seq_lens": torch.zeros(2, **wide)}, ShapeError, "seq_lens: torch.float32"),
        "finished": ({"finished": torch.zeros(2, **wide)}, ShapeError, "finished: torch.float32"),
        "bias": ({"bias": torch.zeros(6, 32, **LOW)}, ShapeError, r"bias: \(6, 32\); allowed: \(10, 32\)"),
        "bias dtype": ({"bias": torch.zeros(10, 32, **wide).int()}, UnsupportedError, "dtype of bias"),
        "out_shift": ({"out_shift": torch.zeros(2, 32, **LOW)}, ShapeError, r"\(2, 32\); allowed: \(6, 32\)"),
        "src_mask": ({"src_mask": torch.zeros(2, 2, 1, 8, **wide)}, ShapeError, "1 or 6, 1, keys"),
        "src_mask dtype": ({"src_mask": torch.zeros(2, 1, 1, 8, **wide).bool()}, UnsupportedError, "torch.bool"),
        "rotary": ({"rotary": torch.zeros(2, 34, **wide)}, ShapeError, "an even rotary_dim up to 32"),
        "rotary dtype": ({"rotary": torch.zeros(2, 32, **LOW)}, UnsupportedError, "float32"),
        "rotary_style": ({"rotary_style": "gptj"}, InvalidArgumentError, "neox, interleaved"),
        "quant_round": ({"quant_round": "up"}, InvalidArgumentError, "half_even, half_away"),
        "bounds": ({"quant_max_bound": 200.0}, InvalidArgumentError, "within int8"),
        "out_scale": ({"out_scale": -1.0}, InvalidArgumentError, "out_scale: -1.0"),
        "steps": ({"steps_per_block": 0}, InvalidArgumentError, "steps_per_block: 0"),
        "out dtype": ({"dtype": torch.int8}, UnsupportedError, "int8 with out_scale"),
        "out": ({"out": torch.zeros(2, 6, 31, **LOW)}, ShapeError, "out"),
        "out for int8": ({"out": torch.zeros(2, 6, 32, **LOW), "out_scale": 1.0}, ShapeError, "torch.int8"),
        "backend": ({"backend": "cuda"}, InvalidArgumentError, "auto, gluon, triton, reference"),
        "devices": ({"seq_lens": torch.zeros(2, device="meta").long()}, UnsupportedError, "one device"),
    }  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "words"), bad_calls().values(), ids=bad_calls().keys())
def test_bad_input_says_what_is_allowed(changes, error, words):
    k, v = torch.zeros(2, 2, 2, 8, 32, **LOW).unbind(0)
    arguments = {
        "qkv": torch.zeros(2, 10, 32, **LOW),
        "cache_k": k,
        "cache_v": v,
        "seq_lens": torch.zeros(2, device=DEVICE).long(),
    }
    with pytest.raises(error, match=words):
        masked_multihead_attention(**(arguments | changes))


@pytest.mark.skipif(DEVICE == "cpu", reason="about a GPU")
def test_float32_on_a_gpu_is_refused():
    case = Case([1], dtype=torch.float32)
    with pytest.raises(UnsupportedError, match=r"cache dtype: torch\.float32 on cuda"):
        case.run("kernel")


@pytest.mark.skipif(DEVICE == "cuda", reason="about a machine without a GPU")
def test_the_kernel_without_a_gpu_is_refused():
    case = Case([1])
    with pytest.raises(UnsupportedError, match=r"backend=triton\): cpu; allowed: cuda"):
        masked_multihead_attention(case.qkv, case.k, case.v, case.seq_lens, backend="triton")


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_a_row_without_room_is_named_before_anything_is_written(monkeypatch, backend):
    monkeypatch.setattr(op, "checks_contents", lambda: True)
    case = Case([3, 23])
    case.seq_lens[1] = 24
    before = case.k.clone()
    with pytest.raises(InvalidArgumentError, match="seq_lens: 24; allowed: less than 24"):
        masked_multihead_attention(case.qkv, case.k, case.v, case.seq_lens, backend=backend)
    assert torch.equal(case.k.nan_to_num(), before.nan_to_num())
    with pytest.raises(InvalidArgumentError, match="src_mask: 3 keys; allowed: at least 4"):
        masked_multihead_attention(
            case.qkv[:1], case.k[:1], case.v[:1], case.seq_lens[:1], src_mask=torch.zeros(1, 1, 1, 3, device=DEVICE)
        )


def everything(dtype: torch.dtype, *, packed: bool) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    case = Case([3, 5], dtype=dtype).with_everything(integers=True)
    case.options["finished"] = torch.tensor([False, True], device=DEVICE)
    k, v = case.k.nan_to_num(), case.v.nan_to_num()
    return (case.qkv, pack_k(k) if packed else k, v, case.seq_lens), case.options


@pytest.mark.parametrize(("packed", "quantised"), [(False, True), (True, False)])
def test_the_registration_passes_pytorchs_own_checks(packed, quantised):
    tensors, given = everything(DTYPES[0], packed=packed)
    rest = [given[n] for n in ("bias", "src_mask", "finished", "rotary", "qkv_out_scale", "out_shift", "out_smooth")]
    dtype = torch.int8 if quantised else DTYPES[0]
    options = (True, 0.5 if quantised else None)
    operators = torch.ops.onewave
    torch.library.opcheck(operators.masked_multihead_attention.default, (*tensors, dtype, *rest, *options))
    out = randn(2, 6, 32, seed=1).to(dtype)
    torch.library.opcheck(operators.masked_multihead_attention_out.default, (out, *tensors, *rest, *options))


@pytest.mark.parametrize("form", ["result", "out", "one cache"])
def test_a_compiled_call_is_one_graph_and_equals_the_eager_one(form):
    def call(qkv: Tensor, k: Tensor, v: Tensor, lengths: Tensor, **options: Any) -> Tensor:
        if form == "one cache":
            k, v = torch.stack((k, v)).unbind(0)
        if form == "out":
            options["out"] = torch.zeros(2, 6 * 32, dtype=torch.int8, device=qkv.device)
        # The whole batch in one row of numbers each: the flat form of qkv.
        return masked_multihead_attention(qkv.flatten(1), k, v, lengths, out_scale=0.5, **options) + 1

    torch._dynamo.reset()
    compiled: Callable[..., Tensor] = torch.compile(call, fullgraph=True, backend="aot_eager")
    (ours, options), (theirs, _) = everything(DTYPES[0], packed=False), everything(DTYPES[0], packed=False)
    with torch.no_grad():
        assert torch.equal(compiled(*ours, **options), call(*theirs, **options))
    assert torch.equal(ours[1], theirs[1])
    assert torch.equal(ours[2], theirs[2])


def test_a_projection_whose_rows_lie_apart_gives_the_same_bits():
    qkv, k, v = randn(2, 4, 96, seed=1), randn(2, 1, 192, 96, seed=2), randn(2, 1, 192, 96, seed=3)
    qkv, k, v = (tensor.to(EXACTEST) for tensor in (qkv, k, v))
    apart = torch.nn.functional.pad(qkv, (0, 2))[..., :96]
    lengths = torch.tensor([154, 190], device=DEVICE)
    found = [masked_multihead_attention(x, k.clone(), v.clone(), lengths) for x in (qkv, apart)]
    assert torch.equal(*found)
