from onewave.ops.embedding.op import embedding

__all__ = ["embedding"]
