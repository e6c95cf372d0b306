from onewave.ops.linear.op import LinearWeight, linear, linear_of_rows, linear_swiglu
from onewave.ops.linear.packed import PackedWeight, can_pack, has_finite_scales, pack, pack_dense, stack

__all__ = [
    "LinearWeight",
    "PackedWeight",
    "can_pack",
    "has_finite_scales",
    "linear",
    "linear_of_rows",
    "linear_swiglu",
    "pack",
    "pack_dense",
    "stack",
]
