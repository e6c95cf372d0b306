"""The memories of ptx_in_numpy: bytes that know who may touch them, and who touched them last."""

from __future__ import annotations

import numpy as np


class Global:
    """Device memory: tensors with untouchable space between them."""

    def __init__(self, size: int = 1 << 21) -> None:
        self.bytes = np.full(size, 0xFF, np.uint8)
        self.readable, self.writable = np.zeros(size, bool), np.zeros(size, bool)
        self.end = 1 << 10

    def put(self, values: np.ndarray, *, writable: bool = False) -> int:
        """Copy an array's bytes in; returns the address."""
        raw = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        at = self.end
        self.end += (-(-len(raw) // 256) + 4) * 256
        assert self.end < len(self.bytes), "the emulated device memory is full"
        self.bytes[at : at + len(raw)] = raw
        (self.writable if writable else self.readable)[at : at + len(raw)] = True
        return at

    def get(self, at: int, like: np.ndarray) -> np.ndarray:
        return self.bytes[at : at + like.nbytes].view(like.dtype).reshape(like.shape).copy()


class Shared:
    """Shared memory in 4-byte words, with who touched each since the last barrier."""

    def __init__(self, size: int, threads: int) -> None:
        self.bytes = np.full(size, 0xFF, np.uint8)  # NaN until written
        words = size // 4
        self.epoch = 0
        self.written, self.writer = np.full(words, -1), np.full(words, -1)
        self.read, self.reader = np.full(words, -1), np.full(words, -1)
        self.in_flight = np.zeros(words, bool)
        self.groups: list[list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = [[]]

    def spans(self, addresses: np.ndarray, width: int) -> np.ndarray:
        assert (addresses % min(width, 16) == 0).all()
        return addresses[:, None].astype(np.int64) + np.arange(width)

    def check(self, addresses: np.ndarray, width: int, threads: np.ndarray, *, store: bool) -> None:
        """Raise on a race with another thread, then note the access."""
        words = self.spans(addresses, width)[:, ::4] // 4
        who = np.broadcast_to(threads[:, None], words.shape)
        assert not self.in_flight[words].any(), "a copy into these words is still in flight"
        assert not ((self.written[words] == self.epoch) & (self.writer[words] != who)).any(), "no barrier since a write"
        if store:
            race = (self.read[words] == self.epoch) & (self.reader[words] != who)
            assert not race.any(), "no barrier since a read"
            self.written[words], self.writer[words] = self.epoch, who
        else:
            before = (self.read[words] == self.epoch) & (self.reader[words] != who)
            shared = words[before]
            self.reader[words] = who
            # Several threads of this very access may read a word, and others have read it before: then it is nobody's.
            self.reader[words[self.reader[words] != who]] = -2
            self.reader[shared] = -2
            self.read[words] = self.epoch

    def wait(self, pending: int) -> None:
        """Finish all groups but the last `pending`."""
        while len(self.groups) - 1 > pending:
            for spans, data, threads in self.groups.pop(0):
                self.bytes[spans] = data
                words = spans[:, ::4] // 4
                self.in_flight[words] = False
                self.written[words], self.writer[words] = self.epoch, threads[:, None]
