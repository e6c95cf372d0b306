"""The m16n8k16 attention kernel as it is compiled, run thread by thread, without a device.

Whole calls of attention(backend="mma") reach the compiled kernel with the launcher's own arguments. Besides results,
the run shows that nothing outside the tensors is read or written, that no barrier is missing, and that no access of
shared memory has a bank conflict.
"""

from __future__ import annotations

import hashlib
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from kit.attention_oracle import oracle, within_rule
from kit.build import Built
from kit.calls.call import Call
from kit.recorder import Recorded
from kit.runs.tensors import run
from onewave.ops.attention.mma.plan import mma_tile
from onewave.ops.attention.op import attention, attention_varlen
from onewave.tiles.sim.banks import Swizzle, conflicts, copied_rows, matrices

_NAN = float("nan")
_PLAIN: dict[str, Any] = {
    "head_dim": 128, "dtype": torch.bfloat16, "capability": 80, "heads": (2, 1), "lengths": (70, 100)
}  # fmt: skip
# Between them: every width and tile, both dtypes, both devices, each option, rows of whole 16-byte pieces and others.
_CASES: dict[str, dict[str, Any]] = {
    "128 causal": {"causal": True},
    "128 sm_90": {"narrow": True, "capability": 90, "dtype": torch.float16, "lengths": (1, 33), "unguarded": True},
    "128 sm_90 wide": {"capability": 90, "dtype": torch.float16, "lengths": (1, 33)},
    "64 causal, one group a tile": {"head_dim": 64, "heads": (6, 2), "lengths": (9, 130), "causal": True},
    "64 window": {"narrow": True, "head_dim": 64, "lengths": (65, 300), "window": (70, 11), "capability": 90},
    "80 top-left": {"narrow": True, "head_dim": 80, "lengths": (66, 50), "causal": True, "align": "top-left"},
    "40 odd strides, softcap": {"head_dim": 40, "odd": True, "softcap": 2.0, "dtype": torch.float16},
    "16 sinks": {
        "narrow": True, "head_dim": 16, "lengths": (64, 64), "sinks": True, "causal": True, "scale": -0.3,
    },
    "32": {"head_dim": 32, "lengths": (3, 257), "capability": 90},
    "256 causal window": {"head_dim": 256, "lengths": (40, 70), "causal": True, "window": 20},
    "128 packed": {"packed": [(3, 40), (0, 5), (70, 0), (65, 66)], "causal": True, "capability": 90},
}  # fmt: skip


def _tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int, *, odd: bool = False) -> Tensor:
    """Random, [batch, heads, seq, head_dim] with NaN around; odd: rows at any multiple of an element."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    batch, heads, length, head_dim = shape
    frame = torch.full((batch, length + 2, heads, head_dim + (3 if odd else 8)), _NAN, dtype=dtype)
    return frame[:, 1 : length + 1, :, :head_dim].transpose(1, 2).copy_(values)


def _options(case: dict[str, Any]) -> dict[str, Any]:
    options = {name: case[name] for name in ("causal", "align", "window", "softcap", "scale") if name in case}
    if case.get("sinks"):
        options["sinks"] = torch.randn(case["heads"][0], generator=torch.Generator().manual_seed(9))
    return options


def _called(case: dict[str, Any]) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    """Call attention as the case says; (q, k, v), out and log-sums, which no launch writes here."""
    (heads, kv_heads), head_dim, dtype = case["heads"], case["head_dim"], case["dtype"]
    if "packed" in case:
        tokens, keys = (sum(n) for n in zip(*case["packed"], strict=True))
        q, k, v = (
            _tensor((1, n, m, head_dim), dtype, seed)[0].transpose(0, 1)
            for seed, (n, m) in enumerate([(heads, tokens + 3), (kv_heads, keys + 2), (kv_heads, keys + 2)])
        )
        starts = [torch.tensor([0, *n]).cumsum(0).int() for n in zip(*case["packed"], strict=True)]
        longest = [max(n) for n in zip(*case["packed"], strict=True)]
        given: Any = (q, k, v, *starts, *longest)
        out, lse = cast("Any", attention_varlen(*given, return_lse=True, backend="mma", **_options(case)))
        return (q, k, v), out, lse
    num_queries, num_keys = case["lengths"]
    q, k, v = (
        _tensor((2, n, m, head_dim), dtype, seed, odd=case.get("odd", False))
        for seed, (n, m) in enumerate([(heads, num_queries), (kv_heads, num_keys), (kv_heads, num_keys)])
    )
    out = _tensor(tuple(q.shape), dtype, 3, odd=case.get("odd", False))
    _, lse = cast("Any", attention(q, k, v, out=out, return_lse=True, backend="mma", **_options(case)))
    return (q, k, v), out, lse


def _agrees(case: dict[str, Any], inputs: tuple[Tensor, ...], out: Tensor, lse: Tensor) -> bool:
    """Whether results are within the operators' rule of the float64 oracle, sequence by sequence."""
    options = _options(case)
    parts = [(*inputs, out, lse)]
    if "packed" in case:
        parts, at, key_at = [], 0, 0
        for n, m in case["packed"]:
            rows, keys = slice(at, at + n), slice(key_at, key_at + m)
            q, k, v = (t[s].transpose(0, 1)[None] for t, s in zip(inputs, (rows, keys, keys), strict=True))
            parts.append((q, k, v, out[rows].transpose(0, 1)[None], lse[None, :, rows]))
            at, key_at = at + n, key_at + m
    found = True
    for q, k, v, got, got_lse in parts:
        wide = {name: value.double() if isinstance(value, Tensor) else value for name, value in options.items()}
        exact, exact_lse = oracle(q.double(), k.double(), v.double(), **wide)
        found &= within_rule(got, exact, oracle(q, k, v, **wide)[0])
        found &= torch.allclose(got_lse.double(), exact_lse, atol=2e-5, rtol=1e-5)
    return found


def _ran(case: dict[str, Any], recorded: Recorded, built: Built) -> dict[str, Any]:
    """Report whether a run agrees, which accesses of shared memory are not as tiles.banks has them, and a digest of
    the results' bits.

    strange: accesses with a bank conflict, or that the layout tool does not know. whole: whether each place of a tile
    is read, and nothing beyond. unguarded: barriers and waits without which a run finds no race, None if not tried.
    """
    inputs, out, lse = recorded.result
    given, written = recorded.given, {"out_ptr", "lse_ptr"}
    accesses = run(built, given, recorded.grid[0], written)
    tile = mma_tile(case["head_dim"], narrow=case.get("narrow", False))
    line = max(1, 64 // tile.width)
    swizzled, rows = Swizzle(tile.width, per_phase=line, max_phase=8 // line), 2 * tile.keys
    known = {frozenset(found) for found in matrices(swizzled, rows)}
    copied = copied_rows(swizzled, rows, width=16)
    pieces = {frozenset(found[at : at + 8]) for found in copied for at in (0, 8, 16, 24)}
    strange: set[str] = set()
    read: set[int] = set()
    for access in accesses:
        groups = {frozenset(access.addresses[at : at + 8]) for at in range(0, len(access.addresses), 8)}
        matrix = access.op.startswith(("ldmatrix", "stmatrix"))
        if any(conflicts(access.addresses[at : at + 32], access.width) for at in range(0, len(access.addresses), 32)):
            strange.add(f"{access.op}: a conflict")
        if (matrix and not groups <= known) or (not matrix and access.width == 16 and not groups <= pieces):
            strange.add(f"{access.op}: unknown addresses")
        read |= set(access.addresses) if access.op.startswith("ldmatrix") else set()
    bits = b"".join(t.contiguous().view(torch.uint8).numpy().tobytes() for t in (out, lse))
    return {
        "agrees": _agrees(case, inputs, out, lse),
        "queries": given["QUERIES"],
        "kinds": sorted({access.op.split(".")[0] for access in accesses}),
        "strange": sorted(strange),
        "whole": read == set(np.arange(0, tile.shared_bytes, 16).tolist()) and built.shared == tile.shared_bytes,
        # Tokens outside of every sequence are whatever was there.
        "bits": None if "packed" in case else hashlib.sha256(bits).hexdigest()[:16],
        "unguarded": _unguarded(built, given, written) if case.get("unguarded") else None,
    }


def _unguarded(built: Built, given: dict[str, Any], written: set[str]) -> dict[str, Any]:
    """How many barriers and waits there are, and those whose loss a run of one block does not notice."""
    lines = built.ptx.splitlines()
    guards = [at for at, line in enumerate(lines) if "bar.sync" in line or "cp.async.wait_group" in line]
    unnoticed: list[str] = []
    for at in guards:
        broken = Built(**{**vars(built), "ptx": "\n".join(lines[:at] + lines[at + 1 :])})
        try:
            run(broken, given, 1, written)
            unnoticed.append(lines[at])
        except RuntimeError as error:
            if "no barrier since a" not in str(error) and "still in flight" not in str(error):
                unnoticed.append(f"{lines[at]}: {error}")
    return {"guards": len(guards), "unnoticed": unnoticed}


MMA_RUNS = {
    f"run of mma {name}": Call(
        partial(_called, _PLAIN | case),
        divmod((_PLAIN | case)["capability"], 10),
        sms=10_000 if case.get("narrow") else 1,
        check=partial(_ran, _PLAIN | case),
    )
    for name, case in _CASES.items()
}
