"""`bench wave` and `bench ops ffn` without a card: what they refuse, and what they count."""

from __future__ import annotations

import pytest
import torch
from typer.testing import CliRunner

from onewave.base.errors import InvalidArgumentError, UnsupportedError
from onewave.bench.ceilings import Ceiling
from onewave.bench.clock import summarize
from onewave.bench.ffn import FFNResult, FFNShape, measure_ffn
from onewave.bench.wave import WaveResult, in_pages
from onewave.cli.bench_ffn import bench_ffn
from onewave.cli.main import app
from onewave.memory.kv_cache import StaticKVCache

CPU = torch.device("cpu")
CEILING = Ceiling("read bandwidth", 4000.0, "GB/s", "a test", summarize([4000.0]))


def test_a_block_counts_each_matrix_once() -> None:
    assert FFNShape(1).weight_bytes == 2 * 2 * 4096 * 14336
    assert FFNShape(8, 64, 128, gated=True).weight_bytes == 3 * 2 * 64 * 128


def test_the_ledgers_lines_hold_the_time_and_the_share_of_the_ceiling() -> None:
    line = FFNResult(FFNShape(1), "wave", summarize([100e-6])).measurement("bfloat16", CEILING)
    assert line.summary.p50 == pytest.approx(100)
    assert line.extra["ceiling_share"] == pytest.approx(FFNShape(1).weight_bytes / 100e-6 / 4e12)
    step = WaveResult("wave", 1, 512, summarize([0.5e-3]), 2_000_000_000, 0.01).measurement("m", "bfloat16", CEILING)
    assert step.summary.p50 == pytest.approx(0.5)
    assert step.extra["ceiling_share"] == pytest.approx(1.0)
    assert step.extra["self_check"] == 0.01
    assert "page_size" not in step.extra
    step = WaveResult("wave, pages", 1, 512, summarize([1.0]), 1, page=64).measurement("m", "bfloat16", CEILING)
    assert step.extra["page_size"] == 64


def test_a_cache_in_pages_holds_what_the_plain_one_does() -> None:
    kv = StaticKVCache(
        num_layers=2, num_slots=3, num_kv_heads=2, head_dim=4, capacity=64, dtype=torch.float32, device=CPU
    )
    kv.k.copy_(torch.randn(kv.k.shape, generator=torch.Generator().manual_seed(0)))
    kv.v.copy_(torch.randn(kv.v.shape, generator=torch.Generator().manual_seed(1)))
    paged = in_pages(kv, 16)
    assert paged.block_table.dtype is torch.int32
    assert sorted(paged.block_table.flatten().tolist()) == list(range(12))
    for plain, pool in ((kv.k, paged.k), (kv.v, paged.v)):
        for slot in range(3):
            for key in range(64):
                page = int(paged.block_table[slot, key // 16])
                assert torch.equal(pool[:, page, :, key % 16], plain[:, slot, :, key])


def test_a_page_size_that_no_kernel_takes_is_refused() -> None:
    result = CliRunner().invoke(app, ["bench", "wave", "--page-size", "48"])
    assert isinstance(result.exception, InvalidArgumentError)


def test_without_a_card_both_say_what_they_need() -> None:
    with pytest.raises(UnsupportedError, match="compute capability"):
        measure_ffn(FFNShape(1), CPU, torch.bfloat16, reps=1)
    result = CliRunner().invoke(app, ["bench", "wave", "--device", "cpu"])
    assert isinstance(result.exception, UnsupportedError)


def test_a_shape_that_is_no_three_numbers_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="rows,hidden,intermediate"):
        bench_ffn(["8,4096"], device=CPU, dtype=torch.bfloat16, reps=1, as_json=False, ledger=None)
