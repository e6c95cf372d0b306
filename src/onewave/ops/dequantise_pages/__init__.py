from onewave.ops.dequantise_pages.op import dequantise_pages

__all__ = ["dequantise_pages"]
