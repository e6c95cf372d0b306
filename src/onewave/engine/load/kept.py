"""Quantised checkpoints in a wave's stream in their own bits: 4-bit matrices, and 8- and 16-bit ones beside them.

Each matrix is held exactly, in the narrowest of the stream's widths that can: a float16 scale, and perhaps a minimum,
for 32 or 128 columns of four bits; a scale for few columns of eight; else sixteen bits, dequantised. Norms' gains stay
apart, because they would change the weights.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from onewave.base.errors import OutOfReachError, UnsupportedError
from onewave.base.group_rounding import GroupedRows, held_rows, stacked_rows
from onewave.base.grouped import Code, GroupedMatrix, GroupFormat, GroupNumbers, Offset
from onewave.base.weight_formats import NIBBLES, MixedFormat, mixed
from onewave.engine.load.checkpoint import ModelParts
from onewave.engine.load.streamed import layer_matrices
from onewave.models.config.model_config import ModelConfig
from onewave.models.llama import MATRICES, LayerWeights, Llama, LlamaWeights, MatrixWeight, plain
from onewave.wave.weights.pack import Sample, StreamMatrix, Weight, WeightStream

# Matrices that are read and unpacked side by side.
_THREADS = 8


def kept_format(parts: ModelParts, config: ModelConfig, *, batch: int) -> MixedFormat | None:
    """Choose how a checkpoint's matrices lie in the stream; None where it has none of four bits that fit.

    batch: sequences of a step; for more than eight, 16-bit matrices beside 4-bit ones are not laid out.
    """
    found = {name: parts.group_formats(*_place(name)) for name in _names(config)}
    narrow = [form for forms in found.values() for form in forms if form is not None and form.bits == 4]
    fine = any(form.offset is Offset.MINIMUM or form.group not in (None, 128) for form in narrow)
    chosen = mixed(NIBBLES[32, True] if fine else NIBBLES[128, False], {})
    widths = {name: _width(forms, chosen) for name, forms in found.items()}
    if 1 not in widths.values() or (batch > 8 and 4 in widths.values()):
        return None
    return mixed(chosen.nibbles, {name: width for name, width in widths.items() if width > 1})


def _names(config: ModelConfig) -> list[str]:
    """All matrices, in the order of a step."""
    return [*(f"{name}{index}" for index in range(config.num_layers) for name in MATRICES), "head"]


def _place(name: str) -> tuple[int | None, str]:
    """A matrix's layer, None for the head's, and its kind."""
    kind = name.rstrip("0123456789")
    return (None if kind == "head" else int(name.removeprefix(kind))), kind


def _width(forms: Iterable[GroupFormat | None], chosen: MixedFormat) -> int:
    """The narrowest width that holds all pieces of a matrix exactly."""
    pieces = list(forms)
    if all(form is not None and _fits_nibbles(form, chosen) for form in pieces):
        return 1
    return 2 if all(form is not None and _fits_bytes(form, chosen) for form in pieces) else 4


def _fits_nibbles(form: GroupFormat, chosen: MixedFormat) -> bool:
    offsets = (Offset.NONE, Offset.MINIMUM) if chosen.nibbles.minima else (Offset.NONE,)
    divides = form.group is None or form.group % chosen.nibbles.group == 0
    whole = form.nested is None and form.number != "F32" and form.code is not Code.E4M3
    return form.bits == 4 and form.offset in offsets and divides and whole


def _fits_bytes(form: GroupFormat, chosen: MixedFormat) -> bool:
    divides = form.group is None or form.group % chosen.wide_group == 0
    number = chosen.wide_number == 4 or (form.nested is None and form.number != "F32")
    return form.code is Code.SIGNED and form.offset is Offset.NONE and divides and number


def stream_kept(
    parts: ModelParts,
    config: ModelConfig,
    stream: WeightStream,
    max_model_len: int,
    report: Callable[[int], None] = lambda done: None,
) -> Llama:
    """Pack a checkpoint's matrices into a stream of its `kept_format`; return the model on them.

    Raises OutOfReachError where a number does not fit after all, UnsupportedError where packed weights read back
    otherwise, WeightsError.
    """
    stream.gains_apart = True
    samples: list[Sample] = []
    done = 0
    for name, content in _contents(parts, config, stream):
        if isinstance(content, Weight):
            tiles = stream.put(name, content)
            samples.append(stream.sample(name, content))
        else:
            tiles = stream.put_rows(name, content)
            samples.append(stream.sample_rows(name, content))
        done += tiles * stream.shape.tile_bytes
        report(done)
    if not bool(stream.reached):
        raise OutOfReachError("weights", got="scales too far apart in a row", next="Use compact=False.")
    if bool(stream.samples_differ(samples)):
        raise UnsupportedError("packing for one wave", got="weights that read back otherwise")
    shapes = layer_matrices(config)
    layers: list[LayerWeights] = []
    for index in range(config.num_layers):
        matrices: dict[str, Any] = {name: stream.matrix(f"{name}{index}", *shape) for name, shape in shapes.items()}
        layers.append(LayerWeights(**parts.vectors(index), **matrices))
    head: StreamMatrix = stream.matrix("head", config.vocab_size, config.hidden_size)
    weights = LlamaWeights(plain(parts.embedding(), "one wave"), tuple(layers), parts.norm(), head)
    return Llama(config, weights, max_model_len=max_model_len)


def _contents(
    parts: ModelParts, config: ModelConfig, stream: WeightStream
) -> Iterator[tuple[str, Weight | GroupedRows]]:
    """Read all matrices, a few side by side, in the stream's order."""

    def read(name: str) -> Weight | GroupedRows:
        index, kind = _place(name)
        width = stream.program.widths.get(name, 1)
        if width == 4:
            matrix: MatrixWeight = parts.head_table() if index is None else parts.matrix(index, kind)
            dense = plain(matrix, "one wave")
            return Weight(tuple(dense.chunk(2)) if kind == "gate_up" else (dense,))
        return _rows(parts.grouped(index, kind), stream, width, alternate=kind == "gate_up")

    pending: deque[tuple[str, Future[Weight | GroupedRows]]] = deque()
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="load") as pool:
        try:
            for name in _names(config):
                pending.append((name, pool.submit(read, name)))
                if len(pending) > _THREADS:
                    first, future = pending.popleft()
                    yield first, future.result()
            for first, future in pending:
                yield first, future.result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _rows(pieces: Sequence[GroupedMatrix], stream: WeightStream, width: int, *, alternate: bool) -> GroupedRows:
    """Put a matrix's pieces below one another, or row by row in turn, in the form of its width."""
    form = stream.weight_format
    assert isinstance(form, MixedFormat)
    nibbles, device = form.nibbles, stream.device
    group, zero = (nibbles.group, 8) if width == 1 else (form.wide_group, 128)
    number = torch.float32 if width == 2 and form.wide_number == 4 else torch.float16
    made: list[GroupedRows] = []
    for piece in pieces:
        if piece.columns is not None or piece.zero_points is not None:
            raise OutOfReachError("weights", got="zero points or another order of columns in some matrices")
        cols = piece.shape[1]
        times = -(-(piece.format.group or cols) // group)

        def spread(numbers: GroupNumbers, times: int = times, cols: int = cols) -> Tensor:
            whole = torch.as_tensor(numbers.expand()).to(device)
            return whole.repeat_interleave(times, dim=1)[:, : -(-cols // group)]

        signed = piece.format.code is Code.SIGNED
        codes = torch.as_tensor(piece.codes).to(device)
        codes = (codes.short() + zero).to(torch.uint8) if signed else codes
        scales = spread(piece.scales)
        minima = None if piece.minima is None else -spread(piece.minima)
        if width == 1 and nibbles.minima and minima is None:
            minima = scales * -zero
        rows, exact = held_rows(codes, scales, minima, number)
        stream.reached &= exact
        made.append(rows)
    return stacked_rows(made, alternate=alternate)
