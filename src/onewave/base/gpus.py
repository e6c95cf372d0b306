"""GPUs by name: what profile predicts for one that is not at hand, and the time that a product's tiles take on it."""

from dataclasses import dataclass

from onewave.base.errors import InvalidArgumentError, shown

TILES = ((1, 32), (1, 64), (1, 128), (2, 64), (2, 128), (1, 192), (1, 256), (2, 192), (2, 256))
"""Warpgroups (64 rows each) and columns of a product's tiles, from which the Hopper product chooses."""
# A step of 64 along K: at least this long, and this long a warpgroup's column; and a tile beside its steps. Fitted to
# all tiles at 64 to 8,192 rows of eight matrices on an H200: the tile found is 0.3 % slower than the best on average.
_STEP_US, _COLUMN_STEP_US, _TILE_US = 0.15, 0.001376, 1.5
# With few tokens device memory bounds most, and an H200 draws less power and clocks higher: the share of a step's time
# that is left, and what streaming the weights takes beside their bytes. Fitted to 16 tokens and four matrices of an 8B
# and a 70B, each by tiles of 64 and of 128 (docs/log/operators.md).
_MAX_STREAMED_TOKENS, _STEP_SHARE, _STREAM_US = 64, 0.86, 8.0
_H200_TFLOPS, _H200_SMS = 989.0, 132
# The share of the sheet's bandwidth that streaming reads reached on an H200 (ledger/h200.jsonl:8).
_READ_SHARE = 4650 / 4800


@dataclass(frozen=True)
class GPU:
    """A GPU. sms: of it. tflops: of dense 16-bit products with float32 sums, by its data sheet.
    bandwidth: of device memory, GB/s, by its data sheet. l2_bytes: of its L2 cache. wave: whether a decode step runs as
    one launch on it. source: the data sheet."""

    name: str
    sms: int
    tflops: float
    bandwidth: float
    l2_bytes: int
    source: str
    wave: bool = False

    @property
    def read_bandwidth(self) -> float:
        """Bytes/ns that a kernel can read."""
        return self.bandwidth * _READ_SHARE

    def product_us(self, tokens: int, rows: int, cols: int) -> float:
        """Predict a product [tokens, cols] x [rows, cols]^T in 16 bits, by its tiles' rounds over all SMs and by the
        bytes of its weights, microseconds."""
        return min(self.product_by_us(tile, tokens, rows, cols) for tile in TILES)

    def product_by_us(self, tile: tuple[int, int], tokens: int, rows: int, cols: int) -> float:
        """Predict the same product with one tile of TILES."""
        by_tiles, by_bytes = self.tile_us(tile, tokens, rows, cols), self.bytes_us(tokens, rows, cols)
        if tokens <= _MAX_STREAMED_TOKENS:
            return max(by_tiles * _STEP_SHARE, by_bytes + (_STREAM_US if tokens > 1 else _TILE_US))
        # More tokens take no less.
        return max(by_tiles, by_bytes + _TILE_US, self.product_by_us(tile, _MAX_STREAMED_TOKENS, rows, cols))

    def bytes_us(self, tokens: int, rows: int, cols: int) -> float:
        """Predict how long device memory takes for the product's operands and its result, microseconds."""
        return 2 * (rows * cols + tokens * (rows + cols)) / self.read_bandwidth * 1e-3

    def tile_us(self, tile: tuple[int, int], tokens: int, rows: int, cols: int) -> float:
        """tile_us on this GPU's SMs, at their speed."""
        speed = self.tflops / self.sms / (_H200_TFLOPS / _H200_SMS)
        return tile_us(tile, tokens, rows, cols, sms=self.sms, speed=speed)


def tile_us(
    tile: tuple[int, int], tokens: int, rows: int, cols: int, *, sms: int = _H200_SMS, speed: float = 1.0
) -> float:
    """Predict the same product with tiles of tile[0] warpgroups and tile[1] columns, by its rounds over the SMs alone.

    speed: of an SM's products, over that of an H200's.
    """
    rounds = -(-(-(-tokens // (64 * tile[0])) * -(-rows // tile[1])) // sms)
    step = max(_STEP_US, tile[0] * tile[1] * _COLUMN_STEP_US) / speed
    return rounds * (-(-cols // 64) * step + _TILE_US)


GPUS = {
    gpu.name: gpu
    for gpu in (
        GPU("H200", _H200_SMS, _H200_TFLOPS, 4800, 50 << 20, "NVIDIA H200 datasheet", wave=True),
        GPU("H100", 132, 989, 3350, 50 << 20, "NVIDIA H100 SXM datasheet", wave=True),
        GPU("A100", 108, 312, 2039, 40 << 20, "NVIDIA A100 80GB SXM datasheet"),
        GPU("A40", 84, 149.7, 696, 6 << 20, "NVIDIA A40 datasheet"),
        GPU("RTX 4090", 128, 165.2, 1008, 72 << 20, "NVIDIA Ada architecture whitepaper"),
        GPU("RTX 3050", 20, 18.2, 224, 2 << 20, "NVIDIA Ampere GA10x whitepaper; 8 GB"),
    )
}
"""GPUs by name. RTX GPUs: products with float32 sums run at half of the 16-bit sums' rate."""


def find_gpu(name: str) -> GPU:
    """Find a GPU by name, whatever its case, spaces and dashes. Raises InvalidArgumentError."""
    plain = {known.replace(" ", "").lower(): gpu for known, gpu in GPUS.items()}
    asked = name.replace(" ", "").replace("-", "").replace("_", "").lower()
    if asked not in plain:
        raise InvalidArgumentError("gpu", got=shown(name), allowed=", ".join(GPUS))
    return plain[asked]
