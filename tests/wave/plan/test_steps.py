"""Step records: each field lies at one word, and the kernel's constants are those words."""

from dataclasses import dataclass, fields

import numpy as np
import pytest

from onewave.wave.kernel import words
from onewave.wave.plan.layout import POINTERS, STEP_WORDS
from onewave.wave.plan.steps import (
    INSTRUCTIONS,
    AttendStep,
    CombineStep,
    Flag,
    Kind,
    LaunchPlaces,
    Place,
    ProductStep,
    ReduceStep,
    Word,
    at,
    offsets,
    words_of,
)


def test_every_field_of_every_instruction_is_found_at_its_word() -> None:
    for instruction in INSTRUCTIONS:
        values = {field.name: 1000 + number for number, field in enumerate(fields(instruction))}
        [record] = words_of([instruction(**values)])
        for name, value in values.items():
            assert record[getattr(Word, name.upper())] == value, (instruction.__name__, name)
        assert np.count_nonzero(record) == len(values)
    [row] = words_of([LaunchPlaces(stream=1 << 40, table_stride=7)], POINTERS, np.int64)
    assert (row[Place.STREAM], row[Place.TABLE_STRIDE], np.count_nonzero(row)) == (1 << 40, 7, 2)


def test_records_of_several_kinds_keep_their_order() -> None:
    steps = [CombineStep(heads=3), ProductStep(kind=Kind.OUT, tiles=5), AttendStep(layer=2), ReduceStep(slice=4)]
    found = words_of([*steps, steps[1]])
    assert found.shape == (5, STEP_WORDS)
    assert found.dtype == np.int32
    assert found[:, Word.KIND].tolist() == [Kind.COMBINE, Kind.OUT, Kind.ATTEND, 0, Kind.OUT]
    assert (found[0, Word.HEADS], found[2, Word.LAYER], found[3, Word.SLICE]) == (3, 2, 4)
    assert np.array_equal(found[4], found[1])
    assert words_of([]).shape == (0, STEP_WORDS)


def test_the_kernels_constants_are_the_records_words() -> None:
    for found, numbers in (
        (words.WORD, Word.offsets),
        (words.PLACE, Place.offsets),
        (words.KIND, vars(Kind)),
        (words.FLAG, vars(Flag)),
    ):
        for name, number in numbers.items():
            if name.isupper():
                assert getattr(found, name) == number
    assert [words.WORD.SOURCE, words.WORD.COMES, words.WORD.MERGEABLE] == [4, 7, 31]


def test_two_fields_at_one_word_or_one_name_at_two_are_refused() -> None:
    @dataclass(frozen=True)
    class Crowded:
        one: int = at(3)
        other: int = at(3)

    @dataclass(frozen=True)
    class Moved:
        source: int = at(5)

    with pytest.raises(AssertionError, match="share a word"):
        offsets([Crowded])
    with pytest.raises(AssertionError, match="two words"):
        offsets([ProductStep, Moved])
    with pytest.raises(AttributeError, match="nothing"):
        _ = Word.NOTHING
