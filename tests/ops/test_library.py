"""Every operator as PyTorch's compiler sees it: schema, fake implementation, and one unbroken graph."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from inspect import signature
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from kit.operands.random import randn as normal
from onewave.base.errors import UnsupportedError
from onewave.ops.append_kv.op import append_kv
from onewave.ops.attention.op import attention, attention_varlen
from onewave.ops.choice import Call
from onewave.ops.decode_attention.op import decode_attention
from onewave.ops.embedding.op import embedding
from onewave.ops.ffn.op import ffn
from onewave.ops.library import is_watched
from onewave.ops.linear.op import linear
from onewave.ops.masked_multihead_attention.op import masked_multihead_attention
from onewave.ops.merge_attention.op import merge_attention
from onewave.ops.quantize_rows.op import quantize_rows
from onewave.ops.rms_norm.op import add_rms_norm, rms_norm
from onewave.ops.sampling.op import greedy
from onewave.ops.scaled_linear.op import linear_int8
from onewave.ops.swiglu.op import swiglu

# fp16 on the CPU: the reference runs, and no kernel has to be compiled first.
F16 = torch.float16
randn = partial(normal, dtype=F16)


@dataclass(frozen=True)
class Case:
    """call: the public function on `tensors`. arguments: of the same through torch.ops, as the schema has them."""

    call: Callable[..., Any]
    tensors: Callable[[], tuple[Tensor, ...]]
    arguments: Callable[..., tuple[Any, ...]] = lambda *tensors: tensors


# An operator's name is the first word of its cases'.
CASES = {
    "rms_norm": Case(
        lambda x, w: rms_norm(x, w, 1e-5),
        lambda: (randn(3, 16), randn(16, seed=1)),
        lambda x, w: (x, w, 1e-5),
    ),
    "add_rms_norm with a float32 residual": Case(
        lambda x, r, w: add_rms_norm(x, r, w, 1e-5),
        lambda: (randn(3, 16), randn(3, 16, seed=1, dtype=torch.float32), randn(16, seed=2)),
        lambda x, r, w: (x, r, w, 1e-5),
    ),
    "swiglu": Case(swiglu, lambda: (randn(3, 32),)),
    "embedding": Case(embedding, lambda: (torch.tensor([3, 0, 3]), randn(5, 16))),
    "linear": Case(linear, lambda: (randn(3, 16), randn(8, 16, seed=1))),
    "linear with bias, in float32": Case(
        lambda x, w, b: linear(x, w, b, torch.float32),
        lambda: (randn(3, 16), randn(8, 16, seed=1), randn(8, seed=2)),
        lambda x, w, b: (x, w, b, torch.float32),
    ),
    "quantize_rows": Case(quantize_rows, lambda: (randn(3, 16),), lambda x: (x, torch.int8, None, False)),
    "scaled_linear of int8": Case(
        lambda x, w, s, b: linear_int8(x, w, s, bias=b, out_scale=0.1),
        lambda: (*(quantize_rows(randn(n, 16, seed=n))[0] for n in (3, 8)), torch.rand(3), randn(8)),
        lambda x, w, s, b: (x, w, torch.int8, "auto", s, None, b, None, None, 0.1),
    ),
    "greedy": Case(greedy, lambda: (randn(3, 50, dtype=torch.float32),)),
    "merge_attention, stacked": Case(
        lambda o, s: merge_attention(o, s),
        lambda: (randn(3, 2, 4, 5, 16), randn(3, 2, 4, 5, seed=1, dtype=torch.float32)),
        lambda o, s: ([o], [s]),
    ),
    "attention": Case(
        # Its LSE, too: the registered operator always makes one, for which a CPU takes another path.
        lambda q, k, v: attention(q, k, v, causal=True, return_lse=True),
        lambda: (randn(2, 4, 5, 16), randn(2, 2, 9, 16, seed=1), randn(2, 2, 9, 16, seed=2)),
        lambda q, k, v: (q, k, v, None, None, None, 0.25, None, 0, False, None, "auto"),
    ),
    "attention in BSHD memory, with every option": Case(
        lambda q, k, v, z, s, b: attention(
            q,
            k,
            v,
            scale=0.3,
            window=(3, 1),
            softcap=5.0,
            sinks=z,
            alibi_slopes=s,
            bias=b,
            align="top-left",
            return_lse=True,
        ),
        lambda: (
            *(randn(2, n, h, 16, seed=n + h).transpose(1, 2) for n, h in ((5, 4), (9, 2), (9, 2))),
            torch.rand(4),
            torch.rand(4),
            randn(1, 4, 5, 9, seed=7),
        ),
        lambda q, k, v, z, s, b: (q, k, v, z, s, b, 0.3, 3, 1, True, 5.0, "auto"),
    ),
    "attention_varlen": Case(
        lambda q, k, v, a, b: attention_varlen(q, k, v, a, b, 4, 5, causal=True, return_lse=True),
        lambda: (
            randn(7, 4, 16),
            randn(9, 2, 16, seed=1),
            randn(9, 2, 16, seed=2),
            torch.tensor([0, 4, 7], dtype=torch.int32),
            torch.tensor([0, 5, 9], dtype=torch.int32),
        ),
        lambda *tensors: (*tensors, 4, 5, None, None, None, 0.25, None, 0, False, None, "auto"),
    ),
    "decode_attention": Case(
        lambda q, k, v, n: decode_attention(q, k, v, n, return_lse=True),
        lambda: (randn(2, 4, 2, 16), randn(2, 2, 9, 16, seed=1), randn(2, 2, 9, 16, seed=2), torch.tensor([5, 9])),
    ),
    "decode_attention, paged, with every option": Case(
        lambda q, k, v, n, t, s, z: decode_attention(
            q, k, v, n, block_table=t, k_scale=s, v_scale=s, sinks=z, scale=0.3, window=4, softcap=5.0, split_size=64
        ),
        lambda: (
            randn(2, 4, 1, 16),
            *(torch.arange(96, dtype=torch.int8).repeat(2).view(3, 2, 2, 16) for _ in "kv"),
            torch.tensor([3, 4]),
            torch.tensor([[2, 0], [1, 2]], dtype=torch.int32),
            torch.rand(2),
            torch.rand(4),
        ),
        lambda q, k, v, n, t, s, z: (q, k, v, n, t, s, s, z, 0.3, 4, 5.0, 64),
    ),
    "masked_multihead_attention": Case(
        lambda x, k, v, n, b, m, f, r: masked_multihead_attention(
            x, k, v, n, bias=b, src_mask=m, finished=f, rotary=r, rotary_style="interleaved", out_scale=0.5
        ),
        lambda: (
            randn(2, 8, 16),
            randn(2, 2, 9, 16, seed=1),
            randn(2, 2, 9, 16, seed=2),
            torch.tensor([5, 8]),
            randn(8, 16, seed=3),
            randn(2, 4, 1, 9, seed=4),
            torch.tensor([False, True]),
            randn(2, 16, seed=5, dtype=torch.float32),
        ),
        lambda x, k, v, n, b, m, f, r: (x, k, v, n, torch.int8, b, m, f, r, None, None, None, True, 0.5),
    ),
    "append_kv": Case(
        lambda x, r, k, v, s, p, b, t: append_kv(
            x, r, k, v, s, p, num_heads=4, bias=b, rotary_style="interleaved", block_table=t
        ),
        lambda: (
            randn(3, 128),
            randn(3, 16, seed=1, dtype=torch.float32),
            *(torch.zeros(4, 2, 8, 16, dtype=F16) for _ in "kv"),
            torch.tensor([0, 1, 1]),
            torch.tensor([9, 3, 4]),
            randn(128, seed=3),
            torch.tensor([[2, 0], [1, 3]], dtype=torch.int32),
        ),
        lambda x, r, k, v, s, p, b, t: (x, r, k, v, s, p, 4, b, None, None, 1e-6, True, t),
    ),
    "merge_attention, a list": Case(
        lambda a, b, s, t: merge_attention([a, b], [s, t]),
        lambda: (
            *(randn(2, 4, 5, 16, seed=i) for i in (0, 1)),
            *(randn(2, 4, 5, seed=i, dtype=torch.float32) for i in (2, 3)),
        ),
        lambda a, b, s, t: ([a[None], b[None]], [s[None], t[None]]),
    ),
}


def operator_of(name: str) -> str:
    return name.split()[0].removesuffix(",")


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b) and a.stride() == b.stride()
    return all(equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_the_registration_passes_pytorchs_own_checks(name: str) -> None:
    operator, case = operator_of(name), CASES[name]
    torch.library.opcheck(getattr(torch.ops.onewave, operator).default, case.arguments(*case.tensors()))


@pytest.mark.parametrize("name", CASES)
def test_a_compiled_call_is_one_graph_and_equals_the_eager_one(name: str) -> None:
    operator, case = operator_of(name), CASES[name]
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return torch._dynamo.backends.registry.lookup_backend("aot_eager")(graph, inputs)

    torch._dynamo.reset()
    compiled = torch.compile(case.call, fullgraph=True, backend=keep)
    ours = case.tensors()
    theirs = [tensor.clone() for tensor in ours]
    with torch.no_grad():
        assert equal(compiled(*ours), case.call(*theirs))
    assert equal(ours, theirs)  # caches that it wrote
    assert len(graphs) == 1
    assert [str(n.target) for n in graphs[0].graph.nodes].count(f"onewave.{operator}") == 1


def attend_into(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
    attention(*(tensor.transpose(1, 2) for tensor in (q, k, v)), out=out.transpose(1, 2))
    return out


def decode_into(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, out: Tensor) -> Tensor:
    decode_attention(q, k.transpose(1, 2), v.transpose(1, 2), lengths, out=out.transpose(0, 1))
    return out


def append(qkv: Tensor, rotary: Tensor, k: Tensor, v: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
    append_kv(qkv, rotary, k.transpose(1, 2), v.transpose(1, 2), slots, positions, num_heads=4)
    return k


def masked(qkv: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    return masked_multihead_attention(qkv, k.transpose(1, 2), v.transpose(1, 2), lengths)[0]


def caches(rows: int, keys: int) -> tuple[Tensor, Tensor]:
    return randn(rows, keys, 2, 16), randn(rows, keys, 2, 16, seed=1)


TURNED = {
    "attention": (attend_into, lambda b, n: (randn(b, n, 4, 16), *caches(b, n), randn(b, n, 4, 16))),
    "decode_attention": (
        decode_into,
        lambda b, n: (randn(b, 4, 16), *caches(b, n), torch.arange(b) + 1, randn(4, b, 16)),
    ),
    "append_kv": (
        append,
        lambda b, n: (
            randn(b, 128), randn(b, 16, dtype=torch.float32), *caches(b, n), torch.arange(b), torch.arange(b),
        ),
    ),
    "masked_multihead_attention": (masked, lambda b, n: (randn(b, 128), *caches(b, n), torch.arange(b))),
}  # fmt: skip


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", TURNED)
def test_views_of_any_size_that_are_written_compile_once_for_all(name: str, dynamic: bool | None) -> None:
    call, tensors = TURNED[name]
    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    with torch.no_grad():
        for sizes in ((2, 7), (3, 5), (4, 9)):
            torch.testing.assert_close(compiled(*tensors(*sizes)), call(*tensors(*sizes)), rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("name", CASES)
def test_backward_is_refused_by_name_when_it_is_asked_for(name: str) -> None:
    operator, case = operator_of(name), CASES[name]
    tensors = case.tensors()
    next(tensor for tensor in tensors if tensor.is_floating_point()).requires_grad_()
    result = case.call(*tensors)
    first = result if isinstance(result, Tensor) else result[0]
    if not first.is_floating_point():
        assert not first.requires_grad
        return
    # PyTorch refuses by itself for operators that write their arguments.
    with pytest.raises(
        (UnsupportedError, RuntimeError), match=rf"({operator}: backward.*no_grad)|through .*{operator}"
    ):
        first.sum().backward()


@pytest.mark.parametrize("compiled", [False, True])
def test_autograd_is_refused_where_out_is_given(compiled: bool) -> None:
    """A compiled call that wrote out= once lost the gradients of its inputs without a word."""
    q, k, v = (randn(1, 4, 9, 16, seed=seed) for seed in range(3))

    def call(q: Tensor, out: Tensor) -> Tensor:
        return attention(q, k, v, out=out) * 1

    run = torch.compile(call, backend="aot_eager") if compiled else call
    with torch.no_grad():
        expected = run(q.requires_grad_(), torch.empty_like(q))
    with pytest.raises(UnsupportedError, match=r"out=: tensors that require grad.*no_grad"):
        run(q, torch.empty_like(q))
    torch.testing.assert_close(run(q.detach(), torch.empty_like(q)), expected)


def test_forward_mode_differentiation_is_refused() -> None:
    """Its tangents were once zeros, or none."""
    q, k, v = (randn(1, 4, 9, 16, seed=seed) for seed in range(3))
    with pytest.raises(UnsupportedError, match="a tensor with a tangent"):
        torch.func.jvp(lambda q: attention(q, k, v), (q,), (q,))
    with forward_ad.dual_level():
        attention(q, k, v)
        with pytest.raises(UnsupportedError, match="a tensor with a tangent"):
            attention(q, forward_ad.make_dual(k, v), v)


def test_what_grad_follows_is_refused_and_what_it_does_not_is_computed() -> None:
    q, k, v = (randn(1, 4, 9, 16, seed=seed).float() for seed in range(3))
    with pytest.raises(UnsupportedError, match=r"backward: a tensor that torch\.func\.grad follows"):
        torch.func.grad(lambda q: attention(q, k, v).sum())(q)
    with pytest.raises(UnsupportedError, match=r"backward: a tensor that torch\.func\.grad follows"):
        torch.func.grad(lambda q: torch.vmap(lambda q: attention(q, k, v))(q).sum())(q[None])
    expected = attention(q, k, v)
    for seen in (lambda x: q, lambda x: x.detach()):
        found = torch.func.grad(lambda x, seen=seen: (x * attention(seen(x), k, v)).sum())(q)
        torch.testing.assert_close(found, expected)


AUTOCAST: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: linear(x, randn(8, 96, seed=1).float()),
    "linear, 16 bits": lambda x: linear(x.half(), randn(8, 96, seed=1)),
    "linear, summed in float32": lambda x: linear(x.bfloat16(), randn(8, 96, seed=1).bfloat16(), None, torch.float32),
    "ffn": lambda x: ffn(x[:, :64], randn(128, 64, seed=1).float(), randn(64, 128, seed=2).float()),
    "masked_multihead_attention": lambda x: masked_multihead_attention(
        x.view(-1, 6, 16), *(randn(3, 2, 8, 16, seed=seed).float() for seed in (1, 2)), torch.tensor([3, 0, 7])
    ),
}


@pytest.mark.parametrize("call", AUTOCAST.values(), ids=AUTOCAST.keys())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_no_product(call: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    x = randn(3, 96, dtype=torch.float32)
    expected = call(x)
    with torch.autocast("cpu", dtype=dtype):
        found = call(x)
    torch.testing.assert_close(found, expected, atol=0, rtol=0)


class Watched(Tensor):
    """A subclass, which may want to see operators."""


def test_a_plain_eager_call_does_not_go_through_the_dispatcher() -> None:
    x, w = randn(3, 16), randn(16, seed=1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        rms_norm(x, w, 1e-5)
        rms_norm(x, torch.nn.Parameter(w, requires_grad=False), 1e-5)
        with torch.no_grad():
            rms_norm(x, torch.nn.Parameter(w), 1e-5)
        rms_norm(x, w.as_subclass(Watched), 1e-5)
    assert [event.name for event in seen.events() if event.name.startswith("onewave")] == ["onewave::rms_norm"]
    assert not is_watched(x, w, None)
    assert is_watched(x.requires_grad_())


@pytest.mark.parametrize("name", CASES)
def test_a_traced_call_is_one_operator(name: str) -> None:
    operator, case = operator_of(name), CASES[name]
    graph = make_fx(lambda *tensors: case.call(*tensors))(*case.tensors()).graph  # which looks at the signature
    assert [str(node.target) for node in graph.nodes].count(f"onewave.{operator}.default") == 1


def test_a_constructor_takes_a_calls_fields_in_their_order() -> None:
    """PyTorch 2.11's compiler gives positional arguments to the fields in their order, whether keyword-only or not."""
    calls = [each for direct in Call.__subclasses__() for each in (direct, *direct.__subclasses__())]
    assert len(calls) > 10
    for each in calls:
        assert [field.name for field in fields(each)] == list(signature(each).parameters), each


def test_a_mapped_call_is_a_call_for_each() -> None:
    q, k, v = (randn(2, 1, 4, 9, 16, seed=seed) for seed in range(3))
    mapped = torch.vmap(attention)(q, k, v)
    alone = torch.stack([attention(*each) for each in zip(q, k, v, strict=True)])
    torch.testing.assert_close(mapped, alone, atol=1e-2, rtol=1e-2)
