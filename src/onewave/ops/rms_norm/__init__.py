from onewave.ops.rms_norm.op import add_rms_norm, rms_norm

__all__ = ["add_rms_norm", "rms_norm"]
