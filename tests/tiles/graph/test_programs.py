"""Programs by name: what people type becomes the graph that they mean, or one clear line."""

import pytest

from kit.refusals import refused
from onewave.base.errors import InvalidArgumentError, OnewaveError
from onewave.tiles.graph.programs import PROGRAMS, ProgramOptions, build_program, parse_bytes, parse_tile

SMALL = {
    "gemm": "64 64 64",
    "chain": "64 64 64 64",
    "ffn": "64 64 128",
    "attention": "64 64",
    "block": "64 2 32 64",
    "conv": "1 8 8 4 8",
}


@pytest.mark.parametrize("kind", PROGRAMS)
def test_every_program_builds_from_text(kind):
    graph, queues = build_program(kind, SMALL[kind].split(), ProgramOptions(tile=(32, 32, 32)))
    assert len(graph.tasks) > 0
    assert queues is None


def test_stream_k_brings_its_queues():
    graph, queues = build_program("gemm", ["96", "96", "96"], ProgramOptions((32, 32, 32), workers=4, stream_k=True))
    assert sorted(i for queue in queues for i in queue) == list(range(len(graph.tasks)))


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("50MB", 50_000_000),
        ("48MiB", 48 * 2**20),
        ("4096", 4096),
        ("1.5kB", 1500),
        ("2G", 2 * 10**9),
        ("7 b", 7),
        ("1k", 1000),
    ],
)
def test_sizes_in_bytes_are_read_as_people_write_them(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "MB", "-1", "0", "1e9", "5XB", "nan", "1MBB", "9" * 30, "0.1"])
def test_a_size_that_is_none_is_refused(text):
    with pytest.raises(InvalidArgumentError, match="50MB"):
        parse_bytes(text)


def test_a_tile_is_three_sizes_or_two():
    assert parse_tile("128x64x32") == (128, 64, 32)
    assert parse_tile("128X64") == (128, 64, 64)


@pytest.mark.parametrize("text", ["", "128", "0x1x1", "1x2x3x4", "axbxc", "-1x1x1", "1.5x2x2", "²x1x1"])
def test_a_tile_that_is_none_is_refused(text):
    with pytest.raises(InvalidArgumentError, match="128x128x64"):
        parse_tile(text)


@pytest.mark.parametrize(
    ("kind", "sizes", "words"),
    [
        ("gem", "1 1 1", "gemm, chain"),
        ("gemm", "1 1", "gemm M N K"),
        ("gemm", "1 1 1 1", "gemm M N K"),
        ("gemm", "0 1 1", "M: '0'"),
        ("gemm", "1 -1 1", "N: '-1'"),
        ("gemm", "1 1 1e9", "K: '1e9'"),
        ("gemm", "1 1 ٣", "K"),
        ("gemm", "1000000000 1000000000 1000000000", "larger tiles"),
        ("notation", "/no/such/file", "No such file"),
        ("notation", "/", "directory"),
    ],
)
def test_a_program_that_is_none_is_one_line(kind, sizes, words):
    with refused(OnewaveError, words):
        build_program(kind, sizes.split())
