"""Parts of the wave's kernel as kernels of their own: no launch of ours runs attention, its combination or the merging
of splits alone, whose layouts, operands and barriers a run can be shown of."""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from onewave.gpu.launch import launch_kernel
from onewave.wave.kernel.attend.attend import attend, attention_memory
from onewave.wave.kernel.attend.combine import combine
from onewave.wave.kernel.attend.layouts import mergeable_words, warps_rows
from onewave.wave.kernel.attend.merge import poll_merged
from onewave.wave.kernel.parameters import Channel, Constants, ExchangeSets, Output, Sequences, Site, Step
from onewave.wave.plan.layout import POINTERS, STEP_WORDS

_RECORD, _PLACES = gl.constexpr(STEP_WORDS), gl.constexpr(POINTERS)


@gluon.constexpr_function
def constants(D, GP, CH, MERGE_WORDS, KSPLITS, QKNORM, PAGE):
    """The wave's constants of float16 attention by 8 warps under SYNC 1, without a ring."""
    return Constants(
        DTYPE=gl.float16, FORMAT=0, IMAGES=1, NB=1, R=8, G=1, S=1, XS=1, PC=1, SPLITS=1, ACT=0, GATED=False, SYNC=1,
        FLIGHT=1, HELD=0, TEST=0, TRACE=False, XW=8, D=D, GP=GP, CH=CH, MERGE_WORDS=MERGE_WORDS, KSPLITS=KSPLITS,
        QKNORM=QKNORM, EPS=1e-5, SCALE=D**-0.5, PAGE=PAGE, STREAMS=0, MULTIPLIERS=1, KV=0,
    )  # fmt: skip


@gluon.jit
def in_shared_memory(words, COUNT: gl.constexpr):
    """Copy so many words of device memory to shared memory, where the wave keeps a record and its places."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
    copy = gl.allocate_shared_memory(words.dtype.element_ty, [COUNT], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    copy.store(gl.load(words + gl.arange(0, COUNT, layout=LANES)))
    gl.thread_barrier()
    return copy


@gluon.jit
def attend_alone(
    record, ours, theirs, positions, slots, places, watch, batch,
    D: gl.constexpr, GP: gl.constexpr, QKNORM: gl.constexpr, PAGE: gl.constexpr, MERGE_WORDS: gl.constexpr,
):  # fmt: skip
    """One attention task, whose queries are there already (SYNC 1 loads them without a poll)."""
    c: gl.constexpr = constants(D, GP, 1, MERGE_WORDS, 1, QKNORM, PAGE)
    memory = attention_memory(c)
    xs = gl.allocate_shared_memory(gl.float32, [8, 8, D], warps_rows(D))
    none = batch * 0
    step = Step(
        record=in_shared_memory(record, _RECORD), kind=none, withheld=none,
        sets=ExchangeSets(current=ours, next=theirs),
        sequences=Sequences(tokens=slots, positions=positions, slots=slots, batch=batch),
        places=in_shared_memory(places, _PLACES), output=Output(words=ours, stride=none),
    )  # fmt: skip
    site = Site(watch=watch, block=none, step=none)
    attend(step, site, memory, Channel(places=(xs,), full=xs, empty=xs), 0, xs, c)


@gluon.jit
def combine_alone(
    record, ours, theirs, positions, watch, batch, D: gl.constexpr, CH: gl.constexpr, KSPLITS: gl.constexpr
):  # fmt: skip
    """One combining task."""
    c: gl.constexpr = constants(D, 1, CH, 0, KSPLITS, False, 0)
    none = batch * 0
    words = in_shared_memory(record, _RECORD)
    step = Step(
        record=words, kind=none, withheld=none, sets=ExchangeSets(current=ours, next=theirs),
        sequences=Sequences(tokens=positions, positions=positions, slots=positions, batch=batch),
        places=words, output=Output(words=ours, stride=none),
    )  # fmt: skip
    combine(step, Site(watch=watch, block=none, step=none), c)


@gluon.jit
def merge_alone(first, lses, watch, out, batch, D: gl.constexpr, WORDS: gl.constexpr):
    """Merging `batch` splits of as many heads as 256 threads take at a time, WORDS words each, without a poll. There is
    a head less of them."""
    COUNT: gl.constexpr = WORDS * 256
    word = gl.arange(0, COUNT, layout=gl.BlockedLayout([4], [32], [8], [0]))
    head = word // (D // 2)
    real = head + 1 < COUNT // (D // 2)
    pointers = gl.where(real, (first + head * mergeable_words(D) + word % (D // 2)).to(gl.int64), 0)
    lses = gl.where(real & (batch > 1), (lses + head * mergeable_words(D)).to(gl.int64), 0)
    c: gl.constexpr = constants(D, 1, 1, WORDS, 1, False, 0)
    words = poll_merged(pointers, lses, real, batch, Site(watch=watch, block=0, step=0), c)
    gl.store(out + word, words)


def _words(count: int = 64) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int32)


def attend_call(head_dim: int, heads: int, norms: bool, page: int, few: int) -> None:
    """One attention task of so many heads at most; see attend's constants."""
    longs = [torch.zeros(64, dtype=torch.int64) for _ in range(3)]
    given = (_words(), _words(), _words(), *longs, _words(), 2)
    constants = {"D": head_dim, "GP": heads, "QKNORM": norms, "PAGE": page, "MERGE_WORDS": few}
    launch_kernel(attend_alone, (1,), *given, **constants, num_warps=8)


def combine_call(head_dim: int, heads: int, splits: int) -> None:
    """One combining task."""
    given = (_words(), _words(), _words(), torch.zeros(1, dtype=torch.int64), _words(), 2)
    launch_kernel(combine_alone, (1,), *given, D=head_dim, CH=heads, KSPLITS=splits, num_warps=8)


def merge_call(head_dim: int, words: int) -> None:
    """Splits of as many heads as 256 threads take at a time, so many words each."""
    launch_kernel(merge_alone, (1,), _words(), _words(), _words(), _words(), 3, D=head_dim, WORDS=words, num_warps=8)
