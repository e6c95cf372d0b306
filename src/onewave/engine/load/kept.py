"""Quantised checkpoints in a wave's stream in their own bits: 4-bit matrices, and 8- and 16-bit ones beside them.

Each matrix is held exactly, in the narrowest of the stream's widths that can: four bits with a scale, and perhaps a
minimum, a group; eight bits likewise; else sixteen bits, dequantised. What groups are like is one format for a model,
the one that takes the fewest bytes. Norms' gains stay apart, because they would change the weights.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from onewave.base.errors import OutOfReachError, UnsupportedError
from onewave.base.group_rounding import GroupedRows, held_rows, stacked_rows
from onewave.base.grouped import Code, GroupedMatrix, GroupFormat, GroupNumbers, Offset
from onewave.base.weight_formats import COMPACT, NESTED, NIBBLES, SIX_BITS, MixedFormat, mixed, times_as_wide
from onewave.engine.load.checkpoint import MAX_THREADS, PLAIN_TYPES, ModelParts, building, open_parts
from onewave.engine.load.options import KeptBits, LoadOptions
from onewave.engine.load.streamed import layer_matrices
from onewave.models.config.model_config import ModelConfig
from onewave.models.llama import MATRICES, LayerWeights, Llama, LlamaWeights, Table, plain
from onewave.wave.weights.pack import StreamMatrix, Weight, WeightStream
from onewave.wave.weights.read_back import ReadBack
from onewave.wave.weights.row_table import RowTable
from onewave.weights.fetch.sources import ModelLocation

_KINDS = (
    *(mixed(nibbles, {}) for nibbles in (NIBBLES[128, False], NIBBLES[64, False], NIBBLES[32, True], NESTED)),
    mixed(NIBBLES[128, False], {}, floats=True),
)
"""Candidate formats of the quantised groups."""
MAX_BESIDE_16_BITS = 8
"""Most sequences of a step whose stream has 16-bit matrices beside 4-bit ones."""


def find_kept(location: ModelLocation, config: ModelConfig, options: LoadOptions) -> KeptBits:
    """Find what a load on the wave's path keeps as it is: nothing where something else is asked for; in more launches a
    step where one has no room for so many sequences, if they read fewer bytes than one would. Uses no GPU.

    Raises what open_parts raises.
    """
    if not options.keeps or options.load_format == "dummy":
        return KeptBits()
    with open_parts(location, config, options, silent=True) as parts:
        for rows in sorted({options.max_num_seqs, min(options.max_num_seqs, MAX_BESIDE_16_BITS)}, reverse=True):
            launches = -(-options.max_num_seqs // rows)
            form = kept_format(parts, config, batch=rows, weight_bytes=options.weight_bytes / launches)
            if form is not None:
                return KeptBits(form, rows, frozenset(dequantised_types(parts, form)))
    return KeptBits()


def kept_format(
    parts: ModelParts, config: ModelConfig, *, batch: int, weight_bytes: float = COMPACT.weight_bytes
) -> MixedFormat | None:
    """Choose how a checkpoint's matrices lie in the stream, in the fewest bytes; None where those are no fewer than
    `weight_bytes` a weight.

    batch: sequences of a launch; for more than MAX_BESIDE_16_BITS, 16-bit matrices beside 4-bit ones are not laid out.
    """
    found = {name: parts.group_formats(*_place(name)) for name in _names(config)}
    shapes = {kind: height * cols * count for kind, (height, cols, count) in layer_matrices(config).items()}
    shapes["head"] = config.vocab_size * config.hidden_size
    sizes = {name: shapes[_place(name)[1]] for name in found}
    best, least = None, sum(sizes.values()) * weight_bytes
    for form in _KINDS:
        widths = {name: _width(pieces, form) for name, pieces in found.items()}
        size = sum(form.weight_bytes * times_as_wide(widths[name]) * sizes[name] for name in found)
        if size < least and (batch <= MAX_BESIDE_16_BITS or 4 not in widths.values()):
            wide = {name: width for name, width in widths.items() if width > 1}
            best, least = mixed(form.nibbles, wide, floats=form.floats), size
    return best


def dequantised_types(parts: ModelParts, form: MixedFormat) -> set[str]:
    """The quantised types of a checkpoint's matrices that its `kept_format` has in sixteen bits."""
    wide = (parts.stored_types(*_place(name)) for name, width in form.widths if width == 4)
    return {kind for types in wide for kind in types} - PLAIN_TYPES


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

    def holds(width: int) -> bool:
        return all(form is not None and _FITS[width](form, chosen) for form in pieces)

    return next(filter(holds, _FITS), 4)


def _fits_nibbles(form: GroupFormat, chosen: MixedFormat) -> bool:
    nibbles = chosen.nibbles
    if form.bits != 4 or form.code is Code.E4M3 or form.number == "F32":
        return False
    if nibbles.nested:
        return _divides(form.group, 32) and _divides(form.nested or form.group, 128)
    offsets = (Offset.NONE, Offset.MINIMUM) if nibbles.minima else (Offset.NONE,)
    return form.offset in offsets and _divides(form.group, nibbles.group) and form.nested is None


def _fits_bytes(form: GroupFormat, chosen: MixedFormat) -> bool:
    if chosen.nibbles.nested:
        whole = form.code is not Code.E4M3 and form.number != "F32" and _divides(form.nested or form.group, 32)
        return whole and _divides(form.group, 16 if form.offset is Offset.NONE else 32)
    if chosen.floats:
        return form.code is Code.E4M3 and _divides(form.group, 128)
    number = chosen.wide_number == 4 or (form.nested is None and form.number != "F32")
    signed = form.code is Code.SIGNED and form.offset is Offset.NONE
    return signed and _divides(form.group, chosen.wide_group) and number


def _fits_six_bits(form: GroupFormat, chosen: MixedFormat) -> bool:
    whole = form.code is Code.SIGNED and form.bits <= 6 and form.number != "F32" and form.offset is Offset.NONE
    return chosen.nibbles.nested and whole and _divides(form.group, 16) and _divides(form.nested or form.group, 128)


_FITS = {1: _fits_nibbles, SIX_BITS: _fits_six_bits, 2: _fits_bytes}
"""Which groups a width holds, the narrowest first."""


def _divides(group: int | None, columns: int) -> bool:
    """Whether a group, or a whole row, is so many columns again and again."""
    return group is None or group % columns == 0


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
    read_back, done = ReadBack(stream), 0
    for name, content in _contents(parts, config, stream):
        if isinstance(content, Weight):
            tiles = stream.put(name, content)
            read_back.add(name, content)
        else:
            tiles = stream.put_rows(name, content)
            read_back.add_rows(name, content)
        done += tiles * stream.shape.tile_bytes
        report(done)
    if not bool(stream.reached):
        raise OutOfReachError("weights", got="scales too far apart in a row", next="Use compact=False.")
    if read_back.differs():
        raise UnsupportedError("packing for one wave", got="weights that read back otherwise")
    shapes = layer_matrices(config)
    layers: list[LayerWeights] = []
    for index in range(config.num_layers):
        matrices: dict[str, Any] = {name: stream.matrix(f"{name}{index}", *shape) for name, shape in shapes.items()}
        layers.append(LayerWeights(**parts.vectors(index), **matrices))
    head: StreamMatrix = stream.matrix("head", config.vocab_size, config.hidden_size)
    weights = LlamaWeights(_embedding(parts, config, stream), tuple(layers), parts.norm(), head)
    return Llama(config, weights, max_model_len=max_model_len)


def _embedding(parts: ModelParts, config: ModelConfig, stream: WeightStream) -> Table:
    """The embedding in its own bits as well, exactly, if nested groups hold them."""
    nested = mixed(NESTED, {})
    if stream.images.is_cuda:
        torch.cuda.empty_cache()
    (own,) = parts.group_formats(None, "embedding")
    fits = [own is not None and check(own, nested) for check in (_fits_nibbles, _fits_bytes)]
    if any(fits):
        width = 1 + fits.index(True)
        # Before what opening takes: a piece of one of those blocks would keep all of it from being given back.
        room = RowTable.room_for(config.vocab_size, config.hidden_size, 4 * width, stream.device)
        (matrix,) = parts.grouped(None, "embedding")
        rows, exact = _nested(matrix, nested, width)
        if bool(exact):
            return RowTable(rows, 4 * width, stream.dtype, room)
    return plain(parts.embedding(), "one wave")


def _contents(
    parts: ModelParts, config: ModelConfig, stream: WeightStream
) -> Iterator[tuple[str, Weight | GroupedRows]]:
    """Read all matrices, a few side by side, in the stream's order."""

    def read(name: str) -> Weight | GroupedRows:
        index, kind = _place(name)
        width = stream.program.widths.get(name, 1)
        if width == 4:
            dense = plain(parts.matrix(index, kind), "one wave")
            return Weight(tuple(dense.chunk(2)) if kind == "gate_up" else (dense,))
        return _rows(parts.grouped(index, kind), stream, width, alternate=kind == "gate_up")

    pending: deque[tuple[str, Future[Weight | GroupedRows]]] = deque()
    with building() as pool:
        for name in _names(config):
            pending.append((name, pool.submit(read, name)))
            if len(pending) > MAX_THREADS:
                first, future = pending.popleft()
                yield first, future.result()
        for first, future in pending:
            yield first, future.result()


def _rows(pieces: Sequence[GroupedMatrix], stream: WeightStream, width: int, *, alternate: bool) -> GroupedRows:
    """Put a matrix's pieces below one another, or row by row in turn, in the form of its width."""
    form = stream.weight_format
    assert isinstance(form, MixedFormat)
    made: list[GroupedRows] = []
    for piece in pieces:
        if piece.columns is not None:
            raise OutOfReachError("weights", got="another order of columns in some matrices")
        if not _FITS[width](piece.format, form):  # the plan has looked at one matrix of each of the file's types
            raise OutOfReachError("weights", got="matrices of one type with and without zero points")
        rows, exact = (_nested if form.nibbles.nested else _plain)(piece, form, width)
        stream.reached &= exact
        made.append(rows)
    return stacked_rows(made, alternate=alternate)


def _plain(piece: GroupedMatrix, form: MixedFormat, width: int) -> tuple[GroupedRows, Tensor]:
    """Hold a piece with a scale a group; also whether it is held exactly."""
    group, zero = (form.nibbles.group, 8) if width == 1 else (form.wide_group, 128)
    scales, minima = _spread(piece.scales.expand(), piece.format.group, group, piece.shape[1]), None
    if piece.minima is not None:
        minima = -_spread(piece.minima.expand(), piece.format.group, group, piece.shape[1])
    codes = _moved(piece.codes, zero if piece.format.code is Code.SIGNED else 0)
    if width == 1 and form.nibbles.minima and minima is None:
        minima = scales * -zero
    return held_rows(codes, scales, minima, torch.float32 if width == 2 and form.wide_number == 4 else torch.float16)


def _nested(piece: GroupedMatrix, form: MixedFormat, width: int) -> tuple[GroupedRows, Tensor]:
    """Hold a piece with scales and minima that are integers times shared ones (formats/nested.py)."""
    own, cols = piece.format, piece.shape[1]
    shared, columns = own.nested or own.group, 32 if width == 2 else 128

    def base(numbers: GroupNumbers) -> Tensor:
        return _spread(numbers.base, shared, columns, cols)

    def steps(numbers: Tensor | None, group: int) -> Tensor:
        if numbers is None:
            return piece.codes.new_ones(piece.shape[0], -(-cols // group), dtype=torch.int32)
        return _spread(numbers, own.group, group, cols).int()

    up = steps(piece.scales.steps, 16 if own.group == 16 else 32)
    up, of_second = (up[:, 0::2], up[:, 1::2]) if own.group == 16 else (up, up)
    # A code's zero, and what is added to codes to lie in a tile: 128 stands for zero in eight bits.
    zero = 128 if own.bits == 8 and own.code is Code.UNSIGNED else 0
    added = {1: 8 if own.code is Code.SIGNED else 0, SIX_BITS: 32}.get(width, 128 - zero)
    scales, down = base(piece.scales), of_second
    if piece.minima is not None:
        minima, down = -base(piece.minima), steps(piece.minima.steps, 32)
    elif width == SIX_BITS:
        minima = None
    elif piece.zero_points is not None or added == 8:
        points = added if piece.zero_points is None else steps(piece.zero_points, 32)
        minima, down = scales, (zero - points) * up
    else:
        minima = torch.zeros_like(scales)
    if width == 2:
        down = torch.where(minima == 0, of_second, down)
    pairs = torch.stack((up, down), dim=2)
    rows, exact = held_rows(_moved(piece.codes, added), scales, minima, torch.float16)
    exact &= (pairs == pairs.to(torch.int8)).all()
    return replace(rows, steps=pairs.to(torch.int8)), exact


def _moved(codes: Tensor, added: int) -> Tensor:
    """Codes and a number as uint8, which the sums fit."""
    codes = codes.view(torch.uint8)
    return codes + added if added else codes


def _spread(numbers: Tensor, group: int | None, columns: int, cols: int) -> Tensor:
    """A number for so many columns each, from one a group, which has as many or more; None: a whole row."""
    return numbers.repeat_interleave(-(-(group or cols) // columns), dim=1)[:, : -(-cols // columns)]
