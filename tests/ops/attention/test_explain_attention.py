"""explain of the attention operators: it answers what the call does, and refuses what the call refuses."""

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

from onewave import ops
from onewave.base.errors import InvalidArgumentError, OnewaveError, ShapeError, UnsupportedError
from onewave.ops.attention.hopper.plan import Work, schedule

Shape = tuple[int, ...]
DTYPES = {
    "bf16": torch.bfloat16, "bool": torch.bool, "fp16": torch.float16, "fp32": torch.float32, "int8": torch.int8,
}  # fmt: skip
KV = (2, 2, 8, 16)
PACKED_KV = (2, 2, 4, 8, 4)
Q = (2, 4, 8, 16)
REFUSED: list[tuple[str, list[Shape], str, dict[str, Any]]] = [
    ("append_kv", [(2, 96), KV], "fp32", {"backend": "triton"}),
    ("append_kv", [(2, 96), KV], "fp32", {"backend": "nonsense"}),
    ("append_kv", [(2, 96), KV], "bf16", {"backend": "cpu"}),
    ("append_kv", [(2, 96), KV], "fp32", {"backend": "cpu", "rotary_style": "interleaved"}),
    ("append_kv", [(2, 96), KV], "fp32", {"rotary_style": "nonsense"}),
    ("append_kv", [(2, 96), KV], "int8", {}),
    ("append_kv", [(2, 96), KV], "fp32", {"kv_dtype": "fp16"}),
    ("append_kv", [(2, 42), (2, 2, 8, 7)], "fp32", {}),
    ("append_kv", [(2, 100), KV], "fp32", {}),
    ("append_kv", [(2, 96), PACKED_KV], "bf16", {}),
    ("merge_attention", [(2, 1, 4, 8, 64)], "fp32", {"backend": "triton"}),
    ("merge_attention", [(2, 1, 4, 8, 64)], "fp32", {"backend": "nonsense"}),
    ("merge_attention", [(2, 1, 4, 8, 64)], "int8", {}),
    ("merge_attention", [(0, 1, 4, 8, 64)], "fp32", {}),
    ("masked_multihead_attention", [(2, 6, 16), KV], "fp32", {"kv_dtype": "int8"}),
    ("masked_multihead_attention", [(2, 6, 7), (2, 2, 8, 7)], "fp32", {}),
    ("masked_multihead_attention", [(3, 6, 16), KV], "fp32", {}),
    ("masked_multihead_attention", [(2, 2, 6, 16), KV], "fp32", {}),
    ("masked_multihead_attention", [(2, 6, 16), KV], "fp32", {"quant_round": "nonsense"}),
    ("attention_varlen", [(6, 3, 21), (6, 3, 21)], "fp32", {}),
    ("attention_varlen", [(6, 3, 16), (6, 2, 16)], "fp32", {}),
    ("attention_varlen", [(6, 3, 16), (6, 3, 16)], "int8", {}),
    ("attention", [Q, KV], "int8", {}),
    ("attention", [Q, KV], "fp32", {"softcap": -1.0}),
    ("attention", [Q, KV], "fp32", {"backend": "torch", "bias": "fp32", "window": 3}),
    ("attention", [Q, KV], "fp32", {"backend": "torch", "bias": "fp16"}),
    ("attention", [Q, KV], "fp32", {"bias": "int8"}),
]
TAKEN: list[tuple[str, list[Shape], str, dict[str, Any]]] = [
    ("append_kv", [(2, 96), KV], "fp32", {}),
    ("append_kv", [(2, 96), KV], "fp32", {"backend": "cpu"}),
    ("append_kv", [(2, 96), KV], "fp32", {"backend": "reference"}),
    ("append_kv", [(2, 96), KV], "fp32", {"block_table": None}),
    ("append_kv", [(2, 96), KV], "fp32", {"block_table": (2, 1)}),
    ("append_kv", [(2, 96), KV], "fp32", {"kv_dtype": "fp32"}),
    ("append_kv", [(2, 96), KV], "fp32", {"kv_dtype": "int8"}),
    ("append_kv", [(2, 96), KV], "fp32", {"rotary": None}),
    ("append_kv", [(2, 96), PACKED_KV], "fp32", {}),
    ("append_kv", [(2, 96), KV], "fp16", {}),
    ("merge_attention", [(2, 1, 4, 8, 64)], "fp32", {"backend": "reference"}),
    ("masked_multihead_attention", [(2, 96), KV], "fp32", {}),
    ("attention_varlen", [(6, 3, 16), (6, 3, 16)], "fp32", {}),
    ("attention", [Q, KV], "fp32", {}),
    ("attention", [(2, 4, 8, 8), (2, 2, 8, 8)], "fp32", {"backend": "torch"}),
    ("attention", [Q, KV], "fp32", {"backend": "torch", "bias": "bool", "window": 3}),
    ("attention", [Q, KV], "fp32", {"backend": "torch", "bias": "fp32"}),
]


def _call(name: str, shapes: list[Shape], dtype: str, options: dict[str, Any]) -> None:
    """The call that a question for a CPU is about."""
    options = dict(options)
    first, kv_dtype = torch.zeros(shapes[0]).to(DTYPES[dtype]), DTYPES[options.pop("kv_dtype", dtype)]
    if name == "merge_attention":
        ops.merge_attention(first, torch.zeros(shapes[0][:-1]), **options)
        return
    k = torch.zeros(shapes[1]).to(kv_dtype)
    v = torch.zeros(KV if k.ndim == 5 else shapes[1]).to(kv_dtype)
    places = torch.zeros(len(first), dtype=torch.int64)
    if name == "append_kv":
        table = options.pop("block_table", None)
        options["block_table"] = table if table is None else torch.zeros(table, dtype=torch.int32)
        rotary: Tensor | None = options.pop("rotary", torch.ones(len(first), v.shape[3] // 2 * 2))
        heads = first.shape[1] // v.shape[3] - 2 * v.shape[1]
        ops.append_kv(first, rotary, k, v, places, places, num_heads=heads, **options)
    elif name == "masked_multihead_attention":
        ops.masked_multihead_attention(first, k, v, places, **options)
    elif name == "attention_varlen":
        starts = torch.tensor([0, len(first)], dtype=torch.int32)
        ops.attention_varlen(first, k, v, starts, starts, len(first), len(k), **options)
    else:
        bias = options.pop("bias", None)
        options["bias"] = bias if bias is None else torch.zeros(shapes[0][2], shapes[1][2]).to(DTYPES[bias])
        ops.attention(first, k, v, **options)


@pytest.mark.parametrize(("name", "shapes", "dtype", "options"), REFUSED)
def test_what_a_call_on_a_cpu_refuses_is_refused(name, shapes, dtype, options):
    with pytest.raises(OnewaveError) as called:
        _call(name, shapes, dtype, options)
    with pytest.raises(type(called.value)) as asked:
        ops.explain(name, *shapes, device="cpu", dtype=dtype, **options)
    assert str(asked.value).startswith(str(called.value).split(":")[0].split(";")[0])


@pytest.mark.parametrize(("name", "shapes", "dtype", "options"), TAKEN)
def test_the_backend_named_for_a_cpu_is_the_one_that_runs(monkeypatch, name, shapes, dtype, options):
    loaded: list[str] = []
    real = importlib.import_module("onewave.ops.backends").load

    def spy(operator: str, module: str) -> Any:
        loaded.append(module)
        return real(operator, module)

    folder = name.removesuffix("_varlen")
    monkeypatch.setattr(importlib.import_module(f"onewave.ops.{folder}.op"), "load", spy)
    _call(name, shapes, dtype, options)
    answer = ops.explain(name, *shapes, device="cpu", dtype=dtype, **options)
    assert loaded == [{"cpu": "numba_impl", "torch": "torch_impl"}.get(answer.backend, answer.backend)]


@pytest.mark.parametrize(
    ("question", "options", "error", "says"),
    [
        (("append_kv", (2, 96), KV), {"dtype": "fp32"}, UnsupportedError, "float32 on cuda"),
        (("append_kv", (2, 96), KV), {"dtype": "int8"}, UnsupportedError, "dtype of qkv: torch.int8"),
        (("append_kv", (2, 42), (2, 2, 8, 7)), {}, UnsupportedError, "head_dim: 7"),
        (("append_kv", (2, 96), KV), {"backend": "cpu"}, UnsupportedError, "backend=cpu"),
        (("append_kv", (2, 96), KV), {"block_table": 3}, InvalidArgumentError, "rows, blocks a row"),
        (("merge_attention", (2, 1, 4, 8, 64)), {"dtype": torch.float64}, UnsupportedError, "float64"),
        (("merge_attention", (0, 1, 4, 8, 64)), {}, ShapeError, "at least one part"),
        (("masked_multihead_attention", (2, 6, 16), KV), {"kv_dtype": "int8"}, UnsupportedError, "cache dtype"),
        (("masked_multihead_attention", (2, 6, 16), KV), {"kv_dtype": "fp8"}, UnsupportedError, "cache dtype"),
        (("masked_multihead_attention", (2, 6, 8), (2, 2, 8, 8)), {}, UnsupportedError, "head_dim: 8"),
        (("masked_multihead_attention", (3, 6, 16), KV), {}, ShapeError, "cache rows: 2; allowed: 3"),
        (
            ("masked_multihead_attention", (2, 6, 16), KV),
            {"dtype": "fp32", "backend": "reference"},
            UnsupportedError,
            "float32 on cuda",
        ),
        (
            ("decode_attention", Q, KV),
            {"dtype": torch.float64, "kv_dtype": "int8"},
            UnsupportedError,
            "q: torch.float64",
        ),
        (("attention_varlen", (6, 3, 20), (6, 3, 20)), {}, UnsupportedError, "head_dim: 20"),
        (("attention", Q, KV), {"dtype": "fp32", "backend": "reference"}, UnsupportedError, "bfloat16, float16"),
        (("attention", Q, KV), {"backend": "torch", "bias": True, "causal": True}, UnsupportedError, "float bias"),
        (("attention", Q, KV), {"bias": "nonsense"}, UnsupportedError, "bias: 'nonsense'"),
        (("decode_attention", (2, 4, 1, 16), KV), {"v_scale": True}, InvalidArgumentError, "both or none"),
        (("decode_attention", (2, 4, 1, 16), KV), {"k_scale": True}, InvalidArgumentError, "both or none"),
    ],
)
def test_what_a_call_on_a_gpu_refuses_is_refused(question, options, error, says):
    with pytest.raises(error, match=says):
        ops.explain(*question, device="cuda:sm_90", **options)


@pytest.mark.parametrize(
    ("question", "options", "backend"),
    [
        (("append_kv", (2, 96), KV), {}, "triton"),
        (("append_kv", (2, 96), KV), {"kv_dtype": "fp8", "k_scale": True, "v_scale": True}, "triton"),
        (("append_kv", (2, 96), KV), {"backend": "reference"}, "reference"),
        (("merge_attention", (2, 1, 4, 8, 64)), {"dtype": "fp32"}, "triton"),
        (("merge_attention", (2, 1, 4, 8, 64)), {"backend": "reference"}, "reference"),
        (("attention", Q, KV), {"backend": "torch", "bias": "bool", "causal": True}, "torch"),
        (("attention", Q, KV), {"softcap": True}, "triton"),
    ],
)
def test_a_gpu_runs_the_backend_that_is_asked_for(question, options, backend):
    answer = ops.explain(*question, device="cuda:sm_90", **options)
    assert answer.backend == backend
    if backend == "reference":
        assert answer.why == ("asked for",)


@pytest.mark.parametrize("name", ["attention", "attention_fp8", "attention_varlen"])
def test_a_gpu_before_the_first_that_attention_takes_is_refused(name):
    shapes = [(8, 4, 16), (8, 2, 16)] if name == "attention_varlen" else [Q, KV]
    with pytest.raises(UnsupportedError, match="sm_75; allowed: sm_80 and newer"):
        ops.explain(name, *shapes, device="cuda:sm_75")
    assert ops.explain(name, *shapes, device="cuda:sm_75", backend="reference").backend == "reference"


@pytest.mark.parametrize(("name", "rows"), [("attention_varlen", 128), ("attention_fp8", 192)])
def test_packed_tiles_are_those_of_all_tokens_however_long_a_sequence_may_be(name, rows):
    shape, lengths = (10_000, 16, 128), {"max_seqlen_q": 5000, "max_seqlen_k": 5000}
    answer = ops.explain(name, shape, shape, device="cuda:sm_90", sequences=64, causal=True, **lengths)
    assert answer.backend == "gluon"
    assert answer.programs == f"132, {10_000 // rows + 64} tiles for each head of a sequence"
    nothing = ops.explain(name, (0, 16, 128), shape, device="cuda:sm_90", sequences=64, **lengths)
    assert nothing.kernel == "attention: none"


def test_sorted_tiles_are_dealt_as_the_launch_deals_them():
    shape = (10_000, 16, 128)
    work = Work(16, 1, shape[0], shape[0], right=0, sequences=64)
    launched = schedule(work, columns=128, num_sms=132, queue=True)
    answer = ops.explain("attention_varlen", shape, shape, device="cuda:sm_90", sequences=64, causal=True)
    assert launched.order == "sorted"
    assert answer.why[-1] == f"{launched.section} heads together"


def test_how_float8s_tiles_are_dealt_is_told():
    shape = (1, 16, 16384, 128)
    answer = ops.explain("attention_fp8", shape, shape, device="cuda:sm_90", causal=True)
    assert any("of the last 8 together" in reason for reason in answer.why)
    answer = ops.explain("attention_fp8", shape, shape, device="cuda:sm_90")
    assert answer.why[-1].endswith("head by head")
    packed = (10_000, 16, 128)
    answer = ops.explain("attention_fp8", packed, packed, device="cuda:sm_90", sequences=64, causal=True)
    assert any(reason.startswith("as sequences follow") for reason in answer.why)
    answer = ops.explain("attention_varlen", (1000, 16, 128), (1000, 16, 128), device="cuda:sm_90", sequences=4)
    assert any(reason.startswith("as sequences follow") for reason in answer.why)
