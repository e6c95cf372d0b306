from onewave.ops.attention.op import attention, attention_varlen

__all__ = ["attention", "attention_varlen"]
