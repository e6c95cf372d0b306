from onewave.ops.post_attention.call import PostAttentionWeights
from onewave.ops.post_attention.op import post_attention, post_attention_rows

__all__ = ["PostAttentionWeights", "post_attention", "post_attention_rows"]
