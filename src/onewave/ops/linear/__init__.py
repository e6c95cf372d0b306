from onewave.ops.linear.op import LinearWeight, linear
from onewave.ops.linear.packed import PackedWeight, can_pack, pack, pack_dense

__all__ = ["LinearWeight", "PackedWeight", "can_pack", "linear", "pack", "pack_dense"]
