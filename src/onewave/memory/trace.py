"""A trace of allocations, as JSON lines: the first names the device, each other one is a block or its end.

{"schema": 1, "device": "cpu", "source": "what was recorded"}
{"op": "allocate", "id": 0, "bytes": 4096, "us": 12}
{"op": "free", "id": 0, "us": 40}
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

from onewave.base.errors import InvalidArgumentError, shown
from onewave.memory.plan import Lifetime


class Event(NamedTuple):
    """A block begins (num_bytes) or ends (None). us: microseconds since the trace began."""

    block: int
    num_bytes: int | None
    us: int


@dataclass
class Trace:
    """Events in order. Each block begins once and ends at most once. source: what was recorded."""

    device: str
    source: str = ""
    events: list[Event] = field(default_factory=list[Event])

    @property
    def num_allocations(self) -> int:
        """Blocks that begin."""
        return sum(event.num_bytes is not None for event in self.events)

    @property
    def peak_bytes(self) -> int:
        """The most bytes that live at once, as they were asked for."""
        live: dict[int, int] = {}
        now = most = 0
        for block, num_bytes, _ in self.events:
            if num_bytes is None:
                now -= live.pop(block)
            else:
                live[block] = num_bytes
                now += num_bytes
                most = max(most, now)
        return most

    def lifetimes(self) -> list[Lifetime]:
        """Each block's, in the order of their beginnings; steps are events."""
        begun: dict[int, tuple[int, int]] = {}
        ends: dict[int, int] = {}
        for step, (block, num_bytes, _) in enumerate(self.events):
            if num_bytes is None:
                ends[block] = step
            else:
                begun[block] = (num_bytes, step)
        last = len(self.events)
        return [Lifetime(size, first, ends.get(block, last)) for block, (size, first) in begun.items()]

    def write(self, path: Path) -> None:
        """Raises InvalidArgumentError where the file can't be written."""
        lines: list[dict[str, Any]] = [{"schema": 1, "device": self.device, "source": self.source}]
        for block, num_bytes, us in self.events:
            begins = {"op": "allocate", "id": block, "bytes": num_bytes, "us": us}
            lines.append(begins if num_bytes is not None else {"op": "free", "id": block, "us": us})
        try:
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        except OSError as error:
            raise InvalidArgumentError("trace", got=f"{path} ({error.strerror})", allowed="a file to write") from error

    @classmethod
    def read(cls, path: Path) -> "Trace":
        """Raises InvalidArgumentError, naming the line, for what is no trace."""
        try:
            lines = path.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidArgumentError("trace", got=f"{path} ({error})", allowed="a file of JSON lines") from error
        parsed = list(_objects(lines, path))
        if not parsed or parsed[0].get("schema") != 1 or not isinstance(parsed[0].get("device"), str):
            got = f"{path}:1: {shown(lines[:1])}"
            raise InvalidArgumentError("trace", got=got, allowed='{"schema": 1, "device": ...} first')
        trace = cls(parsed[0]["device"], str(parsed[0].get("source", "")))
        live: set[int] = set()
        seen: set[int] = set()
        for number, line in enumerate(parsed[1:], start=2):
            found: list[Any] = [line.get(name) for name in ("op", "id", "bytes", "us")]
            op, block, num_bytes, us = found
            begins = op == "allocate" and _is_count(num_bytes) and block not in seen
            if not (_is_count(block) and _is_count(us) and (begins or (op == "free" and block in live))):
                allowed = 'an "allocate" of a new id with its bytes, or the one "free" of it, at a time "us"'
                raise InvalidArgumentError("trace", got=f"{path}:{number}: {shown(line)}", allowed=allowed)
            (live.add if begins else live.remove)(block)
            seen.add(block)
            trace.events.append(Event(block, num_bytes if begins else None, us))
        return trace


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _objects(lines: Sequence[str], path: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(lines, start=1):
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise InvalidArgumentError("trace", got=f"{path}:{number}: {shown(line)}", allowed="a JSON object a line")
        yield cast("dict[str, Any]", found)
