"""A decode step of packed weights on the CPU as one list of jobs.

Llama.forward takes nine operators a layer; on a CPU the interpreter is busy with them longer than the cores are with
the products of a small model. A step's jobs are the same each time, so they are listed once, with rooms of their own
for what goes from one to the next. Only what depends on the step is made by PyTorch: the tokens' embeddings, angles,
and places in the cache. Kernels and their order are the forward pass's, and so are the bits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor

from onewave.memory.kv_cache import KVCache
from onewave.models.batch import Batch, StepRows
from onewave.models.llama import MATRICES, Llama, Reads, places_of
from onewave.ops.append_kv import numba_impl as append_kv
from onewave.ops.append_kv.call import AppendCall
from onewave.ops.cpu.team_impl import Job, JobList
from onewave.ops.decode_attention import numba_impl as decode_attention
from onewave.ops.embedding import embedding
from onewave.ops.linear import PackedWeight
from onewave.ops.linear import numba_impl as linear
from onewave.ops.rms_norm import numba_impl as rms_norm
from onewave.ops.swiglu import numba_impl as swiglu

# Lists that are kept, by rows and blocks a row: 150 KiB each for SmolLM2-135M and one row.
_MAX_LISTS = 8


class CpuSteps:
    """Decode steps of one model and cache."""

    def __init__(self, model: Llama, kv: KVCache):
        self._model, self._kv = model, kv
        self._lists: OrderedDict[tuple[int, int], _Step] = OrderedDict()

    @staticmethod
    def takes(model: Llama, kv: KVCache) -> bool:
        """Whether every operator of the model's step is a job, and nothing is added, padded or reordered between."""
        layers = model.weights.layers
        matrices = [*(getattr(layer, name) for layer in layers for name in MATRICES), model.weights.head]
        return (
            model.device.type == "cpu"
            and kv.k.dtype is model.dtype is torch.float32
            and kv.block_table is not None
            and all(
                isinstance(each, PackedWeight) and linear.reads_plain(each) for each in (*matrices, model.weights.head)
            )
            and all(layer.o_bias is layer.gate_up_bias is layer.down_bias is None for layer in layers)
        )

    def run(self, rows: StepRows) -> Tensor:
        """Return float32 logits [rows, vocab], valid until the next call; see ModelRunner.decode."""
        model, batch = self._model, Batch.decode(*rows)
        places, reads = places_of(batch, self._kv), Reads.of(batch, self._kv, in_place=False)
        inputs = (
            embedding(batch.token_ids, model.weights.embedding),
            model.rotary_rows(batch, self._kv.capacity),
            places.rows,
            places.positions,
            reads.blocks,
            reads.lengths,
        )
        key = reads.blocks.shape[0], reads.blocks.shape[1]
        step = self._lists.get(key)
        if step is None:
            step = self._lists[key] = _Step(model, self._kv, inputs)
            if len(self._lists) > _MAX_LISTS:
                self._lists.popitem(last=False)
        self._lists.move_to_end(key)
        return step.run(inputs)


class _Step:
    """The jobs of a step of some rows."""

    def __init__(self, model: Llama, kv: KVCache, inputs: Sequence[Tensor]):
        config, weights = model.config, model.weights
        # Rooms of the step's own, so that addresses stay.
        self._inputs = [each.clone(memory_format=torch.contiguous_format) for each in inputs]
        residual, rotary, slots, positions, blocks, lengths = self._inputs
        rows, eps, heads = len(residual), config.rms_norm_eps, (config.num_heads, config.head_dim)
        other, normed, update = (torch.empty_like(residual) for _ in range(3))
        qkv = torch.empty(rows, (config.num_heads + 2 * config.num_kv_heads) * config.head_dim)
        q, attended = (torch.empty(rows, *heads) for _ in range(2))
        gate_up = torch.empty(rows, 2 * config.intermediate_size)
        gated = torch.empty(rows, config.intermediate_size)
        self._logits = torch.empty(rows, config.vocab_size)
        jobs: list[Job] = []
        self._kept: list[object] = [kv, weights, other, normed, update, qkv, q, attended, gate_up, gated]

        def multiply(x: Tensor, weight: object, out: Tensor) -> None:
            assert isinstance(weight, PackedWeight)
            products = linear.products(x, weight, out)
            self._kept.append(products)
            jobs.extend(job for product in products for job in product.jobs)

        def add_norm(weight: Tensor) -> None:
            nonlocal residual, other
            jobs.append(rms_norm.job(update, weight, normed, eps, added=(residual, other)))
            residual, other = other, residual

        for index, layer in enumerate(weights.layers):
            if index == 0:
                jobs.append(rms_norm.job(residual, layer.input_norm, normed, eps))
            else:
                add_norm(layer.input_norm)
            multiply(normed, layer.qkv, qkv)
            cache = kv.layer(index)
            appended = AppendCall(
                qkv, rotary, cache.k, cache.v, slots, positions, config.num_heads,
                layer.qkv_bias, layer.q_norm, layer.k_norm, eps,
            )  # fmt: skip
            jobs.append(append_kv.job(appended, q))
            window = config.layer_windows[index]
            jobs.append(decode_attention.job(attended, q, (cache.k, cache.v), lengths, blocks, window=window))
            multiply(attended.flatten(1), layer.o, update)
            add_norm(layer.post_norm)
            multiply(normed, layer.gate_up, gate_up)
            jobs.append(swiglu.job(gate_up, gated))
            multiply(gated, layer.down, update)
        add_norm(weights.norm)
        multiply(normed, weights.head, self._logits)
        self._jobs = JobList(jobs)

    def run(self, inputs: Sequence[Tensor]) -> Tensor:
        """Return logits for inputs of the shapes that the step was made with."""
        for own, given in zip(self._inputs, inputs, strict=True):
            own.copy_(given)
        self._jobs.run()
        return self._logits
