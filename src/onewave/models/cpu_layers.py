"""A model's layers on the CPU as one list of jobs: packed weights in float32.

A layer is nine operators; on a CPU the interpreter is busy with them longer than the cores are with a small model's
products, and threads idle meanwhile. The jobs of a pass are listed at once, with rooms for what goes from one to the
next. Decode steps are the same each time, so their lists are kept. Kernels and their order are the operators', and so
are the bits.
"""

from collections import OrderedDict

import torch
from torch import Tensor

from onewave.memory.kv_cache import KVCache, LayerCache
from onewave.models.batch import Phase
from onewave.models.llama import MATRICES, LayerInputs, Llama
from onewave.ops.append_kv import numba_impl as append_kv
from onewave.ops.append_kv.call import AppendCall
from onewave.ops.attention import numba_impl as attention
from onewave.ops.attention.call import Packed
from onewave.ops.attention.masks import options
from onewave.ops.cpu.team_impl import Job, JobList
from onewave.ops.decode_attention import numba_impl as decode_attention
from onewave.ops.linear import PackedWeight
from onewave.ops.linear import numba_impl as linear
from onewave.ops.rms_norm import numba_impl as rms_norm
from onewave.ops.swiglu import numba_impl as swiglu

# Lists that are kept, by rows and blocks a row: 150 KiB each for SmolLM2-135M and one row.
_MAX_LISTS = 8
# Rows of a decode step up to which its list is kept. A step of more takes longer than making a list.
_MAX_KEPT_ROWS = 16


class CpuLayers:
    """The layers of one model, whose cache stays where it is; see Llama.forward."""

    def __init__(self, model: Llama):
        self._model = model
        self._kept: OrderedDict[tuple[int, ...], _List] = OrderedDict()

    @staticmethod
    def takes(model: Llama, kv: KVCache) -> bool:
        """Whether every operator of the model is a job, and nothing is added, padded or reordered between."""
        layers = model.weights.layers
        matrices = [getattr(layer, name) for layer in layers for name in MATRICES]
        return (
            model.reads_in_place
            and kv.k.dtype is model.dtype is torch.float32
            and kv.block_table is not None
            and all(isinstance(each, PackedWeight) and linear.reads_plain(each) for each in matrices)
            and all(layer.o_bias is layer.gate_up_bias is layer.down_bias is None for layer in layers)
        )

    def __call__(self, given: LayerInputs) -> Tensor:
        """Return what the head multiplies, [tokens, hidden], valid until the next call."""
        blocks = given.reads.blocks
        if given.batch.phase is Phase.PREFILL or len(blocks) > _MAX_KEPT_ROWS:
            return _List(self._model, given, [each.contiguous() for each in _tensors(given)]).run()
        made = self._kept.get(blocks.shape)
        if made is None:
            own = [each.clone(memory_format=torch.contiguous_format) for each in _tensors(given)]
            made = self._kept[blocks.shape] = _List(self._model, given, own)
            if len(self._kept) > _MAX_LISTS:
                self._kept.popitem(last=False)
        self._kept.move_to_end(blocks.shape)
        made.take(given)
        return made.run()


class _List:
    """The jobs of a pass, and all tensors that they read and write. inputs: _tensors, contiguous; the residual stream
    is written to."""

    def __init__(self, model: Llama, given: LayerInputs, inputs: list[Tensor]):
        config, weights, eps = model.config, model.weights, model.config.rms_norm_eps
        self._inputs = inputs
        residual, rotary, slots, positions, blocks, lengths = inputs
        tokens, heads = len(residual), (config.num_heads, config.head_dim)
        other, normed, update = (torch.empty_like(residual) for _ in range(3))
        qkv = torch.empty(tokens, (config.num_heads + 2 * config.num_kv_heads) * config.head_dim)
        q, attended = (torch.empty(tokens, *heads) for _ in range(2))
        gate_up = torch.empty(tokens, 2 * config.intermediate_size)
        gated = torch.empty(tokens, config.intermediate_size)
        self._result = normed
        self._kept: list[object] = [given.kv, weights, other, update, qkv, q, attended, gate_up, gated]
        sequences = _sequences(given, config.num_heads)
        self._kept.append(sequences)
        jobs: list[Job] = []

        def multiply(x: Tensor, weight: object, out: Tensor) -> None:
            assert isinstance(weight, PackedWeight)
            products = linear.products(x, weight, out)
            self._kept.append(products)
            jobs.extend(job for product in products for job in product.jobs)

        def add_norm(weight: Tensor) -> None:
            nonlocal residual, other
            jobs.append(rms_norm.job(update, weight, normed, eps, added=(residual, other)))
            residual, other = other, residual

        def attend(cache: LayerCache, window: int | None) -> Job:
            if sequences is None:
                return decode_attention.job(attended, q, (cache.k, cache.v), lengths, blocks, window=window)
            wanted = options("attention", head_dim=config.head_dim, causal=True, window=window)
            pages = cache.k.transpose(1, 2), cache.v.transpose(1, 2)
            return attention.job(attended, q, *pages, sequences, wanted)

        for index, layer in enumerate(weights.layers):
            if index == 0:
                jobs.append(rms_norm.job(residual, layer.input_norm, normed, eps))
            else:
                add_norm(layer.input_norm)
            multiply(normed, layer.qkv, qkv)
            cache = given.kv.layer(index)
            appended = AppendCall(
                qkv, rotary, cache.k, cache.v, slots, positions, config.num_heads,
                layer.qkv_bias, layer.q_norm, layer.k_norm, eps,
            )  # fmt: skip
            jobs += [append_kv.job(appended, q), attend(cache, config.layer_windows[index])]
            multiply(attended.flatten(1), layer.o, update)
            add_norm(layer.post_norm)
            multiply(normed, layer.gate_up, gate_up)
            jobs.append(swiglu.job(gate_up, gated))
            multiply(gated, layer.down, update)
        add_norm(weights.norm)
        self._jobs = JobList(jobs)

    def take(self, given: LayerInputs) -> None:
        """Take another decode step's inputs, of the same shapes."""
        for own, other in zip(self._inputs, _tensors(given), strict=True):
            own.copy_(other)

    def run(self) -> Tensor:
        self._jobs.run()
        return self._result


def _tensors(given: LayerInputs) -> tuple[Tensor, ...]:
    places, reads = given.places, given.reads
    return given.residual, given.rotary, places.rows, places.positions, reads.blocks, reads.lengths


def _sequences(given: LayerInputs, num_heads: int) -> attention.Sequences | None:
    """Return the sequences that a prompt pass attends to; None for a decode step."""
    starts, blocks, cache = given.reads.starts, given.reads.blocks, given.kv.k
    if starts is None:
        return None
    packed = Packed(*starts, len(given.residual), blocks.shape[1] * cache.shape[3], blocks)
    return attention.Sequences.of(packed, num_heads, cache.shape[2], top_left=False)
