"""A missing wait, an early arrival or a missing fence in the wave kernel is found, whatever the timing was.

The kernel runs in NumPy with one fault planted in its source. `mbarrier.luck` waits as long as a wait does, and orders
nothing: a wait that is missing where the timing happens to be right.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from kit.models.tiny_decoders import random_model
from kit.numpy_gpu.gluon_in_numpy import Fault
from kit.numpy_gpu.happens_before import Heard, Race, allocate, begin, bring, fence, reads, writes
from kit.numpy_gpu.simulated_device import Bench, words
from kit.numpy_gpu.simulated_wave import LONG, Simulated
from kit.operands.random import randn
from onewave.models import llama_plan
from onewave.models.config.model_config import RopeConfig
from onewave.ops.ffn.sizes import FFNSizes
from onewave.ops.ffn.wave.plan import plan_ffn
from onewave.wave.weights.pack import Weight, pack_stream

FAULTS = {
    "the loader does not wait for a free slot": (
        Fault("load_tile", "mbarrier.wait(ring.empty", "mbarrier.luck(ring.empty"),
        "a copy by TMA writes what products of multi",
    ),
    "a product does not wait for its weights": (
        Fault("multiply_block", "mbarrier.wait(ring.full", "mbarrier.luck(ring.full"),
        "products of multi.* reads what a copy",
    ),
    "a product does not wait for its activations": (
        Fault("multiply_steps", "mbarrier.wait(activations.full", "mbarrier.luck(activations.full"),
        "products of multi.* reads what exchange",
    ),
    "a slot goes while its product runs": (
        Fault("multiply_block", "warpgroup_mma_wait(1, deps=[acc])", "warpgroup_mma_wait(2, deps=[acc])"),
        "a copy by TMA writes what products of multi",
    ),
    "activations that were not fenced": (
        Fault("load_activations", "fence_async_shared()", "pass"), "products of multi.* reads what exchange.* wrote"
    ),
    "results are written over ones that nobody has read": (
        Fault("give", "mbarrier.wait(results.empty", "mbarrier.luck(results.empty"),
        "multi.* writes what exchange.* read",
    ),
    "results are read too early": (
        Fault("finish_blocks", "mbarrier.wait(results.full", "mbarrier.luck(results.full"),
        "exchange.* reads what multi.* wrote",
    ),
    "a tile is held before it has landed": (
        Fault("held_tile", "mbarrier.wait(ring.full", "mbarrier.luck(ring.full"), "multi.* reads what a copy"
    ),
    "held tiles' slots go before anything orders their loads and the next copies": (
        Fault("multiply_held", "fence_async_shared()", "pass"), "a copy by TMA writes what multi.* read"
    ),
    "held tiles do not wait for their activations": (
        Fault("multiply_held", "mbarrier.wait(activations.full", "mbarrier.luck(activations.full"),
        "products of multi.* reads what exchange",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str) -> None:
    fault, complaint = FAULTS[name]
    sizes = FFNSizes(1, 192, 2112, 128, True)
    up, gate = ((randn(2112, 192, seed=seed) / 14).half() for seed in (1, 2))
    down = (randn(128, 2112, seed=3) / 33).half()
    program = plan_ffn(sizes, workers=2, order="row").programs[0]
    stream = pack_stream(program, {"up": Weight((gate, up)), "down": Weight((down,))}, torch.device("cpu")).tensor
    bench = Bench(program, stream, HELD=2 if "held" in fault.function else 0)
    source, out = bench.memory.put(words(randn(1, 192, seed=4).half())), bench.memory.put(np.zeros((1, 64), np.int32))
    bench.run(source, 96, out, 64, 1)
    bench.planted.append(fault)
    with pytest.raises(Race, match=complaint):
        bench.run(source, 96, out, 64, 1)


STREAMED = {
    "keys come to a slot that is not free": (
        Fault("stream_keys", "mbarrier.wait(ring.empty", "mbarrier.luck(ring.empty"), "a copy by TMA writes what"
    ),
    "keys' slots go before anything orders their loads and the next copies": (
        Fault("release_keys", "fence_async_shared()", "pass"), "a copy by TMA writes what exchange.* read"
    ),
    "keys are read before they have landed": (
        Fault("tile_from_ring", "mbarrier.wait(ring.full", "mbarrier.luck(ring.full"), "exchange.* reads what a copy"
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "ring"), [*((name, 6) for name in STREAMED), *((name, 3) for name in list(STREAMED)[1:])]
)
def test_a_fault_where_keys_come_through_the_ring_is_found(
    name: str, ring: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault, complaint = STREAMED[name]
    monkeypatch.setattr(llama_plan, "_ATTENTION_TASKS", 1)
    config = replace(LONG, head_dim=64, num_heads=2, num_kv_heads=1, rope=RopeConfig("default", 500.0, 64))
    wave = Simulated(random_model(config), 1, 1, 1, S=ring)
    wave.fill([0], [1000])
    assert wave.bench.arguments["STREAMS"]
    wave.step([5], [1000], [0])
    wave.bench.planted.append(fault)
    with pytest.raises(Race, match=complaint):
        wave.step([5], [1000], [0])


def test_a_copy_is_heard_of_at_its_barrier_and_nowhere_else() -> None:
    begin()
    place, barrier = allocate(np.zeros(256, np.uint8), 128), Heard()
    told = bring(barrier, place)
    with pytest.raises(Race, match="the kernel's start reads what a copy by TMA wrote"):
        reads(place)
    barrier.arrive(told)
    barrier.end_phase()
    barrier.acquire()
    reads(place)
    writes(place[:128])
    with pytest.raises(Race, match="a copy by TMA writes what the kernel's start wrote"):
        bring(barrier, place[:128])  # not fenced
    fence()
    bring(barrier, place[:128])


def test_a_copy_is_behind_what_was_read_if_a_fence_says_so() -> None:
    begin()
    place, barrier = allocate(np.zeros(128, np.uint8), 128), Heard()
    barrier.arrive(bring(barrier, place))
    barrier.end_phase()
    barrier.acquire()
    reads(place)
    with pytest.raises(Race, match="a copy by TMA writes what the kernel's start read"):
        bring(barrier, place)
    fence()
    bring(barrier, place)
