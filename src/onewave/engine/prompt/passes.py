"""Packed prompt passes: chunks of several prompts in one forward pass, replayed from CUDA graphs.

A graph is captured for a number of tokens, a bucket. How many sequences there are, how long they are and where they lie
in the cache is read by kernels from words on the device, so one graph serves every mix. A pass is filled up to its
bucket with tokens that go to a spare slot; a row's bits depend on its own sequence alone, so a pass gives the same
logits packed or alone, whole or in chunks, from a graph or without one. A short chunk alone behind many cached tokens
has a bucket of its own, of one sequence: then attention shares its keys among the SMs (ops/attention/split).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from onewave.gpu.scratch import recording_stream
from onewave.memory.kv_cache import KVCache
from onewave.models.batch import Batch, PromptRows
from onewave.models.llama import Llama
from onewave.ops.attention.split.plan import MAX_TOKENS, MIN_KEYS

MAX_SEQUENCES = 16
"""Sequences of one pass."""
LARGEST_BUCKET = 2048
"""Tokens up to which passes are replayed from graphs."""


def _buckets() -> tuple[int, ...]:
    """Sizes at most a quarter apart, powers of two among them, whose tiles are full. One row alone would run other
    kernels than several, so the smallest is 2."""
    sizes = {2, 3, 4, 5, 6, 7, LARGEST_BUCKET}
    for power in range(3, LARGEST_BUCKET.bit_length() - 1):
        sizes |= {quarter << (power - 2) for quarter in (4, 5, 6, 7)}
    return tuple(sorted(sizes))


BUCKETS = _buckets()


def bucket_of(num_tokens: int) -> int:
    """Return the tokens that a pass of num_tokens is filled up to; beyond the largest bucket their own number."""
    return next((size for size in BUCKETS if size >= num_tokens), num_tokens)


def sequences_of(size: int) -> int:
    """Return the sequences that a pass of so many tokens can hold: an even number, so that all words are aligned."""
    return min(MAX_SEQUENCES, size + size % 2)


@dataclass(frozen=True)
class PromptChunk:
    """Consecutive tokens of one prompt. start: tokens of it that lie in the cache already."""

    slot: int
    token_ids: Sequence[int]
    start: int = 0

    @property
    def end(self) -> int:
        """Tokens in the cache after the pass."""
        return self.start + len(self.token_ids)


class _HostWords:
    """A pass's words in pinned memory, and the parts of PromptRows in them as arrays. sent: once they were copied."""

    def __init__(self, size: int, sequences: int) -> None:
        self.words = torch.zeros(PromptRows.num_words(size, sequences), dtype=torch.int64, pin_memory=True)
        self.whole: np.ndarray[tuple[int], np.dtype[np.int64]] = self.words.numpy()
        self.parts = tuple(part.numpy() for part in PromptRows.of_words(self.words, size, sequences))
        self.sent = torch.cuda.Event()

    def fill(self, chunks: Sequence[PromptChunk], spare_slot: int) -> None:
        """Write the words of chunks, and of the spare slot what is left."""
        token_ids, positions, slots, sequences, last, starts_q, starts_k = self.parts
        self.whole[:] = 0
        slots[:] = sequences[:] = spare_slot
        at = keys = 0
        for index, chunk in enumerate(chunks):
            end = at + len(chunk.token_ids)
            token_ids[at:end] = chunk.token_ids
            positions[at:end] = np.arange(chunk.start, chunk.end)
            slots[at:end] = sequences[index] = chunk.slot
            last[index] = end - 1
            at, keys = end, keys + chunk.end
            starts_q[index + 1 :], starts_k[index + 1 :] = at, keys


@dataclass
class _Bucket:
    """State shared by passes of one size. host: two, so that one is written while the other is on its way. graph,
    logits: from the second pass on."""

    words: Tensor
    batch: Batch
    host: tuple[_HostWords, _HostWords]
    graph: torch.cuda.CUDAGraph | None = None
    logits: Tensor | None = None

    def next_host(self) -> _HostWords:
        """The one that was written before the other."""
        self.host = self.host[1], self.host[0]
        return self.host[0]


class PromptPasses:
    """Runs packed passes over one KV cache. spare_slot: where tokens go that only fill a pass up.

    use_graphs: capture a bucket when it is needed for the second time; the first pass compiles kernels and allocates
    what libraries keep, neither of which may happen in a capture. Graphs share one memory pool.
    """

    def __init__(self, model: Llama, kv: KVCache, *, spare_slot: int, use_graphs: bool) -> None:
        self._model, self._kv, self._spare_slot, self._use_graphs = model, kv, spare_slot, use_graphs
        self._buckets: dict[tuple[int, bool], _Bucket] = {}
        self._pool = torch.cuda.graph_pool_handle() if use_graphs else None

    def run(self, chunks: Sequence[PromptChunk], *, each: Callable[[int, Tensor], object] | None = None) -> Tensor:
        """Run up to MAX_SEQUENCES chunks. Returns float32 [chunks, vocab] of each one's last token, valid until the
        next call. each: see Llama.forward."""
        num_tokens = sum(len(chunk.token_ids) for chunk in chunks)
        size = bucket_of(max(num_tokens, BUCKETS[0]))
        keeps = self._use_graphs and size <= LARGEST_BUCKET
        kind = size, size <= MAX_TOKENS and len(chunks) == 1 and chunks[0].start >= MIN_KEYS
        bucket = self._buckets.get(kind) or self._new_bucket(*kind)
        host = bucket.next_host()
        host.sent.synchronize()  # of the pass before last, long ago
        host.fill(chunks, self._spare_slot)
        bucket.words.copy_(host.words, non_blocking=True)
        host.sent.record()
        if each is not None:

            def within(first: int, logits: Tensor) -> None:
                if first < num_tokens:
                    each(first, logits[: num_tokens - first])

            return self._model.forward(bucket.batch, self._kv, each=within)[: len(chunks)]
        if keeps and kind in self._buckets:
            if bucket.graph is None:
                self._capture(bucket)
            assert bucket.graph is not None
            assert bucket.logits is not None
            bucket.graph.replay()
            return bucket.logits[: len(chunks)]
        if keeps:
            self._buckets[kind] = bucket
        return self._model.forward(bucket.batch, self._kv)[: len(chunks)]

    def clear(self) -> None:
        """Forget all graphs: memory that they read is given back. Later ones need a pool of their own: PyTorch refuses
        one whose graphs are gone."""
        self._buckets.clear()
        self._pool = torch.cuda.graph_pool_handle() if self._use_graphs else None

    def _new_bucket(self, size: int, alone: bool) -> _Bucket:
        sequences = sequences_of(size)
        host = _HostWords(size, sequences), _HostWords(size, sequences)
        words = torch.zeros_like(host[0].words, device=self._model.device)
        rows = PromptRows.of_words(words, size, sequences)
        return _Bucket(words, Batch.packed(rows.first_sequence() if alone else rows), host)

    def _capture(self, bucket: _Bucket) -> None:
        device = self._model.device
        stream = recording_stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        graph = torch.cuda.CUDAGraph()
        # Other threads, a stream's reader for one, may use the GPU meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            bucket.logits = self._model.forward(bucket.batch, self._kv)
        bucket.graph = graph
