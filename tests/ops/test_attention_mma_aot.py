"""The m16n8k16 attention kernel compiled for sm_80 and sm_90 without a card: registers, spills, instructions, banks."""

from __future__ import annotations

import re
from collections import Counter
from itertools import product
from typing import Any

import pytest
from attention_mma_aot import compiled

from onewave.ops.attention.mma.plan import mma_tile
from onewave.tiles.sim.banks import Swizzle, conflicts, copied_rows, matrices

CAUSAL = {"RIGHT": True}
EVERYTHING = {
    "RIGHT": True, "LEFT": True, "SOFTCAP": True, "SINKS": True, "RAGGED": True, "LSE": True, "FOLD": False,
}  # fmt: skip
SETS: dict[str, dict[str, Any]] = {"causal": CAUSAL, "everything": EVERYTHING}
VARIANTS: dict[str, dict[str, Any]] = {
    f"{head_dim} {'narrow' if narrow else 'wide'} {name} sm_{card}": {
        "head_dim": head_dim, "narrow": narrow, "capability": card, **SETS[name],
    }
    for head_dim, narrow, name, card in [
        *product((128,), (False, True), SETS, (80, 90)),
        *product((64,), (False, True), ("everything",), (90,)),
        (256, True, "everything", 80),
        (32, False, "everything", 80),
        (16, False, "causal", 90),
    ]
}  # fmt: skip


@pytest.fixture(scope="module")
def reports() -> dict[str, dict[str, Any]]:
    return dict(zip(VARIANTS, compiled(list(VARIANTS.values())), strict=True))


def tile(name: str) -> Any:
    return mma_tile(VARIANTS[name]["head_dim"], narrow=VARIANTS[name]["narrow"])


def test_no_variant_exceeds_its_tiles_registers_or_spills(reports: dict[str, Any]) -> None:
    for name, report in reports.items():
        assert report["registers"] <= tile(name).registers, name
        assert (report["stack"], report["STL"], report["LDL"]) == (0, 0, 0), name


def test_the_products_are_m16n8k16_on_operands_from_ldmatrix_and_movmatrix(reports: dict[str, Any]) -> None:
    for name, report in reports.items():
        used = tile(name)
        columns = used.queries // used.warps // 8
        steps = (used.keys // 16) * (used.width // 16) * columns
        # Both products of a tile once in the code, and nothing computed twice.
        assert report["HMMA.16816.F32"] == 2 * steps, name
        assert report["ptx"].count("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32") == 2 * steps, name
        # An operand of K and of V is loaded once for all of a warp's queries, four matrices at a time.
        assert report["LDSM.16.M88.4"] == report["LDSM.16.MT88.4"] == steps // columns, name
        # P, block by block, and the output.
        assert report["MOVM"] == (used.keys + used.width) // 8 * columns, name


def test_maxima_and_sums_are_butterflies_over_the_eight_lane_groups(reports: dict[str, Any]) -> None:
    for name, report in reports.items():
        used = tile(name)
        distances = re.findall(r"shfl\.sync\.\w+\.b32\s+%r\d+, %r\d+, (\d+),", report["ptx"])
        # Three steps for each of a thread's queries, two a column of blocks: the max in the loop, the sum after it.
        queries = used.queries // used.warps // 4
        assert Counter(distances) == dict.fromkeys(("16", "8", "4"), 2 * queries), name


def test_keys_and_values_come_by_cp_async_and_scores_never_touch_shared_memory(reports: dict[str, Any]) -> None:
    for name, report in reports.items():
        used = tile(name)
        # 16 bytes a thread, before the loop and in it.
        assert report["LDGSTS"] == 4 * used.keys * used.width // 8 // report["threads"], name
        assert report["shared"] == used.shared_bytes, name
        # All that is stored there is the output: by stmatrix on sm_90, else word by word.
        words = used.queries * used.width // 2 // report["threads"]
        stores = report["ptx"].count("stmatrix") * 4 + report["ptx"].count("st.shared.b32")
        assert stores == words, name


def test_at_head_dim_128_k_takes_at_most_12_kib_and_five_programs_share_an_sm(reports: dict[str, Any]) -> None:
    for card, name in product((80, 90), SETS):
        assert reports[f"128 wide {name} sm_{card}"]["programs"] == 3
        assert reports[f"128 narrow {name} sm_{card}"]["programs"] == 5
        # Q goes from device memory to registers.
        assert reports[f"128 narrow {name} sm_{card}"]["shared"] // 2 <= 12 << 10


@pytest.mark.parametrize("head_dim", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("narrow", [False, True])
def test_the_layout_tool_finds_no_conflict_in_any_access_to_any_place_of_the_tiles(head_dim: int, narrow: bool) -> None:
    """Exhaustively; that the compiled kernel makes these accesses and no others, test_attention_mma_ptx.py shows."""
    used = mma_tile(head_dim, narrow=narrow)
    line = max(1, 64 // used.width)
    swizzled = Swizzle(used.width, vec=8, per_phase=line, max_phase=8 // line)
    rows = max(2 * used.keys, used.queries)
    # Operands of both products (.trans reads the same rows), and the output's matrices.
    assert {conflicts(found, 16) for found in matrices(swizzled, rows)} == {0}
    # cp.async in and the output out: lanes along rows, 16 bytes each.
    assert {conflicts(found, 16) for found in copied_rows(swizzled, rows, width=16)} == {0}
    # The output on sm_80: an 8 x 8 block a warp, 4 bytes a lane.
    for first, column in product(range(0, used.queries, 8), range(0, used.width, 8)):
        lanes = [swizzled.offset(first + lane // 4, column + lane % 4 * 2) for lane in range(32)]
        assert conflicts(lanes, 4) == 0
    # Without the swizzle the operands would conflict.
    plain = Swizzle(used.width, max_phase=1)
    assert min(conflicts(found, 16) for found in matrices(plain, rows)) == 8 // line - 1
