"""Traces of allocations: written, read, refused."""

import pytest

from onewave.base.errors import InvalidArgumentError
from onewave.memory.plan import Lifetime
from onewave.memory.trace import Event, Trace


def test_a_trace_reads_as_it_was_written(tmp_path):
    written = Trace("nowhere", "a test", [Event(0, 1000, 3), Event(1, 500, 4), Event(0, None, 9)])
    written.write(tmp_path / "trace.jsonl")
    trace = Trace.read(tmp_path / "trace.jsonl")
    assert trace == written
    assert (trace.num_allocations, trace.peak_bytes) == (2, 1500)
    assert trace.lifetimes() == [Lifetime(1000, 0, 2), Lifetime(500, 1, 3)]


HEADER = '{"schema": 1, "device": "cpu"}\n'
BEGINS = '{"op": "allocate", "id": 0, "bytes": 8, "us": 0}\n'
ENDS = '{"op": "free", "id": 0, "us": 1}\n'


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", 1), ("[1]", 1), ('{"schema": 2, "device": "cpu"}', 1), (HEADER + ENDS, 2), (HEADER + BEGINS + BEGINS, 3),
        (HEADER + BEGINS + ENDS + ENDS, 4), (HEADER + BEGINS.replace("8", "-8"), 2), (HEADER + "nonsense", 2),
        (HEADER + BEGINS.replace("0,", "true,", 1), 2),
    ],
)  # fmt: skip
def test_what_is_no_trace_is_refused_by_its_line(tmp_path, text, line):
    (tmp_path / "wrong").write_text(text)
    with pytest.raises(InvalidArgumentError, match=f"wrong:{line}: "):
        Trace.read(tmp_path / "wrong")
