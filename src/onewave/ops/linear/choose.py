"""Chooses the kernel for dense weights: our kernels for few tokens on a GPU, PyTorch's matmul for the rest."""

from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import inf

import torch
from torch import Tensor

from onewave.base.device import Device
from onewave.base.errors import ShapeError, check_one_of
from onewave.base.gpus import TILES, tile_us
from onewave.base.weight_formats import COMPACT, ROUNDINGS, find_format
from onewave.ops.choice import Asked, Call, Choice, Counted, because, empty_on_meta

_HALVES = (torch.bfloat16, torch.float16)
_MAX_TILE_TOKENS = 64
_MATMUL = "torch.nn.functional.linear"
_UNPACKED = because("the matrix is unpacked from its tiles first")
_ONE_ORDER = because("one chain of wgmma over K: a token's bits do not depend on the tokens beside it")
GATED_COLUMNS = (64, 128, 256)
"""Columns of the tiles that can be halved between gates and the rest."""

_SHARED_BYTES = 226 << 10
_COMPACT, _LEAST = 3, 7  # FORMATs: compact, and from there on with minima
_LINES = {_COMPACT: 1, 4: 1, 5: 1, 6: 2, 7: 2, 8: 2, 9: 4, 10: 4}
"""Words of a lane in a stage of packed_gemm_kernel beside the planes, by the stream's FORMAT."""
_ON_CPU = Choice("torch", "torch_impl", _MATMUL, (because("dense weights on a CPU"),))
_ON_GPU = Choice(
    "torch", "torch_impl", _MATMUL, (because("several tokens: PyTorch's matmul (cuBLAS) is the better kernel"),)
)


@dataclass(frozen=True, eq=False)
class LinearCall(Call):
    """One call with dense weights; see op.linear. out_dtype: None for x's. gated: SwiGLU of the result. tiles: FORMAT,
    rows and images of a stream's tiles, where explain asks about a matrix in one."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None = None
    out_dtype: torch.dtype | None = None
    gated: bool = False
    tiles: tuple[int, int, int] | None = None
    described: Device | None = None


@dataclass(frozen=True)
class RowsChoice(Counted, Choice):
    """row_kernel: one token; a program owns block_n rows of the weights and adds block_k columns at a time."""

    block_n: int
    block_k: int
    num_programs: int
    num_warps: int = 4

    @property
    def tile(self) -> str:
        return f"{self.block_n} rows x {self.block_k}, {self.num_warps} warps"


@dataclass(frozen=True)
class ProductChoice(Counted, Choice):
    """gemm_kernel: tiles of warpgroups x 64 tokens and `columns` rows of the weights, half of them gates where it is
    gated; see hopper/kernel.py."""

    warpgroups: int
    columns: int
    box_rows: int
    row_blocks: int
    column_blocks: int
    num_programs: int
    to_map: bool
    gated: bool = False
    band: int = 8

    @property
    def slices(self) -> int:
        """Slices of 64 columns a stage."""
        return 2 if self.warpgroups * self.columns <= 64 else 1

    @property
    def starts_early(self) -> bool:
        """Whether it starts while the kernel before it ends; see hopper/kernel.py."""
        return self.row_blocks == 1 or self.warpgroups * self.columns >= 256

    @property
    def piece(self) -> int:
        """Columns of the result that go out at a time."""
        return min(self.columns - self.extra, 64)

    @property
    def stages(self) -> int:
        """Stages of the ring: as many as shared memory holds beside two staging buffers a warpgroup."""
        stage = self.slices * (self.warpgroups * 64 + self.columns) * 128
        return min(12, (_SHARED_BYTES - self.warpgroups * 256 * self.piece) // stage)

    @property
    def extra(self) -> int:
        """Columns beyond the largest power of two; of gated ones those that are no gates."""
        return self.columns // 2 if self.gated else self.columns - (1 << (self.columns.bit_length() - 1))

    @property
    def tile(self) -> str:
        """The tile, warps and stages of a program."""
        return f"{self.warpgroups * 64} x {self.columns}, {4 * self.warpgroups + 1} warps, {self.stages} stages"


@dataclass(frozen=True)
class CompactChoice(ProductChoice):
    """compact_gemm_kernel: such tiles of a matrix in a compact stream, whose own tiles have tile_rows rows and so many
    images; see hopper/compact_kernel.py."""

    tile_rows: int = field(kw_only=True)
    images: int = field(kw_only=True)

    @property
    def slices(self) -> int:
        """Slices of 64 columns a stage: eight parts of the stream's tiles a stage at least, two for each warp. With
        rows of 8, as many as a part's columns are in."""
        return max(1, 128 // self.columns) if self.tile_rows > 8 else 4

    @property
    def look_ahead(self) -> int:
        """Stages whose words are on their way into registers: as many as registers hold."""
        return 1 if self.columns * self.slices > 128 else 3

    @property
    def registers(self) -> int:
        """Registers of a thread that widens."""
        return 144 if self.warpgroups == 1 and self.columns in (64, 128) and self.tile_rows > 8 else 160

    @property
    def tile(self) -> str:
        """The tile, warps and stages of a program."""
        return f"{self.warpgroups * 64} x {self.columns}, 12 warps, {self.stages} stages"


def units_of_words(FORMAT: int, R: int) -> int:
    """Units in sequence, of 64 columns of a stream's tiles of R rows, whose weights are in the same words."""
    if FORMAT == 3:
        return 1
    return (1 if FORMAT < 3 else 2) * (2 if R == 8 else 1)


@dataclass(frozen=True)
class PackedChoice(Counted, Choice):
    """packed_gemm_kernel: tiles of `rows` rows of a matrix in a stream, a warpgroup each 64, and `tokens` tokens. form:
    the stream's FORMAT, whose own tiles have tile_rows rows and so many images; see hopper/packed_kernel.py."""

    rows: int
    tokens: int
    token_blocks: int
    row_blocks: int
    num_programs: int
    to_map: bool
    gated: bool
    form: int
    tile_rows: int
    images: int
    band: int = 16

    @property
    def piece(self) -> int:
        """Tokens that go out at a time."""
        return min(self.tokens, 64)

    @property
    def stages(self) -> int:
        """Stages of the ring: as many as shared memory holds beside two staging buffers a warpgroup."""
        # A lane's line is 512 bytes of 64 rows, a plane four times as much.
        lane = self.rows // 64 * (512 if self.tile_rows > 8 else 1024)
        words = lane * 4 * (3 if self.form == _COMPACT else 2)
        stage = self.tokens * 128 + lane * _LINES.get(self.form, 0)
        room = _SHARED_BYTES - self.rows // 64 * 256 * self.piece
        return max(stages for stages in range(1, 17) if stages * stage + self.word_slots_of(stages) * words <= room)

    @property
    def word_slots(self) -> int:
        """Places of planes in the ring."""
        return self.word_slots_of(self.stages)

    def word_slots_of(self, stages: int) -> int:
        """Places of planes beside so many stages: they are read by the first unit that needs them."""
        return -(-stages // units_of_words(self.form, self.tile_rows))

    @property
    def tile(self) -> str:
        """The tile, warps and stages of a program."""
        return f"{self.tokens} x {self.rows}, {self.rows // 16 + 3} warps, {self.stages} stages"


@dataclass(frozen=True)
class TileChoice(Choice):
    """tile_kernel: up to 64 tokens; a program owns block_n rows of the weights."""

    block_n: int = 128
    block_k: int = 128
    num_warps: int = 8
    num_stages: int = 3

    @property
    def tile(self) -> str:
        return f"{self.block_n} rows x {self.block_k}"


def choose(call: LinearCall) -> Choice:
    """Return what runs; see ops/choice.py."""
    x, weight = call.x, call.weight
    if not call.on_gpu:
        return _ON_CPU
    if call.tiles is not None:
        choice = choose_in_stream(x, weight.shape[0], call.tiles, call.out_dtype, call.device, gated=call.gated)
        plain = replace(call, tiles=None)
        return choice or replace(found := choose(plain), reasons=(_UNPACKED, *found.reasons))
    if x.dtype not in _HALVES or not weight.is_contiguous():
        return _ON_GPU
    widened = call.out_dtype if call.out_dtype is not x.dtype else None
    device = call.device
    tiled = device.capability == (9, 0) and x.shape[1] % 8 == 0 and weight.data_ptr() % 16 == 0
    sms = device.num_sms if tiled else 0
    if call.gated and sms and x.shape[0] > 1 and weight.numel():
        return _product(x.shape[0], weight.shape[0], weight.shape[1], widened, sms, gated=True)
    return _on_gpu(x.shape[0], weight.shape[0], weight.shape[1], widened, sms)


@lru_cache(maxsize=1024)
def _on_gpu(tokens: int, rows: int, cols: int, widened: torch.dtype | None, sms: int) -> Choice:
    """widened: the output's dtype where it is not x's. sms: of a device that runs gemm_kernel on this, else 0."""
    if sms and tokens > 1 and rows and cols:
        return _product(tokens, rows, cols, widened, sms)
    if tokens == 1:
        # Fastest of 4 tilings on the shapes of Llama-3.2-1B and 3.1-8B.
        block_n, block_k = (4, 1024) if cols <= 2048 else (2, 2048)
        why = because("one token: memory bound, a program sums whole rows of the weights in registers")
        kernel = "linear/triton_impl.py: row_kernel"
        return RowsChoice("triton", "triton_impl", kernel, (why,), block_n, block_k, -(-rows // block_n))
    if widened is not None and 1 < tokens <= _MAX_TILE_TOKENS:
        name = str(widened).removeprefix("torch.")
        why = because("few tokens whose products stay in {}, which PyTorch's matmul would round", name)
        return TileChoice("triton", "triton_impl", "linear/triton_impl.py: tile_kernel", (why,))
    return _ON_GPU


@lru_cache(maxsize=1024)
def _product(
    tokens: int, rows: int, cols: int, widened: torch.dtype | None, sms: int, *, gated: bool = False
) -> ProductChoice:
    tiles = tuple(tile for tile in TILES if not gated or tile[1] in GATED_COLUMNS)
    if gated and tokens <= _MAX_NARROW_TOKENS:
        tiles = ((1, GATED_COLUMNS[0]),)
    tile = min(tiles, key=lambda tile: tile_us(tile, tokens, rows, cols, sms=sms))
    return product_of_tile(tile, tokens, rows, widened, sms, gated=gated)


def product_of_tile(
    tile: tuple[int, int], tokens: int, rows: int, widened: torch.dtype | None, sms: int, *, gated: bool = False
) -> ProductChoice:
    """Choose gemm_kernel with a tile of TILES. widened: as in _on_gpu."""
    down, right = blocks_of(tile, tokens, rows)
    to_map = widened is None and rows % (16 if gated else 8) == 0
    kernel = "linear/hopper/kernel.py: gemm_kernel"
    return ProductChoice(
        "gluon", "hopper.launch", kernel, (_ONE_ORDER,), *tile, box_rows_of(tokens), down, right,
        min(sms, down * right), to_map, gated,
    )  # fmt: skip


_MAX_NARROW_TOKENS = 16
"""Tokens that one small copy brings: bound by the weights, gated tiles are the faster the narrower they are. 8B, 8
tokens: 58.9, 59.9 and 60.6 us with 64, 128 and 256 columns; more tokens read x once for each."""


def blocks_of(tile: tuple[int, int], tokens: int, rows: int) -> tuple[int, int]:
    """Return how many tiles of so many warpgroups and columns lie down and across."""
    return -(-tokens // (64 * tile[0])), -(-rows // tile[1])


def box_rows_of(tokens: int) -> int:
    """Return how many tokens one copy brings."""
    return 64 if tokens > 32 else 32 if tokens > 16 else 16


# Microseconds of 64 columns of K with a tile's warpgroups and columns (compact_gemm_kernel) or rows and tokens
# (packed_gemm_kernel, by FORMAT), and of a tile beside them: measured at 8 to 8,192 tokens of an 8B on an H200 (with
# minima: three of the tiles on a matrix of a 1B, the others between them).
_COMPACT_STEPS_US = {(1, 32): 0.17, (1, 64): 0.31}
_COMPACT_TILE_US = 2.5
_WIDE_TILES = ((64, 16), (128, 16), (64, 64), (128, 64), (64, 128), (128, 128), (128, 256))
_BYTES_US, _NIBBLES_US, _MINIMA_US = (
    dict(zip(_WIDE_TILES, steps_us, strict=True))
    for steps_us in (
        (0.155, 0.23, 0.18, 0.275, 0.235, 0.385, 0.66),
        (0.175, 0.27, 0.2, 0.32, 0.245, 0.43, 0.67),
        (0.3, 0.5, 0.33, 0.57, 0.36, 0.63, 0.9),
    )
)
_PACKED_STEPS_US = {
    _COMPACT: {
        (64, 16): 0.2, (128, 16): 0.29, (64, 64): 0.215, (128, 64): 0.33, (64, 128): 0.28,
        (128, 128): 0.43, (64, 256): 0.41, (128, 256): 0.72,
    },
} | {form: _BYTES_US if form < _COMPACT else _NIBBLES_US if form < _LEAST else _MINIMA_US
    for form in (1, 2, *range(_COMPACT + 1, 11))
}  # fmt: skip
_PACKED_TILE_US = 3.5
# Compact tiles of 8 rows: twice the words are loaded, and 128 rows would take more registers than there are.
_EIGHT_ROWS_SHARE = 1.45
_MAX_COMPACT_TOKENS = {8: 384, 16: 4096, 32: 4096}


def max_tile_tokens(form: int, tile_rows: int) -> float:
    """Tokens up to which a product reads a stream's tiles, by their rows. Beyond, widening compact ones once for each
    256 tokens takes longer than to unpack the matrix: 8B, 8,192 tokens 5.6 ms a layer instead of 5.5. Minima take
    longer still. Tiles of four bits without them take as long as the plain product alone, and sums of one-byte tiles
    are of unscaled numbers, which nothing unpacks."""
    if form == _COMPACT:
        return _MAX_COMPACT_TOKENS.get(tile_rows, 0)
    return inf if form < _LEAST else 1024


@lru_cache(maxsize=1024)
def choose_tiles(
    tokens: int, rows: int, cols: int, tile: tuple[int, int, int], widened: torch.dtype | None, sms: int, *, gated: bool
) -> CompactChoice | PackedChoice:
    """The product of several tokens with a matrix in a stream. tile: FORMAT, rows and images of the stream's tiles."""
    form, tile_rows, images = tile
    steps, to_map = -(-cols // 64), widened is None and rows % (16 if gated else 8) == 0

    def rounds(each: tuple[int, int], down: int, right: int) -> int:
        return -(-(-(-tokens // down) * -(-rows // right)) // sms)

    def compact_us(each: tuple[int, int]) -> float:
        return rounds(each, 64 * each[0], each[1]) * (steps * _COMPACT_STEPS_US[each] + _COMPACT_TILE_US)

    def packed_us(each: tuple[int, int]) -> float:
        share = _EIGHT_ROWS_SHARE if crowded else 1.0
        return rounds(each, each[1], each[0]) * (steps * share * steps_us[each] + _PACKED_TILE_US)

    steps_us, crowded = _PACKED_STEPS_US[form], form == _COMPACT and tile_rows == 8
    narrow = min(_COMPACT_STEPS_US, key=compact_us)
    wide = min((each for each in steps_us if not crowded or each[0] == 64), key=packed_us)
    if form == _COMPACT and compact_us(narrow) <= packed_us(wide):
        down, right = blocks_of(narrow, tokens, rows)
        kernel = "linear/hopper/compact_kernel.py: compact_gemm_kernel"
        return CompactChoice(
            "gluon", "hopper.stream_launch", kernel, (_ONE_ORDER,), *narrow, box_rows_of(tokens), down, right,
            min(sms, down * right), to_map, gated, tile_rows=tile_rows, images=images,
        )  # fmt: skip
    height, width = wide
    down, right = -(-tokens // width), -(-rows // height)
    kernel = "linear/hopper/packed_kernel.py: packed_gemm_kernel"
    return PackedChoice(
        "gluon", "hopper.stream_launch", kernel, (_ONE_ORDER,), height, width, down, right, min(sms, down * right),
        to_map, gated, form, tile_rows, images,
    )  # fmt: skip


def choose_in_stream(
    x: Tensor, rows: int, tiles: tuple[int, int, int], out_dtype: torch.dtype | None, device: Device,
    *, gated: bool = False,
) -> CompactChoice | PackedChoice | None:  # fmt: skip
    """Choose the kernel for a matrix of `rows` rows from its tiles: FORMAT, rows and images. None: it is unpacked."""
    if x.dtype is not torch.bfloat16 or x.shape[1] % 8 or device.capability != (9, 0):
        return None
    if not 2 <= len(x) <= max_tile_tokens(*tiles[:2]):
        return None
    widened = None if out_dtype is x.dtype else out_dtype
    return choose_tiles(len(x), rows, x.shape[1], tiles, widened, device.num_sms, gated=gated)


def describe(asked: Asked) -> LinearCall:
    """A question: x, weight. gated: of linear_swiglu. tiles, sequences: of a stream in which the weight is."""
    from onewave.ops.linear.op import linear

    x, weight = (empty_on_meta(shape, asked.dtype) for shape in asked.take((2,), (2,)))
    out = asked.dtype_of("out_dtype", asked.dtype) if "out_dtype" in asked.options else None
    linear(x, weight, out_dtype=out)  # on meta: nothing runs but the checks
    gated = bool(asked.options.get("gated"))
    if gated and len(weight) % 2:
        raise ShapeError("explain linear: weight", got=f"{len(weight)} rows", allowed="an even number with gated")
    return LinearCall(x, weight, None, out, gated, _tiles(asked), described=asked.device)


def _tiles(asked: Asked) -> tuple[int, int, int] | None:
    name = asked.options.get("tiles")
    if name is None:
        return None
    from onewave.wave.plan.layout import tile_shape  # a CPU never imports the wave

    form = find_format(check_one_of("explain linear: tiles", name, (COMPACT.name, *ROUNDINGS)))
    assert form is not None
    return form.number, tile_shape(asked.number("sequences", 1), weight_bytes=form.weight_bytes).rows, 1
