"""On a card: launches of several tokens that end early, and decode steps from a paged cache."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from onewave.base.errors import InvalidArgumentError
from onewave.bench.wave import in_pages
from onewave.memory.kv_cache import PagedKVCache, StaticKVCache
from onewave.models.llama import Llama
from onewave.models.llama_plan import DecodeWave
from onewave.ops.sampling import RowParameters, sample, uniforms
from onewave.wave.launch import runs_here
from onewave.wave.layout import draw_words, limit_words

sys.path.insert(0, str(Path(__file__).parents[1] / "wave"))
sys.path.insert(0, str(Path(__file__).parent))
from test_wave_gpu import copied, filled, on_card
from tiny_decoders import BASE, FAMILIES, random_model

CARD = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not runs_here(CARD), reason="needs a card of compute capability 9.0"),
]
NEVER = 1 << 40


def gathered(paged: PagedKVCache) -> tuple[Tensor, Tensor]:
    found = [pool[:, paged.block_table.long()].transpose(2, 3).flatten(3, 4) for pool in (paged.k, paged.v)]
    return found[0], found[1]


def assert_same(paged: PagedKVCache, kv: StaticKVCache) -> None:
    for ours, theirs in zip(gathered(paged), (kv.k, kv.v), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("page", [16, 256])
def test_pages_give_the_bits_of_a_plain_cache(family: str, page: int) -> None:
    config = FAMILIES[family]
    windows = tuple(None if window is None else 201 for window in config.layer_windows)
    model = on_card(random_model(replace(config, layer_windows=windows)))
    wave, kv = DecodeWave(model, batch=5), filled(model, 6)
    for contexts in ([0, 1, 15, 16, 17], [127, 128, 129, 255, 256], [257, 511, 900, 1023, 63]):
        plain = copied(model, kv)
        paged = in_pages(plain, page)
        rows = [torch.tensor(values, device="cuda") for values in ([5, 6, 7, 8, 9], contexts, [4, 0, 2, 1, 5])]
        wave.bind_cache(plain)
        expected = wave(*rows)
        wave.bind_cache(paged)
        found = wave(*rows)
        wave.wave.check()
        assert torch.equal(found, expected)
        assert_same(paged, plain)


def test_the_table_may_change_between_launches_of_several_tokens() -> None:
    model = on_card(random_model(BASE))
    wave = DecodeWave(model, batch=3, workers=9).several(5)
    plain = filled(model, 3)
    paged = in_pages(plain, 32)
    slots = torch.tensor([2, 0, 1], device="cuda")
    tokens, positions = slots + 5, slots * 60 + 14
    for _ in range(4):
        # Two pages trade places, in the table and in memory.
        pages = paged.block_table[0, :2].long().tolist()
        paged.block_table[0, :2] = paged.block_table[0, :2].flip(0)
        for pool in (paged.k, paged.v):
            pool[:, pages] = pool[:, pages[::-1]]
        wave.bind_cache(plain)
        expected = wave.produce(tokens, positions, slots)
        wave.bind_cache(paged)
        assert torch.equal(wave.produce(tokens, positions, slots), expected)
        assert_same(paged, plain)
        tokens, positions = expected[-1], positions + 5
    wave.wave.check()


def test_a_wrong_entry_is_named_in_debug_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    model = on_card(random_model(BASE))
    wave, paged = DecodeWave(model, batch=1), in_pages(filled(model, 1), 64)
    paged.block_table[0, 2] = 9999
    wave.bind_cache(paged)
    rows = [torch.tensor([value], device="cuda") for value in (5, 127, 0)]
    wave(*rows)  # the entry is not used yet
    monkeypatch.setenv("ONEWAVE_DEBUG", "1")
    wave(*rows)
    rows[1] += 1
    with pytest.raises(InvalidArgumentError, match=r"block table\[0, 2\]"):
        wave(*rows)


def tokens_one_by_one(model: Llama, kv: StaticKVCache, rows: list[Tensor], count: int) -> list[list[int]]:
    """[rows][count] tokens of single launches; kv holds them afterwards."""
    wave = DecodeWave(model, batch=len(rows[0]))
    wave.bind_cache(kv)
    tokens, positions, slots = rows
    made: list[Tensor] = []
    for step in range(count):
        tokens = wave(tokens, positions + step, slots).argmax(dim=1)
        made.append(tokens)
    wave.wave.check()
    return torch.stack(made).T.tolist()


@pytest.mark.parametrize("delays", [False, True])
def test_any_ends_give_the_tokens_and_the_cache_up_to_them(delays: bool) -> None:
    """A launch after a launch with random lengths and stop tokens; with delays, under random pauses before tasks."""
    count, rows = 12, 4
    model = on_card(random_model(replace(BASE, qkv_bias=True, vocab_size=4099)))
    before = filled(model, rows)
    slots = torch.tensor([1, 3, 0, 2], device="cuda")
    given = [slots + 5, slots * 60 + 17, slots]
    whole = copied(model, before)
    expected = tokens_one_by_one(model, whole, given, count)
    wave = DecodeWave(model, batch=rows, delays=delays).several(count)
    dice = torch.Generator().manual_seed(4)
    for _ in range(60):
        kept = torch.randint(count + 1, (rows,), generator=dice).tolist()
        limits: list[list[int]] = []
        for row, fed in enumerate(given[0].tolist()):
            stop = expected[row][kept[row] - 1] if kept[row] else fed
            if torch.randint(2, (), generator=dice):
                kept[row] = [fed, *expected[row]].index(stop)
                limits.append(limit_words(NEVER, [130, stop]))
            else:
                limits.append(limit_words(int(given[1][row]) + kept[row]))
        kv = copied(model, before)
        wave.bind_cache(kv)
        found = wave.produce(*given, torch.tensor(limits, device="cuda"))
        assert found.T.tolist() == [row[:n] + [-1] * (count - n) for row, n in zip(expected, kept, strict=True)]
        wave.wave.check()
        for mine, new, old in ((kv.k, whole.k, before.k), (kv.v, whole.v, before.v)):
            for slot, first, n in zip(slots.tolist(), given[1].tolist(), kept, strict=True):
                assert torch.equal(mine[:, slot, :, : first + n], new[:, slot, :, : first + n])
                assert torch.equal(mine[:, slot, :, first + n :], old[:, slot, :, first + n :])


def test_the_host_ends_a_launch_and_what_it_has_made_is_right() -> None:
    count = 64
    model = on_card(random_model(replace(BASE, qkv_bias=True, vocab_size=4099)))
    before = filled(model, 2)
    slots = torch.tensor([1, 0], device="cuda")
    given = [slots + 5, slots * 60 + 17, slots]
    expected = tokens_one_by_one(model, copied(model, before), given, count)
    # Pauses before tasks, so that a launch takes much longer than the host needs to speak.
    wave = DecodeWave(model, batch=2, workers=16, delays=True).several(count)
    wave.bind_cache(copied(model, before))
    assert wave.produce(*given).T.tolist() == expected
    wave.bind_cache(copied(model, before))
    produced = wave.produce(*given)
    wave.interrupt()
    found = produced.T.tolist()
    made = sum(token >= 0 for token in found[0])
    assert 0 < made < count
    assert found == [row[:made] + [-1] * (count - made) for row in expected]
    # The next launch goes on, and is a whole one.
    tokens = torch.tensor([row[made - 1] for row in expected], device="cuda")
    found = wave.produce(tokens, given[1] + made, slots).T.tolist()
    wave.wave.check()
    assert [row[: count - made] for row in found] == [row[made:] for row in expected]
    assert all(token >= 0 for row in found for token in row)


OFF = ([0] * 4, [1.0] * 4)
LIMITED = ([0, 5, 40, 30000], [0.9, 0.5, 1.0, 0.8])


@pytest.mark.parametrize(
    ("limits", "copies", "delays"),
    [(OFF, 1, False), (LIMITED, 1, False), (LIMITED, 5, False), (LIMITED, 1, True)],
    ids=["no limits", "limits", "limits among equals", "limits, under random pauses"],
)
def test_drawn_tokens_are_those_of_the_sampler(
    limits: tuple[list[int], list[float]], copies: int, delays: bool
) -> None:
    """With copies of the head's rows there are as many equal logits."""
    count, rows = 9, 4
    top_k, top_p = limits
    model = random_model(replace(BASE, qkv_bias=True, vocab_size=50000))
    head = model.weights.head
    assert isinstance(head, Tensor)
    head.copy_(head[: len(head) // copies].repeat(copies, 1))
    model = on_card(model)
    before = filled(model, rows)
    slots = torch.tensor([1, 3, 0, 2], device="cuda")
    temperature, min_p = [0.7, 0.0, 1.0, 2.5], [0.0, 0.0, 0.01, 0.0]
    numbers = uniforms([21, 22, 23, 24], [0] * rows, 3 * count)
    how = RowParameters.build(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, device=CARD)
    one = DecodeWave(model, batch=rows)
    several = (DecodeWave(model, batch=rows, delays=True) if delays else one).several(count)
    whole = copied(model, before)
    one.bind_cache(whole)
    tokens, positions, expected = slots + 5, slots * 60 + 17, list[Tensor]()
    for step in range(3 * count):
        logits = one(tokens, positions + step, slots)
        tokens = sample(logits, torch.from_numpy(numbers[:, step].copy()).cuda(), how, search=False)
        expected.append(tokens)
    kv = copied(model, before)
    several.bind_cache(kv)
    tokens, found = slots + 5, list[Tensor]()
    for begin in range(0, 3 * count, count):
        fixed = torch.tensor([*map(draw_words, temperature, min_p, top_k, top_p)], dtype=torch.float64)
        draws = torch.cat((fixed, torch.from_numpy(numbers[:, begin : begin + count].copy())), dim=1).cuda()
        found.append(several.produce(tokens, positions + begin, slots, draws=draws))
        tokens = found[-1][-1]
        # A launch that makes nothing and draws nothing comes between.
        nothing = torch.tensor([limit_words(0)] * rows, device="cuda")
        assert (several.produce(tokens, positions, slots, nothing) == -1).all()
    several.wave.check()
    assert torch.equal(torch.cat(found), torch.stack(expected))
    assert len({tuple(row.tolist()) for row in expected}) == len(expected)
    assert torch.equal(kv.k, whole.k)
    assert torch.equal(kv.v, whole.v)
