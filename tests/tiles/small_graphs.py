"""Small graphs that the tests of schedules share."""

from __future__ import annotations

from onewave.tiles.graph.builders import conv2d, ffn, gemm, gemm_chain, gemm_stream_k
from onewave.tiles.graph.builders_attention import attention, attention_block
from onewave.tiles.graph.builders_llama import DecodeShape, decode_step
from onewave.tiles.graph.graph import Task, Tensor, TileGraph

__all__ = ["CHAINS", "two_convolutions"]


def two_convolutions(lines: int = 3, blocks: int = 2, channels: int = 2) -> TileGraph:
    """A 3x3 convolution after another: a tile (line, pixels, channels) reads its neighbours in line and pixels."""
    shape = (lines, blocks, channels)
    tensors = {name: Tensor(name, shape, (1, 1, 1), 2) for name in ("image", "middle", "out")}
    tasks: list[Task] = []
    for name, source, target in (("conv0", "image", "middle"), ("conv1", "middle", "out")):
        for y in range(lines):
            for x in range(blocks):
                for c in range(channels):
                    taps = tuple(
                        (source, (j, i, k))
                        for k in range(channels)
                        for j in range(max(0, y - 1), min(lines, y + 2))
                        for i in range(max(0, x - 1), min(blocks, x + 2))
                    )
                    tasks.append(Task(len(tasks), name, taps, ((target, (y, x, c)),), 1, name, (y, x * channels + c)))
    return TileGraph(tensors, tuple(tasks))


TINY = DecodeShape(hidden=16, heads=2, kv_heads=1, head_dim=8, intermediate=24, layers=1, vocab=20, context=10, batch=1)

CHAINS: dict[str, TileGraph] = {
    "gemm": gemm(6, 4, 4, tile=(2, 2, 2)),
    "chain": gemm_chain(6, 2, 4, 4, tile=(2, 2, 2), splits=2),
    "ffn": ffn(4, 4, 4, tile=(2, 2, 2), splits=2),
    "attention": attention(4, 4, heads=2, head_dim=2, tile=(2, 2)),
    "attention block": attention_block(4, 2, 2, 4, tile=(2, 2, 2), kv_heads=1, splits=2),
    "convolution": conv2d((1, 4, 4, 2), 2, (3, 3), tile=(4, 2, 2)),
    "two convolutions": two_convolutions(),
    "decode": decode_step(TINY, workers=2, split=4),
    "stream-k": gemm_stream_k(4, 4, 6, tile=(2, 2, 2), workers=3).graph,
}
