"""Which calls Hopper's decode kernel takes, and what explain says of it."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from onewave.base.errors import UnsupportedError
from onewave.ops.decode_attention.hopper.plan import StreamCall, refusal, stream_tile, undescribable
from onewave.ops.decode_attention.triton.plan import DecodeSizes, plan_decode
from onewave.ops.explain import explain

CALL = StreamCall((9, 0), 16, torch.bfloat16, torch.bfloat16, packed=False, block_size=4096, paged=False)


def plan(**changes: Any) -> Any:
    return plan_decode(DecodeSizes(32, 8, 1, 128, capacity=4096, kv_itemsize=2)._replace(**changes))


def test_plain_and_paged_rows_are_taken() -> None:
    assert refusal(CALL, plan()) is None
    assert refusal(CALL, plan(head_dim=64)) is None
    assert refusal(replace(CALL, dtype=torch.float16, kv_dtype=torch.float16), plan(head_dim=80)) is None
    for dtype in (torch.int8, torch.float8_e4m3fn):
        for head_dim in (33, 64, 65, 128):
            assert refusal(replace(CALL, kv_dtype=dtype, scaled=True), plan(kv_itemsize=1, head_dim=head_dim)) is None
    for size in (8, 16, 32, 64, 128, 256):
        assert refusal(replace(CALL, block_size=size, paged=True), plan()) is None


@pytest.mark.parametrize(
    ("changes", "sizes", "words"),
    [
        ({"capability": (8, 0)}, {}, "sm_80: needs sm_90"),
        ({"capability": (10, 0)}, {}, "sm_100: needs sm_90"),
        ({"kv_dtype": torch.float16}, {}, "a cache in float16"),
        ({"packed": True}, {}, "packed keys"),
        ({"scaled": True}, {}, "scales of keys and values in 16 bits"),
        ({}, {"head_dim": 256}, "head_dim padded to 256"),
        ({}, {"head_dim": 32}, "head_dim padded to 32: needs 33 to 128"),
        ({}, {"num_queries": 4}, "16 query rows a KV head"),
        ({"paged": True, "block_size": 24}, {}, "pages of 24"),
        ({"paged": True, "block_size": 4}, {}, "pages of 4"),
        ({"rows": 257}, {}, "257 rows"),
        ({"strides": "odd ones"}, {}, "odd ones"),
    ],
)
def test_whatever_else_is_refused_with_its_reason(changes: dict[str, Any], sizes: dict[str, Any], words: str) -> None:
    reason = refusal(replace(CALL, **changes), plan(**sizes))
    assert words in reason


def test_strides_that_tma_cannot_have_are_named() -> None:
    cache = torch.zeros(2, 2, 64, 128, dtype=torch.float16)
    assert undescribable(cache, cache.transpose(1, 2).contiguous().transpose(1, 2)) is None
    wide = torch.zeros(2, 2, 64, 129, dtype=torch.float16)
    for odd in (wide[..., :128], cache[:1].expand(2, 2, 64, 128), torch.zeros(1, 1, 65, 8).half().flatten()[4:516]):
        reason = undescribable(odd if odd.ndim == 4 else odd.view(1, 1, 4, 128))
        assert "multiples of 16 bytes" in reason
    assert undescribable(cache, cache[:, :, :0]) == "a cache without a single key: needs some"


def test_a_program_with_few_keys_leaves_room_for_the_next_launchs() -> None:
    assert stream_tile(1, 4096, 16).stages < stream_tile(1, 32768, 16).stages


@pytest.mark.parametrize("rows", [1, 16])
def test_a_place_is_free_beside_what_is_under_way(rows: int) -> None:
    for itemsize in (1, 2):
        tile = stream_tile(rows, 4096, 16, itemsize)
        assert 2 <= tile.flight < tile.stages


def test_a_long_list_of_rows_has_registers_in_the_loading_warp() -> None:
    assert stream_tile(256, 4096, 16).loader > stream_tile(128, 4096, 16).loader


def test_explain_names_the_kernel_or_why_it_is_another() -> None:
    shapes = ((16, 32, 1, 128), (16, 8, 4096, 128))
    taken = explain("decode_attention", *shapes, device="cuda:sm_90", dtype="bf16")
    assert taken.backend == "gluon"
    assert "stream_kernel" in taken.kernel
    in_bytes = explain("decode_attention", *shapes, device="cuda:sm_90", dtype="bf16", kv_dtype="int8")
    assert in_bytes.backend == "gluon"
    narrow = ((16, 32, 1, 32), (16, 8, 4096, 32))
    other = explain("decode_attention", *narrow, device="cuda:sm_90", dtype="bf16", kv_dtype="int8")
    assert other.backend == "triton"
    assert any("head_dim padded to 32" in reason for reason in other.why)
    scaled = explain("decode_attention", *shapes, device="cuda:sm_90", dtype="bf16", k_scale=True, v_scale=True)
    assert scaled.backend == "triton"
    assert explain("decode_attention", *shapes, device="cuda:sm_80", dtype="bf16").backend == "triton"
    assert explain("decode_attention", *shapes, device="cuda:sm_90", dtype="bf16", backend="triton").backend == "triton"
    with pytest.raises(UnsupportedError, match="needs sm_90"):
        explain("decode_attention", *shapes, device="cuda:sm_80", dtype="bf16", backend="gluon")
    fused = explain("masked_multihead_attention", (16, 48, 128), shapes[1], device="cuda:sm_90", dtype="bf16")
    assert fused.backend == "gluon"


def test_programs_over_8_bits_come_in_pairs_and_cut_equal_rows_no_more_often() -> None:
    shapes = ((16, 32, 1, 128), (16, 8, 4096, 128))
    wide, narrow = (
        explain("decode_attention", *shapes, device="cuda:sm_90", dtype="bf16", kv_dtype=dtype).programs
        for dtype in ("bf16", "fp8")
    )
    assert wide.startswith("16 shares x 8")
    assert narrow.startswith("32 shares x 8")
