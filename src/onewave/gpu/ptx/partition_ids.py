"""Lets waiting warps compute their partition from their own number (decision 0012).

Triton's warps read their partition from shared memory, and at the end that there is none, each time between two
barriers of the whole thread block. That is right, but compute-sanitizer's racecheck reports it. Where a kernel's
partitions begin once, the warp's number says as much.
"""

from __future__ import annotations

import re

from onewave.gpu.ptx.ptx_pass import PtxPass
from onewave.gpu.ptx.shared_warpgroups import ALL_WARPS, unexpected

_ASKS = re.compile(r"\tld\.shared\.b8\s+(%r\d+), \[(%r\d+)\+(\d+)\];")
_TELLS = re.compile(r"\tst\.shared\.(?:v[24]\.)?b32\s+\[global_smem\+(\d+)\], \{?([\d, ]+)\}?;")
_WARP = re.compile(r"\tshfl\.sync\.idx\.b32\s+(%r\d+), %r\d+, 0, 31, -1;")
_THREADS = re.compile(r"\.reqntid (\d+)")
_TARGETS = re.compile(r"\$L_brx_\d+: \.branchtargets\n((?:\s*\$L__BB\w+[,;]\n)+)")
_LABEL = re.compile(r"\$L__BB\w+:")
_LEAVES = re.compile(r"\t(?:bra|ret|exit|brx)\b")
_PASSED = re.compile(r"\t\.loc\s|\s*//|\$L__tmp\d+:|\s*$|\tsetmaxnreg\.")
_OVER = "$L__BB_over"
_WARPS_A_WORD, _EACH_BYTE = 4, 0x01010101
_WHAT = "partitions by their warps' numbers"


def numbered(ptx: str) -> str:
    """Let waiting warps know their partition from their number; PTX without partitions stays as it is.

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
        f"\tand.b32 \t{register}, onewave_number, 255;",
    ]
    last = re.findall(r"\$L__BB\w+", targets[1])[-1]
    head, _, code = _ASKS.sub("\n".join(number), "\n".join(_once(kept, last))).partition("\n{\n")
    return "\n".join([head, "{", "\t.reg .pred onewave_these;", "\t.reg .b32 onewave_four, onewave_number;", code])


def _once(lines: list[str], last: str) -> list[str]:
    """The kernel's lines with warps whose partition has ended sent to where the block's last barrier lets them go, at
    label `last`, instead of back to where they wait for a partition.

    For ptxas they may still go back (were there a GPU without SMs): where it knows that a partition's code
    runs once, it spills registers of one with a softcap.
    """
    asks = next(at for at, line in enumerate(lines) if _ASKS.match(line))
    begin = next(at for at in range(asks, -1, -1) if _LABEL.match(lines[at]))
    wait = lines[begin].partition(":")[0]
    end = [
        "\tmov.u32 \tonewave_number, %nsmid;",
        "\tsetp.ne.u32 \tonewave_these, onewave_number, 0;",
        f"\t@onewave_these bra \t{_OVER};",
    ]
    changed: list[str] = []
    entries, ends, others = 0, 0, 0
    for at, line in enumerate(lines):
        if line.startswith(f"{last}:"):
            changed += [f"\tbra.uni \t{last};", f"{_OVER}:", "\tbarrier.sync \t1;"]
        goes = re.fullmatch(rf"\tbra(?:\.uni)?\s+{re.escape(wait)};", line) is not None
        falls = at == begin and not _LEAVES.match(_before(lines, at))
        if goes or falls:
            ended = ALL_WARPS.match(_before(lines, at)) is not None
            changed += end if ended else []
            entries, ends = entries + (not ended), ends + ended
        elif at != begin:
            others += re.search(rf"{re.escape(wait)}\b", line.partition("//")[0]) is not None
        changed.append(line)
    if (entries, others) != (1, 0) or not ends:
        ways = f"{entries} ways to, {ends} back to and {others} others to"
        raise unexpected(f"{ways} where warps wait for their partition", _WHAT)
    return changed


def _before(lines: list[str], at: int) -> str:
    """The instruction before a line, demands for registers passed over."""
    return next((line for line in lines[at - 1 :: -1] if not _PASSED.match(line)), "")


PARTITION_IDS = PtxPass("partition_ids", "3.6", numbered)
