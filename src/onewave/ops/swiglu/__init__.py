from onewave.ops.swiglu.op import swiglu

__all__ = ["swiglu"]
