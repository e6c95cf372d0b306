"""Has waiting warps of a kernel with partitions know theirs by their number, so that racecheck has nothing to report.

Triton tells them in shared memory which partition is theirs, and at the end that there is none, each time between two
barriers of the whole block. That is right, but compute-sanitizer's racecheck reports it. Where a kernel's partitions
begin once, a warp's number tells as much.
"""

from __future__ import annotations

import re

from onewave.wave.one_code import knows_triton, run_as_one, unexpected
from onewave.wave.ptx_hook import complete_ptx

__all__ = ["complete_partitions", "numbered"]

_ASKS = re.compile(r"\tld\.shared\.b8\s+(%r\d+), \[(%r\d+)\+(\d+)\];")
_TELLS = re.compile(r"\tst\.shared\.(?:v[24]\.)?b32\s+\[global_smem\+(\d+)\], \{?([\d, ]+)\}?;")
_WARP = re.compile(r"\tshfl\.sync\.idx\.b32\s+(%r\d+), %r\d+, 0, 31, -1;")
_THREADS = re.compile(r"\.reqntid (\d+)")
_TARGETS = re.compile(r"\$L_brx_\d+: \.branchtargets\n((?:\s*\$L__BB\w+[,;]\n)+)")
_WARPS_A_WORD, _EACH_BYTE = 4, 0x01010101
_WHAT = "partitions by their warps' numbers"


def complete_partitions(kernel: str) -> None:
    """From now on have Gluon kernels of that name compiled with `one_code.run_as_one` and `numbered`."""
    complete_ptx(kernel, _completed)


def _completed(ptx: str) -> str:
    ptx = run_as_one(ptx)
    return numbered(ptx) if knows_triton() else ptx


def numbered(ptx: str) -> str:
    """A kernel's PTX in which waiting warps know their partition from their number; others' as it is.

    Raises UnsupportedError if they are not told once which it is, and once that there is none.
    """
    asks = _ASKS.findall(ptx)
    if not asks:
        return ptx
    threads, warp, targets = _THREADS.search(ptx), _WARP.search(ptx), _TARGETS.search(ptx)
    if len(asks) != 1 or threads is None or warp is None or targets is None:
        raise unexpected(f"{len(asks)} places where warps wait for their partition", _WHAT)
    register, address, base = asks[0]
    if not re.search(rf"\tadd\.s32\s+{address}, %r\d+, {warp[1]};", ptx):
        raise unexpected("another number than a warp's where warps wait for their partition", _WHAT)
    warps = int(threads[1]) // 32
    told: dict[int, list[int]] = {}
    kept: list[str] = []
    for line in ptx.split("\n"):
        tells = _TELLS.fullmatch(line)
        first = int(tells[1]) - int(base) if tells else 0
        if tells and 0 < first < warps:
            for at, word in enumerate(tells[2].split(",")):
                told.setdefault(first // _WARPS_A_WORD + at, []).append(int(word))
        else:
            kept.append(line)
    none = targets[1].count(",")  # the last target
    ends = [none * _EACH_BYTE]
    if sorted(told) != list(range(1, warps // _WARPS_A_WORD)) or any(
        words[1:] != ends or words[:1] == ends for words in told.values()
    ):
        raise unexpected(f"partitions told as {told}, of which {none} is none", _WHAT)
    number = [
        f"\tshr.u32 \tonewave_four, {warp[1]}, 2;",
        "\tmov.b32 \tonewave_number, 0;",
        *(
            line
            for four, words in sorted(told.items())
            for line in (
                f"\tsetp.eq.u32 \tonewave_these, onewave_four, {four};",
                f"\tselp.b32 \tonewave_number, {words[0]}, onewave_number, onewave_these;",
            )
        ),
        f"\tand.b32 \tonewave_four, {warp[1]}, 3;",
        "\tshl.b32 \tonewave_four, onewave_four, 3;",
        "\tshr.u32 \tonewave_number, onewave_number, onewave_four;",
        "\tand.b32 \tonewave_number, onewave_number, 255;",
        f"\tselp.b32 \t{register}, {none}, onewave_number, onewave_begun;",
        "\tsetp.eq.u32 \tonewave_begun, 0, 0;",
    ]
    head, _, code = _ASKS.sub("\n".join(number), "\n".join(kept)).partition("\n{\n")
    begin = [
        "\t.reg .pred onewave_these, onewave_begun;",
        "\t.reg .b32 onewave_four, onewave_number;",
        "\tsetp.ne.u32 \tonewave_begun, 0, 0;",
    ]
    return "\n".join([head, "{", *begin, code])
