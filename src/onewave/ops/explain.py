"""Which kernel an operator runs on given shapes, with which tile and split, and why. Nothing is run to find out.

    >>> print(explain("decode_attention", (1, 32, 1, 128), (1, 8, 4096, 128), device="cuda:sm_90", dtype="bf16"))

Each operator's own plan answers; this file only reads the question and lays out the answer.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from onewave.base.errors import InvalidArgumentError, ShapeError, UnsupportedError
from onewave.ops.attention.plan import AttentionPlan, explain_attention
from onewave.ops.backends import num_sms
from onewave.ops.decode_attention.op import CPU_TAKES, DECODE_BACKENDS
from onewave.ops.decode_attention.plan import plan_decode
from onewave.ops.decode_attention.stream_plan import StreamCall, refusal, stream_tile
from onewave.ops.ffn.chain_plan import ChainSizes, plan_chain
from onewave.ops.ffn.measured import fastest, table_lines
from onewave.ops.ffn.op import suits as ffn_suits
from onewave.ops.ffn.plan import DATA, FFNSizes, plan_ffn
from onewave.ops.masked_multihead_attention.op import MMHA_BACKENDS
from onewave.wave.layout import MOST_BATCH

__all__ = ["Explanation", "explain"]

Shape = Sequence[int]

_DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "fp32": torch.float32,
    "float32": torch.float32,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
    "float8_e4m3fn": torch.float8_e4m3fn,
}
_LINEAR_TILE_TOKENS = 64
_SMS_OF_AN_H200 = 132


@dataclass(frozen=True)
class Explanation:
    """One operator's choice. kernel: where it is and what it is called; tile, split: None where it has none.

    why: sentences. programs: thread blocks of the launch, where there is one.
    """

    operator: str
    question: str
    backend: str
    kernel: str
    why: tuple[str, ...]
    tile: str | None = None
    split: str | None = None
    programs: str | None = None

    def __str__(self) -> str:
        rows = [("backend", self.backend), ("kernel", self.kernel), ("tile", self.tile), ("split", self.split)]
        lines = [f"{self.operator} {self.question}"]
        lines += [f"  {name:<9} {value}" for name, value in (*rows, ("programs", self.programs)) if value]
        lines += [f"  {'because' if i == 0 else '':<9} {reason}" for i, reason in enumerate(self.why)]
        return "\n".join(lines)


@dataclass(frozen=True)
class _Question:
    """What was asked. sm: the card's compute capability, 90 for sm_90; None on a CPU or where nothing says.

    card: its name, if it is there; None for any of its kind.
    """

    operator: str
    shapes: tuple[tuple[int, ...], ...]
    cuda: bool
    sm: int | None
    card: str | None
    dtype: torch.dtype
    options: dict[str, Any]

    def text(self) -> str:
        """In one line."""
        where = "cpu" if not self.cuda else f"cuda sm_{self.sm}" if self.sm else "cuda"
        shapes = ", ".join(str(list(shape)) for shape in self.shapes)
        options = "".join(f", {name}={value}" for name, value in self.options.items())
        return f"{shapes}, {str(self.dtype).removeprefix('torch.')} on {where}{options}"

    def take(self, *ranks: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """The shapes, one for each given set of allowed ranks."""
        if len(self.shapes) != len(ranks) or any(len(s) not in r for s, r in zip(self.shapes, ranks, strict=True)):
            allowed = ", ".join(" or ".join(f"{rank} axes" for rank in each) for each in ranks)
            raise ShapeError(f"explain {self.operator}: shapes", got=self.text(), allowed=f"shapes of {allowed}")
        return self.shapes


def explain(
    op: str | Callable[..., Any],
    *shapes: Shape,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype = "bf16",
    **options: Any,
) -> Explanation:
    """Say what `op` would do with tensors of these shapes.

    op: an operator of onewave.ops or its name. shapes: of its main tensors, in order:
        attention q, k; attention_varlen q, k (and sequences=3, max_seqlen_q=500, max_seqlen_k=500)
        decode_attention q, k_cache (paged: block_table=(rows, blocks); quantised: kv_dtype="int8"; one row's length:
        seq_len=1000); masked_multihead_attention qkv, cache_k; append_kv qkv, k_cache
        merge_attention the stacked outs; linear x, weight; ffn x, w_up, w_down (gated=True, workers=132); the others x
    device: "cpu", "cuda", or a card that need not be there, such as "cuda:sm_90"; default: this machine's. dtype:
    "bf16", "fp16", "fp32". options: the call's own. Raises InvalidArgumentError, ShapeError, UnsupportedError.
    """
    name = (op if isinstance(op, str) else getattr(op, "__name__", repr(op))).replace("-", "_")
    if name not in _EXPLAINERS:
        raise InvalidArgumentError("explain: operator", got=repr(name), allowed=", ".join(sorted(_EXPLAINERS)))
    cuda, sm, card = _device(device)
    kind = _DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if kind is None:
        raise UnsupportedError("explain: dtype", got=repr(dtype), allowed=", ".join(_DTYPES))
    sizes = tuple(tuple(int(size) for size in shape) for shape in shapes)
    return _EXPLAINERS[name](_Question(name, sizes, cuda, sm, card, kind, options))


def _device(device: str | torch.device | None) -> tuple[bool, int | None, str | None]:
    """Whether it is a card, its compute capability and its name."""
    text = "cuda" if torch.cuda.is_available() else "cpu"
    text = text if device is None else str(device)
    found = re.fullmatch(r"cpu|cuda(?::(?:sm_?(\d+)|\d+))?", text)
    if not found:
        raise InvalidArgumentError("explain: device", got=repr(text), allowed="cpu, cuda, cuda:N, cuda:sm_90")
    if text == "cpu":
        return False, None, None
    if found[1]:
        return True, int(found[1]), None
    if not torch.cuda.is_available():
        return True, None, None
    there = None if text == "cuda" else text
    major, minor = torch.cuda.get_device_capability(there)
    return True, 10 * major + minor, torch.cuda.get_device_name(there)


def _attention(question: _Question) -> Explanation:
    q, k, *_ = question.take((4,), (4,), *((4,) for _ in question.shapes[2:]))
    return _as_planned(question, explain_attention(q, k, **_flags(question)))


def _attention_varlen(question: _Question) -> Explanation:
    q, k, *_ = question.take((3,), (3,), *((3,) for _ in question.shapes[2:]))
    options = dict(question.options)
    rows = int(options.pop("sequences", 1))
    longest_q, longest_k = int(options.pop("max_seqlen_q", q[0])), int(options.pop("max_seqlen_k", k[0]))
    asked = replace(question, options=options)
    plan = explain_attention((rows, q[1], longest_q, q[2]), (rows, k[1], longest_k, k[2]), **_flags(asked))
    return _as_planned(question, plan)


def _flags(question: _Question) -> dict[str, Any]:
    """The options of a call as the plan of attention takes them."""
    options = {name: value for name, value in question.options.items() if name != "out"}
    if (
        question.cuda
        and question.dtype not in (torch.float16, torch.bfloat16)
        and options.get("backend") != "reference"
    ):
        raise UnsupportedError(
            f"explain {question.operator}: dtype on a card", got=str(question.dtype), allowed="float16, bfloat16"
        )
    given = {"q_shape", "k_shape", "device", "capability", "dtype", "packed"}
    known = inspect.signature(explain_attention).parameters.keys() - given
    if odd := options.keys() - known:
        allowed = ", ".join(sorted(known))
        raise InvalidArgumentError(f"explain {question.operator}: options", got=", ".join(sorted(odd)), allowed=allowed)
    capability = divmod(question.sm, 10) if question.sm else (9, 0)
    return {
        **options,
        "device": "cuda" if question.cuda else "cpu",
        "capability": capability,
        "dtype": str(question.dtype).removeprefix("torch."),
        "packed": question.operator == "attention_varlen",
    }


def _as_planned(question: _Question, plan: AttentionPlan) -> Explanation:
    kernel, tile, programs = f"attention: {plan.kernel}", None, None
    if plan.block_m:
        kernel = f"attention/{plan.backend}_impl.py: {plan.kernel}"
        tile = f"{plan.block_m} query rows x {plan.block_n} keys x {plan.width}"
        tile += f", {plan.num_warps} warps, {plan.num_stages} stages"
        programs = f"{plan.programs}, {plan.tiles} tiles for each head of a sequence"
        if plan.packed_heads > 1:
            programs = f"{plan.programs}, {plan.tiles} tiles for each group of {plan.packed_heads} heads"
    split = "none: a program walks over all keys of its rows" if plan.block_m else None
    reasons = tuple(plan.why.split("; "))
    return Explanation(question.operator, question.text(), plan.backend, kernel, reasons, tile, split, programs)


def _decode(question: _Question) -> Explanation:
    q, cache = question.take((3, 4), (4, 5))
    options = question.options
    kv_dtype = _DTYPES.get(options.get("kv_dtype", ""), question.dtype)
    if question.cuda and question.dtype is torch.float32:
        raise UnsupportedError(f"{question.operator}: dtype", got="float32 on a card", allowed="float16, bfloat16")
    if kv_dtype is torch.float8_e4m3fn and question.sm is not None and question.sm < 89:
        raise UnsupportedError("decode_attention: float8 cache", got="a card before sm_89", next="Use an int8 cache.")
    # A packed key is [.., head_dim / x, capacity, x].
    block_size = cache[2] if len(cache) == 4 else cache[3]
    table = options.get("block_table")
    capacity = block_size * (table[1] if table else 1)
    num_queries = q[2] if len(q) == 4 else 1
    plan = plan_decode(
        num_heads=q[1],
        num_kv_heads=cache[1],
        num_queries=num_queries,
        head_dim=q[-1],
        capacity=capacity,
        kv_itemsize=kv_dtype.itemsize,
        split_size=options.get("split_size"),
        windowed=options.get("window") is not None,
        smallest_split=options.get("steps_per_block"),
    )
    backend = _backend(question, DECODE_BACKENDS)
    extras = any(options.get(name) is not None for name in ("softcap", "sinks", "k_scale", "v_scale"))
    simple = num_queries == 1 and len(cache) == 4 and not extras and not options.get("return_lse")
    whole_rows = table is None or table[1] == 1
    loops = not question.cuda and question.dtype is kv_dtype is torch.float32 and simple and whole_rows
    if backend == "cpu" and not loops:
        raise UnsupportedError("decode_attention (backend=cpu)", got=question.text(), allowed=CPU_TAKES)
    if backend == "auto" and not question.cuda:
        backend = "cpu" if loops else "reference"
    if backend not in ("auto", "gluon", "triton"):
        return _elsewhere(question, backend, CPU_TAKES)
    sms = num_sms(torch.device("cuda", 0)) if torch.cuda.is_available() else _SMS_OF_AN_H200
    length = min(int(options.get("seq_len", capacity)), capacity)
    split = plan.split or _split_of(length, plan.smallest, plan.doublings, plan.target)
    splits = max(1, -(-length // split))
    capability = divmod(question.sm or 90, 10)
    names = [str(dtype).removeprefix("torch.") for dtype in (question.dtype, kv_dtype)]
    paged = table is not None and table[1] != 1
    cached = (len(cache) == 5, block_size, paged, options.get("k_scale") is not None)
    call = StreamCall((capability[0], capability[1]), q[0], names[0], names[1], *cached)
    refused = refusal(call, plan)
    if backend == "gluon" and refused is not None:
        raise UnsupportedError("decode_attention (backend=gluon)", got=refused, next='Use backend="auto".')
    if backend == "triton" or refused is not None:
        backend, kernel = "triton", "split_kv_impl.py: split_kv_kernel"
        stages, warps = plan.num_stages, f"{plan.num_warps} warps"
        reasons = (plan.why, _pdl(question), *(() if refused is None else (f"not the Hopper kernel: {refused}",)))
    else:
        backend, kernel = "gluon", "stream_impl.py: stream_kernel"
        shares, warps = plan.shares(q[0], sms), "4 warps and a loading one"
        stages = stream_tile(q[0], capacity, shares, in_pieces=paged and block_size < plan.block_n).stages
        how = "a warp of its own streams keys and values by TMA, across rows; the bits are the Triton kernel's"
        reasons = (plan.why, how, _pdl(question))
    return Explanation(
        "decode_attention",
        question.text(),
        backend,
        f"decode_attention/{kernel}",
        reasons,
        tile=f"{plan.block_m} query rows x {plan.block_n} keys x {plan.block_d}, {warps}, {stages} stages",
        split=f"{split} keys, {splits} of a row of {length}",
        programs=f"{plan.shares(q[0], sms)} shares x {cache[1] * plan.tiles}, on {sms} SMs",
    )


def _mmha(question: _Question) -> Explanation:
    qkv, cache = question.take((2, 3, 4), (4, 5))
    head_dim = cache[3] if len(cache) == 4 else cache[2] * cache[4]
    width = qkv[1] // head_dim if len(qkv) == 2 else qkv[-2]
    if _backend(question, MMHA_BACKENDS) == "reference" or not question.cuda:
        return _elsewhere(question, "reference", None)
    options = {"steps_per_block": 128} | question.options
    dtype = question.dtype
    if options.get("qkv_out_scale") is not None:
        # Which goes with a projection in int32; the cache is in the type that was named.
        options, dtype = {"kv_dtype": str(dtype).removeprefix("torch.")} | options, torch.int32
    shapes = ((qkv[0], width - 2 * cache[1], 1, head_dim), cache)
    asked = replace(question, shapes=shapes, options=options, dtype=dtype)
    found = _decode(asked)
    why = "decode attention's kernel with a prologue (bias, rotation, append) and an epilogue (smoothing, rounding)"
    return replace(found, operator=question.operator, question=question.text(), why=(why, *found.why))


def _backend(question: _Question, known: tuple[str, ...]) -> str:
    """The call's; ours only on a card."""
    backend = question.options.get("backend", "auto")
    if backend not in known:
        raise InvalidArgumentError(f"{question.operator}: backend", got=repr(backend), allowed=", ".join(known))
    if backend in ("gluon", "triton") and not question.cuda:
        raise UnsupportedError(f"{question.operator} (backend={backend})", got="a CPU", next='Use backend="auto".')
    return backend


def _split_of(length: int, smallest: int, doublings: int, target: int) -> int:
    """Keys a split of a row: the smallest size that leaves at most `target` splits."""
    for doubling in range(doublings):
        if -(-length // (smallest << doubling)) <= target:
            return smallest << doubling
    return smallest << doublings


def _pdl(question: _Question) -> str:
    if question.sm is not None and question.sm >= 90:
        return "the next kernel may be launched early and waits on the device (programmatic dependent launch)"
    return "the next kernel follows in stream order"


def _merge(question: _Question) -> Explanation:
    (outs,) = question.take((3, 4, 5, 6))
    if not question.cuda:
        return _elsewhere(question, "reference", None)
    head_dim, queries = outs[-1], outs[-2]
    block_d = 1 << (head_dim - 1).bit_length()
    block_s = max(1, min(1 << (queries - 1).bit_length(), 2048 // block_d))
    programs = -(-queries // block_s)
    for size in outs[1:-2]:
        programs *= size
    return Explanation(
        "merge_attention",
        question.text(),
        "triton",
        "merge_attention/triton_impl.py: merge_kernel",
        (f"{outs[0]} parts are read once each, in their order; 2048 numbers a program stay in registers",),
        tile=f"{block_s} queries x {block_d}, 4 warps",
        programs=str(programs),
    )


def _linear(question: _Question) -> Explanation:
    x, weight = question.take((2,), (2,))
    if not question.cuda:
        return Explanation(
            "linear", question.text(), "torch", "torch.nn.functional.linear", ("dense weights on a CPU",)
        )
    out = _DTYPES.get(question.options.get("out_dtype", ""), question.dtype)
    low = question.dtype in (torch.float16, torch.bfloat16)
    if low and x[0] == 1:
        block_n, block_k = (4, 1024) if weight[1] <= 2048 else (2, 2048)
        why = "one token: memory bound, a program sums whole rows of the weights in registers"
        return Explanation(
            "linear", question.text(), "triton", "linear/triton_impl.py: row_kernel", (why,),
            tile=f"{block_n} rows x {block_k}, 4 warps", programs=str(-(-weight[0] // block_n)),
        )  # fmt: skip
    if low and out is not question.dtype and x[0] <= _LINEAR_TILE_TOKENS:
        why = f"few tokens whose products stay in {str(out).removeprefix('torch.')}, which PyTorch's matmul would round"
        return Explanation(
            "linear", question.text(), "triton", "linear/triton_impl.py: tile_kernel", (why,), tile="128 rows x 128"
        )
    why = "several tokens: PyTorch's matmul (cuBLAS) is the better kernel"
    return Explanation("linear", question.text(), "torch", "torch.nn.functional.linear", (why,))


def _ffn(question: _Question) -> Explanation:
    """x, w_up, w_down; options as ffn's, and workers and gated."""
    x, up, down = question.take((1, 2, 3), (2,), (2,))
    rows = math.prod(x[:-1])
    options = question.options
    backend = options.get("backend", "auto")
    suits = question.cuda and question.sm in (None, 90) and question.dtype in (torch.float16, torch.bfloat16)
    gated, dtype = bool(options.get("gated", False)), str(question.dtype).removeprefix("torch.")
    sizes = (up[1], up[0], down[0], gated)
    known = table_lines(*sizes, dtype, card=question.card)
    if backend in ("wave", "chain", "streams"):
        fits = suits and rows >= 1 and (backend != "wave" or rows <= MOST_BATCH)
        if not fits:
            allowed = f"1 to {MOST_BATCH} rows on sm_90" if backend == "wave" else "1 or more rows on sm_90"
            raise UnsupportedError(f"ffn (backend={backend})", got=question.text(), allowed=allowed)
    else:
        asked = backend == "auto" and suits and rows >= 1
        backend = fastest(rows, *sizes, dtype, card=question.card) if asked else "torch"
        if not ffn_suits(backend, options.get("order", "auto"), options.get("policy", "auto")):
            backend, known = "torch", (f"{backend} has no such order or policy", *known)
    if backend == "torch":
        reasons = known if suits else ("both products in one launch need 16-bit types on sm_90",)
        return Explanation("ffn", question.text(), "torch", "ffn/reference.py: products one by one", reasons)
    if backend != "wave":
        return _many_rows(question, ChainSizes(rows, *sizes), backend, known)
    chosen = [options.get(name, "auto") for name in ("order", "policy")]
    order, policy = (given if given != "auto" else own for given, own in zip(chosen, ("row", DATA), strict=True))
    workers = int(options.get("workers", _SMS_OF_AN_H200))
    made = plan_ffn(FFNSizes(1 << (rows - 1).bit_length(), *sizes), workers=workers, order=order, policy=policy)
    shape = made.programs[0].shape
    lanes = [[int(count) for count in program.lanes[:, 0]] for program in made.programs]
    tiles = [sum(counts) for counts in zip(*lanes, strict=True)]
    tasks = sum(table.num_tasks for table in made.tables)
    why = (
        f"few rows: bound by reading the weights, which one launch streams without a pause; order {order}, {policy}",
        f"{tasks} tasks, proved; {max(tiles)} weight tiles on the busiest worker, {sum(tiles) / workers:.1f} a worker",
        "packs the weights at the first call and keeps the copy; auto does so for as many blocks as it keeps copies of",
        *known,
    )
    split = f"K in {made.splits[0]} and {made.splits[1]}"
    return Explanation(
        "ffn", question.text(), "wave", "wave/kernel.py: wave_kernel", why,
        tile=f"{shape.rows} rows x {shape.cols}, ring of {shape.ring}", split=split, programs=str(workers),
    )  # fmt: skip


def _many_rows(question: _Question, sizes: ChainSizes, backend: str, known: tuple[str, ...]) -> Explanation:
    options = question.options
    workers = int(options.get("workers", _SMS_OF_AN_H200))
    made = plan_chain(
        sizes,
        workers=workers,
        order=options.get("order", "auto"),
        policy=options.get("policy", "auto"),
        streams=backend == "streams",
    )
    tile, steps = made.tile, int(made.records[:, 4].sum())
    launches = "two launches side by side" if backend == "streams" else "one launch"
    why = (
        f"{launches}, {len(made.totals)} semaphores; order {made.order}, {made.policy}; hidden tensor of "
        f"{' x '.join(map(str, made.graph.tensors['H'].grid))} tiles",
        f"{len(made.records)} tasks, proved; the last ends {made.predicted * workers / steps - 1:.0%} after the mean",
        *known,
    )
    return Explanation(
        "ffn", question.text(), backend, "ffn/chain_kernel_impl.py: chain_kernel", why,
        tile=f"{tile.rows} rows x {tile.columns}, ring of {tile.stages}", split=f"K in 1 and {tile.splits}",
        programs=" + ".join(str(len(lanes)) for lanes in made.lanes),
    )  # fmt: skip


def _append(question: _Question) -> Explanation:
    qkv, cache = question.take((2,), (4, 5))
    head_dim = cache[3] if len(cache) == 4 else cache[2] * cache[4]
    if not question.cuda:
        plain = len(cache) == 4 and question.options.get("rotary_style", "neox") == "neox"
        plain = plain and not question.options.keys() & {"block_table", "kv_dtype"}
        backend = "cpu" if plain and question.dtype is torch.float32 else "reference"
        return _elsewhere(question, backend, "float32, plain caches, neox rotation")
    why = "bias, norms, rotation and both stores in one pass over qkv; a head's rotary partners come from L1"
    return Explanation(
        "append_kv",
        question.text(),
        "triton",
        "append_kv/triton_impl.py: append_kv_kernel",
        (why,),
        tile=f"1 head of {head_dim}, 1 warp",
        programs=f"{qkv[0]} tokens x {qkv[1] // head_dim} heads of q, k and v",
    )


def _by_row(question: _Question) -> Explanation:
    x = question.shapes[0] if question.shapes else ()
    if not x:
        raise ShapeError(f"explain {question.operator}: shapes", got="none", allowed="x's")
    folder = "rms_norm" if "rms_norm" in question.operator else question.operator
    if not question.cuda:
        backend = "cpu" if question.dtype is torch.float32 else "reference"
        return _elsewhere(question, backend, "float32")
    rows = 1
    for size in x[:-1]:
        rows *= size
    if folder == "swiglu":
        pieces = -(-x[-1] // 2 // 512)
        why, tile, programs = "elementwise, memory bound", "512 elements, 4 warps", f"{rows} x {pieces}"
    else:
        block = 1 << (x[-1] - 1).bit_length()
        why = "a row is read once and stays in registers between its sum of squares and its scaling"
        tile, programs = f"1 row of {block}, {8 if block >= 2048 else 4} warps", str(rows)
    kernel = f"{folder}/triton_impl.py: {folder}_kernel"
    return Explanation(question.operator, question.text(), "triton", kernel, (why,), tile=tile, programs=programs)


def _elsewhere(question: _Question, backend: str, suits: str | None) -> Explanation:
    """The compiled loops of a CPU, or the reference. suits: what the compiled loops take, None where there are none."""
    if backend == "cpu":
        kernel, why = f"{question.operator}/numba_impl.py", f"compiled loops take it: {suits}"
    else:
        kernel = f"{question.operator}/reference.py"
        why = "no other implementation for a CPU" if suits is None else f"compiled loops take only {suits}"
        why = why if not question.cuda else "asked for"
    return Explanation(question.operator, question.text(), backend, kernel, (why,))


_EXPLAINERS: dict[str, Callable[[_Question], Explanation]] = {
    "add_rms_norm": _by_row,
    "append_kv": _append,
    "attention": _attention,
    "attention_varlen": _attention_varlen,
    "decode_attention": _decode,
    "ffn": _ffn,
    "linear": _linear,
    "masked_multihead_attention": _mmha,
    "merge_attention": _merge,
    "rms_norm": _by_row,
    "swiglu": _by_row,
}
