"""From a checkpoint to a model on its device.

A layer's pieces are read, put into the decoder's form and placed on the device by one of several threads; the only
other copy of the model is the mapped file. The decoder's form: q, k, v rows in one matrix, gate and up rows in one,
q and k rows in half-split rotary order, and on the CPU optionally the checkpoint's own number format, tiled for its
kernels.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import groupby
from queue import SimpleQueue
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onewave.base.errors import (
    CapacityError,
    InvalidArgumentError,
    OutOfReachError,
    UnsupportedError,
    WeightsError,
    check_one_of,
)
from onewave.base.grouped import GroupedMatrix, GroupFormat
from onewave.base.quantized import QuantizedRows
from onewave.base.repack import nearest_blocks
from onewave.base.weight_formats import MixedFormat
from onewave.engine.load.options import LoadOptions
from onewave.memory.host import available_bytes
from onewave.memory.shortage import is_out_of_memory
from onewave.models.config.model_config import ModelConfig
from onewave.models.config.read import load_scheme
from onewave.models.llama import LayerWeights, Llama, LlamaWeights
from onewave.models.names import GGUF, HF, Layout, check_tensors, expected_shapes, hf_layout, layer_part_shapes
from onewave.models.registry import FAMILIES
from onewave.ops import checks
from onewave.ops.linear import LinearWeight, PackedWeight, can_pack, has_finite_scales, pack, pack_dense, stack
from onewave.ops.scaled_linear import ScaledMatrix, ScaledPart
from onewave.weights.fetch.sources import LOAD_FORMATS, ModelLocation
from onewave.weights.store import WeightStore, quote

_log = logging.getLogger("onewave")
PLAIN_TYPES = {"BF16", "F16", "F32", "F64"}
"""Types of stored tensors that are not quantised."""
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# The smallest number that float16 rounds to infinity: half way from its largest to what would be the next one.
_HALF_ENDS = 65520.0
# Beyond this, threads only wait for the same disk.
MAX_THREADS = 8
# Matrices that are stacked, row below row, into each matrix of a layer.
_MATRICES = {"qkv": ("q", "k", "v"), "o": ("o",), "gate_up": ("gate", "up"), "down": ("down",)}


def load_model(
    location: ModelLocation, config: ModelConfig, options: LoadOptions, *, packed: bool = False, scaled: bool = False
) -> Llama:
    """Load a model's weights, or with load_format="dummy" make up random ones of its shape.

    config: what `load_config` returned. packed: keep every matrix tiled in the checkpoint's number format where the CPU
    kernels read it, else in float32 (float32 on the CPU only). scaled: matrices whose config asks for 8-bit
    activations stay in 8 bits and quantise them.
    Raises WeightsError naming file and tensor, UnsupportedError, InvalidArgumentError, CapacityError.
    """
    with open_parts(location, config, options, packed=packed, scaled=scaled) as parts:
        weights = _build(parts, config, progress=options.progress)
        return Llama(config, weights, max_model_len=options.positions(config))


@contextmanager
def open_parts(
    location: ModelLocation,
    config: ModelConfig,
    options: LoadOptions,
    *,
    packed: bool = False,
    scaled: bool = False,
    silent: bool = False,
) -> Generator[ModelParts]:
    """Open a checkpoint; its parts are then built one by one. silent: log nothing, as what is opened is only looked at.
    Other arguments and errors as of `load_model`."""
    dtype, device = options.dtype, options.device
    if dtype not in _DTYPES:
        raise UnsupportedError("dtype of the weights", got=str(dtype), allowed=", ".join(map(str, _DTYPES)))
    if packed and (dtype is not torch.float32 or device.type != "cpu"):
        raise UnsupportedError("packed weights", got=f"{dtype} on {device}", allowed="torch.float32 on cpu")
    if device.type != "cpu":
        checks.head_dim(f"model {location.name}", config.head_dim, on_cpu=False, least=8)
    store, layout = _open(location, config, options, scaled=scaled, silent=silent)
    try:
        check_tensors(store, config, layout)
        parts = ModelParts(store, layout, config, options, packed=packed, scaled=scaled)
        if device.type == "cpu":
            parts.check_room(location)
        try:
            yield parts
        except OutOfReachError:
            parts.check_read()  # which says what it is that no format holds
            raise
        parts.check_read()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise CapacityError(
            f"weights of {location.name}", got=f"do not fit on {device}", next="Use a smaller model or dtype."
        ) from error
    finally:
        store.close()


def _open(
    location: ModelLocation, config: ModelConfig, options: LoadOptions, *, scaled: bool, silent: bool
) -> tuple[WeightStore, Layout]:
    """Open the checkpoint by its kind; only that kind's reader is imported."""
    load_format = options.load_format
    check_one_of("load_format", load_format, LOAD_FORMATS)
    if load_format == "dummy":
        from onewave.weights.dummy import DummyStore

        return DummyStore(expected_shapes(config, HF), options.dtype, options.seed, options.device), HF
    if location.path is None or location.kind == "builtin":
        raise InvalidArgumentError(
            f"model {location.name}", got="a configuration without weights", next='Add load_format="dummy".'
        )
    if location.kind == "gguf":
        from onewave.weights.formats.gguf_store import GGUFStore

        file = GGUFStore.open(location.path, location.headers)
        if not silent:
            _say_dequantised({tensor.dtype for tensor in file.tensors.values()} - PLAIN_TYPES, options)
        return file, GGUF
    from onewave.weights.formats.safetensors_store import SafetensorsStore
    from onewave.weights.quantized.store import open_matrices

    scheme = load_scheme(location)
    store = open_matrices(SafetensorsStore.open(location.path), scheme)
    if scheme is not None and scheme.kinds and not silent:
        if scheme.not_followed is not None:
            _log.warning("activations stay in 16 bits or more: the checkpoint asks for %s", scheme.not_followed)
        if not scaled:
            _say_dequantised({scheme.method}, options)
    return store, hf_layout(store.tensors)


def _say_dequantised(types: set[str], options: LoadOptions) -> None:
    if types and options.device.type != "cpu" and not isinstance(options.weight_format, MixedFormat):
        kind = str(options.dtype).removeprefix("torch.")
        _log.warning("%s weights become %s: a GPU holds them dequantised", ", ".join(sorted(types)), kind)


class _Piece(NamedTuple):
    """A stored tensor. rows: those to take, in order; None takes them as they are."""

    name: str
    rows: NDArray[np.int64] | None = None


class ModelParts:
    """Turns stored tensors into the decoder's. Its methods run in several threads at once."""

    def __init__(
        self,
        store: WeightStore,
        layout: Layout,
        config: ModelConfig,
        options: LoadOptions,
        *,
        packed: bool,
        scaled: bool,
    ):
        self._store, self._layout, self._config = store, layout, config
        self._dtype, self._device, self._packed, self._scaled = options.dtype, options.device, packed, scaled
        self._parts = layer_part_shapes(config)
        self._rows: dict[str, NDArray[np.int64]] = {}
        if layout is GGUF and FAMILIES[config.family].interleaved_gguf:
            q, k = (_half_split_rows(config, heads) for heads in (config.num_heads, config.num_kv_heads))
            self._rows = {"q": q, "k": k, "q_bias": q, "k_bias": k}
        self._group_formats: dict[str, GroupFormat | None] = {}
        # Tensors on the GPU, each with its lowest and highest weight there: reading those would wait for the GPU.
        self._unread: list[tuple[str, tuple[Tensor, Tensor]]] = []

    def check_room(self, location: ModelLocation) -> None:
        """Raise CapacityError where the weights alone take more memory than there is: the kernel would end the process
        without a word."""
        room, needed, stored = available_bytes(), 0, self._store.tensors
        for name, tensor in stored.items():
            if name == self._layout.head and self._config.tie_word_embeddings and self._layout.embedding in stored:
                continue
            dense = math.prod(tensor.shape) * self._dtype.itemsize
            # Packed ones keep their own format where the kernels read it.
            needed += min(dense, tensor.nbytes) if self._packed or self._scaled else dense
        if room is not None and needed > room:
            raise CapacityError(
                f"weights of {location.name}",
                got=f"at least {needed / 2**30:.1f} GiB on a CPU with {room / 2**30:.1f} GiB of memory left",
                next="Use a smaller model or dtype.",
            )

    def check_read(self) -> None:
        """Raise WeightsError for weights on the GPU that are not finite, among what was built so far."""
        for name, limits in self._unread:
            self._check(name, limits)
        self._unread.clear()

    def layer(self, index: int) -> LayerWeights:
        parts = self.vectors(index)
        for name in _MATRICES:
            parts[name] = self.matrix(index, name)
        return LayerWeights(**parts)

    def matrix(self, index: int | None, name: str) -> LinearWeight:
        """Build a matrix of a layer: qkv, o, gate_up or down. index None: the head, which may be the embedding."""
        return self._matrix(self._pieces(index, name))

    def group_formats(self, index: int | None, name: str) -> list[GroupFormat | None]:
        """The number format of each piece of a layer's matrix, or of the head's table or the embedding (index None);
        None for one that is not quantised in groups. One tensor of each of the file's types is looked at."""
        pieces = self._pieces(index, name)
        kinds = [self._store.tensors[piece.name].dtype for piece in pieces]
        for kind, piece in zip(kinds, pieces, strict=True):
            if kind not in self._group_formats:
                self._group_formats[kind] = self._store.group_format(piece.name)
        return [self._group_formats[kind] for kind in kinds]

    def stored_types(self, index: int | None, name: str) -> set[str]:
        """The file's types of a matrix's pieces, likewise."""
        return {self._store.tensors[piece.name].dtype for piece in self._pieces(index, name)}

    def grouped(self, index: int | None, name: str) -> list[GroupedMatrix]:
        """Open the pieces of a matrix on the device, quantised as they are, with their rows in the decoder's order."""
        found: list[GroupedMatrix] = []
        for piece in self._pieces(index, name):
            matrix = self._store.load_grouped(piece.name, self._device)
            if matrix is None or not matrix.is_finite:
                self._refuse(piece.name, "scales or minima that are no finite numbers", "finite weights")
            rows = piece.rows
            found.append(matrix if rows is None else matrix.select(torch.as_tensor(rows, device=self._device)))
        return found

    def _pieces(self, index: int | None, name: str) -> list[_Piece]:
        if index is None:
            return [_Piece(self._tables[0] if name == "embedding" or self.tied else self._layout.head)]
        return [self._piece(index, part) for part in _MATRICES[name]]

    def _piece(self, index: int, part: str) -> _Piece:
        return _Piece(self._layout.part(index, part), self._rows.get(part))

    def vectors(self, index: int) -> dict[str, Any]:
        """Build what a layer has beside its matrices: norms and biases by their names in LayerWeights."""

        def vector(*parts: str) -> Tensor | None:
            return self._dense([self._piece(index, part) for part in parts]) if parts[0] in self._parts else None

        return {
            "input_norm": vector("input_norm"),
            "qkv_bias": vector("q_bias", "k_bias", "v_bias"),
            "q_norm": vector("q_norm"),
            "k_norm": vector("k_norm"),
            "o_bias": vector("o_bias"),
            "post_norm": vector("post_norm"),
            "gate_up_bias": vector("gate_bias", "up_bias"),
            "down_bias": vector("down_bias"),
        }

    def norm(self) -> Tensor:
        return self._dense([_Piece(self._layout.norm)])

    def tables(self) -> tuple[Tensor | PackedWeight, LinearWeight]:
        """Build (embedding, head): one object when they are tied."""
        embedding = self.embedding()
        return embedding, embedding if self.tied else self.head()

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding.

        A tied checkpoint may store its table as the head. One that stores two different tables is not tied, whatever
        its config says; transformers reads it so too.
        """
        stored = self._tables
        return self._config.tie_word_embeddings and (len(stored) == 1 or self._equal(*stored))

    def embedding(self) -> Tensor | PackedWeight:
        return self._unscaled(self._pieces(None, "embedding"))

    def head(self) -> LinearWeight:
        """Build the head of a model without tied tables."""
        return self._matrix([_Piece(self._layout.head)])

    @property
    def _tables(self) -> list[str]:
        return [name for name in (self._layout.embedding, self._layout.head) if name in self._store.tensors]

    def _equal(self, first: str, second: str) -> bool:
        one, other = self._load(first), self._load(second)
        return one.dtype == other.dtype and torch.equal(one, other)

    def _matrix(self, pieces: list[_Piece]) -> LinearWeight:
        """Stack the rows of 2-D tensors into one weight."""
        made = self._scaled_matrix(pieces) if self._scaled else None
        return self._unscaled(pieces) if made is None else made

    def _unscaled(self, pieces: list[_Piece]) -> Tensor | PackedWeight:
        if not self._packed:
            return self._dense(pieces)
        stored = [self._stored(piece) for piece in pieces]
        found: list[PackedWeight] = []
        # Neighbours of one format are one weight.
        for key, run in groupby(range(len(pieces)), lambda number: _kind_of(stored[number])):
            numbers = list(run)
            if key is None:
                found.append(self._packed_dense([pieces[i] for i in numbers]))
            else:
                found.append(pack(_stacked([block for i in numbers if (block := stored[i]) is not None])))
        return stack(found)

    def _scaled_matrix(self, pieces: list[_Piece]) -> ScaledMatrix | None:
        """Stack the rows of 8-bit tensors whose activations are quantised; None where any is something else."""
        if not all(self._store.tensors[piece.name].dtype.startswith(("int8", "fp8")) for piece in pieces):
            return None
        found: list[GroupedMatrix] = []
        for piece in pieces:
            matrix = self._store.load_grouped(piece.name)
            if matrix is None or matrix.inputs is None:
                return None
            found.append(matrix if piece.rows is None else matrix.select(piece.rows))
        # Neighbours whose activations have the same codes are one part.
        runs = groupby(found, lambda matrix: (matrix.inputs, matrix.format.code))
        return ScaledMatrix(tuple(self._scaled_part(list(run)) for _, run in runs))

    def _scaled_part(self, pieces: list[GroupedMatrix]) -> ScaledPart:
        def put(arrays: list[NDArray[Any]]) -> Tensor:
            return torch.as_tensor(np.concatenate(arrays)).to(self._device)

        codes, inputs = put([piece.codes for piece in pieces]), pieces[0].inputs
        scale = put([np.broadcast_to(piece.scales.base, (piece.shape[0], 1))[:, 0] for piece in pieces])
        assert inputs is not None
        static = None if inputs.static is None else torch.tensor([inputs.static], device=self._device)
        return ScaledPart(codes.view(torch.float8_e4m3fn) if codes.dtype is torch.uint8 else codes, scale, static)

    def _stored(self, piece: _Piece) -> QuantizedRows | None:
        """A tensor's rows of blocks that a CPU multiplies as they are; None for one that becomes dense."""
        block = self._store.load_quantized(piece.name)
        if block is None and (matrix := self._store.load_grouped(piece.name)) is not None:
            block = nearest_blocks(matrix)
        if block is None or not can_pack(block.qtype):
            return None
        if not has_finite_scales(block):
            self._refuse(piece.name, "blocks with a scale that is no finite number", "finite weights")
        return block if piece.rows is None else block.select(piece.rows)

    def _packed_dense(self, pieces: list[_Piece]) -> PackedWeight:
        dtypes = {self._store.tensors[piece.name].dtype for piece in pieces}
        own = {"BF16": torch.bfloat16, "F16": torch.float16}.get(dtypes.pop()) if len(dtypes) == 1 else None
        return pack_dense(self._dense(pieces, dtype=own))

    def _dense(self, pieces: list[_Piece], dtype: torch.dtype | None = None) -> Tensor:
        """Stack tensors along their first axis, on the device."""
        shapes = [self._store.tensors[piece.name].shape for piece in pieces]
        kind = dtype or self._dtype
        out: Tensor | None = None
        first = 0
        for name, rows in pieces:
            tensor = self._load(name)
            later = self._is_read_later(kind)
            if not later:
                self._check(name, _limits(tensor), kind)
            if rows is not None:
                tensor = tensor[torch.as_tensor(rows, device=tensor.device)]
            if len(pieces) == 1 and tensor.is_cuda and tensor.device == self._device and tensor.dtype is kind:
                return tensor  # made on the GPU for us alone: a copy would take its room twice
            if out is None:
                height = sum(shape[0] for shape in shapes)
                out = torch.empty((height, *shapes[0][1:]), dtype=kind, device=self._device)
            part = out[first : first + tensor.shape[0]].copy_(tensor)
            if later:
                self._unread.append((name, _limits(part)))
            first += tensor.shape[0]
        assert out is not None
        return out

    def _is_read_later(self, kind: torch.dtype) -> bool:
        """Whether weights are looked at on the GPU, which takes no time; not what turns infinite there."""
        return self._device.type == "cuda" and kind is not torch.float16

    def _load(self, name: str) -> Tensor:
        tensor = self._store.load(name)
        if tensor.dtype not in (*_DTYPES, torch.float64):
            info = self._store.tensors[name]
            raise WeightsError(
                f"{info.file}: tensor {quote(name)}", got=f"dtype {info.dtype}", allowed="bf16, fp16, fp32, GGUF blocks"
            )
        return tensor

    def _check(self, name: str, limits: tuple[Tensor, Tensor], kind: torch.dtype | None = None) -> None:
        """Refuse a tensor by its lowest and highest weight: one that is not finite, or that float16, the kind it is
        turned into, would make infinite."""
        low, high = map(float, limits)
        largest = max(-low, high)
        if not (math.isfinite(low) and math.isfinite(high)):
            self._refuse(name, f"weights from {low:g} to {high:g}", "finite ones")
        if kind is torch.float16 and largest >= _HALF_ENDS:
            most = f"at most {torch.finfo(torch.float16).max:g}"
            self._refuse(name, f"a weight of size {largest:.6g}", most, " in float16", "Use bfloat16, or a CPU.")

    def _refuse(
        self, name: str, got: str, allowed: str, kind: str = "", next: str = "Fetch the model again."
    ) -> NoReturn:
        what = f"{self._store.tensors[name].file}: tensor {quote(name)}{kind}"
        raise WeightsError(what, got=got, allowed=allowed, next=next)


def _kind_of(block: QuantizedRows | None) -> tuple[str, bytes] | None:
    """Return the qtype and columns that neighbours of one piece share; None for a dense block."""
    if block is None:
        return None
    return block.qtype, b"" if block.columns is None else block.columns.tobytes()


def _stacked(blocks: list[QuantizedRows]) -> QuantizedRows:
    first = blocks[0]
    data = first.data if len(blocks) == 1 else np.concatenate([block.data for block in blocks])
    return QuantizedRows(first.qtype, data, (data.shape[0], first.shape[1]), first.columns)


def _limits(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The lowest and the highest number, both NaN where one is."""
    low, high = torch.aminmax(tensor if tensor.numel() else tensor.new_zeros(1))
    return low, high


def _half_split_rows(config: ModelConfig, num_heads: int) -> NDArray[np.int64]:
    """Return, for each row in half-split order, its row in a file that keeps rotary pairs side by side.

    Row i and i + rotary_dim / 2 of a head are one pair in half-split order, 2i and 2i + 1 in the file; rows that do not
    rotate stay. int64 [num_heads * head_dim].
    """
    rotary_dim, head_dim = config.rope.rotary_dim, config.head_dim
    rotating = np.arange(rotary_dim).reshape(-1, 2).T.reshape(-1)
    head = np.concatenate((rotating, np.arange(rotary_dim, head_dim)))
    return (np.arange(num_heads)[:, None] * head_dim + head).reshape(-1).astype(np.int64)


@contextmanager
def building(threads: int = MAX_THREADS) -> Generator[ThreadPoolExecutor]:
    """Threads that build parts; where one fails, those that have not begun never do."""
    with ThreadPoolExecutor(threads, thread_name_prefix="load") as pool:
        try:
            yield pool
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _build(parts: ModelParts, config: ModelConfig, *, progress: bool) -> LlamaWeights:
    """Build everything in parallel; the first failure stops the rest."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with building(min(MAX_THREADS, max(2, cores))) as pool:
        # The tables are the largest pieces: first, so that no thread is left alone with one at the end.
        tables = pool.submit(parts.tables)
        layers = [pool.submit(parts.layer, index) for index in range(config.num_layers)]
        norm = pool.submit(parts.norm)
        _wait([tables, *layers, norm], progress=progress)
        embedding, head = tables.result()
        return LlamaWeights(embedding, tuple(layer.result() for layer in layers), norm.result(), head)


def _wait(futures: Sequence[Future[Any]], *, progress: bool) -> None:
    """Wait for all; raise the first failure as soon as it is known."""
    # Not by as_completed: Ctrl-C inside its condition, which is Python code, may leave a worker's lock released twice.
    done: SimpleQueue[Future[Any]] = SimpleQueue()
    for future in futures:
        future.add_done_callback(done.put)
    if not progress:
        for _ in futures:
            done.get().result()
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("Loading weights", total=len(futures))
        for _ in futures:
            done.get().result()
            bar.advance(task)
