"""Publishes which KV blocks are cached, as vLLM does, so that routers send a prompt where its prefix is.

A ZeroMQ PUB socket sends three frames: topic, sequence number (8 bytes, big-endian), and MessagePack of
`[seconds since 1970, events, 0]`. An event is a map with its `type`, or in the form "arrays" (vLLM before 0.23) a list
that begins with it:

    BlockStored       block_hashes, parent_block_hash, token_ids, block_size, lora_id, medium, lora_name
    BlockRemoved      block_hashes, medium
    AllBlocksCleared

A hash is the last 8 bytes of a block's key, unsigned. A second socket, ROUTER, answers a sequence number with all later
batches that are kept, and at the end with the number -1 and an empty frame.
"""

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from importlib import import_module
from queue import Empty, SimpleQueue
from typing import Any

from onewave.base.errors import InvalidArgumentError, UnsupportedError, check_one_of
from onewave.memory.block_pool import BlockEvent, BlockRemoved, BlockStored

FORMS = ("maps", "arrays")
_log = logging.getLogger("onewave.server")
_KEPT_BATCHES = 10_000
_MAX_BATCH = 1000
# Between two looks for askers, while no event comes.
_POLL_S = 0.05
_END = (-1).to_bytes(8, "big", signed=True)
_MEDIUM = "GPU"
_FIELDS = {
    "BlockStored": (
        "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name",
    ),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}  # fmt: skip


class KvEventPublisher:
    """Sends events from a thread of its own; `put` is a BlockPool's listener and never waits.

    endpoint: bound where it names every address (`tcp://*:5557`, `ipc://`), else connected to, as in vLLM. replay:
    where batches are asked for again. Raises InvalidArgumentError, and UnsupportedError without pyzmq or msgpack.
    """

    def __init__(self, endpoint: str, *, replay: str | None = None, topic: str = "", form: str = "maps") -> None:
        check_one_of("kv_events_form", form, FORMS)
        try:
            self._zmq, self._msgpack = (import_module(name) for name in ("zmq", "msgpack"))
        except ImportError as error:
            next = "In a clone: pip install -e '.[serve]'"
            raise UnsupportedError("kv_events", got=f"{error.name} not installed", next=next) from None
        self._form, self._topic = form, topic.encode()
        self._queue: SimpleQueue[BlockEvent | None] = SimpleQueue()
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=_KEPT_BATCHES)
        self._context: Any = self._zmq.Context()
        self._sockets: list[Any] = []
        binds = "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))
        try:
            self._publisher = self._open("kv_events", self._zmq.PUB, endpoint, binds=binds)
            self._replayer = (
                None if replay is None else self._open("kv_events_replay", self._zmq.ROUTER, replay, binds=True)
            )
        except InvalidArgumentError:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=self._run, name="onewave-kv-events", daemon=True)
        self._thread.start()

    def put(self, event: BlockEvent) -> None:
        """Publish an event after those before it."""
        self._queue.put(event)

    def close(self) -> None:
        """Send what was put, and close the sockets."""
        self._queue.put(None)
        self._thread.join()
        self._context.destroy(linger=1000)

    def _open(self, name: str, kind: int, endpoint: str, *, binds: bool) -> Any:
        made = self._context.socket(kind)
        if kind == self._zmq.ROUTER:  # else it drops, without a word, what an asker is slow to read
            made.setsockopt(self._zmq.SNDHWM, 0)
        try:
            (made.bind if binds else made.connect)(endpoint)
        except self._zmq.ZMQError as error:
            got = f"{endpoint[:100]} ({error})"
            raise InvalidArgumentError(
                name, got=got, allowed="tcp://*:PORT to bind, tcp://HOST:PORT, or ipc://"
            ) from None
        return made

    def _run(self) -> None:
        ended = False
        for number in itertools.count():
            batch: list[BlockEvent] = []
            while not batch and not ended:
                self._answer_replays()
                batch, ended = self._next_batch()
            if not batch:
                return
            sequence = number.to_bytes(8, "big")
            packed: bytes = self._msgpack.packb([time.time(), [self._shaped(e) for e in _merged(batch)], 0])
            self._publisher.send_multipart((self._topic, sequence, packed))
            self._kept.append((sequence, packed))

    def _next_batch(self) -> tuple[list[BlockEvent], bool]:
        """Events that are there, and whether none will come any more."""
        batch: list[BlockEvent] = []
        try:
            event = self._queue.get(timeout=_POLL_S)
            while event is not None and len(batch) < _MAX_BATCH:
                batch.append(event)
                event = self._queue.get_nowait()
            if event is not None:
                batch.append(event)
                return batch, False
        except Empty:
            return batch, False
        return batch, True

    def _answer_replays(self) -> None:
        while self._replayer is not None and self._replayer.poll(0):
            frames: Sequence[bytes] = self._replayer.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                _log.warning("kv events: a question that is no sequence number of 8 bytes")
                continue
            asker, _, first = frames
            for sequence, packed in [*self._kept, (_END, b"")]:
                if sequence >= first or sequence == _END:
                    self._replayer.send_multipart((asker, b"", sequence, packed))

    def _shaped(self, found: dict[str, Any]) -> Any:
        if self._form == "maps":
            return found
        return [found["type"], *(found[name] for name in _FIELDS[found["type"]])]


def _merged(events: Sequence[BlockEvent]) -> list[dict[str, Any]]:
    """Events as maps; blocks that follow one another in a prompt, and blocks that go together, are one event."""
    made: list[dict[str, Any]] = []
    last: BlockEvent | None = None
    for event in events:
        if isinstance(event, BlockStored):
            if isinstance(last, BlockStored) and event.parent == last.key:
                made[-1]["block_hashes"].append(_hash(event.key))
                made[-1]["token_ids"] += event.token_ids
            else:
                parent = None if event.parent is None else _hash(event.parent)
                values = ([_hash(event.key)], parent, list(event.token_ids), event.block_size, None, _MEDIUM, None)
                made.append(_map("BlockStored", *values))
        elif isinstance(event, BlockRemoved):
            if isinstance(last, BlockRemoved):
                made[-1]["block_hashes"].append(_hash(event.key))
            else:
                made.append(_map("BlockRemoved", [_hash(event.key)], _MEDIUM))
        else:
            made.append(_map("AllBlocksCleared"))
        last = event
    return made


def _map(kind: str, *values: Any) -> dict[str, Any]:
    return {"type": kind, **dict(zip(_FIELDS[kind], values, strict=True))}


def _hash(key: bytes) -> int:
    return int.from_bytes(key[-8:], "big")
