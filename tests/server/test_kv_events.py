"""Block events over ZeroMQ, read as a router reads them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kit.serving import tiny_llm
from onewave.base.errors import InvalidArgumentError
from onewave.engine.params import SamplingParams
from onewave.memory.block_pool import AllBlocksCleared, BlockPool, BlockRemoved, BlockStored, next_key
from onewave.server.kv_events import KvEventPublisher

zmq = pytest.importorskip("zmq", reason="block events need onewave[serve]")
msgpack = pytest.importorskip("msgpack", reason="block events need onewave[serve]")


class Router:
    """Subscribes to a publisher, and asks for what it missed."""

    def __init__(self, directory: Path) -> None:
        self.events, self.replay = (f"ipc://{directory}/{name}" for name in ("events", "replay"))
        self.context = zmq.Context()
        self.subscriber, self.asker = self.context.socket(zmq.SUB), self.context.socket(zmq.DEALER)
        self.subscriber.subscribe("kv")

    def join(self, publisher: KvEventPublisher) -> None:
        """Connect, and return once what is put arrives."""
        self.subscriber.connect(self.events)
        while not self.subscriber.poll(20):
            publisher.put(AllBlocksCleared())
        publisher.put(BlockRemoved(b"joined".rjust(16)))
        while self.next_batch()[1][-1][0] != "BlockRemoved":
            pass

    def next_batch(self) -> tuple[int, Any]:
        assert self.subscriber.poll(60_000)
        topic, sequence, packed = self.subscriber.recv_multipart()
        _, events, rank = msgpack.unpackb(packed)
        assert (topic, rank) == (b"kv", 0)
        return int.from_bytes(sequence, "big"), events

    def since(self, number: int) -> list[tuple[int, Any]]:
        self.asker.connect(self.replay)
        self.asker.send_multipart((b"", number.to_bytes(8, "big")))
        found = []
        while True:
            assert self.asker.poll(60_000)
            _, sequence, packed = self.asker.recv_multipart()
            if not packed:
                assert int.from_bytes(sequence, "big", signed=True) == -1
                return found
            found.append((int.from_bytes(sequence, "big"), msgpack.unpackb(packed)[1]))


@pytest.fixture
def router(tmp_path: Path) -> Iterator[Router]:
    made = Router(tmp_path)
    yield made
    made.context.destroy(linger=0)


def test_events_come_in_order_and_are_sent_again(router: Router) -> None:
    publisher = KvEventPublisher(router.events, replay=router.replay, topic="kv", form="arrays")
    router.join(publisher)
    number, seen = None, []
    for size in range(5):
        publisher.put(BlockStored(b"k" * 16, None, tuple(range(size)), size))
        sequence, events = router.next_batch()
        assert number is None or sequence == number + 1
        number = sequence
        seen += [(sequence, events)]
        assert events[0][:5] == ["BlockStored", [int.from_bytes(b"k" * 8, "big")], None, list(range(size)), size]
    assert router.since(seen[2][0]) == seen[2:]
    assert router.since(number + 1) == []
    publisher.close()


def test_an_asker_that_reads_late_misses_nothing(router: Router) -> None:
    publisher = KvEventPublisher(router.events, replay=router.replay, topic="kv")
    router.asker.setsockopt(zmq.RCVHWM, 1)
    batch = msgpack.packb([0.0, [bytes(1 << 14)], 0])
    publisher._kept.extend((number.to_bytes(8, "big"), batch) for number in range(1500))  # pyright: ignore[reportPrivateUsage]
    router.asker.connect(router.replay)
    router.asker.send_multipart((b"", bytes(8)))
    other = Router(Path(router.replay.removeprefix("ipc://")).parent)
    while not other.since(1499):  # asked behind the first, and so answered once all has been sent
        pass
    found = list[bytes]()
    while len(found) <= 1500 and router.asker.poll(10_000):
        found.append(router.asker.recv_multipart()[1])
    other.context.destroy(linger=0)
    publisher.close()
    assert found == [*(number.to_bytes(8, "big") for number in range(1500)), b"\xff" * 8]


def test_what_an_engine_caches_is_what_a_router_learns(router: Router, tmp_path: Path) -> None:
    publisher = KvEventPublisher(router.events, replay=router.replay, topic="kv")
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    with tiny_llm(tmp_path / "model") as llm:
        size = llm.runner.block_size
        llm.run_between_steps(lambda engine: engine and engine.listen(publisher.put))
        prompt = [7 * i % 200 for i in range(3 * size + 5)]
        other = [*prompt[: 2 * size], *range(size + 3)]
        for ids in (prompt, prompt, other):
            llm.generate({"prompt_token_ids": ids}, params)
    publisher.put(AllBlocksCleared())
    batches: list[tuple[int, Any]] = []
    while not batches or batches[-1][1][-1] != {"type": "AllBlocksCleared"}:
        batches = router.since(0)
    publisher.close()
    # Chains of blocks, each begun at a prompt's begin or at a block that is known; no block is stored twice.
    prefixes: dict[int | None, list[int]] = {None: []}
    for event in [event for _, events in batches for event in events if event["type"] == "BlockStored"]:
        parent, ids = event["parent_block_hash"], event["token_ids"]
        assert (event["block_size"], event["medium"]) == (size, "GPU")
        assert len(ids) == size * len(event["block_hashes"])
        for at, block in enumerate(event["block_hashes"]):
            assert block not in prefixes
            prefixes[block] = prefixes[parent] + ids[at * size : (at + 1) * size]
            parent = block
    ends = [[], *(prompt[: count * size] for count in (1, 2, 3)), other[: 3 * size]]
    assert sorted(prefixes.values()) == sorted(ends)


def test_an_evicted_block_is_removed_by_the_hash_it_was_stored_by(router: Router) -> None:
    publisher = KvEventPublisher(router.events, replay=router.replay, topic="kv")
    pool = BlockPool(2, 2, listener=publisher.put)
    taken = pool.take(2)
    first = next_key(b"root", [1, 2])
    pool.seal(taken[0], first, parent=None, token_ids=[1, 2])
    pool.seal(taken[1], next_key(first, [3, 4]), parent=first, token_ids=[3, 4])
    pool.release(taken)
    pool.take(2)
    pool.clear()
    events: list[Any] = []
    while not events or events[-1] != {"type": "AllBlocksCleared"}:
        events = [event for _, batch in router.since(0) for event in batch]
    publisher.close()
    stored = [block for event in events if event["type"] == "BlockStored" for block in event["block_hashes"]]
    removed = [block for event in events if event["type"] == "BlockRemoved" for block in event["block_hashes"]]
    assert len(set(stored)) == 2
    assert removed == stored[::-1]  # the last of a prefix goes first


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"endpoint": "tcp://*:nowhere"}, "kv_events: tcp://"),
        ({"endpoint": "nonsense"}, "kv_events: nonsense"),
        ({"endpoint": "ipc:///tmp/x", "form": "xml"}, "kv_events_form"),
        ({"endpoint": "ipc:///nowhere/at/all"}, "kv_events: ipc"),
    ],
)
def test_an_endpoint_that_can_not_be_is_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        KvEventPublisher(**options)
