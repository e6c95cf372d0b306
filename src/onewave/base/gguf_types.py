"""The tensor types a GGUF may hold and that onewave reads: id, name, and the size of a block.

Source: ggml's ggml.h (enum ggml_type) and gguf-py's GGML_QUANT_SIZES. Q8_1 and Q8_K exist in ggml only as
intermediate results and are never stored.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class GGUFType:
    """A storage type: every `block_elements` consecutive elements of a row take `block_bytes` bytes."""

    id: int
    name: str
    block_elements: int
    block_bytes: int

    @property
    def is_quantized(self) -> bool:
        """Whether elements share a block, so that they must be dequantised to be read."""
        return self.block_elements > 1


GGUF_TYPES: dict[int, GGUFType] = {
    row[0]: GGUFType(*row)
    for row in (
        (0, "F32", 1, 4),
        (1, "F16", 1, 2),
        (2, "Q4_0", 32, 18),
        (3, "Q4_1", 32, 20),
        (6, "Q5_0", 32, 22),
        (7, "Q5_1", 32, 24),
        (8, "Q8_0", 32, 34),
        (10, "Q2_K", 256, 84),
        (11, "Q3_K", 256, 110),
        (12, "Q4_K", 256, 144),
        (13, "Q5_K", 256, 176),
        (14, "Q6_K", 256, 210),
        (16, "IQ2_XXS", 256, 66),
        (17, "IQ2_XS", 256, 74),
        (18, "IQ3_XXS", 256, 98),
        (19, "IQ1_S", 256, 50),
        (20, "IQ4_NL", 32, 18),
        (21, "IQ3_S", 256, 110),
        (22, "IQ2_S", 256, 82),
        (23, "IQ4_XS", 256, 136),
        (24, "I8", 1, 1),
        (25, "I16", 1, 2),
        (26, "I32", 1, 4),
        (27, "I64", 1, 8),
        (28, "F64", 1, 8),
        (29, "IQ1_M", 256, 56),
        (30, "BF16", 1, 2),
        (34, "TQ1_0", 256, 54),
        (35, "TQ2_0", 256, 66),
        (39, "MXFP4", 32, 17),
        (40, "NVFP4", 64, 36),
    )
}
"""Readable types by the id that a GGUF's tensor table uses."""

PLAIN_TYPES: frozenset[str] = frozenset(t.name for t in GGUF_TYPES.values() if not t.is_quantized)
"""Types whose elements are ordinary numbers."""

TYPES_BY_NAME = {t.name: t for t in GGUF_TYPES.values()}
