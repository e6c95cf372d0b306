"""The analysis of unset registers finds what ptxas once left unset, and passes over moves that nobody uses."""

from kit.analysers.sass_registers import reads_before_writes


def test_a_register_that_one_of_two_branches_sets_is_found() -> None:
    code = """
        /*0000*/ @P0 BRA `(.L_x_1) ;
        /*0010*/ UMOV UR4, 0x1 ;
        /*0020*/ BRA `(.L_x_2) ;
    .L_x_1:
        /*0030*/ UIADD3.64 UR4, UR63, 0x2, URZ ;
    .L_x_2:
        /*0040*/ HGMMA.64x64x16.F32.BF16 R24, R8, gdesc[UR2], R24 ;
        /*0050*/ EXIT ;
    """
    assert reads_before_writes(code) == ["HGMMA.64x64x16.F32.BF16 R24, R8, gdesc[UR2], R24"]
    assert reads_before_writes(code.replace("UMOV UR4, 0x1", "ULDC.64 UR4, c[0x0][0x8]")) == []


def test_a_place_of_the_stack_that_is_read_before_it_is_stored_to_is_found() -> None:
    code = """
        /*0000*/ STL.64 [R1+0x8], R4 ;
    .L_x_1:
        /*0010*/ LDL.LU.64 R8, [R1] ;
        /*0020*/ LDL R10, [R1+0xc] ;
        /*0030*/ STL.64 [R1], R8 ;
        /*0040*/ @P0 BRA `(.L_x_1) ;
        /*0050*/ EXIT ;
    """
    assert reads_before_writes(code) == ["LDL.LU.64 R8, [R1]"]
    assert reads_before_writes(code.replace("STL.64 [R1+0x8]", "STL.128 [R1]")) == []


def test_a_move_of_an_unset_register_is_a_fault_only_where_it_is_used() -> None:
    code = """
        /*0000*/ UMOV UR4, 0x1 ;
        /*0010*/ UMOV UR5, UR7 ;
        /*0020*/ MOV R6, UR5 ;
        /*0030*/ UMOV UR5, 0x2 ;
        /*0040*/ R2UR UR7, R6 ;
        /*0050*/ UTMALDG.2D [UR4], [UR4] ;
        /*0060*/ EXIT ;
    """
    assert reads_before_writes(code) == []
    used = code.replace("UMOV UR5, 0x2", "IMAD R8, R6, R6, R9")
    assert reads_before_writes(used) == ["IMAD R8, R6, R6, R9"]
    assert reads_before_writes(code.replace("UMOV UR5, 0x2", "UIADD3 UR6, UR5, 0x1, URZ")) == [
        "UIADD3 UR6, UR5, 0x1, URZ"
    ]
    assert reads_before_writes(used.replace("MOV R6, UR5", "MOV R6, UR4")) == []
    for more, read in (
        ("STL [R1+0x8], R6 ;\n /*0034*/ LDL R8, [R1+0x8]", "LDL R8, [R1+0x8]"),
        ("LDG.E R5, [R2.64] ;\n /*0034*/ STS.128 [R4], R4", "STS.128 [R4], R4"),
        ("@P0 MOV R6, R8 ;\n /*0034*/ IADD3 R9, R6, R9, R9", "IADD3 R9, R6, R9, R9"),
    ):
        assert reads_before_writes(code.replace("UMOV UR5, 0x2", more)) == [read]
