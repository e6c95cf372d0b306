"""A model with its matrices in a wave's stream and nowhere else.

Loading builds one matrix after the other, packs it and lets it go, so that a GPU never holds the weights twice. What
runs plain operators (prefill, the log-probabilities of a prompt) gets matrices unpacked into a buffer that the next
one reuses. The gains of the norms before qkv, gate_up and the head are multiplied into these matrices and rounded with
them, in plain operators as in the wave: both compute with the same weights.
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onewave.base.errors import OutOfReachError, UnsupportedError
from onewave.base.weight_formats import Rounding
from onewave.engine.load.checkpoint import ModelParts, building
from onewave.engine.load.options import LoadOptions
from onewave.models.config.model_config import ModelConfig
from onewave.models.decode_wave import wave_weight
from onewave.models.llama import NORMS, LayerWeights, Llama, LlamaWeights, MatrixWeight, plain
from onewave.wave.plan.program import WaveProgram
from onewave.wave.weights.pack import StreamMatrix, Weight, WeightStream
from onewave.wave.weights.read_back import ReadBack

# Device memory beside what stays there: 1 GiB, less what else a load takes (rotary angles, kernels' room).
_ROOM_BYTES = (1 << 30) - (192 << 20)


@dataclass(frozen=True)
class StreamedModel:
    """A model and the stream that its matrices lie in."""

    model: Llama
    stream: WeightStream


def layer_matrices(config: ModelConfig) -> dict[str, tuple[int, int, int]]:
    """A layer's matrices, in the order in which a step uses them: (height, cols, how many take turns)."""
    hidden, inner, width = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
    qkv = width + 2 * config.num_kv_heads * config.head_dim
    return {"qkv": (qkv, hidden, 1), "o": (hidden, width, 1), "gate_up": (inner, hidden, 2), "down": (hidden, inner, 1)}


def num_weights(config: ModelConfig) -> int:
    """Weights of all layers' matrices and of the head."""
    layer = sum(height * cols * count for height, cols, count in layer_matrices(config).values())
    return config.num_layers * layer + config.vocab_size * config.hidden_size


def stream_model(
    parts: ModelParts,
    config: ModelConfig,
    program: WaveProgram,
    options: LoadOptions,
    *,
    report: Callable[[int], None] = lambda done: None,
) -> StreamedModel:
    """Load a model straight into a program's stream.

    program: planned for the options' weight format. dtype: bf16|fp16. report: told the bytes packed so far.
    The device never holds more than the weights, the stream's padding, the head of a model with tied tables a second
    time, and at most 1 GiB beside (an untied head may alone be more). Raises WeightsError, UnsupportedError,
    CapacityError.
    """
    stream = WeightStream(program, options.dtype, options.device, options.weight_format)
    return _Packer(parts, config, stream, report).run(options.positions(config))


class _Packer:
    """One load under way."""

    def __init__(self, parts: ModelParts, config: ModelConfig, stream: WeightStream, report: Callable[[int], None]):
        self._parts, self._config, self._stream, self._report = parts, config, stream, report
        self._done = 0
        self._read_back = ReadBack(stream)
        on_card = stream.images.is_cuda
        self._queue = torch.cuda.current_stream(stream.device) if on_card else None

    def run(self, max_model_len: int) -> StreamedModel:
        config, stream = self._config, self._stream
        norm, ones = self._parts.norm(), torch.ones(config.hidden_size, dtype=stream.dtype, device=stream.device)
        embedding, head = self._tables(norm)
        layers = self._layers(embedding.nbytes if self._parts.tied else 0, ones)
        if not bool(stream.reached):  # the first time that the host waits
            got = "not finite, above 2^95, or too far below the largest of their rows"
            raise OutOfReachError("weights", got=got, next="Use compact=False.")
        if self._read_back.differs():
            raise UnsupportedError("packing for one wave", got="weights that read back otherwise")
        weights = LlamaWeights(embedding, layers, norm if head is embedding else ones, head)
        return StreamedModel(Llama(config, weights, max_model_len=max_model_len), stream)

    def _tables(self, norm: Tensor) -> tuple[Tensor, MatrixWeight]:
        """The embedding, plain because tokens look rows up in it, and the head."""
        if self._parts.tied:
            embedding = plain(self._parts.embedding(), "one wave")
            self._put("head", Weight((embedding,), norm))
            return embedding, self._head() if isinstance(self._stream.weight_format, Rounding) else embedding
        # The head first and alone: with the embedding there already it could be too much.
        self._put("head", Weight((plain(self._parts.head(), "one wave"),), norm))
        return plain(self._parts.embedding(), "one wave"), self._head()

    def _head(self) -> StreamMatrix:
        return self._stream.matrix("head", self._config.vocab_size, self._config.hidden_size)

    def _layers(self, beside: int, ones: Tensor) -> tuple[LayerWeights, ...]:
        """Build matrices in several threads, as many at once as there is room for, and pack them in turn.

        beside: bytes that lie on the device beside the weights already.
        """
        stream, config = self._stream, self._config
        lists = 0 if stream.lists is None else stream.lists.nbytes
        padding = stream.images.nbytes + lists - int(num_weights(config) * stream.shape.weight_bytes)
        room = _ROOM_BYTES - beside - padding
        vectors = [self._parts.vectors(index) for index in range(config.num_layers)]
        pending: deque[tuple[int, str, int, Future[MatrixWeight]]] = deque()
        used = 0

        def finish() -> int:
            index, name, size, future = pending.popleft()
            gain: Tensor | None = vectors[index][NORMS[name]] if name in NORMS else None
            self._put(f"{name}{index}", wave_weight(name, plain(future.result(), "one wave"), gain))
            return size

        with building() as pool:
            for index, name, size in self._jobs():
                while pending and used + size > room:
                    used -= finish()
                pending.append((index, name, size, pool.submit(self._build, index, name)))
                used += size
            while pending:
                finish()
        return tuple(self._layer(index, vectors[index], ones) for index in range(config.num_layers))

    def _jobs(self) -> Iterator[tuple[int, str, int]]:
        """Layer, matrix, and the bytes that building it takes: stacked pieces are there twice for a while."""
        for index in range(self._config.num_layers):
            for name, (height, cols, count) in layer_matrices(self._config).items():
                stacked = name in ("qkv", "gate_up")
                yield index, name, height * cols * count * self._stream.dtype.itemsize * (3 if stacked else 2) // 2

    def _build(self, index: int, name: str) -> MatrixWeight:
        # In the stream of the thread that packs: memory is reused in the order of one stream.
        with torch.cuda.stream(self._queue) if self._queue is not None else nullcontext():
            return self._parts.matrix(index, name)

    def _put(self, name: str, weight: Weight) -> None:
        self._done += self._stream.put(name, weight) * self._stream.shape.tile_bytes
        self._read_back.add(name, weight)
        self._report(self._done)

    def _layer(self, index: int, vectors: dict[str, Any], ones: Tensor) -> LayerWeights:
        parts: dict[str, Any] = {**vectors, "input_norm": ones, "post_norm": ones}
        for name, shape in layer_matrices(self._config).items():
            parts[name] = self._stream.matrix(f"{name}{index}", *shape)
        return LayerWeights(**parts)
