"""explain: what it says is what runs."""

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from kit.no_device import pretended_device
from onewave import ops
from onewave.base.device import Device
from onewave.base.errors import InvalidArgumentError, ShapeError, UnsupportedError
from onewave.ops.decode_attention.call import DecodeCall
from onewave.ops.decode_attention.choose import choose
from onewave.ops.decode_attention.op import decode_attention
from onewave.ops.explain import explain
from onewave.ops.linear.choose import LinearCall
from onewave.ops.linear.choose import choose as choose_linear
from onewave.ops.linear.op import linear
from onewave.ops.merge_attention.op import merge_attention
from onewave.ops.rms_norm.op import rms_norm
from onewave.ops.swiglu.op import swiglu

OPERATORS = Path(ops.__file__).parent
Q, CACHE = (2, 8, 1, 64), (2, 2, 4096, 64)
FFN = [(2, 64), (128, 64), (64, 128)]
QUESTIONS: list[tuple[str, list[tuple[int, ...]], dict[str, Any]]] = [
    ("attention", [(2, 8, 300, 64), (2, 2, 300, 64)], {"causal": True}),
    ("attention_varlen", [(900, 8, 64), (900, 2, 64)], {"sequences": 3, "max_seqlen_q": 500, "max_seqlen_k": 500}),
    ("attention_fp8", [(2, 8, 300, 64), (2, 2, 300, 64)], {"causal": True}),
    ("attention_fp8", [(900, 8, 64), (900, 2, 64)], {"sequences": 3, "max_seqlen_q": 500, "max_seqlen_k": 500}),
    ("decode_attention", [Q, CACHE], {"split_size": 512}),
    ("decode-attention", [(2, 8, 64), (9, 2, 8, 32, 8)], {"block_table": (2, 4)}),
    ("append_kv", [(3, 12 * 64), CACHE], {}),
    ("masked_multihead_attention", [(2, 12, 64), CACHE], {"steps_per_block": 256}),
    ("merge_attention", [(3, 2, 8, 5, 64)], {}),
    ("linear", [(1, 2048), (512, 2048)], {}),
    ("linear", [(8, 2048), (512, 2048)], {"out_dtype": "fp32"}),
    ("linear_int8", [(8, 2048), (512, 2048)], {"out_dtype": "fp16"}),
    ("linear_fp8", [(300, 2048), (512, 2048)], {}),
    ("quantize_rows", [(4, 2048)], {"codes": "fp8"}),
    ("rms_norm", [(4, 2048)], {}),
    ("add_rms_norm", [(4, 90)], {}),
    ("swiglu", [(4, 2048)], {}),
]


@pytest.mark.parametrize(("name", "shapes", "options"), QUESTIONS)
@pytest.mark.parametrize("device", ["cuda:sm_80", "cuda:sm_90", "cpu"])
def test_every_operator_answers_for_gpus_that_are_not_there(name, shapes, options, device):
    answer = explain(name, *shapes, device=device, dtype="bf16", **options)
    text = str(answer)
    assert text.splitlines()[0].startswith(name.replace("-", "_"))
    assert answer.backend in text
    assert answer.kernel in text
    assert all(reason in text for reason in answer.why)
    assert answer.why
    if ".py: " in answer.kernel:
        place, kernel = answer.kernel.split(": ")
        assert f"def {kernel}(" in (OPERATORS / place).read_text()
    if device != "cpu" and answer.backend == "triton":
        assert answer.tile
    if device == "cpu":
        assert answer.backend != "triton"


@pytest.mark.parametrize(
    ("device", "backend", "says"),
    [
        ("cuda:sm_90", "gluon", "fp8/kernel.py: fp8_kernel"),
        ("cuda:sm_80", "triton", "dequantised copies: products in float8 need sm_90, and this is sm_80"),
        ("cpu", "torch", "dequantised copies: tensors on a CPU"),
    ],
)
def test_float8_attention_says_whether_it_multiplies_in_float8(device, backend, says):
    answer = explain("attention_fp8", (1, 4, 300, 128), (1, 2, 300, 128), device=device, dtype="fp16", causal=True)
    assert answer.backend == backend
    assert says in str(answer)
    shapes = ((1, 4, 300, 128), (1, 2, 300, 128))
    with_lse = explain("attention_fp8", *shapes, device=device, dtype="fp16", causal=True, return_lse=True)
    assert with_lse.backend == ("reference" if device == "cpu" else backend)
    for said, asked in ((answer, "e4m3's bits from scores"), (with_lse, "exponentials, whose sums the LSE is")):
        assert (asked in str(said)) == (device == "cuda:sm_90")
    with pytest.raises(UnsupportedError, match="head_dim: 136"):
        explain("attention_fp8", (1, 4, 300, 136), (1, 2, 300, 136), device=device)
    if device != "cuda:sm_90":
        with pytest.raises(UnsupportedError, match=r"backend=gluon"):
            explain("attention_fp8", (1, 4, 300, 64), (1, 2, 300, 64), device=device, backend="gluon")


@pytest.mark.parametrize(
    ("call", "operator", "shapes", "dtype", "options"),
    [
        ((decode_attention, True), "decode_attention", [Q, CACHE], "fp32", {}),
        ((decode_attention, True), "decode_attention", [Q, CACHE], "fp16", {}),
        ((decode_attention, True), "decode_attention", [Q, CACHE], "fp32", {"softcap": 3.0}),
        ((decode_attention, True), "decode_attention", [(2, 8, 2, 64), CACHE], "fp32", {}),
        ((merge_attention, False), "merge_attention", [(3, 2, 8, 5, 64)], "fp32", {}),
        ((rms_norm, False), "rms_norm", [(3, 64)], "fp32", {}),
        ((rms_norm, False), "rms_norm", [(3, 64)], "fp16", {}),
        ((swiglu, False), "swiglu", [(3, 64)], "fp32", {}),
    ],
)
def test_the_implementation_named_is_the_one_that_runs(monkeypatch, call, operator, shapes, dtype, options):
    loaded: list[str] = []

    def spy(name: str, module: str) -> Any:
        loaded.append(f"{name}/{module}.py")
        return real(name, module)

    function, has_cache = call
    home = inspect.getmodule(function)
    real = importlib.import_module("onewave.ops.backends").load
    monkeypatch.setattr("onewave.ops.backends.load", spy)
    if hasattr(home, "load"):
        monkeypatch.setattr(home, "load", spy)
    kind = {"fp32": torch.float32, "fp16": torch.float16}[dtype]
    tensors = [torch.ones(shape, dtype=kind) for shape in shapes]
    if has_cache:
        function(*tensors, tensors[1], torch.tensor([3, 5], dtype=torch.int32), **options)
    elif function is merge_attention:
        function(tensors[0], tensors[0][..., 0].contiguous())
    elif function is rms_norm:
        function(tensors[0], tensors[0][0], 1e-5)
    else:
        function(tensors[0])
    assert loaded == [explain(operator, *shapes, device="cpu", dtype=dtype, **options).kernel]


@pytest.mark.parametrize(("length", "split_size"), [(64, None), (1000, None), (4096, None), (4096, 512)])
def test_the_grid_and_the_split_of_a_decode_step_are_the_launchs(monkeypatch, length, split_size):
    from onewave.ops.decode_attention.triton import launch as triton_impl

    seen: dict[str, Any] = {}

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *arguments, **constants: seen.setdefault("launch", (grid, constants))

    monkeypatch.setattr(triton_impl, "split_kv_kernel", Kernel())
    q, cache = torch.zeros(Q).half(), torch.zeros(2, 2, length, 64).half()
    on_h200: dict[str, Any] = {"backend": "triton", "described": Device((9, 0), 132)}
    call = DecodeCall(q, cache, cache, torch.tensor([length, 1]), split_size=split_size, **on_h200)
    triton_impl.run(call, choose(call))
    answer = explain("decode_attention", Q, cache.shape, device="cuda:sm_90", dtype="fp16", split_size=split_size)
    grid, constants = seen["launch"]
    assert answer.programs is not None
    assert tuple(int(size) for size in re.findall(r"\d+", answer.programs)) == (*grid, 132)
    assert answer.tile.startswith(f"{constants['BLOCK_M']} query rows x {constants['BLOCK_N']} keys")
    keys, splits = int(answer.split.split()[0]), int(answer.split.split()[2])
    assert (splits - 1) * keys < length <= splits * keys
    assert keys == split_size if split_size else splits <= constants.get("TARGET", 64)


def test_the_linear_kernel_named_is_the_one_that_suits():
    for tokens in (1, 2, 64, 65):
        for out in (torch.bfloat16, torch.float32):
            x, weight = torch.zeros(tokens, 32, dtype=torch.bfloat16), torch.zeros(8, 32, dtype=torch.bfloat16)
            answer = explain(linear, x.shape, weight.shape, device="cuda", out_dtype=str(out).removeprefix("torch."))
            on_gpu = LinearCall(x, weight, out_dtype=out, described=Device((9, 0), 132))
            assert answer.kernel == choose_linear(on_gpu).kernel
            assert answer.backend == ("triton" if tokens == 1 else "gluon")


@pytest.mark.parametrize(
    ("arguments", "options", "error", "says"),
    [
        (("atention", (1,)), {}, InvalidArgumentError, "decode_attention"),
        (("decode_attention", Q), {}, ShapeError, "3 axes or 4 axes, 4 axes or 5 axes"),
        (("rms_norm",), {}, ShapeError, "x's"),
        (("rms_norm", (1, 2)), {"device": "tpu"}, InvalidArgumentError, "sm_90"),
        (("rms_norm", (1, 2)), {"device": "cuda:sm_12345"}, InvalidArgumentError, "sm_90"),
        (("rms_norm", "x"), {}, ShapeError, "explain: shape: 'x'; allowed: whole numbers"),
        (("rms_norm", 5), {}, ShapeError, "explain: shape: 5; allowed: whole numbers"),
        (("rms_norm", (1, 2)), {"dtype": "fp4"}, UnsupportedError, "bf16"),
        (("attention", Q, Q), {"device": "cuda:sm_90", "dtype": "fp32"}, UnsupportedError, "bfloat16, float16"),
        (("attention", Q, Q), {"casual": True}, InvalidArgumentError, "causal"),
        (("rms_norm", (4, 8)), {"dtype": "int8", "device": "cpu"}, UnsupportedError, "float16 or float32"),
        (("linear", (1, 8), (4, 9)), {"device": "cpu"}, ShapeError, "cols"),
        (("linear", (1, 8), (4, 8)), {"device": "cuda:sm_90", "dtype": "int8"}, UnsupportedError, "float64"),
        (("linear", (1, 8), (4, 8)), {"device": "cpu", "dtype": "fp8"}, UnsupportedError, "float64"),
        (("linear", (1, 8), (4, 8)), {"device": "cpu", "out_dtype": "int8"}, UnsupportedError, "a float dtype"),
        (("rms_norm", (2, 8)), {"device": "cpu", "eps": -1.0}, InvalidArgumentError, "eps: -1.0"),
        (("add_rms_norm", (2, 8)), {"device": "cpu", "eps": float("nan")}, InvalidArgumentError, "eps: nan"),
        (("rms_norm", (2, 8)), {"device": "cuda:sm_90", "dtype": torch.float64}, UnsupportedError, "64 on a GPU"),
        (("swiglu", (2, 8)), {"device": "cuda:sm_90", "dtype": torch.float64}, UnsupportedError, "64 on a GPU"),
        (("swiglu", (2, 7)), {"device": "cpu"}, ShapeError, "an even length"),
        (("ffn", *FFN), {"device": "cpu", "dtype": torch.float64}, UnsupportedError, "float32 on a CPU"),
        (("ffn", *FFN), {"device": "cpu", "dtype": "fp8"}, UnsupportedError, "float32 on a CPU"),
        (
            ("ffn", *FFN),
            {"device": "cuda:sm_90", "dtype": "fp32"},
            UnsupportedError,
            "dtype: torch.float32; allowed: bf",
        ),
        (("ffn", *FFN), {"device": "cpu", "backend": None}, InvalidArgumentError, "backend: None"),
        (("rms_norm", (-1, 2)), {}, ShapeError, "whole numbers from 0"),
        (("ffn", (2, 60), (128, 60), (64, 128)), {}, ShapeError, "multiples of 64"),
        (("ffn", (2, 64), (128, 128), (64, 128)), {}, ShapeError, "w_up .inner, hidden"),
        (("ffn", *FFN), {"order": "bogus"}, InvalidArgumentError, "sm_local"),
        (("ffn", *FFN), {"backend": "bogus"}, InvalidArgumentError, "wave, chain"),
        (("ffn", *FFN), {"nonsense": 1}, InvalidArgumentError, "gated"),
        (("attention", Q, Q), {"backend": "gluno"}, InvalidArgumentError, "gluon"),
        (("attention", Q, Q), {"device": "cpu", "backend": "gluon"}, UnsupportedError, "backend=gluon"),
        (("attention", Q, Q), {"device": "cuda:sm_90", "backend": "gluon", "scale": -1.0}, UnsupportedError, "scale"),
        (
            ("attention", Q, Q),
            {"device": "cuda:sm_90", "backend": "torch", "softcap": 1.0},
            UnsupportedError,
            "softcap",
        ),
        (("decode_attention", Q, CACHE), {"backend": "gluno"}, InvalidArgumentError, "gluon"),
        (("decode_attention", Q, CACHE), {"device": "cpu", "backend": "gluon"}, UnsupportedError, "backend=gluon"),
        (("decode_attention", Q, CACHE), {"device": "cpu", "backend": "cpu"}, UnsupportedError, "float32"),
        (
            ("decode_attention", Q, CACHE),
            {"device": "cuda:sm_90", "dtype": "fp32"},
            UnsupportedError,
            "dtype of q: torch.float32 on cuda sm_90; allowed: bfloat16, float16",
        ),
        (("decode_attention", Q, CACHE), {"device": "cuda:sm_80", "kv_dtype": "fp8"}, UnsupportedError, "sm_89"),
        (("masked_multihead_attention", (2, 12, 64), CACHE), {"backend": "cpu"}, InvalidArgumentError, "reference"),
        (("attention", (1 << 62, 1, 4, 64), Q), {}, ShapeError, "a product up to"),
        (("decode_attention", Q, CACHE), {"device": "cuda:sm_90", "block_table": (-1, 2)}, ShapeError, r"\(-1, 2\)"),
        (("decode_attention", Q, CACHE), {"device": "cuda:sm_90", "block_table": (2.5, 1)}, ShapeError, "2.5"),
    ],
)
def test_a_question_that_makes_no_sense_is_refused(arguments, options, error, says):
    with pytest.raises(error, match=says):
        explain(*arguments, **options)


def test_a_gpu_without_a_number_is_the_current_one_and_one_that_is_not_there_is_refused(monkeypatch):
    with pretended_device():
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: [(8, 0), (9, 0)][device.index])
        for current, backend in ((1, "gluon"), (0, "triton"), (1, "gluon")):
            monkeypatch.setattr(torch.cuda, "current_device", lambda current=current: current)
            assert explain("attention", (1, 8, 300, 128), (1, 8, 300, 128), device="cuda").backend == backend
        with pytest.raises(InvalidArgumentError, match=r"device: cuda:2; allowed: cuda:0\.\.cuda:1, cuda:sm_90"):
            explain("attention", Q, Q, device="cuda:2")


@pytest.mark.parametrize(
    ("shapes", "options", "backend", "says"),
    [
        ([(1, 8, 300, 128)] * 2, {}, "gluon", "sm_90"),
        ([(1, 8, 300, 128)] * 2, {"scale": -1.0}, "triton", "positive scale"),
        ([(1, 8, 0, 128), (1, 8, 300, 128)], {"causal": True}, "gluon", "no launch"),
        ([(0, 8, 300, 128)] * 2, {"causal": True}, "gluon", "no launch"),
        ([(1, 8, 300, 128), (1, 8, 0, 128)], {}, "gluon", "zeros are written"),
        ([(1, 8, 300, 64), (1, 8, 50, 64)], {"causal": True, "align": "top-left"}, "gluon", "longest rows"),
        ([(8, 16, 1024, 128)] * 2, {"causal": True}, "gluon", "of the last 64 together"),
    ],
)
def test_attention_on_hopper_is_explained_to_its_edges(shapes, options, backend, says):
    answer = explain("attention", *shapes, device="cuda:sm_90", **options)
    assert answer.backend == backend
    assert any(says in reason for reason in answer.why)


def test_pages_that_no_kernel_reads_are_copied_for_hoppers():
    shapes, options = ((8, 2, 64), (96, 1, 64)), {"sequences": 2, "max_seqlen_q": 5, "max_seqlen_k": 48}
    copied = explain("attention_varlen", *shapes, device="cuda:sm_90", page_size=48, **options)
    assert copied.backend == "gluon"
    assert "pages of 48 keys are copied first" in copied.why
    in_place = explain("attention_varlen", *shapes, device="cuda:sm_90", page_size=64, **options)
    assert not any("copied" in reason for reason in in_place.why)
    with pytest.raises(UnsupportedError, match="not of 48"):
        explain("attention_varlen", *shapes, device="cuda:sm_90", page_size=48, backend="gluon", **options)


def test_one_split_that_holds_a_whole_cache_is_explained():
    shapes, options = ((2, 12, 64), CACHE), {"steps_per_block": 100_000, "backend": "triton"}
    answer = explain("masked_multihead_attention", *shapes, device="cuda:sm_90", **options)
    assert any("one split of up to 131072 keys" in reason for reason in answer.why)


def test_a_projection_in_int32_runs_on_the_portable_kernel():
    shapes = ((2, 12, 64), CACHE)
    assert explain("masked_multihead_attention", *shapes, device="cuda:sm_90").backend == "gluon"
    answer = explain("masked_multihead_attention", *shapes, device="cuda:sm_90", qkv_out_scale=True)
    assert answer.backend == "triton"
    assert any("queries in int32 and a cache in bfloat16" in reason for reason in answer.why)


@pytest.mark.parametrize("device", ["cpu", "cuda:sm_90"])
@pytest.mark.parametrize(
    ("name", "shapes", "options"),
    [
        ("attention_varlen", ((4, 2, 16), (4, 2, 16)), ("block_table", "sequences", "page_size")),
        ("attention_fp8", (Q, Q), ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "sequences")),
        ("decode_attention", (Q, CACHE), ("seq_len", "kv_dtype", "split_size", "block_table")),
        ("masked_multihead_attention", ((2, 12, 64), CACHE), ("seq_len", "kv_dtype")),
        ("ffn", FFN, ("workers", "gated", "w_gate")),
        ("linear", ((1, 8), (4, 8)), ("out_dtype", "bias")),
    ],
)
def test_an_option_that_is_none_is_as_one_not_given(name, shapes, options, device):
    usual = explain(name, *shapes, device=device)
    assert explain(name, *shapes, device=device, **dict.fromkeys(options)) == usual


@pytest.mark.parametrize(
    ("call", "shape", "dtype", "backend"),
    [
        (lambda x: rms_norm(x, torch.ones_like(x[0]), 1e-5), (2, 8), torch.float64, "reference"),
        (swiglu, (2, 8), torch.float64, "reference"),
        (swiglu, (2, 0), torch.float32, "cpu"),
    ],
)
def test_a_row_that_only_a_cpu_takes_is_explained(call, shape, dtype, backend):
    call(torch.ones(shape, dtype=dtype))
    name = "swiglu" if call is swiglu else "rms_norm"
    assert explain(name, shape, device="cpu", dtype=dtype).backend == backend
