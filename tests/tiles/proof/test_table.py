"""The task table: words, files, and who may make one."""

import dataclasses
import zlib

import numpy as np
import pytest

from kit.refusals import refused
from kit.task_tables.small_graphs import CHAINS
from kit.task_tables.verify_table import verify_table
from onewave.base.errors import InvalidArgumentError, UnverifiedError, VerificationError
from onewave.tiles.graph.builders import gemm
from onewave.tiles.order.policies import plan
from onewave.tiles.order.schedule import Mode
from onewave.tiles.proof.table import HEADER_WORDS, MAGIC, TaskTable, lower
from onewave.tiles.proof.verify import verify


def table_of(name: str = "chain", mode: Mode = Mode.STATIC, policy: str = "row") -> TaskTable:
    graph = CHAINS[name]
    return lower(verify(plan(graph, range(len(graph.tasks)), policy, workers=3, mode=mode)))


def resealed(words: np.ndarray) -> np.ndarray:
    """The words with their checksum made right again."""
    raw = words.astype("<i4")
    raw[HEADER_WORDS - 1] = 0
    value = zlib.crc32(raw[HEADER_WORDS:].tobytes(), zlib.crc32(raw[: HEADER_WORDS - 1].tobytes()))
    raw[HEADER_WORDS - 1] = value - (1 << 32) if value >> 31 else value
    return raw.astype(np.int32)


def test_only_a_verified_schedule_is_lowered():
    graph = CHAINS["chain"]
    schedule = plan(graph, range(len(graph.tasks)), workers=3)
    for other in (schedule, graph, None):
        with pytest.raises(UnverifiedError, match="verify"):
            lower(other)
    with pytest.raises(TypeError):
        lower(schedule)


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("mode", list(Mode))
def test_words_bytes_and_files_come_back_the_same(name, mode, tmp_path):
    table = table_of(name, mode)
    words = table.to_words()
    assert words.dtype == np.int32
    assert words[:4].tolist() == [MAGIC, 1, HEADER_WORDS, len(words)]
    (tmp_path / "t.npy").write_bytes(table.to_npy())
    for copy in (
        TaskTable.from_words(words),
        TaskTable.from_bytes(table.to_bytes()),
        TaskTable.load(tmp_path / "t.npy"),
    ):
        assert np.array_equal(copy.to_words(), words)
        assert copy.opcode_names == table.opcode_names
        assert verify_table(copy)
    assert np.array_equal(np.load(tmp_path / "t.npy"), words)


def test_a_row_says_what_the_task_says():
    graph = CHAINS["chain"]
    table = table_of("chain")
    for row in range(table.num_tasks):
        task = graph.tasks[int(table.task[row])]
        tiles = table.tile[table.start[row] : table.start[row + 1]].tolist()
        reads = int(table.num_reads[row])
        assert tiles[:reads] == [graph.tile_number(tile) for tile in task.reads]
        assert tiles[reads:] == [graph.tile_number(tile) for tile in task.writes]
        assert table.name(row) == f"{task.name}#{task.id}"
    assert table.phase_names == ("gemm0", "gemm1")


def test_the_layout_can_be_read_by_hand():
    # One task of a 2 x 2 x 2 GEMM in one tile: no waits, no posts.
    table = lower(verify(plan(gemm(2, 2, 2, tile=(2, 2, 2)), [0], workers=1, co_resident=1)))
    words = table.to_words().tolist()
    assert words[4:16] == [0, 1, 1, 1, 1, 3, 3, 0, 3, 0, 0, len('{"opcodes": ["gemm"], "phases": ["gemm"]}')]
    assert words[20:22] == [0, 1]  # queue starts
    assert words[22] == 0  # the queue's one entry
    assert words[23:33] == [0, 0, 0, 0, 2, 1, 0, 0, 0, 0]  # task
    assert words[33:39] == [0, 0, 1, 1, 2, 2]  # (slot, tile) of A, B, C


def test_any_flipped_word_is_noticed():
    words = table_of("gemm").to_words()
    for at in range(len(words)):
        broken = words.copy()
        broken[at] ^= 1 << (at % 31)
        with pytest.raises(InvalidArgumentError, match="task table"):
            TaskTable.from_words(broken)


def test_a_table_with_a_good_checksum_and_bad_numbers_never_gets_past_reading_and_proving():
    rng = np.random.default_rng(3)
    words = table_of("chain").to_words()
    refused: list[str] = []
    for _ in range(1500):
        broken = words.copy()
        at = int(rng.integers(len(words)))
        broken[at] = rng.choice([-1, 0, 1, 7, 1000, 2**31 - 1, -(2**31)])
        try:
            verify_table(TaskTable.from_words(resealed(broken)))
        except (InvalidArgumentError, VerificationError) as error:
            refused.append(str(error))
    assert len(refused) > 500
    assert not any("\n" in message for message in refused)


@pytest.mark.parametrize("data", [b"", b"abc", b"\0" * 80, b"\xff" * 400], ids=["nothing", "no words", "zeros", "ones"])
def test_bytes_that_are_no_table_are_refused_in_one_line(data, tmp_path):
    with refused(InvalidArgumentError):
        TaskTable.from_bytes(data)
    (tmp_path / "x.npy").write_bytes(data)
    with pytest.raises(InvalidArgumentError):
        TaskTable.load(tmp_path / "x.npy")


def test_files_that_are_missing_or_hold_other_arrays_are_refused(tmp_path):
    np.save(tmp_path / "floats.npy", np.zeros(100))
    np.save(tmp_path / "matrix.npy", np.zeros((10, 10), dtype=np.int32))
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    np.savez(tmp_path / "many.npz", a=np.zeros(3))
    for name in ("floats.npy", "matrix.npy", "objects.npy", "many.npz", "missing.npy", "."):
        with pytest.raises(InvalidArgumentError):
            TaskTable.load(tmp_path / name)


@pytest.mark.parametrize("mode", list(Mode))
def test_a_table_is_proved_against_the_program_it_came_from(mode):
    graph = CHAINS["ffn"]
    proved = verify(plan(graph, range(len(graph.tasks)), "row", workers=3, mode=mode))
    table = lower(proved)
    program = proved.schedule.program
    assert verify_table(table, program)
    for wrong in (
        dataclasses.replace(table, tile=np.roll(table.tile, 1)),
        dataclasses.replace(table, opcode=np.roll(table.opcode, 1)),
        dataclasses.replace(table, task=np.zeros_like(table.task)),
    ):
        with pytest.raises((InvalidArgumentError, VerificationError)):
            verify_table(wrong, program)


def test_two_live_tiles_put_in_one_slot_are_a_race_once_the_program_is_known():
    graph = CHAINS["ffn"]
    proved = verify(plan(graph, range(len(graph.tasks)), "row", workers=3))
    table = lower(proved)
    gate, up = (graph.tile_number((name, (0, 0))) for name in ("gate_out", "up_out"))
    slot_of_gate = int(table.slot[table.tile == gate][0])
    crowded = dataclasses.replace(table, slot=np.where(table.tile == up, slot_of_gate, table.slot))
    with pytest.raises(VerificationError) as caught:
        verify_table(crowded, proved.schedule.program)
    assert caught.value.kind == "race"


def test_a_wrong_total_is_a_wrong_count():
    table = table_of("chain")
    totals = table.totals.copy()
    totals[0] += 1
    with pytest.raises(VerificationError) as caught:
        verify_table(dataclasses.replace(table, totals=totals))
    assert (caught.value.kind, caught.value.witness["counter"]) == ("count", 0)
