from onewave.ops.append_kv.op import append_kv

__all__ = ["append_kv"]
