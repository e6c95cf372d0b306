from onewave.ops.masked_multihead_attention.op import masked_multihead_attention

__all__ = ["masked_multihead_attention"]
