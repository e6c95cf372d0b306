"""Inline PTX of the wave kernel: data-as-flag polls, spins on counters, L2 prefetches, clocks, delays.

Every wait on device memory is bounded. A poll that does not find its data reads the launch's abort word every _LOOK
polls. When its own budget runs out it writes a stall record (thread block, step, address, what it expected and got),
sets the abort word, and sets the host's word. A thread that sees the abort word stops waiting, so all thread blocks
end within microseconds; the host then refuses the launch's results.

watch: int32 words. 0: abort. 1: budget in polls. 2, 3: address of the host's word. From word 16 on, 8 words a thread
block: state (1: counter, 2: data), step, address (2 words), expected, got, 0, 0.

constexpr  meaning [unit] (allowed values)
WORDS      words a thread (4, 8, 16, 32; of poll_splits 4, 8)
STRIDE     from split to split [bytes] (64, 128, 256)
WAITS      whether absent words are polled for (False, True)
BYTES      of a prefetch (a multiple of 16)
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from onewave.wave.plan.layout import POLLED_SPLITS

ABSENT = gl.constexpr(-1)
"""A word of all ones is data that has not come: no bf16, fp16 or fp32 result of ours is that NaN."""

# Polls from one read of the abort word to the next, a power of two. With more, an abort takes longer.
_LOOK = 32


def _give_up(state: int, step: str, address: str, expected: str, got: str, flag: str, record: str) -> list[str]:
    """Write the thread block's stall record, once; set the abort word and the host's word."""
    return [
        f"atom.relaxed.gpu.cas.b32 a, [{record}], 0, {state};",
        "setp.ne.s32 p, a, 0;",
        "@p bra WTOLD;",
        f"st.relaxed.gpu.b32 [{record}+4], {step};",
        f"st.relaxed.gpu.b64 [{record}+8], {address};",
        f"st.relaxed.gpu.b32 [{record}+16], {expected};",
        f"st.relaxed.gpu.b32 [{record}+20], {got};",
        "fence.acq_rel.sys;",
        "WTOLD:",
        f"st.relaxed.gpu.b32 [{flag}], 1;",
        f"ld.relaxed.gpu.b64 w, [{flag}+8];",
        "st.relaxed.sys.b32 [w], 1;",
    ]


def _look_and_count(flag: str, again: str) -> list[str]:
    """Count a poll in n and go to `again`. Every _LOOK polls read the abort word first: go to WEND if it is set, and to
    the following lines if the budget is spent. Not before the first polls, because the data may just have come."""
    return [
        "add.s32 n, n, 1;",
        f"and.b32 a, n, {_LOOK - 1};",
        "setp.ne.s32 p, a, 0;",
        f"@p bra {again};",
        f"ld.relaxed.gpu.v2.b32 {{a, t}}, [{flag}];",
        "setp.ne.s32 p, a, 0;",
        "@p bra WEND;",
        "setp.lt.s32 p, n, t;",
        f"@p bra {again};",
    ]


def _absent(packets: dict[int, list[str]]) -> list[str]:
    """Set m to all ones if any word of these packets is absent, and q of their packets. packets: q's number: words."""
    lines = ["mov.b32 m, 0;"]
    for q, (a, b, c, d) in packets.items():
        lines += [f"max.u32 t, {a}, {b};", f"max.u32 u, {c}, {d};", "max.u32 t, t, u;"]
        lines += [f"setp.eq.u32 q{q}, t, 0xffffffff;", "max.u32 m, m, t;"]
    return lines


def _poll_text(words: int, waits: bool) -> tuple[str, str]:
    """Load `words` words a thread in packets of four; if `waits`, again until none is absent.

    Words at address 0 are zeros: loading them from one place would send every thread block there at once. Operands:
    the words; their addresses (every fourth is used); abort word; stall record; step.
    """
    packets = {i: [f"${4 * i + j}" for j in range(4)] for i in range(words // 4)}
    load = [f"@q{i} ld.relaxed.gpu.global.v4.b32 {{{', '.join(to)}}}, [${words + 4 * i}];" for i, to in packets.items()]
    check = [*_absent(packets), "setp.ne.u32 p, m, 0xffffffff;", "@p bra WEND;"]
    flag, record, step = f"${2 * words}", f"${3 * words}", f"${4 * words}"
    text = ["{", f".reg .pred p, q<{len(packets)}>; .reg .b32 t, u, m, n, a; .reg .b64 w, z;"]
    for i, to in packets.items():
        text += [f"setp.ne.s64 q{i}, ${words + 4 * i}, 0;", *(f"mov.b32 {word}, 0;" for word in to)]
    text += load
    if waits:
        text += [*check, "mov.b32 n, 0;", "WLOOP:", *_look_and_count(flag, "WGO"), f"mov.b64 z, ${words};"]
        text += [f"@q{i} mov.b64 z, ${words + 4 * i};" for i in packets]
        text += [*_give_up(2, step, "z", "0", "m", flag, record), "bra WEND;", "WGO:"]
        text += [*load, *check, "bra WLOOP;", "WEND:"]  # only the missing packets are read again
    text.append("}")
    constraints = ["=&r"] * words + ["l"] * (3 * words) + ["r"] * words
    return "\n".join(text), ",".join(constraints)


def _splits_text(words: int, stride: int, waits: bool) -> tuple[str, str]:
    """Load `words` words a thread, in packets of four, of each of up to eight splits, and with each packet the splits'
    log2-sum-exp2, two packets; if `waits`, again until none is absent.

    The log2-sum-exp2s are polled first: they are published last and are the same for many threads. stride: bytes from
    split to split. Operands: the words of each split, and both packets of log2-sum-exp2; the addresses of the first
    split's words and of the log2-sum-exp2 (every fourth is used); the number of splits; abort word; stall record; step.
    Words of unused splits are zeros, their log2-sum-exp2 is -inf; at address 0 the first one's is 0.
    """
    firsts = range(0, words, 4)
    # Packets: by the first of their words, and by split or part of the log2-sum-exp2s. q: wanted.
    values = [(i, split) for i in firsts for split in range(POLLED_SPLITS)]
    lses = [(i, POLLED_SPLITS + part) for i in firsts for part in (0, 1)]
    number = {packet: at for at, packet in enumerate(values + lses)}
    first, lse, count, flag, record, step = range(10 * words, 16 * words, words)
    bases = {(i, piece): (lse + i, 16 * (piece - POLLED_SPLITS)) for i, piece in lses}
    bases |= {(i, split): (first + i, stride * split) for i, split in values}

    def names(i: int, piece: int) -> list[str]:
        return [f"${piece * words + i + j}" for j in range(4)]

    def load(packets: list[tuple[int, int]]) -> list[str]:
        lines = []
        for packet in packets:
            base, offset = bases[packet]
            vector = ", ".join(names(*packet))
            lines.append(f"@q{number[packet]} ld.relaxed.gpu.global.v4.b32 {{{vector}}}, [${base}+{offset}];")
        return lines

    def none() -> list[str]:
        """Set unused splits' log2-sum-exp2 to -inf."""
        places = {i: [*names(i, POLLED_SPLITS), *names(i, POLLED_SPLITS + 1)] for i in firsts}
        return [
            f"setp.le.s32 p, ${count + i}, {split}; @p mov.b32 {places[i][split]}, 0xff800000;"
            for i in firsts
            for split in range(1, POLLED_SPLITS)
        ]

    def missing(packets: list[tuple[int, int]]) -> list[str]:
        """Set p if any word is absent, and q of its packets."""
        return [*_absent({number[packet]: names(*packet) for packet in packets}), "setp.eq.u32 p, m, 0xffffffff;"]

    text = ["{", f".reg .pred p, q<{len(number)}>; .reg .b32 t, u, m, n, a; .reg .b64 w, z;"]
    text += [f"mov.b32 ${i}, 0;" for i in range(10 * words)]
    text += [f"setp.gt.s32 q{number[i, split]}, ${count + i}, {split};" for i, split in values]
    for i, part in lses:
        at = number[i, part]
        text += [f"setp.gt.s32 q{at}, ${count + i}, {4 * (part - POLLED_SPLITS)};"]
        text += [f"setp.ne.and.s64 q{at}, ${lse + i}, 0, q{at};"]
    text += [*load([*number]), *none()]
    if waits:
        text += [*missing([*number]), "@!p bra WEND;", "mov.b32 n, 0;", "WLOOP:"]
        text += [*_look_and_count(f"${flag}", "WGO"), "mov.b64 z, 0;"]
        text += [f"@q{at} add.s64 z, ${bases[packet][0]}, {bases[packet][1]};" for packet, at in number.items()]
        text += [*_give_up(2, f"${step}", "z", "0", "m", f"${flag}", f"${record}"), "bra WEND;", "WGO:"]
        text += [*load(lses), *none(), *missing(lses), "@p bra WLOOP;"]
        text += [*load(values), *missing(values), "@p bra WLOOP;", "WEND:"]
    constraints = ["=&r"] * (10 * words) + ["l"] * (2 * words) + ["r"] * words + ["l"] * (2 * words) + ["r"] * words
    return "\n".join([*text, "}"]), ",".join(constraints)


def _counter_text() -> tuple[str, str]:
    """Spin until a counter has reached a value, by their signed difference.

    Operands: a dummy result; counter's address; value; abort word; stall record; step. Address 0: no wait.
    """
    text = ["{", ".reg .pred p; .reg .b32 n, a, t, v, d; .reg .b64 w;", "mov.b32 $0, 0;"]
    text += ["setp.eq.s64 p, $1, 0;", "@p bra WEND;", "mov.b32 n, 0;", "WGO:"]
    text += ["ld.acquire.gpu.global.b32 v, [$1];", "sub.s32 d, v, $2;", "setp.ge.s32 p, d, 0;", "@p bra WEND;"]
    text += [*_look_and_count("$3", "WGO"), *_give_up(1, "$5", "$1", "$2", "v", "$3", "$4"), "WEND:", "}"]
    return "\n".join(text), "=&r,l,r,l,l,r"


# By words a thread, and whether absent words are polled for.
_POLLS = gl.constexpr({(words, waits): _poll_text(words, waits) for words in (4, 8, 16, 32) for waits in (False, True)})
# By words a thread, bytes from split to split (head_dim 32, 64 and 128), and whether absent words are polled for.
_SPLITS = gl.constexpr(
    {
        (words, stride, waits): _splits_text(words, stride, waits)
        for words in (4, 8)
        for stride in (64, 128, 256)
        for waits in (False, True)
    }
)
_TEN = gl.constexpr((gl.int32,) * 10)
_SPIN, _SPIN_WITH = (gl.constexpr(text) for text in _counter_text())


@gluon.constexpr_function
def poll_text(words, waits):
    return _POLLS.value[words, waits]


@gluon.constexpr_function
def splits_text(words, stride, waits):
    return _SPLITS.value[words, stride, waits]


@gluon.jit
def poll_words(pointers, watch, block, step, WORDS: gl.constexpr):
    """Poll int32 words at `pointers` until all have come, WORDS a thread; four neighbours are a 16-byte aligned packet.

    pointers: int64; 0 for words that are zero.
    """
    flag = pointers * 0 + watch.to(gl.int64)
    record = flag + 64 + block * 32
    waiter = flag.to(gl.int32) * 0 + step
    TEXT: gl.constexpr = poll_text(WORDS, True)
    return gl.inline_asm_elementwise(
        TEXT[0], TEXT[1], [pointers, flag, record, waiter], dtype=gl.int32, is_pure=False, pack=WORDS
    )


@gluon.jit
def poll_splits(pointers, lses, counts, site, WAITS: gl.constexpr, WORDS: gl.constexpr, STRIDE: gl.constexpr):
    """Poll int32 words of eight splits at `pointers`, and their packets at `lses`, WORDS (4 or 8) a thread.

    Without WAITS load them once. pointers: int64, of the first split; the next ones are STRIDE bytes apart. lses: of
    each packet's eight log2-sum-exp2; 0 if it needs none. counts: number of splits; words of further ones are zeros,
    their log2-sum-exp2 -inf. Returns ten tensors, the last two the log2-sum-exp2 by fours.
    """
    flag = pointers * 0 + site.watch.to(gl.int64)
    record = flag + 64 + site.block * 32
    waiter = flag.to(gl.int32) * 0 + site.step
    TEXT: gl.constexpr = splits_text(WORDS, STRIDE, WAITS)
    return gl.inline_asm_elementwise(
        TEXT[0], TEXT[1], [pointers, lses, counts, flag, record, waiter], dtype=_TEN, is_pure=False, pack=WORDS
    )


@gluon.jit
def load_words(pointers, WORDS: gl.constexpr):
    """Load words as poll_words does, without waiting."""
    flag = pointers * 0
    waiter = flag.to(gl.int32)
    TEXT: gl.constexpr = poll_text(WORDS, False)
    return gl.inline_asm_elementwise(
        TEXT[0], TEXT[1], [pointers, flag, flag, waiter], dtype=gl.int32, is_pure=False, pack=WORDS
    )


@gluon.jit
def read_words(pointers, site, SYNC: gl.constexpr, WORDS: gl.constexpr):
    """Load words of the exchange, WORDS a thread; under SYNC 0 poll until all have come."""
    if SYNC == 1:
        return load_words(pointers, WORDS)
    else:
        return poll_words(pointers, site.watch, site.block, site.step, WORDS)


@gluon.jit
def spin_counter(pointers, values, watch, block, step):
    """Wait until each int32 counter at `pointers` has reached its value; pointer 0: no wait."""
    flag = pointers.to(gl.int64) * 0 + watch.to(gl.int64)
    record = flag + 64 + block * 32
    gl.inline_asm_elementwise(
        _SPIN,
        _SPIN_WITH,
        [pointers.to(gl.int64), values, flag, record, values * 0 + step],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def prefetch_lines(pointers, wanted):
    """Prefetch the lines at `pointers` to L2, where wanted."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
        "=r,l,r",
        [pointers, wanted.to(gl.int32)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def prefetch_bytes(pointers, wanted, BYTES: gl.constexpr):
    """Prefetch BYTES at each of `pointers` (int64) to L2, where wanted."""
    wanted = wanted.to(gl.int32)
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $3; mov.u32 $0, 0; }",
        "=r,l,r,r",
        [pointers, wanted, wanted * 0 + BYTES],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def nanoseconds(after):
    """Read the low word of the global timer [ns], no earlier than `after` (int32) is known."""
    return gl.inline_asm_elementwise(
        "mov.u32 $0, %globaltimer_lo;", "=r,r", [after], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def fence():
    """Order this thread's earlier loads and stores before its later ones, at GPU scope."""
    gl.inline_asm_elementwise(
        "fence.acq_rel.gpu; mov.u32 $0, 0;", "=r,r", [gl.program_id(0)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def delay(nanos):
    """Sleep about `nanos` ns (int32)."""
    gl.inline_asm_elementwise(
        "nanosleep.u32 $1; mov.u32 $0, 0;", "=r,r", [nanos], dtype=gl.int32, is_pure=False, pack=1
    )
