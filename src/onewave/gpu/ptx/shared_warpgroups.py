"""Lets warpgroups run one copy of their code, where Triton compiles a copy for each (decision 0009).

Gluon's partitions are functions of their own, inlined one by one. Triton takes a partition's warps as one program, with
barriers of all of them where one warpgroup's would do. So two warpgroups that do the same are two partitions with two
copies of the code: twice the time to compile, twice the instructions to fetch.

With this pass the kernel's first partition holds one warpgroup's code, with the warpgroup's number in a register. The
next partitions, one for each further warpgroup, are empty (`twin`). In the PTX their warps take the first partition's
path: they skip the block's setup, synchronise on a barrier of their own warpgroup, and end with it. Triton's code for
four warps takes a thread's number modulo 128, so it stays right. It must keep no scratch in shared memory, which all of
them would share: tests of the compiled kernels look for that.

Where one warpgroup's path parts from the others' (ONLY), its barriers have constant numbers: instructions behind a
barrier whose number is in a register wait longer. A thread's warpgroup never changes, so code reached only through that
point is its own.

A kernel asks for the pass by reading its number from the register `onewave_warpgroup`, which only this module declares.
Without the pass the kernel does not assemble.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import triton

from onewave.base.errors import UnsupportedError
from onewave.gpu.ptx.ptx_pass import PtxPass, sources_digest

# Triton 3.6 keys compiled kernels by their source alone: with this digest in it, a changed pass compiles them again.
_DIGEST = sources_digest()[:12]
NUMBER = f"mov.b32 $0, onewave_warpgroup; // {{warpgroups}} warpgroups of {{registers}} registers run this ({_DIGEST})"
"""Inline assembly of the first partition: the warpgroup's number. Registers are a thread's."""
ONLY = "mov.b32 $0, 0; // only warpgroup {0} goes on from here"
"""Inline assembly where one warpgroup's way parts from the others': what can be reached through it alone is its own."""

_ASKED = re.compile(r"onewave_warpgroup; // (\d+) warpgroups of (\d+) registers")
_TRITON = "3.6"
# The first warpgroup's. Triton's own are 0, 1 and those of partitions with several warps, from 2 on; kernels' own begin
# at 10.
_FIRST_BARRIER = 4
_SHARED = "$L__BB_shared"
# Instructions that make a register of registers, and that every warp can do before they part.
_PURE = re.compile(
    r"\t(?:(?:add|sub|mul|mad|setp|and|or|xor|not|shl|shr|bfe|bfi|cvt|mov|selp|min|max)\.\S+\s+%\w+, [^;\[]*"
    r"|ld\.param\.\S+\s+%\w+, \[\w+\]);"
)
_NOTE = re.compile(r"\t\.loc\s|\s*//|\$L__tmp\d+:|\s*$")
# Other instructions that a block's setup may hold: none that makes a register.
_EFFECT = re.compile(r"\t(?:@%p\d+ )?(?:mbarrier\.init|bar\.sync|fence\.|st\.shared)\S*(?:\s[^;]*)?;?")
_END = re.compile(r"\tst\.shared\S*\s+\[global_smem\+\d+\], \{?[\d, ]+\}?;")
_LABEL = re.compile(r"(\$L__BB\w+):")
_BRANCH = re.compile(r"\t(@!?%p\d+ )?bra(?:\.uni)?\s+(\$L__BB\w+);")
_LEAVES = re.compile(r"\$L__BB|\b(?:brx|ret|exit|call|trap)\b")
_PARTS = re.compile(r"only warpgroup (\d+) goes on from here")
_ASM_BEGINS, _ASM_ENDS = "// begin inline asm", "// end inline asm"
ALL_WARPS = re.compile(r"\tbarrier\.sync\s+1;")
"""A barrier of the whole block, by which Triton's partitions begin and end."""
_OF_FOUR_WARPS = re.compile(r"\tbar\.sync\s+0, 128;")
_STILL_OF_FOUR = re.compile(r"\bbar(?:rier)?\.\S+\s+(?:\w+, )?0, \d+")
_BARRIER = re.compile(r"\bbar(?:rier)?\.\S+\s+(?:\w+, )?(\d+), \d+")
_REGISTERS = re.compile(r"\tsetmaxnreg\.(?:inc|dec)\.sync\.aligned\.u32\s+(\d+);")


def run_as_one(ptx: str) -> str:
    """Let as many warpgroups as the kernel asks for run its first partition's code; other PTX stays as it is.

    Raises UnsupportedError if the text is not as expected, or if there are not so many registers.
    """
    asked = _ASKED.search(ptx)
    if asked is None:
        return ptx
    warpgroups, registers = int(asked[1]), int(asked[2])
    lines = ptx.split("\n")
    dispatch = _first(lines, 0, r"\t@%p\d+ bra\s+\$L__BB\w+;")
    predicate, default = re.findall(r"%p\d+|\$L__BB\w+", lines[dispatch])
    test = _first(lines, 0, rf"\tsetp\.lt\.u32\s+{predicate}, %r\d+, 4;")
    warp = re.findall(r"%r\d+", lines[test])[0]
    begin = _first(lines, dispatch, re.escape(default) + ":")
    go = _first(lines, begin, ALL_WARPS.pattern)
    started = _first(lines, go + 1, ALL_WARPS.pattern)
    end = len(lines) - 1 - _first(lines[::-1], 0, r"\tret;")
    *_, over, done = (started, started, *(at for at in range(started + 1, end) if ALL_WARPS.match(lines[at])))
    _expect(lines[go + 1 : started], _REGISTERS)
    _expect(lines[over + 1 : done], _REGISTERS, _END)
    _expect(lines[done + 1 : end], _LABEL)
    if over == done or not any(map(_END.match, lines[over:done])):
        raise unexpected("no word to the other warps where its first partition ends")
    if _twins(lines) != warpgroups - 1:
        raise unexpected(f"{_twins(lines)} empty partitions behind the first one instead of {warpgroups - 1}")
    waiting = lines[_before(lines, _first(lines, 0, r"\tld\.shared\.b8\s+%r\d+, \[%r\d+\+\d+\];"), _REGISTERS)]
    _check_registers(ptx, warpgroups, registers, waiting)

    hoisted, setup = _parted(lines[begin + 1 : go])
    lines[test] = lines[test].replace(", 4;", f", {4 * warpgroups};")
    own = [
        "\t.reg .b32 onewave_warpgroup, onewave_barrier;",
        "\t.reg .pred onewave_later;",
        f"\tshr.u32 \tonewave_warpgroup, {warp}, 2;",
        f"\tadd.u32 \tonewave_barrier, onewave_warpgroup, {_FIRST_BARRIER};",
        "\tsetp.ne.u32 \tonewave_later, onewave_warpgroup, 0;",
    ]
    code = _own_barriers(lines[started:over], warpgroups)
    left = [_REGISTERS.sub(waiting, line) for line in lines[over:done]]
    grown = [_REGISTERS.sub(f"\tsetmaxnreg.inc.sync.aligned.u32 \t{registers};", line) for line in lines[go:started]]
    return "\n".join(
        [
            *lines[:dispatch], *hoisted, *own, *lines[dispatch : begin + 1],
            f"\t@onewave_later bra \t{_SHARED};", *setup, f"{_SHARED}:", *grown, *code, *left, *lines[done:],
        ]
    )  # fmt: skip


def _first(lines: list[str], start: int, pattern: str) -> int:
    found = next((at for at in range(start, len(lines)) if re.match(pattern, lines[at])), None)
    if found is None:
        raise unexpected(f"no line {pattern!r} from line {start + 1} on")
    return found


def _before(lines: list[str], start: int, pattern: re.Pattern[str]) -> int:
    found = next((at for at in range(start, -1, -1) if pattern.match(lines[at])), None)
    if found is None:
        raise unexpected(f"no line {pattern.pattern!r} up to line {start + 1}")
    return found


def _expect(lines: Iterable[str], *patterns: re.Pattern[str]) -> None:
    for line in lines:
        if not any(pattern.match(line) for pattern in (_NOTE, *patterns)):
            raise unexpected(f"{line.strip()!r} where its first partition begins or ends")


def unexpected(found: str, what: str = "warpgroups that share their code") -> UnsupportedError:
    """Return the error to raise for a kernel's PTX in which that was found."""
    return UnsupportedError(
        what,
        got=f"PTX of Triton {triton.__version__} with {found}",
        allowed=f"what Triton {_TRITON}.0 writes",
        next=f"Install triton {_TRITON}.0, or take another backend.",
    )


def _twins(lines: list[str]) -> int:
    """How many partitions behind the first one do nothing."""
    table = _first(lines, 0, r"\s*\$L_brx_\d+: \.branchtargets")
    count = 0
    for entry in lines[table + 1 :]:
        target = re.fullmatch(r"\s*(\$L__BB\w+)[,;]", entry)
        if target is None:
            break
        at = _first(lines, 0, re.escape(target[1]) + ":") + 1
        while any(pattern.match(lines[at]) for pattern in (_NOTE, _REGISTERS, ALL_WARPS)):
            at += 1
        if not lines[at].startswith("\tbra"):
            break
        count += 1
    return count


def _parted(setup: list[str]) -> tuple[list[str], list[str]]:
    """(what only makes registers, the rest without its own demand for registers) of the first warpgroup's setup."""
    pure: list[str] = []
    rest: list[str] = []
    inline = False
    for line in setup:
        inline = _ASM_BEGINS in line or (inline and _ASM_ENDS not in line)
        if _REGISTERS.match(line):
            continue
        if not inline and _PURE.fullmatch(line):
            pure.append(line)
        elif _EFFECT.fullmatch(line) or _NOTE.match(line):
            rest.append(line)
        else:
            raise unexpected(f"{line.strip()!r} before its partitions begin")
    return pure, rest


def _own_barriers(code: list[str], warpgroups: int) -> list[str]:
    """The partition's code with a warpgroup's own barriers, by constants where no other warpgroup comes."""
    own = range(_FIRST_BARRIER, _FIRST_BARRIER + warpgroups)
    for line in code:
        if any(int(n) in own for n in _BARRIER.findall(line)):
            raise unexpected(f"{line.strip()!r} in its partitions")
    numbers = ["onewave_barrier"] * len(code)
    parts: dict[int, set[int]] = {}
    for at, line in enumerate(code):
        told = _PARTS.search(line)
        if told is not None and int(told[1]) >= warpgroups:
            raise unexpected(f"{line.strip()!r}, of a warpgroup more than there are,")
        if told is not None:
            parts.setdefault(int(told[1]), set()).add(at)
    everywhere = _reached(code, set()) if parts else set[int]()
    for warpgroup, closed in parts.items():
        for at in everywhere - _reached(code, closed):
            numbers[at] = f"{own[warpgroup]}"
    code = [
        _OF_FOUR_WARPS.sub(f"\tbar.sync \t{number}, 128;", line) for line, number in zip(code, numbers, strict=True)
    ]
    for line in code:
        if _STILL_OF_FOUR.search(line):
            raise unexpected(f"{line.strip()!r} in its partitions")
    return code


def _reached(code: list[str], closed: set[int]) -> set[int]:
    """The lines that are reached from the first one past no closed one."""
    labels = {label[1]: at for at, line in enumerate(code) if (label := _LABEL.match(line))}
    reached: set[int] = set()
    ahead = [0]
    while ahead:
        at = ahead.pop()
        while at < len(code) and at not in reached and at not in closed:
            reached.add(at)
            branch = _BRANCH.match(code[at])
            if branch is not None and branch[2] in labels:
                ahead.append(labels[branch[2]])
                if branch[1] is None:
                    break
            elif _LEAVES.search(code[at].partition("//")[0]) and not _LABEL.match(code[at]):
                raise unexpected(f"{code[at].strip()!r} in its first partition")
            at += 1
    return reached


def _check_registers(ptx: str, warpgroups: int, registers: int, waiting: str) -> None:
    """More than a block begins with are waited for without end."""
    threads, most = (int(next(iter(re.findall(rf"\.{word} (\d+)", ptx)), 0)) for word in ("reqntid", "maxnreg"))
    given = {int(n) for n in _REGISTERS.findall(ptx)} - {int(n) for n in _REGISTERS.findall(waiting)}
    others = max((n for n in given if n < registers), default=0)
    needed = warpgroups * registers + (threads // 128 - warpgroups) * others
    if needed > threads // 128 * most:
        raise UnsupportedError(
            "registers of warpgroups that share their code",
            got=f"{needed} for a thread of each warpgroup together",
            allowed=f"at most {threads // 128 * most}",
            next="Ask for fewer.",
        )


SHARED_WARPGROUPS = PtxPass("shared_warpgroups", _TRITON, run_as_one)
