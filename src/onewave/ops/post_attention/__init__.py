from onewave.ops.post_attention.call import PostAttentionWeights
from onewave.ops.post_attention.op import post_attention

__all__ = ["PostAttentionWeights", "post_attention"]
