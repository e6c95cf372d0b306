"""Several warpgroups on one copy of their code: what becomes of a kernel's text, and what is refused."""

import pytest

from onewave.base.errors import UnsupportedError
from onewave.gpu.ptx import ptx_pass
from onewave.gpu.ptx.passes import passes_of
from onewave.gpu.ptx.shared_warpgroups import NUMBER, ONLY, SHARED_WARPGROUPS, run_as_one

HOPPER = ("onewave.ops.attention.hopper.kernel", "attention_kernel")

PTX = f"""
.visible .entry sharing()
.reqntid 512
.maxnreg 128
{{
	mov.u32 	%r1, %tid.x;
	shr.u32 	%r2, %r1, 5;
	shfl.sync.idx.b32 	%r3, %r2, 0, 31, -1;
	setp.lt.u32 	%p1, %r3, 4;
	mov.b32 	%r9, global_smem;
	@%p1 bra 	$L__BB0_7;
	bra.uni 	$L__BB0_1;
$L__BB0_7:
	setmaxnreg.inc.sync.aligned.u32 	256;
	ld.param.b32 	%r12, [sharing_param_3];
	and.b32 	%r4, %r1, 127;
	setp.eq.b32 	%p2, %r4, 0;
	.loc	1 349 18                        // kernel.py:349:18
	add.s32 	%r5, %r9, 64;
	// begin inline asm
	@%p2 mbarrier.init.shared::cta.b64 [%r5], 3;
	// end inline asm
	bar.sync 	0, 128;
	fence.proxy.async.shared::cta;
	st.shared.v2.b32 	[global_smem+80], {{0, 33620739}};
	barrier.sync 	1;
	setmaxnreg.dec.sync.aligned.u32 	160;
	barrier.sync 	1;
	// begin inline asm
	{NUMBER.format(warpgroups=3, registers=160).replace("$0", "%r6")}
	// end inline asm
	bar.sync 	0, 128;
	@%p2 mbarrier.arrive.shared::cta.b64 _, [%r5];
	bra.uni 	$L__BB0_8;
$L__BB0_1:
	setmaxnreg.dec.sync.aligned.u32 	88;
	barrier.sync 	1;
	add.s32 	%r10, %r9, %r3;
	ld.shared.b8 	%r11, [%r10+76];
	$L_brx_0: .branchtargets
		$L__BB0_2,
		$L__BB0_2,
		$L__BB0_3,
		$L__BB0_9;
	brx.idx 	%r11, $L_brx_0;
$L__BB0_2:
	setmaxnreg.inc.sync.aligned.u32 	160;
	barrier.sync 	1;
	barrier.sync 	1;
	setmaxnreg.dec.sync.aligned.u32 	88;
	bra.uni 	$L__BB0_1;
$L__BB0_3:
	setmaxnreg.dec.sync.aligned.u32 	32;
	barrier.sync 	1;
	st.shared.b32 	[global_smem+60], %r11;
	bar.warp.sync 	-1;
	barrier.sync 	1;
	setmaxnreg.inc.sync.aligned.u32 	88;
	bra.uni 	$L__BB0_1;
$L__BB0_8:
	barrier.sync 	1;
	setmaxnreg.inc.sync.aligned.u32 	256;
	st.shared.v2.b32 	[global_smem+80], {{67372036, 67372036}};
	barrier.sync 	1;
$L__BB0_9:
	ret;
}}
"""


def test_later_warpgroups_take_the_first_ones_way() -> None:
    found = run_as_one(PTX)
    before, _, rest = found.partition("@%p1 bra")
    setup, _, shared = rest.partition("$L__BB_shared:")
    # The warps that go there, their numbers, and the values that all of them know.
    assert "setp.lt.u32 	%p1, %r3, 12;" in before
    assert "shr.u32 	onewave_warpgroup, %r3, 2;" in before
    assert all(made in before for made in ("%r4, %r1, 127;", "%p2, %r4, 0;", "%r5, %r9, 64;", "ld.param.b32 	%r12"))
    # Only the first one sets up, and nobody asks for registers before there are some.
    assert setup.index("@onewave_later bra 	$L__BB_shared;") < setup.index("mbarrier.init")
    assert "bar.sync 	0, 128;" in setup
    assert "setmaxnreg" not in setup
    # From then on each waits for itself, and at the end gives back what others wait for.
    code, _, end = shared.partition("$L__BB0_8:")
    assert "setmaxnreg.inc.sync.aligned.u32 	160;" in code
    assert "bar.sync 	onewave_barrier, 128;" in code
    assert "bar.sync 	0, 128;" not in shared
    assert "setmaxnreg.dec.sync.aligned.u32 	88;" in end
    assert "256" not in found
    # Everybody else's code is as it was.
    others = PTX[PTX.index("$L__BB0_1:\n") : PTX.index("$L__BB0_8:\n")]
    assert others in found


def test_two_warpgroups_as_three() -> None:
    twin = "		$L__BB0_2,\n"
    text = PTX.replace("// 3 warpgroups", "// 2 warpgroups").replace(twin, "", 1)
    assert "setp.lt.u32 	%p1, %r3, 8;" in run_as_one(text)


BARRIER = "	bar.sync 	0, 128;\n"
# Behind the first arrival: a loop for either of two warpgroups, and what all three do again.
PARTED = f"""	@%p3 bra 	$L__BB0_10;
	{ONLY.format(0)}
$L__BB0_11:
{BARRIER}	@%p4 bra 	$L__BB0_11;
	bra.uni 	$L__BB0_12;
$L__BB0_10:
	{ONLY.format(1)}
{BARRIER}	@!%p4 bra 	$L__BB0_12;
{BARRIER}$L__BB0_12:
{BARRIER}	@%p5 bra 	$L__BB0_10;
	bra.uni 	$L__BB0_8;
"""
ARRIVED = "	@%p2 mbarrier.arrive.shared::cta.b64 _, [%r5];\n	bra.uni 	$L__BB0_8;\n"


def test_where_one_warpgroup_alone_goes_on_its_barriers_have_constants() -> None:
    """But not where all come again, though one has passed where its way parts."""
    found = run_as_one(PTX.replace(ARRIVED, PARTED))
    code = found[found.index("@%p3 bra") : found.index("$L__BB0_1:")]
    numbers = [line.split()[1] for line in code.splitlines() if "bar.sync" in line]
    assert numbers == ["4,", "5,", "5,", "onewave_barrier,"]
    # Around the mark as well: then who comes there is not known.
    around = PARTED.replace(
        f"	{ONLY.format(1)}\n", f"	@%p6 bra 	$L__BB0_13;\n	{ONLY.format(1)}\n$L__BB0_13:\n"
    )
    code = run_as_one(PTX.replace(ARRIVED, around)).partition("@%p3 bra")[2].partition("$L__BB0_1:")[0]
    numbers = [line.split()[1] for line in code.splitlines() if "bar.sync" in line]
    assert numbers == ["4,", "onewave_barrier,", "onewave_barrier,", "onewave_barrier,"]


def test_a_way_of_a_warpgroup_that_there_is_not_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"only warpgroup 3 .* of a warpgroup more than there are"):
        run_as_one(PTX.replace(ARRIVED, PARTED.replace("only warpgroup 1", "only warpgroup 3")))


@pytest.mark.parametrize(
    "line", ["bra.uni 	$L__BB0_1;", "brx.idx 	%r4, $L_brx_0;", "exit;", "@%q1 bra	$L__BB0_8;"]
)
def test_a_way_out_of_code_that_is_parted_is_refused(line: str) -> None:
    text = PTX.replace(ARRIVED, PARTED.replace("	bra.uni 	$L__BB0_8;", f"	{line}"))
    with pytest.raises(UnsupportedError, match="first partition"):
        run_as_one(text)


def test_a_change_of_this_module_compiles_kernels_anew() -> None:
    """Triton 3.6 keeps them by their source, which the text of the assembly is in."""
    assert ptx_pass.sources_digest()[:12] in NUMBER


def test_a_kernel_that_does_not_ask_stays_as_it_is() -> None:
    text = PTX.replace("onewave_warpgroup", "another")
    assert run_as_one(text) == text
    assert run_as_one("") == ""


END = "	st.shared.v2.b32 	[global_smem+80], {67372036, 67372036};\n	barrier.sync 	1;\n"
UNEXPECTED = {
    "no such test": ("	setp.lt.u32 	%p1, %r3, 4;", "	setp.lt.u32 	%p1, %r3, 8;"),
    "no such branch": ("	@%p1 bra 	$L__BB0_7;", "	@!%p1 bra 	$L__BB0_1;"),
    "no barriers of all": ("	barrier.sync 	1;", "	bar.sync 	1;"),
    "no second one": ("	setmaxnreg.dec.sync.aligned.u32 	160;\n	barrier.sync 	1;\n", ""),
    "no table": ("	ld.shared.b8 	%r11", "	ld.shared.b32 	%r11"),
    "a register of the setup": ("	bar.sync 	0, 128;\n	fence", "	ld.shared.b32 	%r7, [%r5];\n	fence"),
    "no word at the end": (END, "	barrier.sync 	1;\n"),
    "no last barrier": (END, END.partition("\n")[0] + "\n"),
    "others' code at the end": (END, "$L__BB0_4:\n" + END),
    "something after the end": ("$L__BB0_9:\n", "	st.global.b32 	[%rd1], %r4;\n$L__BB0_9:\n"),
    "too few twins": ("		$L__BB0_2,\n		$L__BB0_2,\n", "		$L__BB0_2,\n"),
    "too many twins": ("// 3 warpgroups", "// 2 warpgroups"),
    "another form of the barrier": (
        "	bar.sync 	0, 128;\n	@%p2 mb",
        "	@%p2 bar.sync 	0, 128;\n	@%p2 mb",
    ),
    "a warpgroup's barrier": ("	bar.warp.sync 	-1;", "	bar.sync 	5, 64;"),
}


@pytest.mark.parametrize("name", UNEXPECTED)
def test_text_that_triton_does_not_write_is_refused(name: str) -> None:
    """Twins that nobody sends on would wait without end."""
    line, instead = UNEXPECTED[name]
    assert line in PTX
    with pytest.raises(
        UnsupportedError, match=r"share their code: PTX of Triton .* allowed: what Triton 3\.6\.0 writes"
    ):
        run_as_one(PTX.replace(line, instead))


def test_more_registers_than_a_block_has_are_refused() -> None:
    """The GPU would wait for them without end."""
    with pytest.raises(UnsupportedError, match="536 for a thread of each warpgroup together; allowed: at most 512"):
        run_as_one(PTX.replace("160", "168"))


def test_hoppers_prefill_kernels_share_where_triton_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    for kernel in (("onewave.ops.attention.fp8.kernel", "fp8_kernel"), HOPPER):
        assert SHARED_WARPGROUPS in passes_of(*kernel)
    monkeypatch.setattr(ptx_pass.triton, "__version__", "3.7.0")
    assert not SHARED_WARPGROUPS.applies()
    assert passes_of(*HOPPER) == ()
