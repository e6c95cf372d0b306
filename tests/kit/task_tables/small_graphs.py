"""Small graphs that the tests of schedules share."""

from dataclasses import replace

from onewave.models.config.model_config import ModelConfig
from onewave.models.config.read import builtin_config
from onewave.models.llama_plan import DealtStep, DecodeStep, deal_decode
from onewave.tiles.graph.builders import conv2d, ffn, gemm, gemm_chain, gemm_stream_k
from onewave.tiles.graph.builders_attention import attention, attention_block
from onewave.tiles.graph.graph import Task, Tensor, TileGraph


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


def small_model(**changes: int) -> ModelConfig:
    """A model of one layer and a few columns that runs as one wave."""
    base = builtin_config("llama-3.2-1b")
    sizes = {"num_layers": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "num_kv_heads": 1}
    sizes |= {"head_dim": 32, "vocab_size": 16} | changes
    return replace(
        base,
        **sizes,
        rope=replace(base.rope, rotary_dim=sizes["head_dim"]),
        layer_windows=(None,) * sizes["num_layers"],
    )


def small_step(*, workers: int = 2, batch: int = 1, context: int = 300, **changes: int) -> DealtStep:
    """A small model's decode step, as the wave deals it out."""
    return deal_decode(DecodeStep(small_model(**changes), batch), workers=workers, context=context)


CHAINS: dict[str, TileGraph] = {
    "gemm": gemm(6, 4, 4, tile=(2, 2, 2)),
    "chain": gemm_chain(6, 2, 4, 4, tile=(2, 2, 2), splits=2),
    "ffn": ffn(4, 4, 4, tile=(2, 2, 2), splits=2),
    "attention": attention(4, 4, heads=2, head_dim=2, tile=(2, 2)),
    "attention block": attention_block(4, 2, 2, 4, tile=(2, 2, 2), kv_heads=1, splits=2),
    "convolution": conv2d((1, 4, 4, 2), 2, (3, 3), tile=(4, 2, 2)),
    "two convolutions": two_convolutions(),
    "decode": small_step().graph,
    "stream-k": gemm_stream_k(4, 4, 6, tile=(2, 2, 2), workers=3)[0],
}
