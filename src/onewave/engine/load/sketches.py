"""Compiling a model's kernels before the program of its decode step is planned.

What the step's kernel is compiled for does not depend on how many layers or words of vocabulary there are. So one layer
of the model with a few words, all zeros, is planned in a moment and launched once. Plain operators run on a layer of
zeros as well, with all words. first_load.py keeps these launches and makes none.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, product
from typing import Any

import torch

from onewave.base.group_rounding import GroupedRows
from onewave.base.weight_formats import MixedFormat, Rounding, WeightFormat
from onewave.engine.load.options import LoadOptions
from onewave.engine.load.streamed import layer_matrices
from onewave.gpu.compile_pool import done_by
from onewave.memory.kv_cache import KVFormat
from onewave.models.config.model_config import ModelConfig
from onewave.models.decode_wave import DecodeWave
from onewave.models.llama import MATRICES, LayerWeights, Llama, LlamaWeights, MatrixWeight
from onewave.models.llama_plan import plan_program
from onewave.wave.plan.layout import BLOCK_KEYS
from onewave.wave.plan.program import WaveProgram
from onewave.wave.plan.steps import Word
from onewave.wave.weights.pack import StreamMatrix, TileMatrix, WeightStream
from onewave.wave.weights.row_table import RowTable

_WORDS = 64
_CAPACITY = BLOCK_KEYS  # for which keys come through the ring, as they will


def one_layer(config: ModelConfig) -> ModelConfig:
    """Return a model of one layer and a few words; its decode step is compiled as the whole model's."""
    return replace(config.of_layers(1), vocab_size=_WORDS)


class BlankStream(WeightStream):
    """A stream of one tile of zeros: a launch reads zeros beyond a tensor's end as well.

    starts: where matrices' places begin in the program's table: a kernel is compiled for aligned ones, or for any.
    """

    def __init__(
        self, program: WaveProgram, dtype: torch.dtype, device: torch.device, weight_format: WeightFormat | None = None
    ):
        sizes = [len(tiles) for tiles in program.stream.values()]
        self.starts = list(dict.fromkeys(int(start % 4 > 0) for start in accumulate(sizes[:-1], initial=0)))
        # A program of one layer has the widths of its own matrices alone.
        widths = dict(weight_format.widths) if isinstance(weight_format, MixedFormat) else {}
        program = replace(program, widths=widths)
        super().__init__(replace(program, stream={}, stream_tiles=1), dtype, device, weight_format)
        steps = program.steps.copy()
        steps[:, Word.AHEAD_TILES] = 0  # what brings tiles nearer goes by their addresses
        self.program = replace(program, steps=steps)
        assert self.images.nbytes == program.shape.tile_bytes

    def in_tiles(self, matrix: StreamMatrix) -> TileMatrix | None:
        form = self.format_of(matrix.name).product
        if not form or self.scales is None:
            return None
        words, place = self.images.view(torch.int32).view(-1), torch.zeros(1, dtype=torch.int32, device=self.device)
        rows = matrix.shape[0]
        blocks, tiles = -(-rows // self.shape.rows), -(-matrix.cols // self.shape.cols)
        longest = None if self.lists is None else place
        return TileMatrix(
            form, words, self.lists, place, self.scales, 0, 0, rows, blocks, tiles, longest, listed=False
        )  # fmt: skip

    def kept(self, matrix: StreamMatrix) -> torch.Tensor | None:
        return torch.empty(matrix.shape, dtype=self.dtype, device=self.device) if self.keeping else None

    def _unpack(self, matrix: StreamMatrix, first: int, last: int, out: torch.Tensor) -> torch.Tensor:
        return out.view(matrix.count * (last - first), matrix.cols)


def sketch(
    config: ModelConfig, stream: WeightStream, *, max_model_len: int = _CAPACITY, numbers: Sequence[int] | None = None
) -> Llama:
    """A model of zeros, with what a decode step's setup looks at; its matrices lie in the stream. numbers: of the whole
    model's layers, which these are; None: the first ones."""
    device, dtype, dim = stream.device, stream.dtype, config.head_dim

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    shapes = layer_matrices(config)
    parts: dict[str, Any] = {"input_norm": zeros(config.hidden_size), "post_norm": zeros(config.hidden_size)}
    parts |= {"o_bias": None, "gate_up_bias": None, "down_bias": None}
    parts["qkv_bias"] = zeros(shapes["qkv"][0]) if config.qkv_bias else None
    parts |= {name: zeros(dim) if config.qk_norm else None for name in ("q_norm", "k_norm")}

    def layer(number: int) -> LayerWeights:
        own: dict[str, Any] = {name: StreamMatrix(stream, f"{name}{number}", *shape) for name, shape in shapes.items()}
        return LayerWeights(**parts, **own)

    layers = tuple(map(layer, numbers or range(config.num_layers)))
    head: MatrixWeight = StreamMatrix(stream, "head", config.vocab_size, config.hidden_size)
    weights = LlamaWeights(zeros(config.vocab_size, config.hidden_size), layers, zeros(config.hidden_size), head)
    return Llama(config, weights, max_model_len=max_model_len)


class PlainSketch(Llama):
    """A layer of zeros of each kind that a model has, by window and formats of matrices, and all words, for what plain
    operators launch on the whole model with matrices in a stream."""

    def __init__(self, config: ModelConfig, stream: WeightStream, *, max_model_len: int):
        formats = [[stream.format_of(f"{name}{at}") for name in MATRICES] for at in range(config.num_layers)]
        kinds = list(zip(config.layer_windows, map(tuple, formats), strict=True))
        first = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
        windows = tuple(config.layer_windows[at] for at in first)
        few = replace(config, num_layers=len(first), layer_windows=windows)
        weights = sketch(few, stream, numbers=first).weights
        if config.tie_word_embeddings and not isinstance(stream.weight_format, Rounding | MixedFormat):
            assert isinstance(weights.embedding, torch.Tensor)
            weights = replace(weights, head=weights.embedding)
        super().__init__(few, weights, max_model_len=max_model_len)


def blank_stream(config: ModelConfig, options: LoadOptions, program: WaveProgram | None) -> BlankStream:
    """A stream in which there is nothing but zeros, in next to no memory, of the model's program or, where there is
    none yet, one layer's. One of the options' compilers plans it, as threads that ask for kernels want Python's
    lock."""
    from onewave.wave.launch.launch import co_resident

    if program is None:
        plan = partial(plan_program, options.step(one_layer(config)), workers=co_resident(options.device))
        program = done_by(options.compilers, plan)
    return BlankStream(program, options.dtype, options.device, options.weight_format)


def keep_in(model: Llama, kv_dtype: torch.dtype | None, scale: float = 1.0) -> None:
    """Have a model keep keys and values in 8 bits, of that scale; None: in its dtype."""
    if kv_dtype is not None:
        shape = (model.config.num_layers, model.config.num_kv_heads)
        model.kv_format = KVFormat(kv_dtype, *(torch.full(shape, scale, device=model.device) for _ in range(2)))


@torch.inference_mode()
def compile_step(config: ModelConfig, stream: WeightStream, *, batch: int, kv_dtype: torch.dtype | None = None) -> None:
    """Launch a blank stream's step. kv_dtype: of the cache; None: the stream's."""
    model = sketch(one_layer(config), stream)
    keep_in(model, kv_dtype)
    wave = DecodeWave(model, batch=batch, stream=stream)
    wave.bind_cache(model.new_row_cache(num_slots=batch, capacity=_CAPACITY))
    numbers = torch.zeros(batch, dtype=torch.int64, device=stream.device)
    wave(numbers, numbers, torch.arange(batch, device=stream.device))


@torch.inference_mode()
def compile_packing(stream: BlankStream) -> None:
    """Launch what packs and unpacks a model's matrices of each width, on a blank stream's one tile, and what looks up
    rows of a quantised embedding."""
    from onewave.wave.weights.formats.tile_format import UnpackedRows

    shape, places = stream.shape, torch.zeros(2, dtype=torch.int32, device=stream.device)
    tiles, gain = stream.all_tiles(), torch.ones(shape.cols, dtype=stream.dtype, device=stream.device)
    for start, form, (count, gained) in product(stream.starts, stream.formats, ((1, gain), (1, None), (2, gain))):
        zeros = torch.zeros(shape.rows, shape.cols, dtype=stream.dtype, device=stream.device)
        matrices = zeros.chunk(count)
        part = UnpackedRows(zeros.view(count, -1, shape.cols), count, first_row=0, first_block=0, blocks=1)
        form.pack_by_kernel(tiles, places[start:], matrices, gained)
        form.unpack(tiles, places[start:], part)
    if isinstance(stream.weight_format, MixedFormat):
        for bits in (4, 8):
            _blank_table(stream, bits).look_up(torch.zeros(2, dtype=torch.int64, device=stream.device))


def _blank_table(stream: WeightStream, bits: int) -> RowTable:
    """A quantised embedding of one row, of zeros."""
    device, cols, groups = stream.device, 128, 1 if bits == 4 else 4
    codes, steps = (torch.zeros(size, device=device) for size in ((1, cols), (1, 4, 2)))
    scales = torch.zeros(1, groups, dtype=torch.float16, device=device)
    rows = GroupedRows(codes.byte(), scales, scales.clone(), torch.zeros(1, device=device), steps.char())
    return RowTable(rows, bits, stream.dtype)
