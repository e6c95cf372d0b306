from onewave.ops.merge_attention.op import merge_attention

__all__ = ["merge_attention"]
