from onewave.ops.scaled_linear.matrix import ScaledMatrix, ScaledPart
from onewave.ops.scaled_linear.op import linear_fp8, linear_int8

__all__ = ["ScaledMatrix", "ScaledPart", "linear_fp8", "linear_int8"]
