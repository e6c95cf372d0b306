"""A quantised matrix's parts, as checkpoints store them, to a matrix in groups.

GPTQ     qweight int32 [cols * bits / 32, rows], qzeros int32 [groups, rows * bits / 32], scales [groups, rows], g_idx
         [cols] (the group of each column). The first version stores zero points less one.
AWQ      qweight int32 [cols, rows / 8], qzeros int32 [groups, rows / 8], scales [groups, rows]; the eight rows of a
         word are in the order of _AWQ_ROWS.
packed   weight_packed int32 [rows, cols * bits / 32], weight_scale [rows, groups], weight_zero_point (int8 [rows,
         groups], or packed along rows), weight_shape [2], weight_g_idx [cols]; codes less their middle are signed.
plain    weight int8 or e4m3 [rows, cols], weight_scale [rows, groups], or one, or one a block. transformers calls
         one of e4m3 weight_scale_inv.
blocks   weight e4m3 [rows, cols], weight_scale_inv [rows / block, cols / block].

The lowest bits of a word are its first code. Sources: AutoGPTQ's qlinear_cuda.py, AutoAWQ's gemm.py,
compressed-tensors' pack_quantized.py, transformers' finegrained_fp8.py.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch

from onewave.base.blocks import as_bytes, as_int8, cat
from onewave.base.errors import WeightsError
from onewave.base.grouped import Array, Code, GroupedMatrix, GroupFormat, GroupNumbers, InputScale, Offset
from onewave.weights.quantized.scheme import Activations, Packing, Scheme, Sharing
from onewave.weights.store import TensorInfo, quote

_AWQ_ROWS = (0, 4, 1, 5, 2, 6, 3, 7)
_NUMBERS = {"F16": "F16", "BF16": "BF16", "F32": "F32"}


@dataclass(frozen=True)
class Names:
    """A packing's names of its parts. main: holds the codes. needed: must be there. other: may be there; what is not
    read (of activations that stay in 16 bits or more) counts too. or_scale: another name of the scale."""

    main: str
    scale: str
    needed: tuple[str, ...] = ()
    other: tuple[str, ...] = ()
    or_scale: str | None = None


_INPUT_SCALES = ("input_scale", "activation_scale")
_ACTIVATIONS = ("input_scale", "input_zero_point", "output_scale", "output_zero_point", "activation_scale")
NAMES = {
    Packing.GPTQ: Names("qweight", "scales", ("qzeros",), ("g_idx",)),
    Packing.GPTQ_V2: Names("qweight", "scales", ("qzeros",), ("g_idx",)),
    Packing.AWQ: Names("qweight", "scales", ("qzeros",)),
    Packing.PACKED: Names(
        "weight_packed",
        "weight_scale",
        ("weight_shape",),
        ("weight_zero_point", "weight_g_idx", *_ACTIVATIONS),
    ),
    Packing.PLAIN: Names(
        "weight", "weight_scale", (), ("weight_zero_point", "weight_g_idx", *_ACTIVATIONS), or_scale="weight_scale_inv"
    ),
    Packing.BLOCKS: Names("weight", "weight_scale_inv", (), _ACTIVATIONS),
}


@dataclass(frozen=True)
class Plan:
    """A quantised matrix before it is read: its parts by short name, its shape, and what it will be."""

    scheme: Scheme
    parts: Mapping[str, TensorInfo]
    shape: tuple[int, int]
    bits: int
    sharing: Sharing
    is_float: bool

    @property
    def main(self) -> TensorInfo:
        """The tensor that holds the codes."""
        return self.parts[NAMES[self.scheme.packing].main]

    @property
    def nbytes(self) -> int:
        """Bytes of all parts in the file."""
        return sum(part.nbytes for part in self.parts.values())

    @property
    def label(self) -> str:
        """The format in a few characters: "int4 g128"."""
        rows, cols = self.sharing.rows, self.sharing.cols
        size = f"g{cols}" if rows == 1 and cols else f"b{rows}x{cols}" if cols else "row" if rows == 1 else "tensor"
        return f"{'fp' if self.is_float else 'int'}{self.bits} {size}"


def plan(scheme: Scheme, parts: Mapping[str, TensorInfo], stored_shape: tuple[int, ...] | None = None) -> Plan:
    """Check a matrix's parts against each other by what the files' headers say.

    stored_shape: the matrix's, where that is stored; it decides where several of the scheme's kinds fit. Raises
    WeightsError.
    """
    names = NAMES[scheme.packing]
    main = parts[names.main]
    if not scheme.kinds:
        _fail(main, f"dtype {main.dtype}", "weights of 16 bits or more, as the config names no quantised modules")
    for name in (names.scale, *names.needed):
        if name not in parts:
            _fail(main, f"its {name} is missing", next="The file is incomplete; fetch it again.")
    is_float = main.dtype == "F8_E4M3"
    _check_dtype(main, *scheme.codes)
    _check_dtype(parts[names.scale], *_NUMBERS)
    if len(main.shape) != 2:
        _fail(main, f"shape {list(main.shape)}", "a matrix")
    found: list[tuple[int, Sharing, tuple[int, int]]] = []
    wanted: list[str] = []
    ragged = ""
    for bits, sharing in scheme.kinds:
        shape = _shape(scheme.packing, main.shape, bits, stored_shape)
        if sharing.rows == 1 and sharing.cols and shape[1] % sharing.cols:
            ragged = f"{shape[1]} columns in groups of {sharing.cols}"
            continue
        for scales in _scale_shapes(scheme.packing, shape, sharing):
            wanted.append(str(list(scales)))
            if parts[names.scale].shape == scales:
                found.append((bits, sharing, shape))
    if not wanted:
        _fail(main, ragged, "a group size that divides them")
    if not found:
        _fail(parts[names.scale], f"shape {list(parts[names.scale].shape)}", " or ".join(dict.fromkeys(wanted)))
    bits, sharing, shape = min(found, key=lambda kind: (kind[2] != stored_shape, not _fits_zeros(parts, kind[0])))
    made = Plan(scheme, parts, shape, bits, sharing, is_float)
    _check_others(made)
    return made


def _fits_zeros(parts: Mapping[str, TensorInfo], bits: int) -> bool:
    """Whether GPTQ's zero points are as many as scales, if their codes have so many bits."""
    zeros = parts.get("qzeros")
    return zeros is None or zeros.shape[-1:] == (-(-parts["scales"].shape[-1] * bits // 32),)


def _shape(
    packing: Packing, shape: tuple[int, ...], bits: int, stored_shape: tuple[int, ...] | None
) -> tuple[int, int]:
    """(rows, cols) of a matrix whose codes have this shape; the last word of a packed row may be filled up."""
    first, second = shape
    if packing in (Packing.GPTQ, Packing.GPTQ_V2):
        return second, first * 32 // bits
    if packing is Packing.AWQ:
        return second * 32 // bits, first
    if packing is not Packing.PACKED:
        return first, second
    cols = second * 32 // bits
    if stored_shape is not None and len(stored_shape) == 2 and 0 <= cols - stored_shape[1] < 32 // bits:
        cols = int(stored_shape[1])
    return first, cols


def _scale_shapes(packing: Packing, shape: tuple[int, int], sharing: Sharing) -> list[tuple[int, ...]]:
    """The shapes that the scales may have."""
    down = 1 if sharing.rows is None else -(-shape[0] // sharing.rows)
    right = 1 if sharing.cols is None else -(-shape[1] // sharing.cols)
    if packing in (Packing.GPTQ, Packing.GPTQ_V2, Packing.AWQ):
        return [(right, down)]
    return [(down, right)] + ([(down,)] if right == 1 else []) + ([()] if down == right == 1 else [])


def _check_others(made: Plan) -> None:
    """Check dtypes and shapes of what lies beside codes and scales."""
    (rows, cols), parts, per_word = made.shape, made.parts, 32 // made.bits
    groups = 1 if made.sharing.cols is None else -(-cols // made.sharing.cols)
    if "qzeros" in parts:
        _check_dtype(parts["qzeros"], "I32")
        _check_shape(parts["qzeros"], (groups, -(-rows // per_word)))
    if "weight_zero_point" in parts and parts["weight_zero_point"].dtype == "I32":
        _check_shape(parts["weight_zero_point"], (-(-rows // per_word), groups))
    elif "weight_zero_point" in parts:
        _check_dtype(parts["weight_zero_point"], "I8", "I32")
        _check_shape(parts["weight_zero_point"], parts[NAMES[made.scheme.packing].scale].shape)
    elif made.scheme.zero_points:
        _fail(made.main, "its weight_zero_point is missing", next="The file is incomplete; fetch it again.")
    index = next((name for name in ("g_idx", "weight_g_idx") if name in parts), None)
    if index is not None:
        _check_dtype(parts[index], "I32", "I64")
        _check_shape(parts[index], (cols,))
    elif made.scheme.act_order:
        _fail(made.main, "activation order without its index", next="The file is incomplete; fetch it again.")
    if made.scheme.activations is Activations.STATIC:
        scale = _input_scale(made)
        if scale is None:
            _fail(made.main, "its input_scale is missing", next="The file is incomplete; fetch it again.")
        _check_dtype(scale, *_NUMBERS)
        if math.prod(scale.shape) != 1:
            _fail(scale, f"shape {list(scale.shape)}", "one number")
    if "weight_shape" in parts:
        _check_dtype(parts["weight_shape"], "I32", "I64")
        _check_shape(parts["weight_shape"], (2,))


def read(made: Plan, arrays: Mapping[str, npt.NDArray[Any]], device: torch.device | None = None) -> GroupedMatrix:
    """Read a matrix. arrays: its parts; scales float32, e4m3 as uint8. device: of its tensors; None: arrays are made.
    Raises WeightsError."""
    names, packing = NAMES[made.scheme.packing], made.scheme.packing
    if "weight_shape" in arrays and tuple(arrays["weight_shape"].tolist()) != made.shape:
        _fail(made.parts["weight_shape"], str(arrays["weight_shape"].tolist()), str(list(made.shape)))
    stored = arrays[names.main]
    codes = _codes(made, stored if device is None else torch.as_tensor(stored).to(device))
    zeros = _zero_points(made, arrays)
    scales = arrays[names.scale]
    if packing in (Packing.GPTQ, Packing.GPTQ_V2, Packing.AWQ):
        scales = np.ascontiguousarray(scales.T)
    scales = _by_row(scales, made)
    if not bool(np.isfinite(scales).all()):
        _fail(made.parts[names.scale], "a scale that is no finite number", "finite weights", "Fetch the model again.")
    middle = 1 << made.bits - 1
    code = Code.E4M3 if made.is_float else Code.SIGNED
    if packing not in (Packing.PLAIN, Packing.BLOCKS):
        if zeros is None or bool((zeros == middle).all()):
            codes, zeros = _signed(codes, made.bits), None
        else:
            code = Code.UNSIGNED
    group = None if made.sharing.cols is None or made.sharing.cols == made.shape[1] else made.sharing.cols
    offset = Offset.NONE if zeros is None else Offset.ZERO_POINT
    number = made.parts[names.scale].dtype
    form = GroupFormat(code, made.bits, group, offset, number)
    inputs = None if zeros is not None else _inputs(made, arrays)
    matrix = GroupedMatrix(form, made.shape, codes, GroupNumbers(scales), zeros, inputs=inputs)
    matrix = _in_order(made, matrix, arrays)
    return matrix if device is None else matrix.on(device)


def _input_scale(made: Plan) -> TensorInfo | None:
    """The stored scale of a matrix's activations."""
    return next((made.parts[name] for name in _INPUT_SCALES if name in made.parts), None)


def _inputs(made: Plan, arrays: Mapping[str, npt.NDArray[Any]]) -> InputScale | None:
    """How activations are quantised; None where they stay as they are."""
    if made.scheme.activations is None:
        return None
    if made.scheme.activations is Activations.BY_TOKEN:
        return InputScale(None)
    stored = _input_scale(made)
    assert stored is not None
    scale = float(arrays[stored.name.rpartition(".")[2]].reshape(-1)[0])
    if not (math.isfinite(scale) and scale > 0):
        _fail(stored, f"a scale of {scale:g}", "a finite number greater than 0", "Fetch the model again.")
    zero = arrays.get("input_zero_point")
    if zero is not None and zero.any():
        _fail(made.parts["input_zero_point"], "a zero point", "0, as the config says symmetric")
    return InputScale(scale)


def _codes(made: Plan, stored: Array) -> Array:
    """One code a byte, [rows, cols]: uint8 of words and of e4m3, int8 where they are stored so."""
    packing = made.scheme.packing
    if packing in (Packing.PLAIN, Packing.BLOCKS):
        if made.is_float and bool((stored & 127 == 127).any()):
            _fail(made.main, "weights that are no numbers", "finite weights", "Fetch the model again.")
        return stored
    if packing is Packing.AWQ:
        return _in_awq_order(stored)
    return unpack_words(stored if packing is Packing.PACKED else stored.T, made.bits)[:, : made.shape[1]]


def _in_awq_order(stored: Array) -> Array:
    """int32 [n, rows / 8] -> uint8 [rows, n]."""
    return unpack_words(stored, 4).reshape(len(stored), -1, 8)[..., _AWQ_ROWS].reshape(len(stored), -1).T


def unpack_words(words: Array, bits: int) -> Array:
    """Codes of 4 or 8 bits, the lowest first: int32 [..., n] -> uint8 [..., n * 32 / bits]."""
    data = as_bytes(words)
    if bits == 8:
        return data
    return cat((data & 15)[..., None], (data >> 4)[..., None]).reshape(*data.shape[:-1], -1)


def _signed(codes: Array, bits: int) -> Array:
    """Unsigned codes less their middle."""
    return as_int8(codes ^ 128) if bits == 8 else as_int8(codes) - 8


def _zero_points(made: Plan, arrays: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[Any] | None:
    """Zero points [rows, groups], of the codes' own kind; None where there are none."""
    packing, rows = made.scheme.packing, made.shape[0]
    if packing is Packing.AWQ:
        return np.ascontiguousarray(_in_awq_order(arrays["qzeros"]))
    if packing in (Packing.GPTQ, Packing.GPTQ_V2):
        zeros = np.ascontiguousarray(unpack_words(arrays["qzeros"], made.bits)[:, :rows].T)
        if packing is Packing.GPTQ_V2:
            return zeros
        largest = (1 << made.bits) - 1
        if bool((zeros == largest).any()):
            _fail(made.parts["qzeros"], f"zero point {largest + 1}", f"1 to {largest}", "Quantise it to gptq_v2.")
        return np.add(zeros, 1, dtype=np.uint8)
    stored = arrays.get("weight_zero_point")
    if stored is None:
        return None
    middle = 1 << made.bits - 1
    if stored.dtype == np.int32 and packing is Packing.PACKED:
        zeros = np.ascontiguousarray(unpack_words(np.ascontiguousarray(stored.T), made.bits)[:, :rows].T)
    else:
        wide = _by_row(stored, made).astype(np.int16)
        if packing is Packing.PLAIN:
            return None if not wide.any() else wide.astype(np.int8)
        if wide.min() < -middle or wide.max() >= middle:
            got = f"zero point {wide.min() if wide.min() < -middle else wide.max()}"
            _fail(made.parts["weight_zero_point"], got, f"{-middle} to {middle - 1}")
        zeros = (wide + middle).astype(np.uint8)
    return zeros


def _by_row(numbers: npt.NDArray[Any], made: Plan) -> npt.NDArray[Any]:
    """Numbers of rows, blocks or a whole matrix as [rows, groups]."""
    rows = made.shape[0]
    numbers = numbers.reshape(-1, 1) if numbers.ndim < 2 else numbers
    if len(numbers) == rows:
        return numbers
    return np.repeat(numbers, rows if made.sharing.rows is None else made.sharing.rows, axis=0)[:rows]


def _in_order(made: Plan, matrix: GroupedMatrix, arrays: Mapping[str, npt.NDArray[Any]]) -> GroupedMatrix:
    """Bring the columns of a group together where an index says that they are not."""
    name = next((name for name in ("g_idx", "weight_g_idx") if name in arrays), None)
    group = matrix.format.group
    if name is None:
        return matrix
    index, cols = arrays[name].astype(np.int64), made.shape[1]
    groups = matrix.format.groups(cols)
    if index.min() < 0 or index.max() >= groups:
        got = int(index.min() if index.min() < 0 else index.max())
        _fail(made.parts[name], f"group {got}", f"0 to {groups - 1}")
    if group is None or np.array_equal(index, np.arange(cols) // group):
        return matrix
    if not bool((np.bincount(index, minlength=groups) == group).all()):
        _fail(made.parts[name], "groups of several sizes", f"{group} columns each")
    columns = np.argsort(index, kind="stable")
    codes, zeros = matrix.codes[:, columns], matrix.zero_points
    return GroupedMatrix(matrix.format, matrix.shape, codes, matrix.scales, zeros, columns=columns)


def _check_dtype(tensor: TensorInfo, *allowed: str) -> None:
    if tensor.dtype not in allowed:
        _fail(tensor, f"dtype {tensor.dtype}", ", ".join(allowed))


def _check_shape(tensor: TensorInfo, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        _fail(tensor, f"shape {list(tensor.shape)}", str(list(shape)))


def _fail(tensor: TensorInfo, got: str, allowed: str | None = None, next: str | None = None) -> NoReturn:
    raise WeightsError(f"{tensor.file}: tensor {quote(tensor.name)}", got=got, allowed=allowed, next=next)
