from onewave.ops.quantize_rows.op import QuantizedRows, quantize_rows

__all__ = ["QuantizedRows", "quantize_rows"]
