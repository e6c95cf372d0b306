"""The task table: a proved schedule as int32 words, which a persistent kernel walks and `interpret` runs.

Layout, version 1, all words int32, little-endian on disk. Sections follow the header in this order, without gaps:

header, 20 words
  0 magic 0x4254574F ("OWTB")   1 version   2 header words (20)   3 words in all   4 mode: 0 static, 1 ticket
  5 queues   6 workers that run at once   7 tasks   8 queue entries   9 slots   10 tiles   11 counters   12 operands
  13 waits   14 posts   15 bytes of names   16..18 zero   19 CRC-32 of all words but this one
queue starts   queues + 1: queue w owns entries start[w] to start[w + 1]; ticket mode has one queue, the ticket order
queue entries  rows of tasks, in the order of a worker (or of the tickets)
tasks          10 words a row, rows in an order that happens-before allows:
               0 the task's number in its graph   1 opcode   2 phase   3 first operand   4 reads   5 writes
               6 first wait   7 waits   8 first post   9 posts
operands       2 words each, a task's reads before its writes: slot (where it lies), tile number (what it is)
waits          2 words each: counter, value
posts          2 words each: counter, amount
totals         1 word a counter: what one run of the table posts to it
names          UTF-8 JSON {"opcodes": [...], "phases": [...]}, padded with zeros to whole words

A worker takes a row, spins until each of its waits holds, runs the opcode, makes what it wrote visible, and adds to the
counters of its posts. Counters are never reset: in epoch e (the e-th run, from 0, each starting when the one before has
ended) a wait holds when counter >= e * total + value. Counters of 32 bits wrap around in a long life: take the
difference of the two sides and look at its sign.
"""

from __future__ import annotations

import io
import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError
from typing import Any, cast
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from onewave.base.errors import InvalidArgumentError, UnverifiedError
from onewave.tiles.graph.graph import entries_of
from onewave.tiles.order.schedule import Csr, Ints, Mode
from onewave.tiles.proof.verify import VerifiedSchedule

MAGIC, VERSION, HEADER_WORDS, TASK_WORDS = 0x4254574F, 1, 20, 10
MAX_INT32 = 2**31 - 1
MAX_WORDS = 1 << 29
# Errors that NumPy raises, too, of files that are not its own.
_OTHERS = (BadZipFile, TokenError)


@dataclass(frozen=True)
class TaskTable:
    """A task table, its sections as int64 arrays. `to_words` and `from_words` are its int32 form.

    queue_start, queue: see the layout. task, opcode, phase, num_reads: [rows]. start: [rows + 1], bounds of each row's
    operands. slot, tile: [operands]. waits, posts: by row. totals: [counters].
    """

    mode: Mode
    co_resident: int
    num_slots: int
    num_tiles: int
    queue_start: Ints
    queue: Ints
    task: Ints
    opcode: Ints
    phase: Ints
    start: Ints
    num_reads: Ints
    slot: Ints
    tile: Ints
    waits: Csr
    posts: Csr
    totals: Ints
    opcode_names: tuple[str, ...]
    phase_names: tuple[str, ...]

    @property
    def num_tasks(self) -> int:
        """Rows."""
        return len(self.task)

    @property
    def num_counters(self) -> int:
        """Counters, all 0 before epoch 0."""
        return len(self.totals)

    @property
    def queues(self) -> tuple[Ints, ...]:
        """Each queue's rows."""
        return tuple(
            self.queue[self.queue_start[w] : self.queue_start[w + 1]] for w in range(len(self.queue_start) - 1)
        )

    @property
    def is_write(self) -> npt.NDArray[np.bool_]:
        """For each operand, whether its task writes it."""
        place = np.arange(len(self.slot)) - np.repeat(self.start[:-1], np.diff(self.start))
        return place >= np.repeat(self.num_reads, np.diff(self.start))

    def name(self, row: int) -> str:
        """Name a row for people: its opcode and its number in the graph."""
        return f"{self.opcode_names[int(self.opcode[row])]}#{int(self.task[row])}"

    def to_words(self) -> npt.NDArray[np.int32]:
        """The int32 words of the layout. Raises InvalidArgumentError when a number needs more than 31 bits."""
        names = json.dumps({"opcodes": self.opcode_names, "phases": self.phase_names}).encode()
        padded = np.frombuffer(names + b"\0" * (-len(names) % 4), dtype="<i4").astype(np.int64)
        num_writes = np.diff(self.start) - self.num_reads
        ranges = [(side.start[:-1], np.diff(side.start)) for side in (self.waits, self.posts)]
        columns = [self.task, self.opcode, self.phase, self.start[:-1], self.num_reads, num_writes]
        rows = np.stack([*columns, *ranges[0], *ranges[1]], axis=1)
        body = [
            self.queue_start,
            self.queue,
            rows,
            np.stack((self.slot, self.tile), axis=1),
            np.stack((self.waits.first, self.waits.second), axis=1),
            np.stack((self.posts.first, self.posts.second), axis=1),
            self.totals,
            padded,
        ]
        flat = np.concatenate([part.reshape(-1) for part in body])
        header = np.zeros(HEADER_WORDS, dtype=np.int64)
        mode = 1 if self.mode is Mode.TICKET else 0
        header[:7] = (MAGIC, VERSION, HEADER_WORDS, HEADER_WORDS + len(flat), mode, len(self.queues), self.co_resident)
        sizes = (self.num_tasks, len(self.queue), self.num_slots, self.num_tiles, self.num_counters, len(self.slot))
        header[7:16] = (*sizes, len(self.waits.first), len(self.posts.first), len(names))
        words = np.concatenate((header, flat))
        if len(words) > MAX_WORDS or (len(words) and max(int(words.max()), -int(words.min())) > MAX_INT32):
            raise InvalidArgumentError("task table", got="a number above 31 bits", allowed="smaller schedules")
        out = words.astype("<i4")
        out[-1 + HEADER_WORDS] = _checksum(out)
        return out.astype(np.int32)

    def to_bytes(self) -> bytes:
        """The words as little-endian bytes."""
        return self.to_words().astype("<i4").tobytes()

    def to_npy(self) -> bytes:
        """The words as a .npy file's bytes."""
        stream = io.BytesIO()
        np.save(stream, self.to_words())
        return stream.getvalue()

    @staticmethod
    def load(path: Path | str) -> TaskTable:
        """Read a .npy file of what `to_npy` made. Raises InvalidArgumentError for anything else."""
        try:
            with open(path, "rb") as stream:
                words = np.load(stream)
        except (OSError, ValueError, EOFError, MemoryError, OverflowError, SyntaxError, *_OTHERS) as error:
            reason = getattr(error, "strerror", None) or " ".join(str(error).split())[:200]
            raise InvalidArgumentError("task table", got=f"{path}: {reason}", allowed="a .npy file of int32") from None
        if not isinstance(words, np.ndarray):
            raise InvalidArgumentError("task table", got=f"{path}: an archive", allowed="a .npy file of int32")
        return TaskTable.from_words(cast("npt.NDArray[np.int32]", words))

    @staticmethod
    def from_bytes(data: bytes) -> TaskTable:
        """Read what `to_bytes` wrote. Raises InvalidArgumentError."""
        if len(data) % 4:
            raise _bad(f"{len(data)} bytes", "whole 4-byte words")
        return TaskTable.from_words(np.frombuffer(data, dtype="<i4").astype(np.int32))

    @staticmethod
    def from_words(words: npt.NDArray[np.int32]) -> TaskTable:
        """Read int32 words. All is checked but that no order deadlocks or races. Raises InvalidArgumentError."""
        return _Parser(words).table()


def _bad(got: str, allowed: str) -> InvalidArgumentError:
    return InvalidArgumentError("task table", got=got, allowed=allowed)


def _checksum(words: npt.NDArray[Any]) -> int:
    """CRC-32 of all words but the checksum's own, as a signed number."""
    raw = words.astype("<i4").tobytes()
    at = 4 * (HEADER_WORDS - 1)
    value = zlib.crc32(raw[at + 4 :], zlib.crc32(raw[:at]))
    return value - (1 << 32) if value >= 1 << 31 else value


class _Parser:
    """Reads words section by section, checking as it goes."""

    def __init__(self, words: npt.NDArray[np.int32]):
        if words.dtype != np.int32 or words.ndim != 1:
            raise _bad(f"{words.dtype} of {words.ndim} dimensions", "one dimension of int32")
        if len(words) < HEADER_WORDS:
            raise _bad(f"{len(words)} words", f"{HEADER_WORDS} or more")
        head = [int(word) for word in words[:HEADER_WORDS]]
        if head[0] != MAGIC:
            raise _bad(f"magic {head[0]:#x}", f"{MAGIC:#x}")
        if head[1] != VERSION or head[2] != HEADER_WORDS:
            raise _bad(f"version {head[1]} with {head[2]} header words", f"version {VERSION} with {HEADER_WORDS}")
        if head[3] != len(words):
            raise _bad(f"{len(words)} words", f"{head[3]}, as the header says")
        if head[19] != _checksum(words):
            raise _bad("a checksum that does not match", "the words as they were written")
        if head[4] not in (0, 1) or any(size < 0 for size in head[5:16]) or any(head[16:19]):
            raise _bad("a header out of range", "mode 0 or 1, sizes of 0 or more, zeros in words 16 to 18")
        self.words = words.astype(np.int64)
        self.head = head
        self.at = HEADER_WORDS

    def take(self, rows: int, width: int = 1) -> Ints:
        part = self.words[self.at : self.at + rows * width]
        if len(part) != rows * width:
            raise _bad("sections longer than the table", "sizes that add up")
        self.at += rows * width
        return part if width == 1 else part.reshape(rows, width)

    def table(self) -> TaskTable:
        mode = Mode.TICKET if self.head[4] else Mode.STATIC
        queues, co_resident, tasks, entries, slots, tiles, counters, operands, waits, posts, names = self.head[5:16]
        if slots > operands:
            raise _bad(f"{slots} slots", f"up to {operands}, the operands: no slot goes unused")
        if mode is Mode.TICKET and queues != 1:
            raise _bad(f"{queues} queues in ticket mode", "1")
        queue_start, queue = self.take(queues + 1), self.take(entries)
        rows, places = self.take(tasks, TASK_WORDS), self.take(operands, 2)
        wait, post, totals = self.take(waits, 2), self.take(posts, 2), self.take(counters)
        opcodes, phases = self.names(names)
        if self.at != len(self.words):
            raise _bad("words after the last section", "sizes that add up")
        self.check_starts("queue starts", queue_start, entries)
        for what, values, limit in (
            ("queue entry", queue, tasks),
            ("opcode", rows[:, 1], len(opcodes)),
            ("phase", rows[:, 2], len(phases)),
            ("slot", places[:, 0], slots),
            ("tile", places[:, 1], tiles),
            ("counter", wait[:, 0], counters),
            ("counter", post[:, 0], counters),
            ("task number", rows[:, 0], MAX_INT32),
            ("reads", rows[:, 4], MAX_INT32),
            ("writes", rows[:, 5], MAX_INT32),
        ):
            if len(values) and not (int(values.min()) >= 0 and int(values.max()) < limit):
                raise _bad(f"{what} out of range", f"0 to {limit - 1}")
        start = self.starts("operands", rows[:, 3], rows[:, 4] + rows[:, 5], operands)
        return TaskTable(
            mode=mode,
            co_resident=co_resident,
            num_slots=slots,
            num_tiles=tiles,
            queue_start=queue_start,
            queue=queue,
            task=rows[:, 0],
            opcode=rows[:, 1],
            phase=rows[:, 2],
            start=start,
            num_reads=rows[:, 4],
            slot=places[:, 0],
            tile=places[:, 1],
            waits=Csr(self.starts("waits", rows[:, 6], rows[:, 7], waits), wait[:, 0], wait[:, 1]),
            posts=Csr(self.starts("posts", rows[:, 8], rows[:, 9], posts), post[:, 0], post[:, 1]),
            totals=totals,
            opcode_names=opcodes,
            phase_names=phases,
        )

    def check_starts(self, what: str, starts: Ints, end: int) -> None:
        if int(starts[0]) != 0 or int(starts[-1]) != end or (np.diff(starts) < 0).any():
            raise _bad(f"{what} out of order", f"0, rising, to {end}")

    def starts(self, what: str, first: Ints, count: Ints, end: int) -> Ints:
        found = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(count)))
        if (count < 0).any() or int(found[-1]) != end or not np.array_equal(found[:-1], first):
            raise _bad(f"{what} that do not follow each other", f"each row's after the last row's, {end} in all")
        return found

    def names(self, size: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        raw = self.take(-(-size // 4)).astype("<i4").tobytes()[:size]
        try:
            found = json.loads(raw)
            opcodes, phases = found["opcodes"], found["phases"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise _bad("names that are no JSON of opcodes and phases", "what lower writes") from None
        if not all(isinstance(names, list) for names in (opcodes, phases)) or not all(
            isinstance(name, str) for name in [*opcodes, *phases]
        ):
            raise _bad("names that are no texts", "lists of texts")
        return tuple(opcodes), tuple(phases)


def lower(verified: VerifiedSchedule) -> TaskTable:
    """Write a proved schedule down as a table; nothing else is accepted.

    Rows stand in an order that happens-before allows, so that reading the rows one after the other means the same as
    the schedule. Raises UnverifiedError for what `verify` did not return.
    """
    if not isinstance(verified, VerifiedSchedule):  # pyright: ignore[reportUnnecessaryIsInstance] # callers may not type
        raise UnverifiedError(
            "lower", got=type(verified).__name__, allowed="a VerifiedSchedule", next="Call verify first."
        )
    schedule, order = verified.schedule, verified.order
    program, syncs = schedule.program, schedule.syncs
    n = program.num_tasks
    row_of = np.empty(n, dtype=np.int64)
    row_of[order] = np.arange(n)
    owner, accesses = entries_of(program.start, order)
    counts = np.diff(program.start)[order]
    # Reads before writes, whatever the program's own order inside a task.
    accesses = accesses[np.lexsort((program.is_write[accesses], owner))]
    slots, slot = np.unique(schedule.place[program.tile[accesses]], return_inverse=True)
    totals = np.zeros(syncs.num_counters, dtype=np.int64)
    np.add.at(totals, syncs.posts.first, syncs.posts.second)

    def moved(side: Csr) -> Csr:
        _, entries = entries_of(side.start, order)
        start = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(np.diff(side.start)[order])))
        return Csr(start, side.first[entries], side.second[entries])

    lengths = [len(queue) for queue in schedule.queues]
    return TaskTable(
        mode=schedule.mode,
        co_resident=schedule.co_resident,
        num_slots=len(slots),
        num_tiles=program.num_tiles,
        queue_start=np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(lengths, dtype=np.int64))),
        queue=row_of[np.concatenate([*schedule.queues, np.zeros(0, dtype=np.int64)])],
        task=order.copy(),
        opcode=(program.opcodes if len(program.opcodes) else np.zeros(n, dtype=np.int64))[order],
        phase=(program.phases if len(program.phases) else np.zeros(n, dtype=np.int64))[order],
        start=np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(counts))),
        num_reads=np.bincount(owner, weights=~program.is_write[accesses], minlength=n).astype(np.int64),
        slot=slot.reshape(-1).astype(np.int64),
        tile=program.tile[accesses],
        waits=moved(syncs.waits),
        posts=moved(syncs.posts),
        totals=totals,
        opcode_names=program.opcode_names,
        phase_names=program.phase_names,
    )
