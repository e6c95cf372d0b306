from onewave.ops.decode_attention.op import decode_attention

__all__ = ["decode_attention"]
