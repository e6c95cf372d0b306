"""Operations of a wave: products, reductions, attention by splits, combination of splits."""

from __future__ import annotations

from dataclasses import dataclass

from onewave.wave.plan.steps import Flag

INPUT = "input"
"""The name of the caller's activations as a source."""
OUTPUT = "output"
"""The name of the caller's result as a target."""


@dataclass(frozen=True)
class Operation:
    """A product, or the reduction of its slices of K.

    weight: the matrix of a product, [rows, cols] 16-bit; None for a reduction, which adds up `slices` partial sums of
    `rows` rows. source: INPUT, or the name of the activations (or partial sums) that it reads. target: OUTPUT or a
    name. partial: the product leaves float32 sums for a reduction. activation: the kernel's function applies to the
    rows. gated: rows come in (gate, up) pairs, each giving one value, function(gate) * up.

    Of a decode step alone: norm: the source is divided by its root mean square. residual: the result is added to the
    float32 residual stream. embedded: the caller's input, or the residual stream before, is the token's embedding.
    logits: float32 results to the caller. width: how many times as many bytes a weight takes as the step's TileShape
    says. gain: the number of the norm, where its gains may lie beside the weights. bias: the first
    value of the rows' bias among all biases. merges: the
    attention that leaves its splits to this product, which merges them while it loads them.
    """

    weight: str | None
    rows: int
    cols: int
    slices: int
    source: str
    target: str
    partial: bool = False
    activation: bool = False
    gated: bool = False
    norm: bool = False
    residual: bool = False
    embedded: bool = False
    logits: bool = False
    bias: int | None = None
    merges: Attention | None = None
    width: int = 1
    gain: int | None = None

    @property
    def flags(self) -> int:
        """The record's FLAGS."""
        return (
            Flag.ACTIVATE * (self.activation or self.gated)
            + Flag.GATED * self.gated
            + Flag.NORM * self.norm
            + Flag.RESIDUAL * self.residual
            + Flag.LOGITS * self.logits
            + Flag.EMBEDDED * self.embedded
        )

    @property
    def outputs(self) -> int:
        """Values of one sequence."""
        return self.rows // 2 if self.gated else self.rows


@dataclass(frozen=True)
class HeadGroups:
    """Groups of query heads for attention: at most `size` (a power of two) heads of one KV head a task.

    splits: of a sequence's keys, a task each. merged: heads that one combining task takes, a power of two up to size.
    reader_merges: the product that reads the attention merges the splits itself, which saves a hand-off.
    """

    heads: int
    kv_heads: int
    head_dim: int
    splits: int
    merged: int = 1
    reader_merges: bool = False

    @property
    def per_kv_head(self) -> int:
        """Query heads that share a KV head."""
        return self.heads // self.kv_heads

    @property
    def size(self) -> int:
        """Heads a task has room for: up to 8, the half of a product's rows that it uses."""
        return min(8, 1 << (self.per_kv_head - 1).bit_length())

    @property
    def of_kv_head(self) -> int:
        """Groups of one KV head."""
        return -(-self.per_kv_head // self.size)

    @property
    def count(self) -> int:
        """Groups of a sequence."""
        return self.kv_heads * self.of_kv_head

    @property
    def part_words(self) -> int:
        """Words of one split's result: a group's values, and log2-sum-exp2 four times a head."""
        return self.size * (self.head_dim + 4)

    def first_head(self, group: int) -> int:
        """The group's first query head."""
        return group // self.of_kv_head * self.per_kv_head + group % self.of_kv_head * self.size

    def heads_of(self, group: int) -> int:
        """Query heads that the group really has."""
        return min(self.size, self.per_kv_head - group % self.of_kv_head * self.size)

    def parts_of(self, group: int) -> list[int]:
        """Query heads of each combining task of the group."""
        heads = self.heads_of(group)
        return [min(self.merged, heads - first) for first in range(0, heads, self.merged)]


@dataclass(frozen=True)
class Attention:
    """Attention of a layer, by splits. A task's index is (unit, 1, split), unit = sequence * groups + group.

    source: the projected q, k, v. target: the splits' results. combined: finished attention. Attention itself writes it
    for a sequence of one split, the Combination for others, and nothing does where groups.reader_merges. window: keys
    in sight, None for all.
    """

    groups: HeadGroups
    layer: int
    source: str
    target: str
    combined: str
    window: int | None = None


@dataclass(frozen=True)
class Combination:
    """Merge the splits of up to groups.merged heads of a unit, where there are several. A task's index is (unit, 1,
    part)."""

    groups: HeadGroups
    source: str
    target: str
    window: int | None = None


AnyOperation = Operation | Attention | Combination
