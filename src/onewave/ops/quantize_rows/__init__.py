from onewave.ops.quantize_rows.op import quantize_rows

__all__ = ["quantize_rows"]
