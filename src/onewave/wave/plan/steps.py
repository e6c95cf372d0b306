"""Step records: one frozen dataclass an instruction, and the words that the kernel reads of it.

A record is STEP_WORDS int32 words. Each field says at which word it lies, here and nowhere else: `words_of` serialises
records by it, and Word and Place, from which the kernel's constants are made (kernel/words.py), look it up. Fields of
two instructions may share a word; fields of one name lie at one word in all of them. A field that a step does not use
is 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from onewave.wave.plan.layout import STEP_WORDS

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Words = npt.NDArray[np.int32]


def at(offset: int, default: int = 0) -> Any:
    """Declare a field that lies so many words into its record."""
    return field(default=default, metadata={"offset": offset})


class Kind:
    """Use of a step's result. Products come first, then sums of their slices, then attention."""

    NOTHING = 0
    PARTIAL = 1
    """float32 sums of one slice of K, to the exchange."""
    HIDDEN = 2
    """Finished 16-bit activations, to the exchange."""
    OUT = 3
    """Finished 16-bit activations, to the caller's tensor."""
    REDUCE_HIDDEN = 4
    """Add up partial sums in the order of K; then as HIDDEN."""
    REDUCE_OUT = 5
    ATTEND = 6
    """Attention of one group of heads over one split of one sequence's keys; partial results to the exchange."""
    COMBINE = 7
    """Merge the splits of a few heads; 16-bit activations to the exchange."""


class Flag:
    """Bits of a step's flags."""

    ACTIVATE = 1
    GATED = 2
    NORM = 4
    """The activations are divided by their root mean square."""
    RESIDUAL = 8
    """The result is added to the float32 residual stream, and what is published is the rounded sum."""
    LOGITS = 16
    """Float32 results to the caller."""
    EMBEDDED = 32
    """The caller's input, or the residual stream before, is the embedding of the sequence's token."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """The words of every instruction.

    kind: a Kind. source, target: the first exchange word that the step reads, and that it writes. source_stride,
    target_stride: words from one sequence to the next. slice: the part of the reduction axis that the step covers.
    first_wait, waits: its entries among the program's waits. post: 1 + the counter that it posts to; 0 for none.
    """

    kind: int = at(0)
    source: int = at(4)
    source_stride: int = at(5)
    target: int = at(9)
    target_stride: int = at(10)
    slice: int = at(11)
    first_wait: int = at(13)
    waits: int = at(14)
    post: int = at(15)


@dataclass(frozen=True, kw_only=True)
class ProductStep(Step):
    """Multiply row blocks of a weight matrix over one slice of K.

    kind: PARTIAL, HIDDEN or OUT. source: -1 for the caller's input. target_stride of partial sums: slices of K. blocks:
    row blocks, from first_block on. tiles: weight tiles a row block. chunks: loads of activations. first_column,
    columns: of the slice, in words of a sequence's row. flags: Flag bits. bias: 1 + its first value; 0 for none.
    splits, window, mergeable: of the attention that leaves its splits to this product, which merges them as it loads
    them: how many there are (0 for no merging), keys in sight (0 for all), and their first word. prefetch: records from
    here to an attention step, for which the product brings the first keys to L2; 0 for none. ahead, ahead_tiles: the
    lane's tiles that it brings to L2. scales: the first of its rows' scales, of weights below 16 bits. width: of
    Operation, 0 for 1. gain: of 4-bit weights, the first word of the gains of the norm before the product.
    """

    blocks: int = at(1)
    tiles: int = at(2)
    chunks: int = at(3)
    first_column: int = at(6)
    columns: int = at(7)
    first_block: int = at(8)
    flags: int = at(12)
    bias: int = at(16)
    splits: int = at(17)
    window: int = at(20)
    prefetch: int = at(26)
    ahead: int = at(27)
    ahead_tiles: int = at(28)
    scales: int = at(29)
    width: int = at(30)
    gain: int = at(18)
    mergeable: int = at(31)

    @property
    def weight_tiles(self) -> int:
        """Weight tiles that the step streams."""
        return self.blocks * self.tiles


@dataclass(frozen=True, kw_only=True)
class ReduceStep(Step):
    """Add up the partial sums of all slices of K. slice: how many there are. blocks: pieces of rows, from first_block
    on. kind: REDUCE_HIDDEN or REDUCE_OUT. flags, bias: as of ProductStep."""

    blocks: int = at(1)
    first_block: int = at(8)
    flags: int = at(12)
    bias: int = at(16)


@dataclass(frozen=True, kw_only=True)
class AttendStep(Step):
    """Attend with one group of query heads to one split of one sequence's keys.

    source: the sequence's row of projected q, k, v. q, k, v: the first words of the group's in that row.
    target: the split's partial result. slice: the split, of `splits`. further: layers from the lane's attention step
    before, if that goes over the same keys, else 0. comes: the lane's weight tile before which the keys come, where
    they are streamed. window: keys in sight; 0 for all. appends: whether the step writes the new key and value to the
    cache. heads: query heads of the group. whole: the first word of its finished attention, where one split holds the
    sequence. mergeable: the first word of its splits, where the reader merges them.
    """

    kind: int = at(0, Kind.ATTEND)
    further: int = at(2)
    comes: int = at(7)
    sequence: int = at(8)
    splits: int = at(17)
    layer: int = at(18)
    kv_head: int = at(19)
    window: int = at(20)
    appends: int = at(21)
    heads: int = at(22)
    q: int = at(23)
    k: int = at(24)
    v: int = at(25)
    whole: int = at(30)
    mergeable: int = at(31)

    @property
    def keys(self) -> tuple[int, ...]:
        """The fields that say over which keys the step goes, in any layer."""
        return self.sequence, self.slice, self.window, self.splits, self.kv_head


@dataclass(frozen=True, kw_only=True)
class CombineStep(Step):
    """Merge the splits of a few heads of one sequence. heads: how many; the other fields as of AttendStep."""

    kind: int = at(0, Kind.COMBINE)
    sequence: int = at(8)
    splits: int = at(17)
    window: int = at(20)
    heads: int = at(22)


INSTRUCTIONS: tuple[type[Step], ...] = (ProductStep, ReduceStep, AttendStep, CombineStep)


@dataclass(frozen=True, kw_only=True)
class LaunchPlaces:
    """Addresses and strides of one launch, int64 each, in the words before the first record; 0 where there is none.

    rotary: float32 [positions, head_dim], cosines, then sines. residual: float32. q_norm, k_norm: float32 [layers,
    head_dim]. layer_stride, slot_stride, head_stride: of keys and values, in 32-bit words; slot_stride of a paged cache
    is a page's. stream: all weight tiles. gains: 16-bit [norms, hidden], which activations are
    multiplied by; 0 where they are in the weights. table, table_stride: the block table, and from one slot's row to the
    next.
    """

    embedding: int = at(0)
    rotary: int = at(1)
    keys: int = at(2)
    values: int = at(3)
    residual: int = at(4)
    biases: int = at(5)
    q_norm: int = at(6)
    k_norm: int = at(7)
    layer_stride: int = at(8)
    slot_stride: int = at(9)
    head_stride: int = at(10)
    stream: int = at(11)
    scales: int = at(12)
    gains: int = at(13)
    table: int = at(14)
    table_stride: int = at(15)


def words_of(
    records: Sequence[DataclassInstance], width: int = STEP_WORDS, dtype: npt.DTypeLike = np.int32
) -> npt.NDArray[Any]:
    """Serialise records: dtype [records, width], each field at its word."""
    found = np.zeros((len(records), width), dtype=dtype)
    for kind in dict.fromkeys(map(type, records)):
        rows = [row for row, record in enumerate(records) if type(record) is kind]
        take = attrgetter(*(each.name for each in fields(kind)))
        found[np.ix_(rows, list(offsets([kind]).values()))] = [take(records[row]) for row in rows]
    return found


def offsets(records: Iterable[type[DataclassInstance]]) -> dict[str, int]:
    """Map each field's name, in capitals, to its word. A name must lie at one word in all records."""
    found: dict[str, int] = {}
    for record in records:
        own = {each.name.upper(): int(each.metadata["offset"]) for each in fields(record)}
        assert len(set(own.values())) == len(own), f"two fields of {record.__name__} share a word"
        assert all(found.get(name, offset) == offset for name, offset in own.items()), "one name, two words"
        found |= own
    return found


class _ByName(type):
    """A class with offsets as attributes."""

    offsets: Mapping[str, int]

    def __getattr__(cls, name: str) -> int:
        if name not in cls.offsets:
            raise AttributeError(f"no field {name.lower()!r}")
        return cls.offsets[name]


class Word(metaclass=_ByName):
    """The word of each field of the step records, by the field's name in capitals: Word.SOURCE is that of `source`."""

    offsets = offsets(INSTRUCTIONS)


class Place(metaclass=_ByName):
    """The place of each field of LaunchPlaces, by its name in capitals."""

    offsets = offsets([LaunchPlaces])
