"""Warps that know their partition from their number: the same one that Triton would have told them."""

from __future__ import annotations

import re

import pytest

from onewave.base.errors import UnsupportedError
from onewave.wave.partitions import numbered

PTX = """
.visible .entry parted()
.reqntid 512
{
	mov.u32 	%r1, %tid.x;
	shr.u32 	%r2, %r1, 5;
	shfl.sync.idx.b32 	%r3, %r2, 0, 31, -1;
	setp.lt.u32 	%p1, %r3, 4;
	mov.b32 	%r9, global_smem;
	@%p1 bra 	$L__BB0_7;
	bra.uni 	$L__BB0_1;
$L__BB0_7:
	st.shared.v2.b32 	[global_smem+76], {1, 2};
	st.shared.v2.b32 	[global_smem+84], {0, 16843009};
	st.shared.b32 	[global_smem+92], 67240707;
	barrier.sync 	1;
	barrier.sync 	1;
	st.shared.b32 	[global_smem+96], 3;
	barrier.sync 	1;
	st.shared.v2.b32 	[global_smem+84], {84215045, 84215045};
	st.shared.b32 	[global_smem+92], 84215045;
	barrier.sync 	1;
	bra.uni 	$L__BB0_9;
$L__BB0_1:
	barrier.sync 	1;
	add.s32 	%r10, %r9, %r3;
	ld.shared.b8 	%r11, [%r10+80];
	setp.gt.u32 	%p2, %r11, 5;
	@%p2 bra 	$L__BB0_1;
	$L_brx_0: .branchtargets
		$L__BB0_2,
		$L__BB0_3,
		$L__BB0_4,
		$L__BB0_5,
		$L__BB0_6,
		$L__BB0_9;
	brx.idx 	%r11, $L_brx_0;
$L__BB0_9:
	ret;
}
"""
# What Triton writes there: a byte for each warp from the fourth on.
TOLD = [0] * 4 + [1] * 4 + [3, 3, 2, 4]


def ran(lines: list[str], registers: dict[str, int]) -> None:
    """Registers after a few of PTX's instructions, of one thread."""

    def value(word: str) -> int:
        return registers[word] if word in registers else int(word)

    operations = {"shr.u32": lambda a, b: a >> b, "and.b32": lambda a, b: a & b, "shl.b32": lambda a, b: a << b}
    for line in lines:
        name, into, *rest = re.split(r"[\s,]+", line.strip().rstrip(";"))
        values = [value(word) for word in rest]
        if name == "mov.b32":
            registers[into] = values[0]
        elif name == "setp.eq.u32":
            registers[into] = int(values[0] == values[1])
        elif name == "setp.ne.u32":
            registers[into] = int(values[0] != values[1])
        elif name == "selp.b32":
            registers[into] = values[0] if values[2] else values[1]
        else:
            registers[into] = operations[name](*values)


def test_each_warp_finds_the_partition_that_it_would_have_been_told_and_then_none() -> None:
    found = numbered(PTX)
    begin = re.search(r"\n\{\n(?:\t\.reg[^\n]*\n)+((?:\tsetp[^\n]*\n)+)\tmov\.u32", found)
    asks = re.search(r"add\.s32 \t%r10[^\n]*\n(.*?)\tsetp\.gt", found, re.DOTALL)
    assert begin
    assert asks
    for warp, partition in enumerate(TOLD, 4):
        registers = {"%r3": warp}
        ran(begin[1].splitlines(), registers)
        for expected in (partition, 5, 5):
            ran(asks[1].splitlines(), registers)
            assert registers["%r11"] == expected


def test_nothing_of_it_is_left_in_shared_memory_and_all_else_is() -> None:
    found = numbered(PTX)
    assert re.findall(r"(?:ld|st)\.shared.*", found) == [
        "st.shared.v2.b32 	[global_smem+76], {1, 2};",
        "st.shared.b32 	[global_smem+96], 3;",
    ]
    assert [line for line in PTX.splitlines() if line not in found.splitlines()] == [
        "	st.shared.v2.b32 	[global_smem+84], {0, 16843009};",
        "	st.shared.b32 	[global_smem+92], 67240707;",
        "	st.shared.v2.b32 	[global_smem+84], {84215045, 84215045};",
        "	st.shared.b32 	[global_smem+92], 84215045;",
        "	ld.shared.b8 	%r11, [%r10+80];",
    ]


def test_a_kernel_without_partitions_stays_as_it_is() -> None:
    text = PTX.replace("ld.shared.b8", "ld.shared.b32")
    assert numbered(text) == text
    assert numbered("") == ""


UNEXPECTED = {
    "asked twice": ("	setp.gt", "	ld.shared.b8 	%r12, [%r10+80];\n	setp.gt"),
    "no number of threads": (".reqntid 512", ".maxntid 512"),
    "no number of a warp": ("	shfl.sync.idx.b32", "	shfl.sync.up.b32"),
    "another number": ("	add.s32 	%r10, %r9, %r3;", "	add.s32 	%r10, %r9, %r2;"),
    "no table": ("	$L_brx_0: .branchtargets", "	$L_other: .branchtargets"),
    "a group of warps untold": ("	st.shared.b32 	[global_smem+92], 67240707;\n", ""),
    "told a third time": ("	st.shared.b32 	[global_smem+96]", "	st.shared.b32 	[global_smem+92]"),
    "no end": ("{84215045, 84215045}", "{84215045, 16843009}"),
    "the end at the beginning": ("67240707", "84215045"),
    "another end": ("		$L__BB0_6,\n", ""),
    "by a register": ("[global_smem+92], 67240707", "[global_smem+92], %r7"),
}


@pytest.mark.parametrize("name", UNEXPECTED)
def test_text_that_triton_does_not_write_is_refused(name: str) -> None:
    line, instead = UNEXPECTED[name]
    assert line in PTX
    with pytest.raises(UnsupportedError, match=r"partitions by their warps' numbers: PTX of Triton .* with "):
        numbered(PTX.replace(line, instead))
