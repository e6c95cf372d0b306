"""Runs the model for the engine: prefill, decode, KV-cache room, CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from onewave.base.errors import CapacityError
from onewave.gpu.scratch import recording_stream
from onewave.memory.kv_cache import StaticKVCache
from onewave.memory.shortage import is_out_of_memory
from onewave.models.batch import Batch, StepRows
from onewave.models.llama import Llama

if TYPE_CHECKING:
    from onewave.engine.wave_decode import WaveDecoder

_SMALLEST_CAPACITY = 256
# Up to this many rows a decode step costs what its weights cost to read, however many rows are real.
_FREE_ROWS = 64


@dataclass(frozen=True)
class _DecodeGraph:
    """One captured decode step of a fixed number of rows, with the buffers it reads and writes. rotary: kept for its
    address, as the model may have made a longer table since."""

    graph: torch.cuda.CUDAGraph
    rows: StepRows
    logits: Tensor
    rotary: Tensor


class ModelRunner:
    """Owns the KV cache of one model. Sequences are known by their slot, 0 <= slot < max_num_seqs.

    decode: "graph" or "eager"; a CPU is always eager. wave: decode through it instead, one launch a step. With
    "graph" a decode step is replayed from a CUDA graph captured once per number of rows and cache size. The graph's
    number of rows is always max_num_seqs (rounded up to a power of two) as long as that is at most 64, filled up with
    idle rows: matrix kernels choose their summation order by the number of rows, so a fixed number is what makes a
    row's result independent of its neighbours. Nothing here waits for the device.
    """

    def __init__(
        self,
        model: Llama,
        *,
        max_num_seqs: int,
        max_model_len: int,
        decode: str = "graph",
        wave: WaveDecoder | None = None,
    ):
        self.model = model
        self.device = model.device
        self.vocab_size = model.config.vocab_size
        self.max_num_seqs, self.max_model_len = max_num_seqs, max_model_len
        self._on_cuda = self.device.type == "cuda"
        self.run_ahead = 1 if self._on_cuda else 0
        self._use_graphs = self._on_cuda and decode == "graph"
        self._wave = wave
        # Where the matrices lie that the wave reads, if not as plain ones.
        self.stream = None if wave is None else wave.stream
        self.decode_path = "wave" if wave is not None else decode if self._on_cuda else "eager"
        self._graphs: dict[int, _DecodeGraph] = {}
        self._bound: tuple[_DecodeGraph, Tensor] | None = None
        # Rows that only fill a graph up to its size write here.
        self._spare_slot = max_num_seqs
        self._kv: StaticKVCache | None = None
        # What the wave was bound to last.
        self._wave_kv: StaticKVCache | None = None

    @torch.inference_mode()
    def reserve(self, num_tokens: int) -> None:
        """Make room for sequences of num_tokens tokens; the cache grows by doubling or, where that finds no memory, to
        what is needed. Raises CapacityError."""
        if num_tokens > self.max_model_len:
            raise CapacityError(
                "sequence length", got=str(num_tokens), allowed=f"up to max_model_len={self.max_model_len}"
            )
        if self._kv is not None and num_tokens <= self._kv.capacity:
            return
        grown = self._larger_cache(num_tokens)
        if self._kv is not None:
            grown.copy_from(self._kv)
        # Captured graphs hold the old cache's addresses; so does the wave until it is bound again: now or, where this
        # is interrupted, before its next step.
        self._graphs.clear()
        self._bound = None
        self._kv = grown
        self._bind_wave()

    def _larger_cache(self, num_tokens: int) -> StaticKVCache:
        blocks = -(-num_tokens // _SMALLEST_CAPACITY) * _SMALLEST_CAPACITY
        wanted, needed = (min(self.max_model_len, size) for size in (_power_of_two(blocks), blocks))
        capacity = wanted
        while True:
            try:
                return self.model.new_cache(num_slots=self.max_num_seqs + 1, capacity=capacity)
            except CapacityError:
                if self._wave is not None and self._wave.release():
                    continue
                if capacity == needed:
                    raise
                capacity = needed

    def _bind_wave(self) -> None:
        if self._wave is not None and self._wave_kv is not self._kv:
            assert self._kv is not None
            self._wave.bind_cache(self._kv)
            self._wave_kv = self._kv

    @torch.inference_mode()
    def prefill(
        self, slot: int, token_ids: Sequence[int], *, each: Callable[[int, Tensor], object] | None = None
    ) -> Tensor:
        """Run a whole prompt into an empty slot.

        Returns float32 logits [1, vocab] of the last token. each: see Llama.forward; where memory is freed meanwhile it
        is called from the first token again. Raises CapacityError.
        """
        self.reserve(len(token_ids))
        assert self._kv is not None
        batch = Batch.prefill([(slot, token_ids, 0)], self.device)
        try:
            return self.model.forward(batch, self._kv, each=each)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            if self._wave is None or not self._wave.release():
                raise CapacityError(
                    f"a prompt of {len(token_ids)} tokens",
                    got=f"does not fit beside the model on {self.device}",
                    next="Shorten it, or lower max_model_len or max_num_seqs.",
                ) from error
        # Its entries are only written again.
        return self.prefill(slot, token_ids, each=each)

    @torch.inference_mode()
    def decode(self, rows: StepRows) -> Tensor:
        """Feed one token a row, at positions that lie within what was reserved.

        Returns float32 [rows, vocab], valid until the next call.
        """
        assert self._kv is not None, "reserve() comes first"
        count = rows.num_rows
        if self._wave is not None:
            self._bind_wave()
            return self._wave.step(rows)
        if not self._on_cuda and count > 1 and self.model.dtype is not torch.float32:
            # PyTorch sums 16-bit products of several rows in another order than one row's: not batch-invariant.
            return torch.cat([self.model.forward(Batch.decode(*row), self._kv) for row in rows.each()])
        if not self._use_graphs:
            batch = Batch.decode(*(self._filled(rows) if self._on_cuda else rows))
            return self.model.forward(batch, self._kv)[:count]
        step = self._graph_for(count)
        if self._bound is None or self._bound[0] is not step or self._bound[1] is not rows.slots:
            step.rows.slots.fill_(self._spare_slot)
            step.rows.positions.zero_()
            step.rows.slots[:count].copy_(rows.slots)
            self._bound = (step, rows.slots)
        step.rows.token_ids[:count].copy_(rows.token_ids)
        step.rows.positions[:count].copy_(rows.positions)
        step.graph.replay()
        return step.logits[:count]

    def check(self) -> None:
        """Raise WaveStalled if a launch of the wave has stalled, as far as the host knows; the next one works."""
        if self._wave is not None:
            self._wave.check()

    def _size(self, rows: int) -> int:
        """Rows a decode step of `rows` sequences is run with."""
        return _power_of_two(max(rows, min(self.max_num_seqs, _FREE_ROWS)))

    def _filled(self, rows: StepRows) -> StepRows:
        idle = self._size(rows.num_rows) - rows.num_rows
        zeros = rows.token_ids.new_zeros(idle)
        more = StepRows(zeros, zeros, zeros + self._spare_slot)
        return StepRows(*(torch.cat(pair) for pair in zip(rows, more, strict=True)))

    def _graph_for(self, rows: int) -> _DecodeGraph:
        size = self._size(rows)
        if size not in self._graphs:
            self._graphs[size] = self._capture(size)
        return self._graphs[size]

    @torch.inference_mode()
    def _capture(self, size: int) -> _DecodeGraph:
        assert self._kv is not None
        token_ids, positions = (torch.zeros(size, dtype=torch.int64, device=self.device) for _ in range(2))
        slots = torch.full_like(token_ids, self._spare_slot)
        rows = StepRows(token_ids, positions, slots)
        batch = Batch.decode(*rows)
        stream = recording_stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            # Compiles kernels and fills library workspaces, neither of which may happen while capturing.
            self.model.forward(batch, self._kv)
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads, a stream's reader for one, may use the GPU meanwhile.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            logits = self.model.forward(batch, self._kv)
        return _DecodeGraph(graph, rows, logits, self.model.rotary.rows(self._kv.capacity))


def _power_of_two(n: int) -> int:
    """The smallest power of two >= n."""
    return 1 << (n - 1).bit_length()
