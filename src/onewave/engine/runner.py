"""Runs the model for the engine: prefill, decode, KV-cache room, CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from onewave.base.errors import CapacityError
from onewave.engine.prompt.passes import LARGEST_BUCKET, MAX_SEQUENCES, PromptChunk, PromptPasses
from onewave.engine.prompt.queue import PassLimits
from onewave.gpu.scratch import recording_stream
from onewave.memory.kv_cache import KV_PAGE, StaticKVCache
from onewave.memory.shortage import is_out_of_memory
from onewave.models.batch import Batch, StepRows
from onewave.models.llama import Llama

if TYPE_CHECKING:
    from onewave.engine.wave_decode import WaveDecoder

_SMALLEST_CAPACITY = KV_PAGE
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
        max_num_batched_tokens: int = LARGEST_BUCKET,
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
        self._prompt_graphs = self._on_cuda and decode != "eager"
        # A pass of several prompts must not change what each would give alone, as PyTorch's 16-bit products would.
        packs = model.packs_prompts if self._on_cuda else model.dtype is torch.float32
        self.limits = PassLimits(
            max_tokens=max_num_batched_tokens, max_prompts=MAX_SEQUENCES if packs else 1,
            whole=not packs or model.rotary.varies,
        )  # fmt: skip
        self._wave = wave
        # Where the matrices lie that the wave reads, if not as plain ones.
        self.stream = None if wave is None else wave.stream
        self.decode_path = "wave" if wave is not None else decode if self._on_cuda else "eager"
        self._graphs: dict[int, _DecodeGraph] = {}
        self._bound: tuple[_DecodeGraph, Tensor] | None = None
        # Rows that only fill a graph up to its size write here.
        self._spare_slot = max_num_seqs
        self._kv: StaticKVCache | None = None
        self._passes: PromptPasses | None = None
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
        self._passes = PromptPasses(self.model, grown, spare_slot=self._spare_slot, use_graphs=self._prompt_graphs)
        self._bind_wave()

    def _larger_cache(self, num_tokens: int) -> StaticKVCache:
        blocks = -(-num_tokens // _SMALLEST_CAPACITY) * _SMALLEST_CAPACITY
        longest = -(-self.max_model_len // KV_PAGE) * KV_PAGE
        wanted, needed = (min(longest, size) for size in (_power_of_two(blocks), blocks))
        capacity = wanted
        while True:
            try:
                return self.model.new_cache(num_slots=self.max_num_seqs + 1, capacity=capacity)
            except CapacityError:
                if self._release():
                    continue
                if capacity == needed:
                    raise
                capacity = needed

    def _release(self) -> bool:
        """Give back memory that only makes prompts faster; graphs that read it go with it. Returns whether there was
        any."""
        if self._wave is None or not self._wave.release():
            return False
        if self._passes is not None:
            self._passes.clear()
        return True

    def _bind_wave(self) -> None:
        if self._wave is not None and self._wave_kv is not self._kv:
            assert self._kv is not None
            self._wave.bind_cache(self._kv)
            self._wave_kv = self._kv

    @torch.inference_mode()
    def prefill(self, chunks: Sequence[PromptChunk], *, each: Callable[[int, Tensor], object] | None = None) -> Tensor:
        """Run chunks of prompts; what comes before each lies in its slot already.

        Returns float32 logits [chunks, vocab] of each one's last token, valid until the next call. each: of one chunk
        alone, see Llama.forward; where memory is freed meanwhile it is called from the first token again.
        Raises CapacityError.
        """
        self.reserve(max(chunk.end for chunk in chunks))
        assert self._kv is not None
        try:
            if self.model.packs_prompts and self.model.prefill_backend == "auto":
                assert self._passes is not None
                return self._passes.run(chunks, each=each)
            batch = Batch.prefill([(chunk.slot, chunk.token_ids, chunk.start) for chunk in chunks], self.device)
            return self.model.forward(batch, self._kv, each=each)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            if not self._release():
                raise CapacityError(
                    f"a prompt of {max(chunk.end for chunk in chunks)} tokens",
                    got=f"does not fit beside the model on {self.device}",
                    next="Shorten it, or lower max_model_len, max_num_seqs or max_num_batched_tokens.",
                ) from error
        # Their entries are only written again.
        return self.prefill(chunks, each=each)

    def copy_prompt(self, source: int, target: int, num_tokens: int) -> None:
        """Have a slot hold the first tokens of another one, too."""
        assert self._kv is not None
        self._kv.copy_slot(source, target, num_tokens)

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
