from onewave.ops.stream_read.op import stream_read

__all__ = ["stream_read"]
