from onewave.ops.linear.op import LinearWeight, linear
from onewave.ops.linear.packed import PackedWeight, can_pack, has_finite_scales, pack, pack_dense

__all__ = ["LinearWeight", "PackedWeight", "can_pack", "has_finite_scales", "linear", "pack", "pack_dense"]
