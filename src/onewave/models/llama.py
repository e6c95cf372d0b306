"""The LLaMA decoder: one forward pass over a packed batch, prefill or decode.

RMSNorm, then a layer after the other: QKV projection; (bias, q/k norm, rotation, cache append) in one operator;
attention; all that comes behind it, up to the next norm, in one operator (ops/post_attention). Families differ only in
what is present (biases, q/k norms, windows, tied head), which the weights and the config say.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from onewave.base.device import device_of
from onewave.base.errors import UnsupportedError
from onewave.memory.kv_cache import CacheSizes, KVCache, KVFormat, LayerCache, block_size_on
from onewave.models.batch import Batch, Phase
from onewave.models.config.model_config import ModelConfig
from onewave.models.rope import RotaryTable
from onewave.ops.append_kv import append_kv
from onewave.ops.attention import attention, attention_varlen
from onewave.ops.attention.choose import reads_pages
from onewave.ops.decode_attention import decode_attention
from onewave.ops.dequantise_pages import dequantise_pages
from onewave.ops.embedding import embedding
from onewave.ops.linear import LinearWeight, PackedWeight, linear, linear_of_rows
from onewave.ops.post_attention import PostAttentionWeights, post_attention_rows
from onewave.ops.quantize_rows import QuantizedRows
from onewave.ops.rms_norm import rms_norm

if TYPE_CHECKING:
    from onewave.wave.weights.pack import StreamMatrix
    from onewave.wave.weights.row_table import RowTable

    MatrixWeight = LinearWeight | StreamMatrix
    Table = Tensor | PackedWeight | RowTable
else:
    MatrixWeight = LinearWeight  # a CPU never imports the wave
    Table = Tensor | PackedWeight
"""A projection: a tensor, packed rows for the CPU's kernels, 8-bit rows that quantise what they are multiplied by, or a
matrix that lies in a wave's stream."""


# Rows of logits at once, for a prompt whose every token's logits are asked for: [64, 128k] float32 is 32 MiB.
_ROWS_OF_LOGITS = 64


MATRICES = ("qkv", "o", "gate_up", "down")
"""A layer's, in the order in which a step uses them."""
NORMS = {"qkv": "input_norm", "gate_up": "post_norm"}
"""The norm whose gains scale a matrix's columns, by matrix."""


def plain(matrix: object, what: str) -> Tensor:
    """Return a matrix that is a tensor. Raises UnsupportedError for packed rows, and for one that lies in a stream."""
    if not isinstance(matrix, Tensor):
        kinds = {"stream": "weights in a stream", "parts": "weights that quantise activations"}
        got = next((kinds[name] for name in kinds if hasattr(matrix, name)), "packed weights")
        raise UnsupportedError(what, got=got, allowed="plain tensors")
    return matrix


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer. Projections are [out, in]; qkv stacks q, k, v rows, gate_up stacks gate and up rows.

    q and k rows are in half-split (NeoX) rotary order. Where the matrices lie in a wave's stream, the gains of the
    norms before qkv and gate_up are in those, rounded with them, and the norms' own are ones.
    """

    input_norm: Tensor
    qkv: MatrixWeight
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: MatrixWeight
    o_bias: Tensor | None
    post_norm: Tensor
    gate_up: MatrixWeight
    gate_up_bias: Tensor | None
    down: MatrixWeight
    down_bias: Tensor | None


@dataclass(frozen=True)
class LlamaWeights:
    """All weights. head is the same object as embedding when the config ties them and no rounding parts
    them."""

    embedding: Table
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: MatrixWeight

    @cached_property
    def post_attention(self) -> tuple[PostAttentionWeights, ...]:
        """Each layer's weights after attention, up to the next layer's first norm or the last norm."""
        norms = (*(layer.input_norm for layer in self.layers[1:]), self.norm)
        matrices = (*(layer.qkv for layer in self.layers[1:]), None)
        return tuple(
            PostAttentionWeights(
                layer.o, layer.post_norm, layer.gate_up, layer.down, next_norm, layer.o_bias, layer.gate_up_bias,
                layer.down_bias, following,
            )
            for layer, next_norm, following in zip(self.layers, norms, matrices, strict=True)
        )  # fmt: skip


class Llama:
    """A loaded model. Holds weights and rotary angles, no state of any sequence.

    kv_format: of the caches that it makes; by default in the model's dtype.
    """

    def __init__(self, config: ModelConfig, weights: LlamaWeights, *, max_model_len: int):
        self.config, self.weights, self.max_model_len = config, weights, max_model_len
        self.device, self.dtype = weights.norm.device, weights.norm.dtype
        self.kv_format = KVFormat(self.dtype)
        self.rotary = RotaryTable(config, max_model_len, self.device)
        on_cpu = self.device.type == "cpu"
        in_place = reads_pages(device_of(self.device), self.dtype, config.head_dim, block_size_on(self.device))
        # Whether a prompt pass whose lengths the host knows reads the cache in place.
        self.reads_in_place = on_cpu and in_place
        # Whether prompts run packed, their lengths known to the device alone: where attention reads the cache in place.
        # With dynamic NTK a prompt's angles depend on its length.
        self.packs_prompts = self.device.type == "cuda" and not self.rotary.varies and in_place
        # A GPU's kernels begin at 16; PyTorch's attention takes the small heads of test models.
        self.prefill_backend = "auto" if on_cpu or config.head_dim >= 16 else "torch"

    def new_cache(self, *, num_slots: int, capacity: int) -> KVCache:
        """Make a KV cache for sequences of up to `capacity` tokens, one after another in memory, without a block table.

        Raises CapacityError.
        """
        cache = self.new_block_cache(num_blocks=num_slots, num_slots=1, capacity=capacity, block_size=capacity)
        return replace(cache, block_table=None)

    def new_block_cache(
        self, *, num_blocks: int, num_slots: int, capacity: int, block_size: int | None = None
    ) -> KVCache:
        """Make a KV cache of blocks, with a table for num_slots sequences of up to `capacity` tokens.

        block_size: None for the device's. Raises CapacityError.
        """
        size = block_size or block_size_on(self.device)
        config = self.config
        sizes = CacheSizes(
            config.num_layers, config.num_kv_heads, config.head_dim, size, num_blocks, num_slots, -(-capacity // size)
        )
        wide = self.dtype if self.packs_prompts and self.kv_format.dtype is not self.dtype else None
        return KVCache.reserve(sizes, self.kv_format, device=self.device, wide_dtype=wide)

    def new_row_cache(self, *, num_slots: int, capacity: int) -> KVCache:
        """Make a KV cache of blocks in which every sequence has its own, one after another. Raises CapacityError."""
        per_slot = -(-capacity // block_size_on(self.device))
        cache = self.new_block_cache(num_blocks=num_slots * per_slot, num_slots=num_slots, capacity=capacity)
        assert cache.block_table is not None
        cache.block_table.copy_(torch.arange(num_slots * per_slot).view(num_slots, per_slot))
        return cache

    @torch.inference_mode()
    def forward(
        self,
        batch: Batch,
        kv: KVCache,
        *,
        each: Callable[[int, Tensor], object] | None = None,
        layers: Callable[[LayerInputs], Tensor] | None = None,
    ) -> Tensor:
        """Run every layer on the batch's tokens and append their keys and values to the cache.

        Returns float32 logits [sequences, vocab] of each sequence's last token. each: called in a prefill with the
        logits of every token, some at a time, [some, vocab], and the number of the first. It may keep them. layers:
        what runs the layers in the operators' place, with their result.
        """
        in_place = self.reads_in_place and kv.k.dtype is self.dtype
        # The residual stream stays float32: rounding it twice a layer would be the largest avoidable error of a 16-bit
        # model (test_parity.py).
        residual = embedding(batch.token_ids, self.weights.embedding).float()
        places, reads = _places(batch, kv), Reads.of(batch, kv, in_place=in_place)
        given = LayerInputs(batch, kv, residual, self._rotary_rows(batch, kv.capacity), places, reads)
        normed = (self._layers if layers is None else layers)(given)
        if batch.phase is not Phase.PREFILL:
            return self._logits(normed)
        ends: list[int] = []  # of a packed pass: every product gives a row the same bits
        if batch.rows is not None:
            last = batch.rows.last
        else:
            ends = [end - 1 for end in accumulate(chunk.length for chunk in batch.chunks)]
            last = torch.tensor(ends, device=self.device)
        own = self._logits(normed[last])
        for first in range(0, len(normed) if each is not None else 0, _ROWS_OF_LOGITS):
            logits = self._logits(normed[first : first + _ROWS_OF_LOGITS])
            # A product of many rows may round differently: what is sampled must not depend on a question about the
            # prompt.
            for row, end in enumerate(ends):
                if first <= end < first + len(logits):
                    logits[end - first] = own[row]
            assert each is not None
            each(first, logits)
        return own

    def _layers(self, given: LayerInputs) -> Tensor:
        """Return what the head multiplies, [tokens, hidden]: every layer's, and the last norm's."""
        batch, kv, residual, rotary, places, reads = given
        config, weights = self.config, self.weights
        normed: Tensor | QuantizedRows = rms_norm(residual, weights.layers[0].input_norm, config.rms_norm_eps)
        for index, layer in enumerate(weights.layers):
            cache = kv.layer(index)
            queries = append_kv(
                # The bias goes in before the product is rounded to 16 bits, not after.
                linear_of_rows(normed, layer.qkv, layer.qkv_bias),
                rotary,
                cache.k,
                cache.v,
                places.rows,
                places.positions,
                num_heads=config.num_heads,
                q_norm=layer.q_norm,
                k_norm=layer.k_norm,
                eps=config.rms_norm_eps,
                block_table=places.table,
                k_scale=cache.k_scale,
                v_scale=cache.v_scale,
            )
            attended = self._attend(batch, reads, queries, cache, kv.wide, config.layer_windows[index])
            behind = weights.post_attention[index]
            normed, residual = post_attention_rows(attended, residual, behind, config.rms_norm_eps)
        assert isinstance(normed, Tensor)  # the last one has no next matrix
        return normed

    def _logits(self, normed: Tensor) -> Tensor:
        """Float32 [rows, vocab]."""
        return linear(normed, self.weights.head, out_dtype=torch.float32)

    def _rotary_rows(self, batch: Batch, capacity: int) -> Tensor:
        """Cosines and sines of every token, float32 [tokens, rotary_dim]. capacity: positions that the cache holds."""
        if batch.phase is Phase.DECODE or batch.rows is not None:
            # A GPU's positions are not read back; on a CPU the table grows as sequences do.
            reach = capacity if self.device.type == "cuda" else int(batch.positions.max()) + 1
            return self.rotary.rows(reach)[batch.positions]
        rows = [self.rotary.prefill(chunk.start, chunk.end) for chunk in batch.chunks]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def _attend(
        self,
        batch: Batch,
        reads: Reads,
        q: Tensor,
        cache: LayerCache,
        wide: tuple[Tensor, Tensor] | None,
        window: int | None,
    ) -> Tensor:
        """Attention of each sequence over its own keys; [tokens, heads * head_dim]. wide: of KVCache."""
        if batch.phase is Phase.DECODE:
            attended = decode_attention(
                q, cache.k, cache.v, reads.lengths, block_table=reads.blocks, window=window,
                k_scale=cache.k_scale, v_scale=cache.v_scale,
            )  # fmt: skip
            assert isinstance(attended, Tensor)  # no LSE was asked for
            return attended.flatten(1)
        if reads.starts is not None:
            k, v = cache.k, cache.v
            if wide is not None:
                k, v = dequantise_pages(*cache, reads.blocks, reads.starts[1], out=wide)
            pages = k.transpose(1, 2), v.transpose(1, 2)
            longest = reads.blocks.shape[1] * k.shape[2]
            attended = attention_varlen(
                q, *pages, *reads.starts, len(q), longest,
                causal=True, window=window, block_table=reads.blocks,
            )  # fmt: skip
            assert isinstance(attended, Tensor)  # no LSE was asked for
            return attended.flatten(1)
        out = torch.empty_like(q)
        first = 0
        for chunk, blocks in zip(batch.chunks, reads.chunks, strict=True):
            queries = q[None, first : first + chunk.length].transpose(1, 2)
            keys, values = cache.rows(blocks, chunk.end, q.dtype)
            attended = attention(queries, keys, values, causal=True, window=window, backend=self.prefill_backend)
            out[first : first + chunk.length] = attended[0].transpose(0, 1)
            first += chunk.length
        return out.flatten(1)


class Places(NamedTuple):
    """Where each token's key and value go, as append_kv takes it."""

    rows: Tensor
    positions: Tensor
    table: Tensor | None


def _places(batch: Batch, kv: KVCache) -> Places:
    if kv.block_table is None or kv.block_table.is_cuda:
        return Places(batch.slots, batch.positions, kv.block_table)
    # Looked up once, not in every layer: a CPU's loops take blocks.
    blocks = kv.block_table[batch.slots, batch.positions // kv.block_size].long()
    return Places(blocks, batch.positions % kv.block_size, None)


class Reads(NamedTuple):
    """The inputs of attention from the KV cache.

    blocks: [sequences, blocks a row], of a decode step and of a prompt pass that reads in place; lengths: int64
    [sequences], the new token counted. starts: where each sequence's queries and keys begin in such a pass, as
    PromptRows has them. chunks: each chunk's blocks otherwise, or its one block's number.
    """

    blocks: Tensor
    lengths: Tensor
    starts: tuple[Tensor, Tensor] | None = None
    chunks: tuple[Tensor | int, ...] = ()

    @classmethod
    def of(cls, batch: Batch, kv: KVCache, *, in_place: bool) -> Reads:
        lengths = batch.positions + 1
        if batch.rows is not None:
            return cls(kv.table_of(batch.rows.sequences).int(), lengths, (batch.rows.starts_q, batch.rows.starts_k))
        if batch.phase is Phase.DECODE:
            blocks = kv.table_of(batch.slots)
            # A CPU's loops would have it in 64 bits in every layer.
            return cls(blocks if blocks.is_cuda else blocks.long(), lengths)
        table, chunks = kv.block_table, batch.chunks
        if in_place:
            used = max(-(-chunk.end // kv.block_size) for chunk in chunks)
            slots = torch.tensor([chunk.slot for chunk in chunks]).to(lengths.device, non_blocking=True)
            of_each = [chunk.length for chunk in chunks], [chunk.end for chunk in chunks]
            words = torch.tensor([[0, *accumulate(each)] for each in of_each], dtype=torch.int32)
            blocks, starts = kv.table_of(slots)[:, :used], words.to(lengths.device, non_blocking=True)
            return cls(blocks.int(), lengths, (starts[0], starts[1]))
        if table is None:
            return cls(batch.slots, lengths, chunks=tuple(chunk.slot for chunk in chunks))
        used = [table[chunk.slot, : -(-chunk.end // kv.block_size)].long() for chunk in chunks]
        return cls(table, lengths, chunks=tuple(int(row) if row.is_cpu and len(row) == 1 else row for row in used))


class LayerInputs(NamedTuple):
    """The inputs of a pass's layers. residual: the tokens' embeddings; rotary: cosines and sines of each token."""

    batch: Batch
    kv: KVCache
    residual: Tensor
    rotary: Tensor
    places: Places
    reads: Reads
