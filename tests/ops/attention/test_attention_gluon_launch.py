"""What Hopper's kernel is launched with: a slow model of it reads and writes through the very same arguments.

The model takes the launch's arguments by the names of the kernel's parameters, walks the tiles with the kernel's own
code and addresses memory as TMA does: coordinates times strides modulo 2^64; outside the bounds it reads zeros and
writes nothing.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from kit.device import pretend
from kit.numpy_gpu.descriptor_rows import load, rows_of
from onewave.ops.attention.hopper import launch as gluon_impl
from onewave.ops.attention.hopper import tiles as gluon_tiles_impl
from onewave.ops.attention.op import attention, attention_varlen
from onewave.ops.attention.reference import attention as in_torch

NAN = float("nan")
LOG2E = math.log2(math.e)
PLACE = gluon_tiles_impl.place.fn


class Model:
    """Stands for the compiled kernel: model[(programs,)](*arguments)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, names: list[str]) -> None:
        self.monkeypatch, self.names, self.launches = monkeypatch, names, 0

    def __getitem__(self, grid: tuple[int]) -> Any:
        def launch(*values: Any, num_warps: int, **constants: Any) -> None:
            assert num_warps == 4
            assert not constants.keys() & set(self.names[: len(values)])
            given = dict(zip(self.names, values, strict=False)) | constants
            assert given.keys() == set(self.names)
            assert grid[0] <= 132
            self.launches += 1
            for program in range(grid[0]):
                self.run(program, grid[0], SimpleNamespace(**given))

        return launch

    def run(self, program: int, programs: int, problem: Any) -> None:
        language = SimpleNamespace(
            program_id=lambda _: program, num_programs=lambda _: programs, minimum=min, maximum=max,
            where=lambda condition, yes, no: yes if condition else no, load=Pointer.load,
        )  # fmt: skip
        self.monkeypatch.setattr(gluon_tiles_impl, "gl", language)
        self.monkeypatch.setattr(gluon_tiles_impl, "place", PLACE)
        if problem.RAGGED:
            problem.starts_q, problem.starts_k = Pointer(problem.starts_q), Pointer(problem.starts_k)
        if problem.ORDER:
            problem.order = Pointer(problem.order.view(-1))
        for turn in range(problem.rounds):
            tile = gluon_tiles_impl.tile_at.fn(problem, gluon_tiles_impl.position_of.fn(problem, turn))
            if tile[-1]:
                for warpgroup in range(problem.WARPGROUPS):
                    self.multiply(problem, 64 * warpgroup, *tile[:-1])

    def multiply(
        self, problem: Any, own: int, batch: int, head: int, first: int, start_q: int, rows: int, start_k: int,
        num_keys: int, shift: int, begin: int, count: int,
    ) -> None:  # fmt: skip
        place = [int(x) for x in PLACE(problem, batch, head, start_q, rows, first + own)]
        q = load(problem.q, place)
        keys, values = [], []
        for tile in range(begin, begin + count):
            at = gluon_tiles_impl.place_of_keys.fn(problem, batch, head // problem.group, start_k, num_keys, tile)
            keys.append(load(problem.k, [int(x) for x in at]))
            values.append(load(problem.v, [int(x) for x in at]))
        scores = q @ torch.cat(keys).T
        if problem.SOFTCAP:
            scores = problem.outer * torch.tanh(scores * problem.inner / (2 * LOG2E)) / LOG2E
        else:
            scores = scores * problem.scale_log2 / LOG2E
        key = begin * problem.BN + torch.arange(count * problem.BN)
        row = first + own + torch.arange(64)
        seen = (key < num_keys)[None].expand(64, -1)
        if problem.RIGHT:
            seen = seen & (key <= row[:, None] + shift + problem.right)
        if problem.LEFT:
            seen = seen & (key >= row[:, None] + shift - problem.left)
        scores = scores.masked_fill(~seen, -math.inf)
        empty = ~seen.any(1)
        if problem.SINKS:
            scores = torch.cat((scores, problem.sinks.as_strided((head + 1,), (1,))[head].double().expand(64, 1)), 1)
        weights = scores.softmax(1)[:, : len(key)].masked_fill(empty[:, None], 0)
        view, at = rows_of(problem.out, place)
        view.copy_((weights @ torch.cat(values))[at : at + len(view), : view.shape[1]])
        if problem.LSE:
            lse = scores.logsumexp(1).masked_fill(empty, -math.inf)[: max(0, rows - first - own)]
            at = head * problem.lse_head + (start_q if problem.RAGGED else batch * problem.lse_batch) + first + own
            problem.lse.view(-1)[at : at + len(lse)] = lse


class Pointer:
    """Into a tensor; adding moves it."""

    def __init__(self, values: Any, at: int = 0) -> None:
        self.values, self.at = (values.values, values.at) if isinstance(values, Pointer) else (values, at)

    def __add__(self, steps: int) -> Pointer:
        return Pointer(self.values, self.at + steps)

    def load(self) -> int:
        return int(self.values[self.at])


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Model:
    """CPU tensors go the way of a GPU's as far as the kernel."""
    found = Model(monkeypatch, list(gluon_impl.attention_kernel.arg_names))
    monkeypatch.setattr(gluon_impl, "attention_kernel", found)
    pretend(monkeypatch)
    return found


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


MASKS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"causal": True, "align": "top-left"},
    {"causal": True, "softcap": 5.0},
    {"window": (37, 11)},
    {"causal": True, "window": 40, "sinks": True},
]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    ("head_dim", "heads", "kv_heads", "lengths"),
    [(128, 4, 2, (130, 200)), (64, 2, 1, (200, 70)), (72, 2, 2, (1, 300)), (128, 2, 1, (5, 1)), (192, 2, 1, (70, 70))],
)
def test_every_argument_is_the_one_that_the_kernel_expects(
    model: Model, head_dim: int, heads: int, kv_heads: int, lengths: tuple[int, int], mask: dict[str, Any]
) -> None:
    num_queries, num_keys = lengths
    q = randn(2, num_queries, heads, head_dim, seed=0).transpose(1, 2)
    k, v = (randn(2, kv_heads, num_keys, head_dim, seed=seed) for seed in (1, 2))
    given = dict(mask)
    if given.get("sinks"):
        given["sinks"] = randn(heads, seed=3).float()
    exact, exact_lse = in_torch(q.double(), k.double(), v.double(), **given)
    frame = torch.full((2, heads, num_queries + 3, head_dim + 8), 7.0).bfloat16()
    out = frame[:, :, 1 : num_queries + 1, :head_dim]
    _, lse = cast("tuple[Tensor, Tensor]", attention(q, k, v, out=out, return_lse=True, backend="gluon", **given))
    torch.testing.assert_close(out.double(), exact, atol=2e-2, rtol=1e-2)
    torch.testing.assert_close(lse.double(), exact_lse, atol=1e-5, rtol=1e-5)
    out.fill_(7.0)
    assert (frame == 7.0).all()
    assert model.launches == 1


@pytest.mark.parametrize("packed", [False, True])
def test_sinks_that_lie_apart_reach_the_kernel_side_by_side(model: Model, packed: bool) -> None:
    q, k, v = (randn(1, 4, 70, 64, seed=seed) for seed in range(3))
    sinks = randn(4, 3, seed=3).float()[:, 1]
    exact, _ = in_torch(q.double(), k.double(), v.double(), sinks=sinks)
    if packed:
        starts = torch.tensor([0, 70]).int()
        rows = (tensor[0].transpose(0, 1) for tensor in (q, k, v))
        out = cast("Tensor", attention_varlen(*rows, starts, starts, 70, 70, sinks=sinks, backend="gluon"))
        out = out.transpose(0, 1)[None]
    else:
        out = cast("Tensor", attention(q, k, v, sinks=sinks, backend="gluon"))
    torch.testing.assert_close(out.double(), exact, atol=2e-2, rtol=1e-2)


@pytest.mark.parametrize("mask", [MASKS[0], MASKS[4], {"causal": True, "window": 9}])
def test_keys_before_and_beyond_all_that_is_seen_may_hold_nan(model: Model, mask: dict[str, Any]) -> None:
    q, k, v = (randn(1, 2, n, 128, seed=n) for n in (20, 500, 501))
    v = v[:, :, :500].clone()
    if mask:
        right = mask["window"][1] if isinstance(mask["window"], tuple) else 0
        left = mask["window"][0] if isinstance(mask["window"], tuple) else mask["window"] - 1
        k[:, :, : 480 - left], v[:, :, : 480 - left] = NAN, NAN
        short = torch.full((1, 2, 700, 128), NAN).bfloat16()
        align = {"align": "top-left"}
        top = attention(q, *(short.index_copy(2, torch.arange(20 + right), t[:, :, -20 - right :]) for t in (k, v)),
                        backend="gluon", **mask, **align)  # fmt: skip
        assert not cast("Tensor", top).isnan().any()
    out = cast("Tensor", attention(q, k, v, backend="gluon", **mask))
    exact, _ = in_torch(q.double(), k.double(), v.double(), **mask)
    torch.testing.assert_close(out.double(), exact, atol=2e-2, rtol=1e-2)


@pytest.mark.parametrize("mask", [MASKS[0], MASKS[1], MASKS[2]])
@pytest.mark.parametrize("longest", [200, 130])
def test_packed_sequences_read_and_write_their_own_rows_alone(model: Model, mask: dict[str, Any], longest: int) -> None:
    lengths, key_lengths = [3, 0, 200, 64], [130, 5, 0, 64]
    starts, key_starts = (torch.tensor([0, *n]).cumsum(0).int() for n in (lengths, key_lengths))
    q = randn(sum(lengths) + 4, 4, 128, seed=0)
    k, v = (randn(sum(key_lengths) + 200, 2, 128, seed=seed) for seed in (1, 2))
    k[sum(key_lengths) :], v[sum(key_lengths) :] = NAN, NAN
    out = torch.full_like(q, 7.0)
    _, lse = cast(
        "tuple[Tensor, Tensor]",
        attention_varlen(
            q, k, v, starts, key_starts, longest, 130, return_lse=True, out=out, backend="gluon", **mask
        ),
    )  # fmt: skip
    assert (out[sum(lengths) :] == 7.0).all()
    for row, (n, m) in enumerate(zip(lengths, key_lengths, strict=True)):
        at, key_at = int(starts[row]), int(key_starts[row])
        parts = [
            t[a : a + b].transpose(0, 1)[None].double() for t, a, b in ((q, at, n), (k, key_at, m), (v, key_at, m))
        ]
        exact, exact_lse = in_torch(*parts, **mask)
        written = min(n, longest)
        mine = out[at : at + n].transpose(0, 1).double()
        torch.testing.assert_close(mine[:, :written], exact[0, :, :written], atol=2e-2, rtol=1e-2)
        torch.testing.assert_close(lse[:, at : at + written].double(), exact_lse[0, :, :written], atol=1e-5, rtol=1e-5)
        assert (mine[:, written:] == 7.0).all()


def test_sequences_without_any_key_give_zeros(model: Model) -> None:
    starts, none = torch.tensor([0, 3, 5]).int(), torch.zeros(3).int()
    q, k = randn(5, 2, 64, seed=0), randn(0, 1, 64, seed=1)
    out, lse = cast(
        "tuple[Tensor, Tensor]", attention_varlen(q, k, k, starts, none, 3, 0, return_lse=True, backend="gluon")
    )
    assert not out.any()
    assert (lse == -math.inf).all()
    dense = randn(1, 2, 5, 64, seed=0)
    assert not cast("Tensor", attention(dense, dense[:, :, :0], dense[:, :, :0], backend="gluon")).any()
