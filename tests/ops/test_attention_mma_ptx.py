"""The m16n8k16 attention kernel as it is compiled: its PTX run thread by thread, without a card.

Whole calls of attention(backend="mma") reach the compiled kernel with the launcher's own arguments. Besides results,
the run shows that nothing outside the tensors is read or written, that no barrier is missing, and that no access of
shared memory has a bank conflict.
"""

from __future__ import annotations

import json
from typing import Any, cast

import numpy as np
import pytest
import torch
from attention_mma_aot import compiled
from ptx_in_numpy import Access, Block, Program
from ptx_memories import Global
from torch import Tensor

from kit.attention_oracle import oracle, within_rule
from kit.numpy_gpu.mma_launches import Launch, addressed, record
from onewave.ops.attention.mma.plan import MmaTile, mma_tile
from onewave.ops.attention.op import attention, attention_varlen
from onewave.tiles.sim.banks import Swizzle, conflicts, copied_rows, matrices

NAN = float("nan")
KINDS = {torch.float16: "fp16", torch.bfloat16: "bf16"}
PLAIN = {"head_dim": 128, "dtype": torch.bfloat16, "capability": 80, "heads": (2, 1), "lengths": (70, 100)}
# Between them: every width and tile, both dtypes, both cards, each option, rows of whole 16-byte pieces and others.
CASES: dict[str, dict[str, Any]] = {
    "128 causal": PLAIN | {"causal": True},
    "128 sm_90": PLAIN | {"narrow": True, "capability": 90, "dtype": torch.float16, "lengths": (1, 33)},
    "128 sm_90 wide": PLAIN | {"capability": 90, "dtype": torch.float16, "lengths": (1, 33)},
    "64 causal, one group a tile": PLAIN | {"head_dim": 64, "heads": (6, 2), "lengths": (9, 130), "causal": True},
    "64 window": PLAIN | {"narrow": True, "head_dim": 64, "lengths": (65, 300), "window": (70, 11), "capability": 90},
    "80 top-left": PLAIN | {"narrow": True, "head_dim": 80, "lengths": (66, 50), "causal": True, "align": "top-left"},
    "40 odd strides, softcap": PLAIN | {"head_dim": 40, "odd": True, "softcap": 2.0, "dtype": torch.float16},
    "16 sinks": PLAIN
    | {"narrow": True, "head_dim": 16, "lengths": (64, 64), "sinks": True, "causal": True, "scale": -0.3},
    "32": PLAIN | {"head_dim": 32, "lengths": (3, 257), "capability": 90},
    "256 causal window": PLAIN | {"head_dim": 256, "lengths": (40, 70), "causal": True, "window": 20},
    "128 packed": PLAIN | {"packed": [(3, 40), (0, 5), (70, 0), (65, 66)], "causal": True, "capability": 90},
}


def tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int, *, odd: bool = False) -> Tensor:
    """Random, [batch, heads, seq, head_dim] with NaN around; odd: rows at any multiple of an element."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    batch, heads, length, head_dim = shape
    frame = torch.full((batch, length + 2, heads, head_dim + (3 if odd else 8)), NAN, dtype=dtype)
    return frame[:, 1 : length + 1, :, :head_dim].transpose(1, 2).copy_(values)


def called(case: dict[str, Any]) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    """Call attention as the case says; (q, k, v), out and log-sums, which the recorder leaves unwritten."""
    options = {name: case[name] for name in ("causal", "align", "window", "softcap", "scale") if name in case}
    (heads, kv_heads), head_dim, dtype = case["heads"], case["head_dim"], case["dtype"]
    if case.get("sinks"):
        options["sinks"] = torch.randn(heads, generator=torch.Generator().manual_seed(9))
    if "packed" in case:
        tokens, keys = (sum(n) for n in zip(*case["packed"], strict=True))
        q, k, v = (
            tensor((1, n, m, head_dim), dtype, seed)[0].transpose(0, 1)
            for seed, (n, m) in enumerate([(heads, tokens + 3), (kv_heads, keys + 2), (kv_heads, keys + 2)])
        )
        starts = [torch.tensor([0, *n]).cumsum(0).int() for n in zip(*case["packed"], strict=True)]
        longest = [max(n) for n in zip(*case["packed"], strict=True)]
        given: Any = (q, k, v, *starts, *longest)
        out, lse = cast("Any", attention_varlen(*given, return_lse=True, backend="mma", **options))
        return (q, k, v), out, lse
    num_queries, num_keys = case["lengths"]
    q, k, v = (
        tensor((2, n, m, head_dim), dtype, seed, odd=case.get("odd", False))
        for seed, (n, m) in enumerate([(heads, num_queries), (kv_heads, num_keys), (kv_heads, num_keys)])
    )
    out = tensor(tuple(q.shape), dtype, 3, odd=case.get("odd", False))
    _, lse = cast("Any", attention(q, k, v, out=out, return_lse=True, backend="mma", **options))
    return (q, k, v), out, lse


def tile_of(case: dict[str, Any]) -> MmaTile:
    return mma_tile(case["head_dim"], narrow=case.get("narrow", False))


def variant(case: dict[str, Any], launch: Launch) -> dict[str, Any]:
    """What to compile for a launch: the constants that it was made with."""
    assert launch.given["QUERIES"] == tile_of(case).queries
    constants = {name: value for name, value in launch.given.items() if name.isupper()}
    return {
        "head_dim": case["head_dim"], "capability": case["capability"], "dtype": KINDS[case["dtype"]],
        "registers": launch.options["maxnreg"],
    } | constants  # fmt: skip


def run(report: dict[str, Any], launch: Launch) -> set[Access]:
    """Run a launch's blocks on its compiled PTX; out and lse are written. Returns its accesses of shared memory."""
    program, memory = Program(report["ptx"]), Global()
    values: list[Any] = []
    places: dict[int, int] = {}
    written = {"out_ptr", "lse_ptr"}
    for name, value in launch.given.items():
        if name.isupper():
            continue
        if isinstance(value, Tensor):
            storage, own = addressed(value)
            at = places.get(value.untyped_storage().data_ptr())
            if at is None:
                at = memory.put(storage.numpy())
                memory.readable[at : at + len(storage)] = False
                places[value.untyped_storage().data_ptr()] = at
            allowed = memory.writable if name in written else memory.readable
            allowed[at : at + len(storage)] |= own.numpy()
            values.append(at + value.storage_offset() * value.element_size())
        else:
            values += value if isinstance(value, tuple) else [value]
    values += [0] * (len(program.parameters) - len(values))
    arguments = {name: value for (_, name), value in zip(program.parameters, values, strict=True)}
    accesses: set[Access] = set()
    for block in range(launch.programs):
        accesses |= Block(program, memory, arguments, block, report["shared"]).run().accesses
    for name in written:
        storage, _ = addressed(launch.given[name])
        at = places[launch.given[name].untyped_storage().data_ptr()]
        storage.copy_(torch.from_numpy(memory.bytes[at : at + len(storage)].copy()))
    return accesses


def check(case: dict[str, Any], inputs: tuple[Tensor, ...], out: Tensor, lse: Tensor) -> None:
    """Within the operators' rule of the float64 oracle, sequence by sequence."""
    options = {name: case[name] for name in ("causal", "align", "window", "softcap", "scale") if name in case}
    if case.get("sinks"):
        options["sinks"] = torch.randn(case["heads"][0], generator=torch.Generator().manual_seed(9)).double()
    parts = [(*inputs, out, lse)]
    if "packed" in case:
        parts, at, key_at = [], 0, 0
        for n, m in case["packed"]:
            rows, keys = slice(at, at + n), slice(key_at, key_at + m)
            q, k, v = (t[s].transpose(0, 1)[None] for t, s in zip(inputs, (rows, keys, keys), strict=True))
            parts.append((q, k, v, out[rows].transpose(0, 1)[None], lse[None, :, rows]))
            at, key_at = at + n, key_at + m
    for q, k, v, got, got_lse in parts:
        exact, exact_lse = oracle(q.double(), k.double(), v.double(), **options)
        assert within_rule(got, exact, oracle(q, k, v, **options)[0])
        torch.testing.assert_close(got_lse.double(), exact_lse, atol=2e-5, rtol=1e-5)


@pytest.fixture(scope="module")
def ran() -> dict[str, tuple[dict[str, Any], set[Access], Tensor, Tensor]]:
    """Every case: called, compiled (all in one process), run and checked against the oracle."""
    calls: list[tuple[Any, ...]] = []
    for name, case in CASES.items():
        with pytest.MonkeyPatch.context() as patch:
            recorder = record(patch, num_sms=10_000 if case.get("narrow") else 1)
            calls.append((name, case, *called(case), recorder.launches[-1]))
    reports = compiled([json.loads(json.dumps(variant(case, launch))) for _, case, _, _, _, launch in calls])
    found = {}
    for (name, case, inputs, out, lse, launch), report in zip(calls, reports, strict=True):
        accesses = run(report, launch)
        try:
            check(case, inputs, out, lse)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error
        found[name] = (report, accesses, out, lse)
    return found


def test_what_is_compiled_agrees_with_float64_without_a_race_or_a_stray_access(ran: dict[str, Any]) -> None:
    assert ran.keys() == CASES.keys()


def test_no_access_of_shared_memory_has_a_bank_conflict(ran: dict[str, Any]) -> None:
    for name, (_, accesses, *_) in ran.items():
        kinds = {access.op.split(".")[0] for access in accesses}
        assert {"ldmatrix", "ld"} <= kinds, name
        assert "st" in kinds or "stmatrix" in kinds, name
        for access in accesses:
            for warp in range(0, len(access.addresses), 32):
                assert conflicts(access.addresses[warp : warp + 32], access.width) == 0, (name, access.op)


def test_the_layout_tool_knows_every_matrix_and_piece_that_the_compiled_kernel_touches(ran: dict[str, Any]) -> None:
    """So that its proof over whole tiles, in test_attention_mma_banks.py, speaks of this kernel."""
    for name, (_, accesses, *_) in ran.items():
        tile = tile_of(CASES[name])
        line = max(1, 64 // tile.width)
        swizzled = Swizzle(tile.width, per_phase=line, max_phase=8 // line)
        rows = 2 * tile.keys
        known = {frozenset(found) for found in matrices(swizzled, rows)}
        pieces = {
            frozenset(found[at : at + 8]) for found in copied_rows(swizzled, rows, width=16) for at in (0, 8, 16, 24)
        }
        for access in accesses:
            groups = {frozenset(access.addresses[at : at + 8]) for at in range(0, len(access.addresses), 8)}
            if access.op.startswith(("ldmatrix", "stmatrix")):
                assert groups <= known, (name, access.op)
            elif access.width == 16:
                assert groups <= pieces, (name, access.op)


def test_every_tile_is_read_whole_and_nothing_beyond_it(ran: dict[str, Any]) -> None:
    for name, (report, accesses, *_) in ran.items():
        tile = tile_of(CASES[name])
        read = {a for access in accesses if access.op.startswith("ldmatrix") for a in access.addresses}
        assert read == set(np.arange(0, tile.shared_bytes, 16).tolist()), name
        assert report["shared"] == tile.shared_bytes
        assert report["stack"] == 0, name


def test_a_rows_bits_do_not_depend_on_how_many_queries_a_tile_has(ran: dict[str, Any]) -> None:
    narrow, wide = ran["128 sm_90"], ran["128 sm_90 wide"]
    assert narrow[0]["registers"] <= 96 < wide[0]["registers"]
    assert torch.equal(narrow[2], wide[2])
    assert torch.equal(narrow[3], wide[3])


def test_without_any_one_of_its_barriers_or_waits_the_run_finds_a_race(ran: dict[str, Any]) -> None:
    """That the runs above found none means something."""
    case = CASES["128 sm_90"]
    report = ran["128 sm_90"][0]
    with pytest.MonkeyPatch.context() as patch:
        recorder = record(patch, num_sms=10_000)
        called(case)
    launch = recorder.launches[-1]
    launch.programs = 1
    lines = report["ptx"].splitlines()
    guards = [at for at, line in enumerate(lines) if "bar.sync" in line or "cp.async.wait_group" in line]
    assert len(guards) >= 6
    for at in guards:
        broken = report | {"ptx": "\n".join(lines[:at] + lines[at + 1 :])}
        with pytest.raises(RuntimeError, match=r"no barrier since a|still in flight"):
            run(broken, launch)
