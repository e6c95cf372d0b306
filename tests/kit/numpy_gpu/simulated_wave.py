"""Decode steps of a model on the simulated device, through the wave kernel's own source."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kit.models.tiny_decoders import BASE, in_float32, randn
from kit.numpy_gpu.numpy_memory import DTYPES, Memory, Pointer
from kit.numpy_gpu.numpy_tensor_maps import Boxes
from kit.numpy_gpu.simulated_device import Bench, words
from kit.operands.nested import float_rows, nested_rows
from onewave.base.weight_formats import Rounding, WeightFormat
from onewave.engine.load.rounded import round_weights
from onewave.memory.kv_cache import KVCache
from onewave.models.batch import Batch
from onewave.models.decode_wave import norm_gains, wave_weights
from onewave.models.llama import Llama
from onewave.models.llama_plan import DecodeStep, plan_decode
from onewave.wave.plan.layout import TILE_BYTES
from onewave.wave.weights.formats.nested import NestedTiles
from onewave.wave.weights.formats.six_bits import SixTiles
from onewave.wave.weights.formats.wide import FloatTiles
from onewave.wave.weights.pack import WeightStream

CPU = torch.device("cpu")
CAPACITY = 8240
STREAM = 1 << 40  # where the packed weights lie, as far as prefetching them goes
LONG = replace(BASE, num_layers=1, layer_windows=(None,))


def keys_box_of(memory: Memory, cache: Pointer, shape: tuple[int, ...], dtype: Any) -> Boxes:
    """launch_boxes.keys_box of a cache in the simulated device's memory."""
    group = 16 * shape[-1]
    rows = (int(np.prod(shape)) - 7 * group) // 64
    return Boxes(memory, Pointer(cache.address, dtype), (8, rows, 64), (group, 64, 1), [8, 16, 64])


class Simulated:
    """A decode wave on the simulated device, with caches of its own. model: of float16 or bfloat16 weights. Matrices of
    nested formats and of e4m3 numbers beside others are random."""

    def __init__(
        self,
        model: Llama,
        batch: int,
        workers: int,
        slots: int,
        *,
        weight_format: WeightFormat | None = None,
        gains_apart: bool = False,
        **constants: Any,
    ):
        plan = plan_decode(DecodeStep(model.config, batch, weight_format), workers=workers)
        config, groups, self.dtype = model.config, plan.groups, model.weights.embedding.dtype
        stream = WeightStream(plan.program, self.dtype, CPU, weight_format)
        for name, weight in wave_weights(model).items():
            form = stream.format_of(name)
            rows, cols = len(weight.matrices[0]) * len(weight.matrices), weight.matrices[0].shape[1]
            if isinstance(form, NestedTiles | SixTiles):
                stream.put_rows(name, nested_rows(rows, cols, form.bits, seed=rows))
            elif isinstance(form, FloatTiles):
                stream.put_rows(name, float_rows(rows, cols, seed=rows))
            else:
                stream.put(name, replace(weight, gain=None) if gains_apart else weight)
        assert stream.reached
        self.bench = Bench(
            plan.program,
            stream.tensor,
            stream.lists,
            weight_format,
            **{
                "D": groups.head_dim,
                "GP": groups.size,
                "CH": groups.merged,
                "KSPLITS": groups.splits,
                "QKNORM": config.qk_norm,
                "SCALE": groups.head_dim**-0.5,
            }
            | constants,
        )
        put = self.bench.memory.put
        self.config, self.slots, self.stream = config, slots, stream
        self.cache_shape = (config.num_layers, slots, config.num_kv_heads, CAPACITY, config.head_dim)
        empty = words(torch.full(self.cache_shape, torch.nan, dtype=self.dtype))
        self.k, self.v = put(empty), put(empty)
        if (
            groups.head_dim in (64, 128)
            and plan.program.shape.tile_bytes >= TILE_BYTES
            and not {"PAGE", "STREAMS"} & set(constants)
        ):
            boxes = (
                keys_box_of(self.bench.memory, cache, self.cache_shape, DTYPES[self.dtype])
                for cache in (self.k, self.v)
            )
            self.bench.arguments |= {"STREAMS": 1, **dict(zip(("keys", "values"), boxes, strict=True))}
        layers = model.weights.layers

        def stacked(name: str) -> np.ndarray:
            there = [getattr(layer, name) for layer in layers if getattr(layer, name) is not None]
            return torch.cat(there).float().numpy() if there else np.zeros(1, dtype=np.float32)

        self.embedding = put(words(model.weights.embedding))
        padded = plan.program.shape.batch
        pointers = [
            self.embedding,
            put(model.rotary.rows(CAPACITY).numpy()),
            self.k,
            self.v,
            put(np.full((padded, config.hidden_size), np.nan, dtype=np.float32)),
            put(stacked("qkv_bias")),
            put(stacked("q_norm")),
            put(stacked("k_norm")),
        ]
        strides = [np.prod(self.cache_shape[axis:]) // 2 for axis in (1, 2, 3)]
        scales = put(np.zeros(1, dtype=np.float32) if stream.scales is None else stream.scales.numpy())
        known = [*(int(p.address) for p in pointers), *strides, STREAM, int(scales.address)]
        gains = put(words(norm_gains(model))) if gains_apart else None
        known += [0 if gains is None else int(gains.address)]
        self.places = known + [0] * (16 - len(known))

    def fill(self, slots: list[int], contexts: list[int]) -> None:
        """Put random keys and values of so many tokens into slots; NaN behind them, and everywhere else."""
        for pointer, seed in ((self.k, 1), (self.v, 2)):
            cache = randn(*self.cache_shape, seed=seed).to(self.dtype)
            for slot in range(self.slots):
                context = contexts[slots.index(slot)] if slot in slots else 0
                cache[:, slot, :, context:] = float("nan")
            self.bench.memory.set(pointer, words(cache))

    def step(self, tokens: list[int], positions: list[int], slots: list[int], **more: Any) -> Tensor:
        put, vocab = self.bench.memory.put, self.config.vocab_size
        out = put(np.full((len(tokens), vocab), np.nan, dtype=np.float32).view(np.int32))
        three = [put(np.array(values, dtype=np.int64)) for values in (tokens, positions, slots)]
        self.bench.run(
            self.embedding,
            self.config.hidden_size // 2,
            out,
            vocab,
            len(tokens),
            **dict(zip(("tokens", "positions", "slots"), three, strict=True)),
            places=self.places,
            **more,
        )
        return torch.from_numpy(self.bench.memory.get(out, (len(tokens), vocab)).view(np.float32))

    def caches(self) -> list[Tensor]:
        shape = (*self.cache_shape[:-1], self.cache_shape[-1] // 2)
        return [torch.from_numpy(self.bench.memory.get(p, shape)).view(self.dtype) for p in (self.k, self.v)]


def exactly_rounded(model: Llama, form: Rounding) -> Llama:
    """The rounded weights in float32: what a step on them is to come to."""
    return Llama(model.config, round_weights(in_float32(model).weights, form), max_model_len=model.max_model_len)


def assert_steps_agree(
    wave: Simulated, exact: Llama, slots: Sequence[int], steps: int, *, at_once: bool = False
) -> KVCache:
    """Decode `steps` tokens: each step's logits against those of `exact`, which is in float32. A sequence begins in a
    slot a step after the one before it, or all begin at once. Returns the exact cache, NaN where nothing is."""
    kv = exact.new_cache(num_slots=max(slots) + 1, capacity=CAPACITY)
    kv.k.fill_(float("nan"))
    kv.v.fill_(float("nan"))
    dice = torch.Generator().manual_seed(3)
    for step in range(steps):
        where = list(slots if at_once else slots[: step + 1])
        tokens = torch.randint(131, (len(where),), generator=dice).tolist()
        positions = [step if at_once else step - place for place in range(len(where))]
        expected = exact.forward(Batch.decode(*torch.tensor([tokens, positions, where])), kv)
        found = wave.step(tokens, positions, where)
        assert (found - expected).norm() < 4e-3 * expected.norm(), f"step {step}"
    return kv


def assert_batch_invariant(model: Llama, weight_format: WeightFormat | None = None) -> None:
    """Neither the number of workers nor batch-mates change a bit of a step's logits."""
    contexts, tokens = [40, 3, 299, 16], [5, 6, 7, 8]

    def step(workers: int, rows: list[int]) -> Tensor:
        wave = Simulated(model, 4, workers, 4, weight_format=weight_format)
        wave.fill([0, 1, 2, 3], contexts)
        return wave.step([tokens[i] for i in rows], [contexts[i] for i in rows], rows)

    together = step(3, [0, 1, 2, 3])
    for workers in (1, 7):
        assert torch.equal(step(workers, [0, 1, 2, 3]), together)
    for row in (0, 2):
        assert torch.equal(step(3, [row])[0], together[row])


def assert_error_rule(wave: Simulated, exact: Llama, plain: Llama) -> None:
    """Three steps of three sequences: at most twice as far from exact logits as the plain forward pass in 16 bits."""
    caches = [network.new_cache(num_slots=3, capacity=CAPACITY) for network in (exact, plain)]
    dice = torch.Generator().manual_seed(5)
    for position in range(3):
        rows = (torch.randint(131, (3,), generator=dice), torch.full((3,), position), torch.arange(3))
        right, ordinary = (
            network.forward(Batch.decode(*rows), kv).float() for network, kv in zip((exact, plain), caches, strict=True)
        )
        found = wave.step(*(row.tolist() for row in rows))
        assert (found - right).abs().max() <= 2 * (ordinary - right).abs().max() + 1e-5
