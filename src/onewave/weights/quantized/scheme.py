"""How a checkpoint says that its matrices are quantised. Needs no torch."""

from dataclasses import dataclass
from enum import Enum


class Packing(Enum):
    """Where a quantised matrix's parts are; see readers.py."""

    GPTQ = "gptq"
    GPTQ_V2 = "gptq_v2"
    AWQ = "awq"
    PACKED = "packed"
    PLAIN = "plain"
    BLOCKS = "blocks"


@dataclass(frozen=True)
class Sharing:
    """Which weights share a scale: `rows` x `cols` of them; None is all."""

    rows: int | None
    cols: int | None


class Activations(Enum):
    """How a scheme quantises the activations of its products, to the weights' own 8-bit codes."""

    BY_TOKEN = "a scale for each token"
    STATIC = "a scale that each matrix stores"


@dataclass(frozen=True)
class Scheme:
    """A checkpoint's quantisation.

    method: its name in config.json. kinds: (bits of a code, weights that share a scale) that its matrices may have;
    none where only the KV cache has scales.
    act_order: whether columns were quantised in an order of their own, so that each matrix needs its index.
    zero_points: whether each matrix needs them.
    activations: None where they stay in 16 bits or more. not_followed: in words, what the config asks of them and is
    not done. codes: dtypes that tensors of codes may have. beside: of matrices that are packed otherwise.
    """

    method: str
    packing: Packing
    kinds: tuple[tuple[int, Sharing], ...]
    act_order: bool = False
    activations: Activations | None = None
    not_followed: str | None = None
    zero_points: bool = False
    codes: tuple[str, ...] = ("I32",)
    beside: "Scheme | None" = None
