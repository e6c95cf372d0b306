"""Choices of `auto` from measurements: the ledger's table, one launch only where it is ahead, no copy too many."""

import json
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kit.paths import ROOT
from onewave.base.device import Device
from onewave.base.errors import UnsupportedError
from onewave.ops import choice
from onewave.ops.explain import explain
from onewave.ops.ffn import choose, ffn
from onewave.ops.ffn import measured as table
from onewave.ops.ffn.call import FFNCall
from onewave.ops.ffn.chain import launch as chain_impl
from onewave.ops.ffn.choose import ChainChoice
from onewave.ops.ffn.measured import MARGIN, MEASURED, Block, Measured, fastest
from onewave.ops.ffn.reference import ffn as in_torch
from onewave.ops.ffn.wave import launch as wave_impl


def named(row: Measured) -> dict[str, float]:
    """A row's times by the first word of the ledger's implementation."""
    times = {"wave": row.wave_us, "chain": row.chain_us, "streams": row.streams_us, "cuBLAS, two": row.products_us}
    return {name: time for name, time in {**times, "cuBLAS, gate": row.together_us}.items() if time is not None}


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: f"{row.rows}{'-gated' * row.block.gated}")
def test_every_row_of_the_table_is_what_the_ledger_has(row: Measured) -> None:
    path, _, lines = row.source.partition(":")
    first, last = map(int, lines.split("-"))
    ledger = (ROOT / path).read_text().splitlines()
    found: dict[str, float] = {}
    for line in ledger[first - 1 : last]:
        record = json.loads(line)
        assert (record["metric"], record["device_name"], record["unit"]) == ("ffn", row.block.gpu, "us")
        sizes = f"{row.rows}x{row.block.hidden}x{row.block.intermediate}{' gated' * row.block.gated}"
        assert (record["extra"]["shape"], record["extra"]["dtype"]) == (sizes, row.block.dtype)
        assert row.block.out == row.block.hidden
        name = record["extra"]["implementation"]
        found[" ".join(name.split()[:2]) if name.startswith("cuBLAS") else name.split(",")[0]] = record["p50"]
    assert found == {name: pytest.approx(time, abs=0.051) for name, time in named(row).items()}


def test_no_number_of_rows_stands_in_the_table_twice() -> None:
    keys = [(row.block, row.rows) for row in MEASURED]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: f"{row.rows}{'-gated' * row.block.gated}")
def test_one_launch_is_taken_exactly_where_it_was_ahead_of_every_arrangement_of_two(row: Measured) -> None:
    times = named(row)
    fused = min(time for name, time in times.items() if name in ("wave", "chain"))
    others = min(time for name, time in times.items() if name not in ("wave", "chain"))
    assert (row.best in ("wave", "chain")) is (fused < others * (1 - MARGIN))
    if row.best in ("wave", "chain"):
        assert times[row.best] == fused


BLOCK = Block(128, 192, 128, False, "bfloat16", "GPU")


def line(
    rows: int, products: float, together: float | None, streams: float, chain: float, wave: float | None
) -> Measured:
    gated = together is not None
    times = (products, together, streams, chain, wave)
    return Measured(BLOCK._replace(gated=gated), rows, *times, f"ledger/x.jsonl:{rows}")


def test_a_lead_within_what_runs_differ_by_is_none() -> None:
    assert line(8, 100.0, None, 120.0, 98.1, None).best == "torch"
    assert line(8, 100.0, None, 120.0, 97.9, None).best == "chain"
    assert line(8, 100.0, None, 120.0, 97.9, 97.0).best == "wave"
    # Ahead of the products that auto would run, behind what a caller could do with both matrices in one: not fused.
    assert line(8, 100.0, 90.0, 120.0, 95.0, None).best == "torch"
    assert line(8, 100.0, 90.0, 97.0, 95.0, None).best == "streams"
    assert line(8, 100.0, None, 98.5, 120.0, None).best == "torch"


TABLE = (
    *(line(1, 9.0, None, 9.0, 9.0, 5.0), line(8, 9.0, None, 9.0, 9.0, 7.0), line(64, 9.0, None, 9.0, 9.0, 20.0)),
    *(line(256, 9.0, None, 9.0, 5.0, None), line(512, 9.0, None, 6.0, 9.0, None)),
)


@pytest.fixture
def best(monkeypatch: pytest.MonkeyPatch) -> Any:
    def best(rows: int, known: tuple[Measured, ...] = TABLE, **change: Any) -> str:
        monkeypatch.setattr(table, "MEASURED", known)
        return fastest(rows, BLOCK._replace(gpu=None)._replace(**change))

    return best


def test_between_measured_rows_only_what_both_sides_agree_on_is_known(best: Any) -> None:
    assert [best(rows) for rows in (1, 5, 8, 9, 63, 64, 65, 256, 300, 512)] == [
        *("wave", "wave", "wave", "torch", "torch", "torch", "torch", "chain", "torch", "streams"),
    ]
    assert best(2, TABLE[:1]) == "torch"
    assert best(513) == "torch"
    # Not the same winner on both sides, but both have seen streams ahead of the products.
    assert best(700, (*TABLE, line(1024, 9.0, None, 8.0, 7.0, None))) == "streams"
    assert best(700, (*TABLE, line(1024, 9.0, None, 8.9, 7.0, None))) == "torch"


@pytest.mark.parametrize(
    "change",
    [{"hidden": 192}, {"intermediate": 256}, {"out": 192}, {"gated": True}, {"dtype": "float16"}, {"gpu": "another"}],
)
def test_another_block_dtype_or_gpu_is_not_known(best: Any, change: dict[str, Any]) -> None:
    assert best(1) == "wave"
    assert best(1, **change) == "torch"


def test_explain_prints_the_table_with_its_lines_and_losses() -> None:
    text = str(explain("ffn", (100, 4096), (14336, 4096), (4096, 14336), device="cuda:sm_90"))
    known = [row for row in MEASURED if not row.block.gated and row.block.hidden == 4096]
    assert known
    for row in known:
        assert f"{row.rows} rows: two products {row.products_us:.1f}" in text
        assert f"{row.best} ({row.source})" in text
    assert any(row.two_launches_us < row.one_launch[1] for row in known)
    other = explain("ffn", (100, 2048), (8192, 2048), (2048, 8192), device="cuda:sm_90", gated=True)
    assert other.backend == "torch"
    assert "bench ops ffn --shape ROWS,2048,8192,gated" in str(other)


class Gpu:
    """A GPU that is not there, on which a table's sizes were measured; notes what would have been launched."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rows: tuple[Measured, ...] = TABLE):
        self.ran: list[str] = []
        self.capturing, self.free = False, 1 << 30
        choose._chosen.cache_clear()
        monkeypatch.setattr(table, "MEASURED", rows)
        monkeypatch.setattr(choice, "device_of", lambda device: Device((9, 0), 4, "GPU"))
        monkeypatch.setattr(wave_impl, "co_resident", lambda device: 4)
        monkeypatch.setattr(wave_impl, "_kept", OrderedDict())
        monkeypatch.setattr(wave_impl, "PackedFFN", self.pack)
        monkeypatch.setattr(chain_impl, "run", self.chain)
        monkeypatch.setattr(chain_impl, "is_ready", lambda *given: False)
        for name, value in {
            "is_current_stream_capturing": lambda: self.capturing,
            "mem_get_info": lambda device: (self.free, 1 << 40),
            "memory_reserved": lambda device: 0,
            "memory_allocated": lambda device: 0,
            "synchronize": lambda device: self.ran.append("wait"),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)

    def pack(self, w_up: Tensor, w_down: Tensor, w_gate: Tensor | None, choice: Any) -> Any:
        self.ran.append("pack")

        def call(x: Tensor) -> Tensor:
            self.ran.append("wave")
            return x.new_zeros(len(x), len(w_down))

        call.waves = (SimpleNamespace(device=w_up.device),)
        return call

    def chain(self, call: FFNCall, taken: ChainChoice) -> Tensor:
        self.ran.append("streams" if taken.streams else "chain")
        return call.x.new_zeros(len(call.x), len(call.w_down))

    def took(self) -> str:
        """Names of the kernels that ran since it was last asked, products being none of ours."""
        ran, self.ran = self.ran, []
        return " ".join(ran) or "torch"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    yield Gpu(monkeypatch)
    choose._chosen.cache_clear()


def block(seed: int = 0) -> tuple[Tensor, Tensor]:
    dice = torch.Generator().manual_seed(seed)
    return torch.randn(192, 128, generator=dice).bfloat16(), torch.randn(128, 192, generator=dice).bfloat16()


def rows(count: int) -> Tensor:
    return torch.ones(count, 128, dtype=torch.bfloat16)


def test_auto_runs_what_was_fastest_and_products_elsewhere(gpu: Gpu) -> None:
    up, down = block()
    taken = []
    for count in (1, 9, 64, 256, 300, 512, 600):
        ffn(rows(count), up, down)
        taken.append(gpu.took())
    assert taken == ["pack wave", "torch", "torch", "chain", "torch", "streams", "torch"]
    ffn(rows(1), up, down)
    assert gpu.took() == "wave"
    ffn(rows(1).half(), up.half(), down.half())
    assert gpu.took() == "torch"
    assert ffn(rows(0), up, down).shape == (0, 128)


def test_auto_keeps_no_order_from_being_asked_for_and_takes_products_where_its_choice_has_none(gpu: Gpu) -> None:
    up, down = block()
    for count, change, expected in (
        (256, {"order": "skewed:2"}, "chain"),
        (256, {"order": "sm_local"}, "torch"),
        (256, {"policy": "data"}, "torch"),
        (1, {"order": "rows:2"}, "torch"),
        (1, {"order": "sm_local"}, "pack wave"),
        # A hidden row of one tile has no halves.
        (1, {"order": "half_row"}, "torch"),
        (1, {"order": "half_row", "backend": "wave"}, "pack wave"),
    ):
        found = ffn(rows(count), up, down, **change)
        assert gpu.took() == expected
        if expected == "torch":
            assert torch.equal(found, in_torch(rows(count), up, down, None, "silu"))


@pytest.mark.parametrize("gated", [False, True])
def test_auto_and_explain_take_products_for_rows_that_an_order_has_no_plan_for(
    gpu: Gpu, gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "MEASURED", MEASURED)
    monkeypatch.setattr(choice, "device_of", lambda device: Device((9, 0), 132, "NVIDIA H200"))
    up, down = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((14336, 4096), (4096, 14336)))
    for count, expected in ((8, "wave"), (9, "torch"), (32, "torch")):
        x = up.new_empty(count, 4096)
        for order, backend in (("auto", "wave"), ("sm_local", expected)):
            call = FFNCall(x, up, down, up if gated else None, order=order)
            assert choose.settled(call, choose.choose(call)).backend == backend
        shapes = (x.shape, up.shape, down.shape)
        answer = explain("ffn", *shapes, device="cuda:sm_90", order="sm_local", gated=gated)
        assert answer.backend == expected
        assert any("no plan for so many rows in order sm_local" in why for why in answer.why) is (expected == "torch")
    with pytest.raises(UnsupportedError, match="Use row"):
        explain("ffn", *shapes, device="cuda:sm_90", order="sm_local", gated=gated, backend="wave")


def test_the_same_memory_in_another_dtype_is_packed_again(gpu: Gpu) -> None:
    up, down = block()
    ffn(rows(1), up, down, backend="wave")
    ffn(rows(1).half(), up.view(torch.float16), down.view(torch.float16), backend="wave")
    assert gpu.took() == "pack wave pack wave"


def test_a_model_of_many_blocks_is_not_packed_again_at_every_step(gpu: Gpu) -> None:
    blocks = [block(seed) for seed in range(7)]
    first, second = ([[ffn(rows(1), *each), gpu.took()][1] for each in blocks] for _ in range(2))
    assert first == ["pack wave"] * 6 + ["torch"]
    assert second == ["wave"] * 6 + ["torch"]
    # A block that is gone makes room for another.
    del blocks[0]
    ffn(rows(1), *blocks[-1])
    assert gpu.took() == "wait pack wave"  # for launches on other streams that may still read the copy that goes


def test_there_is_room_for_all_numbers_of_rows_that_auto_takes_the_wave_for(gpu: Gpu) -> None:
    sizes = sorted({1 << (row.rows - 1).bit_length() for row in MEASURED if row.best == "wave"})
    up, down = block()
    for count in sizes:
        ffn(rows(count), up, down, backend="wave")
    gpu.took()
    for count in sizes:
        ffn(rows(count), up, down, backend="wave")
        assert gpu.took() == "wave", count


def test_auto_notices_weights_that_were_written_to(gpu: Gpu) -> None:
    up, down = block()
    ffn(rows(1), up, down)
    assert gpu.took() == "pack wave"
    up.mul_(2)
    ffn(rows(1), up, down)
    assert gpu.took() == "wait pack wave"
    with torch.inference_mode():
        hidden_writes = [each.clone() for each in block()]
        ffn(rows(1), *hidden_writes)
    assert gpu.took() == "torch"


def test_auto_packs_neither_into_the_last_memory_nor_into_a_recording(gpu: Gpu) -> None:
    up, down = block()
    gpu.free = 2 * (up.nbytes + down.nbytes) - 1
    ffn(rows(1), up, down)
    assert gpu.took() == "torch"
    gpu.free += 1
    gpu.capturing = True
    for count in (1, 256):
        ffn(rows(count), up, down)
        assert gpu.took() == "torch"
    gpu.capturing = False
    ffn(rows(1), up, down)
    assert gpu.took() == "pack wave"
    gpu.capturing = True
    ffn(rows(1), up, down)
    assert gpu.took() == "wave"


def test_the_docs_tables_are_the_tables_rows() -> None:
    page = (ROOT / "docs" / "reference" / "ffn.md").read_text()
    page = page.split("## Measured")[1].split("## Memory traffic")[0]
    printed = [
        [cell.strip() for cell in each.strip("| \n").split("|")] for each in page.splitlines() if "jsonl" in each
    ]
    found = {cells[-1]: cells for cells in printed}
    assert len(printed) == len(found) == len(MEASURED)
    for row in MEASURED:
        cells = [cell.replace(",", "") for cell in found[row.source]]
        times = [
            row.products_us,
            *([row.together_us] if row.block.gated else []),
            row.streams_us,
            row.chain_us,
            row.wave_us,
        ]
        shown = [f"{row.rows}", *("" if t is None else f"{t:.1f}" if t < 1000 else f"{t:.0f}" for t in times)]
        ratio = f"{row.two_launches_us / row.one_launch[1]:.3f}"
        assert cells[:-1] == [*shown, ratio, {"torch": "two products"}.get(row.best, row.best)]


def test_the_docs_bytes_are_the_ledgers() -> None:
    section = (ROOT / "docs" / "reference" / "ffn.md").read_text().split("## Memory traffic")[1]
    ledger = (ROOT / "ledger" / "h200.jsonl").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in section.splitlines() if "jsonl" in line]
    assert len(rows) == 7
    for cells in rows:
        first, last = map(int, cells[-1].partition(":")[2].split("-"))
        records = [json.loads(line) for line in ledger[first - 1 : last]]
        shown = {
            column: cell
            for column, cell in zip(("cuBLAS", "streams", "chain", "wave"), cells[2:6], strict=True)
            if cell
        }
        assert len(records) == len(shown)
        for record in records:
            name, _, _ = record["extra"]["implementation"].partition(",")
            megabytes = (f"{record['extra'][key] * 1e-6:,.0f}" for key in ("dram_read_bytes", "dram_write_bytes"))
            assert shown[name] == f"{' + '.join(megabytes)}, {record['extra']['l2_hit_rate'] * 100:.0f} %"
            assert record["extra"]["shape"] == f"{cells[0].replace(',', '')}x4096x14336"
