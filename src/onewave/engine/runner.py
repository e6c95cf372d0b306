"""Runs the model for the engine: prefill, decode, KV-cache room, CUDA graphs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from onewave.base.errors import CapacityError
from onewave.engine.prompt.passes import LARGEST_BUCKET, MAX_SEQUENCES, PromptChunk, PromptPasses
from onewave.engine.scheduler.sequence import PassLimits
from onewave.gpu.scratch import recording_stream
from onewave.memory.kv_cache import block_size_on, default_cache_bytes
from onewave.memory.shortage import is_out_of_memory
from onewave.models.activations import plan_pass
from onewave.models.batch import Batch, StepRows
from onewave.models.llama import Llama

if TYPE_CHECKING:
    from onewave.engine.wave_decode import WaveDecoder
    from onewave.models.cpu_layers import CpuLayers

_log = logging.getLogger("onewave")
# Up to this many rows a decode step costs what its weights cost to read, however many rows are real.
_FREE_ROWS = 64
# Position of a row that only fills a step up: its key is not stored, and its length, one more, has attention leave it
# alone. A row of one key would take as long as 90 keys, and all such rows follow one another on one SM.
_IDLE = -2
# Tokens of the longest sequence that kernels are planned for at first. A longer one has twice as many planned for, or
# more, and graphs captured anew: an order of tiles that suits 131,072 keys does not suit 500.
_SHORT = 256


@dataclass(frozen=True)
class _DecodeGraph:
    """One captured decode step of a fixed number of rows, with the buffers it reads and writes."""

    graph: torch.cuda.CUDAGraph
    rows: StepRows
    logits: Tensor


class _Bound(NamedTuple):
    """A graph that rows of these slots are fed to, and the parts of its buffers that are theirs."""

    graph: torch.cuda.CUDAGraph
    slots: Tensor
    token_ids: Tensor
    positions: Tensor
    logits: Tensor


class ModelRunner:
    """Owns the KV cache of one model. Sequences are known by their slot, 0 <= slot < max_num_seqs, their row in the
    block table. Blocks are 0 to num_blocks - 1; the scheduler says which sequence has which.

    kv_bytes: what keys and values may take. None: what all sequences of max_model_len take together, within what
    default_cache_bytes says. The cache is reserved here, once, so captured graphs and the wave keep its addresses.
    Raises CapacityError.

    decode: "graph" or "eager"; a CPU is always eager. wave: decode through it instead, one launch a step. With
    "graph" a decode step is replayed from a CUDA graph captured once per number of rows. The graph's
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
        kv_bytes: int | None = None,
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
        self._bound: _Bound | None = None
        # Rows that only fill a graph up to its size have this slot. Its row of the table, and whatever of the others no
        # sequence has, is a block that no sequence gets.
        self._spare_slot = max_num_seqs
        self.block_size = block_size_on(self.device)
        self.num_blocks = self._blocks_within(kv_bytes)
        self._kv = model.new_block_cache(
            num_blocks=self.num_blocks + 1, num_slots=max_num_seqs + 1, capacity=max_model_len
        )
        assert self._kv.block_table is not None
        self._kv.block_table.fill_(self.num_blocks)
        # Its entries that were written so far, by slot and place.
        self._table: dict[tuple[int, int], int] = {}
        if self._on_cuda:
            model.rotary.rows(max_model_len)  # all of it, so that captured graphs keep its address
        if wave is not None:
            wave.bind_cache(self._kv)
        self._narrow(min(self._kv.block_table.shape[1], -(-_SHORT // self.block_size)))

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values."""
        return self._kv.nbytes

    def _blocks_within(self, kv_bytes: int | None) -> int:
        """Blocks of the cache, without the spare one. Raises CapacityError."""
        config, a_row = self.model.config, -(-self.max_model_len // self.block_size)
        layer = 2 * self.block_size * config.num_kv_heads * config.head_dim
        kv_dtype, own = self.model.kv_format.dtype, self.model.dtype
        block_bytes, wanted = config.num_layers * layer * kv_dtype.itemsize, a_row * self.max_num_seqs
        if kv_dtype is not own and self.model.packs_prompts:
            block_bytes += layer * own.itemsize  # KVCache.wide
        bound = kv_bytes
        if bound is None:
            tokens = min(self.limits.max_tokens, self.max_model_len)
            beside = plan_pass(config, tokens, MAX_SEQUENCES, self.model.dtype.itemsize).total_bytes
            bound = default_cache_bytes(self.device, one_sequence=a_row * block_bytes, beside=beside)
        found = min(wanted, bound // block_bytes - 1)
        if found < 1:
            raise CapacityError(
                "KV cache",
                got=f"{bound} bytes",
                allowed=f"at least {2 * block_bytes}: a block of {self.block_size} tokens, and a spare one",
                next="Raise kv_cache_memory_bytes, or use a smaller model.",
            )
        if found < wanted:
            _log.info(
                "KV cache: %d tokens; %d sequences of %d would need %d",
                found * self.block_size, self.max_num_seqs, self.max_model_len, wanted * self.block_size,
            )  # fmt: skip
        return found

    def _narrow(self, blocks: int) -> None:
        """Plan kernels for sequences of so many blocks; what was captured for shorter ones goes."""
        self._blocks = blocks
        self._narrowed = self._kv.narrowed(blocks)
        self._graphs.clear()
        self._bound = None
        self._layers = self._listed_layers()
        self._passes = PromptPasses(
            self.model, self._narrowed, spare_slot=self._spare_slot, use_graphs=self._prompt_graphs
        )

    def _listed_layers(self) -> CpuLayers | None:
        """Layers without the interpreter, where the model's operators are all jobs of the CPU's threads."""
        if self._on_cuda:
            return None
        from onewave.models.cpu_layers import CpuLayers  # a GPU needs no Numba

        return CpuLayers(self.model) if CpuLayers.takes(self.model, self._narrowed) else None

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks, (from, to), one after the other and after all that was launched before."""
        self._kv.copy_blocks(pairs)

    def set_blocks(self, entries: Sequence[tuple[int, int, int]]) -> None:
        """Have a slot's sequence use a block: (slot, place in the sequence, block), for all that is launched later."""
        assert self._kv.block_table is not None
        longest = 1 + max(place for _, place, _ in entries)
        if longest > self._blocks:
            self._narrow(min(self._kv.block_table.shape[1], _power_of_two(longest)))
        # Often the slot's last sequence began alike.
        changed = [entry for entry in entries if self._table.get(entry[:2]) != entry[2]]
        if changed:
            try:
                self._kv.set_blocks(changed)
                self._table.update((entry[:2], entry[2]) for entry in changed)
            except BaseException:
                self._table.clear()  # some of them may be written
                raise

    def _release(self) -> bool:
        """Give back memory that only makes prompts faster; graphs that read it go with it. Returns whether there was
        any."""
        if self._wave is None or not self._wave.release():
            return False
        self._passes.clear()
        return True

    @torch.inference_mode()
    def prefill(self, chunks: Sequence[PromptChunk], *, each: Callable[[int, Tensor], object] | None = None) -> Tensor:
        """Run chunks of prompts; what comes before each lies in its slot's blocks already.

        Returns float32 logits [chunks, vocab] of each one's last token, valid until the next call. each: of one chunk
        alone, see Llama.forward; where memory is freed meanwhile it is called from the first token again.
        Raises CapacityError.
        """
        try:
            if self.model.packs_prompts and self.model.prefill_backend == "auto":
                return self._passes.run(chunks, each=each)
            batch = Batch.prefill([(chunk.slot, chunk.token_ids, chunk.start) for chunk in chunks], self.device)
            return self.model.forward(batch, self._narrowed, each=each, layers=self._layers)
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

    @torch.inference_mode()
    def decode(self, rows: StepRows) -> Tensor:
        """Feed one token a row, each at a position that its slot has a block for.

        Returns float32 [rows, vocab], valid until the next call.
        """
        count = rows.num_rows
        if self._wave is not None:
            return self._wave.step(rows)
        if not self._on_cuda and count > 1 and self.model.dtype is not torch.float32:
            # PyTorch sums 16-bit products of several rows in another order than one row's: not batch-invariant.
            return torch.cat([self.model.forward(Batch.decode(*row), self._narrowed) for row in rows.split(1)])
        if not self._use_graphs:
            batch = Batch.decode(*(self._filled(rows) if self._on_cuda else rows))
            return self.model.forward(batch, self._narrowed, layers=self._layers)[:count]
        bound = self._bound
        if bound is None or bound.slots is not rows.slots:
            step = self._graph_for(count)
            step.rows.slots.fill_(self._spare_slot)
            step.rows.positions.fill_(_IDLE)
            step.rows.slots[:count].copy_(rows.slots)
            token_ids, positions = step.rows.token_ids[:count], step.rows.positions[:count]
            bound = self._bound = _Bound(step.graph, rows.slots, token_ids, positions, step.logits[:count])
        bound.token_ids.copy_(rows.token_ids)
        bound.positions.copy_(rows.positions)
        bound.graph.replay()
        return bound.logits

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
        more = StepRows(zeros, zeros + _IDLE, zeros + self._spare_slot)
        return StepRows(*(torch.cat(pair) for pair in zip(rows, more, strict=True)))

    def _graph_for(self, rows: int) -> _DecodeGraph:
        size = self._size(rows)
        if size not in self._graphs:
            self._graphs[size] = self._capture(size)
        return self._graphs[size]

    @torch.inference_mode()
    def _capture(self, size: int) -> _DecodeGraph:
        token_ids = torch.zeros(size, dtype=torch.int64, device=self.device)
        positions, slots = torch.full_like(token_ids, _IDLE), torch.full_like(token_ids, self._spare_slot)
        rows = StepRows(token_ids, positions, slots)
        batch = Batch.decode(*rows)
        stream = recording_stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            # Compiles kernels and fills library workspaces, neither of which may happen while capturing.
            self.model.forward(batch, self._narrowed)
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads, a stream's reader for one, may use the GPU meanwhile.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            logits = self.model.forward(batch, self._narrowed)
        return _DecodeGraph(graph, rows, logits)


def _power_of_two(n: int) -> int:
    """The smallest power of two >= n."""
    return 1 << (n - 1).bit_length()
