"""Speed of the 16-bit product of many rows at the matrices of a model, beside PyTorch's: both of plain weights and, as
prompts have it, of a wave's tiles.

All take turns in one run, on copies of the operands that the L2 cache can't hold. The product of `gate_up` is timed
alone, as PyTorch has it, and with SwiGLU in one launch, as prompts run it; from tiles with SwiGLU only.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from onewave.base.weight_formats import WeightFormat, name_of
from onewave.bench.ceilings import Ceiling
from onewave.bench.clock import Summary, recorded, time_in_rounds
from onewave.bench.ledger import Measurement
from onewave.engine.load.streamed import layer_matrices
from onewave.models.config.model_config import ModelConfig
from onewave.models.llama_plan import DecodeStep, plan_program, workers_for
from onewave.ops.linear import linear, linear_swiglu
from onewave.wave.launch.launch import co_resident
from onewave.wave.weights.pack import StreamMatrix, Weight, WeightStream

LOSS = 0.95
"""A product slower than this share of PyTorch's speed is a loss."""
PEER = "torch"
# More than the L2 cache holds: with less it serves weights; with more, packing takes longer.
_BYTES_IN_ROTATION = {"cuda": 512 << 20, "cpu": 1 << 20}
_MAX_COPIES = 64
# Words of a model whose head is not measured: a row block of them for each thread block.
_SMALL_VOCAB = 1 << 14
_CPU_WORKERS = 3


@dataclass(frozen=True)
class Product:
    """One matrix of a model: [count * height, cols]. packed_as: its name in a stream of `config`, a model of one layer
    that has it."""

    name: str
    height: int
    cols: int
    count: int
    packed_as: str
    config: ModelConfig

    @property
    def shape(self) -> tuple[int, int]:
        return self.count * self.height, self.cols

    @property
    def nbytes(self) -> int:
        """Bytes of 16-bit weights."""
        return 2 * self.count * self.height * self.cols


@dataclass(frozen=True)
class ProductResult:
    """Seconds a call with so many rows of x. ratio: of speeds, this to PyTorch's; None for PyTorch's own."""

    product: Product
    rows: int
    implementation: str
    seconds: Summary
    ratio: float | None

    @property
    def teraflops_per_second(self) -> float:
        """10^12 operations a second at the median."""
        height, cols = self.product.shape
        return 2e-12 * self.rows * height * cols / self.seconds.p50

    @property
    def is_loss(self) -> bool:
        """Whether PyTorch is faster by more than may be."""
        return self.ratio is not None and self.ratio < LOSS

    def __str__(self) -> str:
        height, cols = self.product.shape
        return f"{self.product.name} {height}x{cols}, {self.rows} rows, {self.implementation}"

    def measurement(self, model: str, dtype: str, ceiling: Ceiling) -> Measurement:
        extra = {
            "implementation": self.implementation,
            "matrix": self.product.name,
            "shape": "{}x{}".format(*self.product.shape),
            "rows": self.rows,
            "dtype": dtype,
            "tflops": self.teraflops_per_second,
            "ceiling_share": self.teraflops_per_second / ceiling.value,
            "speed_by_torch": self.ratio,
        }
        return Measurement(model, "linear_rows", "us", self.seconds.scaled(1e6), ceiling, extra)


def products_of(config: ModelConfig) -> list[Product]:
    """A model's matrices, in the order of a step."""
    one = config.of_layers(1)
    few = replace(one, vocab_size=_SMALL_VOCAB)
    layer = [Product(name, *shape, f"{name}0", few) for name, shape in layer_matrices(few).items()]
    return [*layer, Product("head", config.vocab_size, config.hidden_size, 1, "head", one)]


def product_of_shape(config: ModelConfig, rows: int, cols: int) -> Product:
    """A matrix [rows, cols]: `down` of a model like this one that has it."""
    one = replace(config.of_layers(1), vocab_size=_SMALL_VOCAB, hidden_size=rows, intermediate_size=cols)
    return Product("matrix", rows, cols, 1, "down0", one)


@dataclass(frozen=True)
class Setting:
    """Where products are timed. tiles: the stream's format, for steps of `sequences`; None: plain weights alone.
    rounds: turns of each."""

    device: torch.device
    dtype: torch.dtype
    tiles: WeightFormat | None
    sequences: int
    rounds: int


@torch.inference_mode()
def measure_products(
    products: Sequence[Product], rows: Sequence[int], setting: Setting, *, show: Callable[[str], None]
) -> Iterator[ProductResult]:
    """Time each matrix with each number of rows. Raises UnsupportedError where a stream can't hold it."""
    for product in products:
        show(f"{product.name}: packing")
        most = _copies(product.nbytes, setting)
        weights = [_random(product.shape, setting) * 0.02 for _ in range(most)]
        packed = [] if setting.tiles is None else _in_tiles(product, weights, setting.tiles, setting)
        for tokens in rows:
            show(f"{product.name}: {tokens} rows")
            count = min(most, _copies(product.nbytes + 2 * tokens * sum(product.shape), setting))
            xs = [_random((tokens, product.cols), setting) for _ in range(count)]
            ways = _ways(product, xs, weights, packed, setting)
            # A recording holds calls' kernels, which the first of its turns compiles.
            runs = {name: (recorded(calls, setting.device), count) for name, calls in ways.items()}
            seconds = time_in_rounds(runs, setting.device, rounds=setting.rounds)
            for name, summary in seconds.items():
                ratio = None if name == PEER else seconds[PEER].p50 / summary.p50
                yield ProductResult(product, tokens, name, summary, ratio)


def _ways(
    product: Product, xs: list[Tensor], weights: list[Tensor], packed: list[StreamMatrix], setting: Setting
) -> Mapping[str, list[Callable[[], object]]]:
    def calls(function: Callable[..., object], matrices: Sequence[object]) -> list[Callable[[], object]]:
        return [partial(function, x, matrix) for x, matrix in zip(xs, matrices, strict=False)]

    found = {"onewave": calls(linear, weights), PEER: calls(F.linear, weights)}
    gated = product.count > 1
    if gated:
        found["onewave, SwiGLU"] = calls(linear_swiglu, weights)
    if packed:
        found[f"onewave, {name_of(setting.tiles)} tiles"] = calls(linear_swiglu if gated else linear, packed)
    return found


def _in_tiles(product: Product, weights: list[Tensor], form: WeightFormat, setting: Setting) -> list[StreamMatrix]:
    """Pack each copy of a matrix into a stream of its own, of a model of one layer, where nothing else is packed."""
    step, device = DecodeStep(product.config, setting.sequences, form), setting.device
    available = co_resident(device) if device.type == "cuda" else _CPU_WORKERS
    program = plan_program(step, workers=workers_for(step, available=available))
    found: list[StreamMatrix] = []
    for weight in weights:
        stream = WeightStream(program, setting.dtype, device, form)
        stream.put(product.packed_as, Weight(tuple(weight.chunk(product.count))))
        found.append(stream.matrix(product.packed_as, product.height, product.cols, product.count))
    return found


def _copies(nbytes: int, setting: Setting) -> int:
    return min(_MAX_COPIES, max(2, -(-_BYTES_IN_ROTATION[setting.device.type] // nbytes)))


def _random(shape: tuple[int, int], setting: Setting) -> Tensor:
    return torch.randn(shape, device=setting.device, dtype=setting.dtype)
