"""The float8 kernel's tile, and how its tiles are dealt."""

from dataclasses import replace

from onewave.ops.attention.hopper.plan import Schedule, Work, schedule

COLUMNS, KEYS, ROWS, WARPGROUPS = 128, 128, 64, 3
FP8_TILE = {"D": COLUMNS, "BN": KEYS, "K_STAGES": 3, "V_STAGES": 3}
"""Constants of the kernel."""
# A tile's start and end, in key tiles. 1.5, bfloat16's, is no better on average (docs/log/prefill-attention.md).
_TILE_COST = 1.0


def deal(work: Work, num_sms: int) -> Schedule:
    """hopper/plan.schedule, of this kernel's tiles. Packed ones are taken in turns: no sorted queue was tried."""
    plan = schedule(
        work, columns=COLUMNS, num_sms=num_sms, rows=ROWS * WARPGROUPS, tile_cost=_TILE_COST, item_bytes=1
    )  # fmt: skip
    return replace(plan, order="turns") if plan.order == "sorted" else plan
