"""The reference of `embedding`, in plain PyTorch."""

from torch import Tensor

from onewave.ops.linear.packed import PackedWeight


def embedding(token_ids: Tensor, table: Tensor | PackedWeight) -> Tensor:
    """Index the whole, dequantised table."""
    dense = table.dequantize() if isinstance(table, PackedWeight) else table
    return dense[token_ids]
