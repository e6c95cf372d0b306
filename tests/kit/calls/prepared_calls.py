"""Random calls of the operators whose calls are prepared: few forms of each, and some that are not prepared."""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onewave import ops
from onewave.ops.sampling import triton_impl as sampling

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""An operator, arguments and arguments by name."""

DTYPES = (torch.bfloat16, torch.float16)
OPERATORS = (
    ops.attention, ops.attention_varlen, ops.attention_fp8, ops.decode_attention, ops.append_kv, ops.rms_norm,
    ops.add_rms_norm, ops.swiglu, ops.linear, ops.linear_swiglu, sampling.greedy_of_pieces,
    sampling.max_of_pieces, sampling.draw_of_pieces,
)  # fmt: skip


def forms_of(operator: Any) -> dict[Any, Any]:
    """An operator's known forms."""
    return next(cell.cell_contents for cell in operator.__closure__ if isinstance(cell.cell_contents, dict))


@dataclass(frozen=True)
class Calls:
    """Makes calls. device: of operands; None for memory that nothing writes, on the current one."""

    device: str | None = None

    def tensor(self, *shape: int, dtype: torch.dtype = torch.bfloat16, off: int = 0) -> Tensor:
        """Random elements. off: how many lie between a multiple of 16 bytes and the first."""
        count = torch.Size(shape).numel()
        made = torch.empty(count + off, dtype=dtype, device=self.device)
        if self.device is not None:
            made.copy_(torch.randn(count + off, device=self.device))
        return made[off:].view(shape)

    def numbers(self, values: Iterable[int], dtype: torch.dtype = torch.int32, off: int = 0) -> Tensor:
        """These numbers; off: as of tensor."""
        return torch.tensor([0] * off + [*values], dtype=dtype, device=self.device)[off:]

    def an_attention(self, r: random.Random) -> Call:
        heads, queries, keys = r.choice((2, 4)), r.choice((1, 64, 300, 4096)), r.choice((1, 64, 300))
        sizes, dtype = (r.choice((1, 3)), heads, queries, r.choice((64, 128))), r.choice(DTYPES)
        q, k, v = (
            self.tensor(sizes[0], n, h, sizes[3], dtype=dtype) for n, h in ((queries, heads), (keys, 2), (keys, 2))
        )
        if r.random() < 0.3:  # views of one tensor
            packed = self.tensor(sizes[0], queries, heads + 4, sizes[3], dtype=dtype)
            q, k, v = packed.split((heads, 2, 2), 2)
        operands = [tensor.transpose(1, 2) for tensor in (q, k, v)]
        window, softcap = r.choice((None, None, 100, (50, 0))), r.choice((None, None, 20.0))
        out = torch.empty_like(operands[0]) if r.random() < 0.3 else None
        named = {"causal": r.random() < 0.5, "window": window, "softcap": softcap, "out": out}
        return ops.attention, (*operands,), {**named, "return_lse": r.random() < 0.3}

    def a_packed_attention(self, r: random.Random) -> Call:
        tokens, sequences, dtype = r.choice((64, 500)), r.choice((2, 9)), r.choice(DTYPES)
        longest = tokens * r.choice((1, 2))
        q, k, v = (self.tensor(tokens, heads, 128, dtype=dtype) for heads in (4, 2, 2))
        starts = self.numbers(tokens * at // sequences for at in range(sequences + 1))
        return ops.attention_varlen, (q, k, v, starts, starts, longest, longest), {"causal": r.random() < 0.8}

    def an_attention_in_bytes(self, r: random.Random) -> Call:
        tokens, sequences = r.choice((64, 500)), r.choice((None, 3))
        shapes = [(tokens, heads, 128) if sequences else (2, heads, tokens, 128) for heads in (4, 2, 2)]
        operands = [self.tensor(*shape, dtype=torch.float8_e4m3fn) for shape in shapes]
        scales = [1 + self.tensor(heads, dtype=torch.float32).square() for heads in (4, 2, 2)]
        given: dict[str, Any] = dict(zip(("q_scale", "k_scale", "v_scale"), scales, strict=True))
        if r.random() < 0.3:
            given.pop("k_scale")  # ones are made, so not prepared
        if sequences:
            starts = self.numbers(tokens * at // sequences for at in range(sequences + 1))
            given |= {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": tokens, "max_seqlen_k": tokens}
        return ops.attention_fp8, (*operands,), {**given, "causal": r.random() < 0.7, "return_lse": r.random() < 0.3}

    def a_decode_step(self, r: random.Random) -> Call:
        rows, dim, dtype, kv_dtype = r.choice((1, 4, 40)), r.choice((64, 128)), r.choice(DTYPES), None
        shape = (rows, 8, dim) if r.random() < 0.5 else (rows, 8, r.choice((1, 2)), dim)
        table = self.numbers(r.choices(range(40), k=rows * 8)).view(rows, 8) if r.random() < 0.5 else None
        cache = (40, 2, 64, dim) if table is not None else (rows, 2, r.choice((256, 4096)), dim)
        scales: dict[str, Tensor] = {}
        if r.random() < 0.3:
            kv_dtype = r.choice((torch.int8, torch.float8_e4m3fn))
            scales = {"k_scale": self.tensor(2, dtype=torch.float32), "v_scale": self.tensor(2, dtype=torch.float32)}
        k, v = (self.tensor(*cache, dtype=kv_dtype or dtype) for _ in "kv")
        kind, off = r.choice((torch.int32, torch.int64)), r.choice((0, 1))
        lengths = self.numbers(r.choices(range(250), k=rows), kind, off)
        named = {"block_table": table, "window": r.choice((None, 100)), "return_lse": r.random() < 0.3}
        return ops.decode_attention, (self.tensor(*shape, dtype=dtype), k, v, lengths), {**named, **scales}

    def an_append(self, r: random.Random) -> Call:
        tokens, dtype = r.choice((1, 5, 100)), r.choice(DTYPES)
        k, v = (self.tensor(3, 2, 128, 64, dtype=dtype) for _ in "kv")
        kind, off = r.choice((torch.int32, torch.int64)), r.choice((0, 1))
        places = [
            self.numbers(values, kind, off) for values in zip(*(divmod(at, 40) for at in range(tokens)), strict=True)
        ]
        norm = self.tensor(64, dtype=dtype) if r.random() < 0.3 else None
        rotary = self.tensor(tokens, 64, dtype=torch.float32)
        return (
            ops.append_kv,
            (self.tensor(tokens, 8 * 64, dtype=dtype), rotary, k, v, *places),
            {"num_heads": 4, "q_norm": norm},
        )

    def of_rows(self, r: random.Random) -> Call:
        rows, hidden, dtype = r.choice((1, 5, 33)), r.choice((256, 1000)), r.choice((*DTYPES, torch.float32))
        x, weight = self.tensor(rows, hidden, dtype=dtype, off=r.choice((0, 0, 1))), self.tensor(hidden, dtype=dtype)
        calls: list[Call] = [
            (ops.rms_norm, (x, weight, 1e-5), {}),
            (ops.rms_norm, (x[:, ::2], weight[::2], 1e-5), {}),  # copied first, so not prepared
            (ops.add_rms_norm, (x, self.tensor(rows, hidden, dtype=dtype), weight, 1e-6), {}),
            (ops.swiglu, (x,), {}),
        ]
        return r.choice(calls)

    def a_product(self, r: random.Random) -> Call:
        tokens, cols, rows, dtype = (
            r.choice((1, 2, 40, 200)),
            r.choice((256, 1024)),
            r.choice((128, 513)),
            r.choice(DTYPES),
        )
        x = (
            self.tensor(tokens, cols + 8, dtype=dtype)[:, :cols]
            if r.random() < 0.3
            else self.tensor(tokens, cols, dtype=dtype)
        )
        bias = self.tensor(rows * 2, dtype=dtype) if r.random() < 0.3 else None
        weight = self.tensor(rows * 2, cols, dtype=dtype)
        if r.random() < 0.3:
            return ops.linear_swiglu, (x, weight, bias), {}
        return ops.linear, (x, weight, bias, r.choice((None, torch.float32))), {}

    def logits(self, r: random.Random) -> Tensor:
        vocab = r.choice((1000, 5000))
        return self.tensor(r.choice((1, 3)), vocab + 8, dtype=torch.float32)[:, : r.choice((vocab, vocab + 8))]

    def a_choice(self, r: random.Random) -> Call:
        return r.choice((sampling.greedy_of_pieces, sampling.max_of_pieces)), (self.logits(r),), {}

    def a_draw(self, r: random.Random) -> Call:
        logits = self.logits(r)
        uniform, temperature, min_p = (
            (self.tensor(len(logits), dtype=dtype).abs() + 0.1).clamp(max=0.9)
            for dtype in (torch.float64, torch.float32, torch.float64)
        )
        highest = sampling.max_of_pieces.__wrapped__(logits)
        return sampling.draw_of_pieces, (logits, uniform, temperature, min_p, 2.0**40, highest), {}


KINDS = (
    Calls.an_attention,
    Calls.a_packed_attention,
    Calls.an_attention_in_bytes,
    Calls.a_decode_step,
    Calls.an_append,
    Calls.of_rows,
    Calls.a_product,
    Calls.a_choice,
)
"""Calls that launch the same, whether prepared or not."""

WITH_MEMORY = (Calls.a_draw,)
"""Calls whose memory is new unless they are prepared, so that they are known by their results."""
