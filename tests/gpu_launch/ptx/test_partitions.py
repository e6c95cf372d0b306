"""Warps that know their partition from their number: the same one that Triton would have told them."""

import re
from collections.abc import Callable

import pytest

from onewave.base.errors import UnsupportedError
from onewave.gpu.ptx.partition_ids import numbered

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
	mov.b32 	%r8, 7;
	bra.uni 	$L__BB0_8;
$L__BB0_2:
	setmaxnreg.inc.sync.aligned.u32 	232;
	barrier.sync 	1;
	barrier.sync 	1;
	setmaxnreg.dec.sync.aligned.u32 	120;
	bra.uni 	$L__BB0_8;
$L__BB0_3:
	barrier.sync 	1;
	barrier.sync 	1;
	bra.uni 	$L__BB0_8;
$L__BB0_4:
	barrier.sync 	1;
	@%p3 bra 	$L__BB0_4;
	bra.uni 	$L__BB0_6;
$L__BB0_6:
	barrier.sync 	1;
	bra.uni 	$L__BB0_8;
$L__BB0_5:
	barrier.sync 	1;
	.loc	1 388 0                         // the last one's end
	barrier.sync 	1;
	setmaxnreg.inc.sync.aligned.u32 	120;
$L__BB0_8:                              // where warps wait
	setmaxnreg.dec.sync.aligned.u32 	120;
	barrier.sync 	1;
	add.s32 	%r10, %r9, %r3;
	ld.shared.b8 	%r11, [%r10+80];
	setp.gt.u32 	%p2, %r11, 5;
	@%p2 bra 	$L__BB0_3;
	$L_brx_0: .branchtargets
		$L__BB0_2,
		$L__BB0_3,
		$L__BB0_4,
		$L__BB0_5,
		$L__BB0_3,
		$L__BB0_9;
	brx.idx 	%r11, $L_brx_0;
$L__BB0_9:
	ret;
}
"""
# Bytes that Triton writes there: one for each warp from the fourth on.
TOLD = [0] * 4 + [1] * 4 + [3, 3, 2, 4]
FIRSTS = ["$L__BB0_2", "$L__BB0_3", "$L__BB0_4", "$L__BB0_5", "$L__BB0_3"]
NONE = len(FIRSTS)


OPERATIONS: dict[str, Callable[..., int]] = {
    "mov.u32": lambda a: a,
    "mov.b32": lambda a: a,
    "shr.u32": lambda a, b: a >> b,
    "shl.b32": lambda a, b: a << b,
    "and.b32": lambda a, b: a & b,
    "setp.eq.u32": lambda a, b: int(a == b),
    "setp.ne.u32": lambda a, b: int(a != b),
    "setp.lt.u32": lambda a, b: int(a < b),
    "setp.gt.u32": lambda a, b: int(a > b),
    "selp.b32": lambda a, b, c: a if c else b,
}


def way_of(warp: int, ptx: str) -> tuple[list[str], int]:
    """The labels that a warp comes by until it ends, and at how many barriers of the block it waits."""
    lines = [line.split("//")[0].strip().rstrip(";") for line in ptx.splitlines()]
    labels = {line[:-1]: at for at, line in enumerate(lines) if line.endswith(":")}
    first = next(at for at, line in enumerate(lines) if ".branchtargets" in line) + 1
    targets = [line.rstrip(",") for line in lines[first : first + NONE + 1]]
    known = {"%tid.x": 32 * warp, "%nsmid": 132, "global_smem": 0, "%p3": 0}
    passed: list[str] = []
    barriers, at = 0, 0
    for _ in range(1000):
        line = lines[at]
        at += 1
        if line == "ret":
            return passed, barriers
        condition = re.match(r"@(\w+|%\w+) ", line)
        name, *words = re.split(r"[\s,]+", line[condition.end() :] if condition else line)
        if condition and not known[condition[1]]:
            continue
        if line.endswith(":"):
            passed.append(line[:-1])
        elif name in ("bra", "bra.uni"):
            at = labels[words[0]]
        elif name == "brx.idx":
            at = labels[targets[known[words[0]]]]
        elif name == "barrier.sync":
            barriers += 1
        elif name == "shfl.sync.idx.b32":
            known[words[0]] = known[words[1]]
        elif name in OPERATIONS:
            known[words[0]] = OPERATIONS[name](*(known[word] if word in known else int(word) for word in words[1:]))
    pytest.fail(f"warp {warp} does not end")


DEFAULT = PTX[PTX.index("$L__BB0_7:") : PTX.index("	bra.uni 	$L__BB0_9;\n")]
FALLS = "	setmaxnreg.inc.sync.aligned.u32 	120;\n$L__BB0_8:"
VARIANTS = {
    "as it is": PTX,
    "the wait reached by jumps alone": PTX.replace(FALLS, FALLS.replace("\n", "\n	bra.uni 	$L__BB0_8;\n")),
    "the first partition at the end": PTX.replace(DEFAULT, "").replace("$L__BB0_9:\n", f"{DEFAULT}$L__BB0_9:\n"),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_each_warp_goes_to_the_partition_that_it_would_have_been_told_and_to_the_end(name: str) -> None:
    found = numbered(VARIANTS[name])
    assert way_of(0, found)[1] == 4
    for warp, partition in enumerate(TOLD, 4):
        passed, barriers = way_of(warp, found)
        waits = passed.index("$L__BB0_8")
        assert passed[waits + 1] == FIRSTS[partition]
        assert passed[waits + 2 :] in (["$L__BB_over", "$L__BB0_9"], ["$L__BB0_6", "$L__BB_over", "$L__BB0_9"])
        assert barriers == way_of(0, found)[1]


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
    "two ways to the wait": ("	mov.b32 	%r8, 7;\n", "	@%p3 bra 	$L__BB0_2;\n	bra.uni 	$L__BB0_8;\n"),
    "a way back on a condition": ("	@%p3 bra 	$L__BB0_4;", "	@%p3 bra 	$L__BB0_8;"),
    "the wait as a partition": ("		$L__BB0_5,\n", "		$L__BB0_8,\n"),
    "no way to the wait": ("	mov.b32 	%r8, 7;\n", "	barrier.sync 	1;\n"),
    "asked twice": ("	setp.gt", "	ld.shared.b8 	%r12, [%r10+80];\n	setp.gt"),
    "no number of threads": (".reqntid 512", ".maxntid 512"),
    "no number of a warp": ("	shfl.sync.idx.b32", "	shfl.sync.up.b32"),
    "another number": ("	add.s32 	%r10, %r9, %r3;", "	add.s32 	%r10, %r9, %r2;"),
    "no table": ("	$L_brx_0: .branchtargets", "	$L_other: .branchtargets"),
    "a group of warps untold": ("	st.shared.b32 	[global_smem+92], 67240707;\n", ""),
    "told a third time": ("	st.shared.b32 	[global_smem+96]", "	st.shared.b32 	[global_smem+92]"),
    "no end": ("{84215045, 84215045}", "{84215045, 16843009}"),
    "the end at the beginning": ("67240707", "84215045"),
    "another end": ("		$L__BB0_5,\n", ""),
    "by a register": ("[global_smem+92], 67240707", "[global_smem+92], %r7"),
}


def test_partitions_without_a_way_back_are_refused() -> None:
    text = re.sub(r"bra\.uni \t\$L__BB0_8;", "ret;", PTX.replace(FALLS, "	ret;\n$L__BB0_8:"))
    with pytest.raises(UnsupportedError, match="0 back to"):
        numbered(
            text.replace("	mov.b32 	%r8, 7;\n	ret;", "	mov.b32 	%r8, 7;\n	bra.uni 	$L__BB0_8;")
        )


@pytest.mark.parametrize("name", UNEXPECTED)
def test_text_that_triton_does_not_write_is_refused(name: str) -> None:
    line, instead = UNEXPECTED[name]
    assert line in PTX
    with pytest.raises(UnsupportedError, match=r"partitions by their warps' numbers: PTX of Triton .* with "):
        numbered(PTX.replace(line, instead))
