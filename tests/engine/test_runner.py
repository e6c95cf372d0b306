"""ModelRunner's cache: how large it is, and that blocks may lie anywhere and be copied."""

import pytest
import torch

from kit.models.tiny_decoders import BASE, in_float32, random_model
from onewave.base.errors import CapacityError
from onewave.engine.prompt.passes import PromptChunk
from onewave.engine.runner import ModelRunner
from onewave.memory import kv_cache
from onewave.models.batch import StepRows
from onewave.models.llama import Llama

BLOCK_BYTES = 2 * kv_cache.CPU_BLOCK_SIZE * BASE.num_layers * BASE.num_kv_heads * BASE.head_dim * 4


@pytest.fixture(scope="module")
def model() -> Llama:
    return in_float32(random_model(BASE))


def runner(model: Llama, kv_bytes: int | None = None, *, max_num_seqs: int = 3, max_model_len: int = 50) -> ModelRunner:
    return ModelRunner(model, max_num_seqs=max_num_seqs, max_model_len=max_model_len, kv_bytes=kv_bytes)


@pytest.mark.parametrize(("blocks", "found"), [(None, 12), (13, 12), (12, 11), (2, 1)])
def test_a_cache_holds_all_sequences_or_what_it_may_take(model: Llama, blocks: int | None, found: int) -> None:
    made = runner(model, None if blocks is None else blocks * BLOCK_BYTES + 1)
    assert made.num_blocks == found
    assert made._kv.k.shape[1] == found + 1
    # The block of no sequence is the spare one.
    assert (made._kv.block_table == found).all()


def test_a_cache_that_may_take_less_than_two_blocks_is_refused(model: Llama) -> None:
    with pytest.raises(CapacityError, match=f"KV cache: {2 * BLOCK_BYTES - 1} bytes.*Raise kv_cache_memory_bytes"):
        runner(model, 2 * BLOCK_BYTES - 1)


@pytest.mark.parametrize(("free", "found"), [(1 << 40, 1 << 30), (1 << 20, 1 << 18)])
def test_a_cpu_s_default_is_a_gib_or_a_quarter_of_what_is_free(
    monkeypatch: pytest.MonkeyPatch, free: int, found: int
) -> None:
    monkeypatch.setattr(kv_cache, "available_bytes", lambda: free)
    assert kv_cache.default_cache_bytes(torch.device("cpu"), one_sequence=1 << 20) == found
    assert kv_cache.default_cache_bytes(torch.device("cpu"), one_sequence=1 << 36) == min(1 << 36, free // 4)
    # A pass's activations fit beside it.
    assert kv_cache.default_cache_bytes(torch.device("cpu"), one_sequence=1, beside=free - 100) == min(found, 100)


def test_a_slot_reads_the_blocks_that_it_has_and_a_copy_is_as_good(model: Llama) -> None:
    made = runner(model)
    made._kv.k.fill_(torch.nan)
    made._kv.v.fill_(torch.nan)
    prompt, one = [(7 * i) % 131 for i in range(40)], torch.ones(1, dtype=torch.int64)
    made.set_blocks([(0, place, block) for place, block in enumerate((7, 2, 9))])
    first = made.prefill([PromptChunk(0, prompt)]).clone()
    made.set_blocks([(2, 0, 7), (2, 1, 2), (2, 2, 11)])
    made.copy_blocks([(9, 11)])
    rows = [StepRows(one * 5, one * 40, one * slot) for slot in (0, 2)]
    assert torch.equal(*(made.decode(row).clone() for row in rows))
    alone = runner(model)
    alone.set_blocks([(1, place, place) for place in range(3)])
    assert torch.equal(alone.prefill([PromptChunk(1, prompt)]), first)
    assert torch.equal(alone.decode(StepRows(one * 5, one * 40, one)), made.decode(rows[1]))


def test_a_block_table_that_was_half_written_is_written_again(model: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    made = runner(model)
    assert made._kv.block_table is not None
    made.set_blocks([(0, 0, 7), (1, 0, 8)])
    real = kv_cache.KVCache.set_blocks

    def fail(cache: kv_cache.KVCache, entries: list[tuple[int, int, int]]) -> None:
        real(cache, entries[:1])
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(kv_cache.KVCache, "set_blocks", fail)
        with pytest.raises(MemoryError):
            made.set_blocks([(0, 0, 3), (1, 0, 4)])
    made.set_blocks([(0, 0, 7), (1, 0, 8)])
    assert made._kv.block_table[:2, 0].tolist() == [7, 8]
