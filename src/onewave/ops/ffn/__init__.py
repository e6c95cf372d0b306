from onewave.ops.ffn.op import ffn, pack_ffn

__all__ = ["ffn", "pack_ffn"]
