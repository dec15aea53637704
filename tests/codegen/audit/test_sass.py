"""Tests the reader of disassembled kernels: its sections, its opcodes, and which loop is the main
one."""

import pytest

from tilewright.codegen.audit.sass import count_opcodes, section

PLAIN = """
.text.k:
        /*0000*/                   S2R R4, SR_TID.X ;
.L_x_0:
        /*0010*/                   LDG.E.128 R8, desc[UR4][R2.64] ;
.L_x_1:
        /*0020*/                   UTCHMMA gdesc[UR8], gdesc[UR10], tmem[UR12], tmem[UR14] ;
        /*0030*/              @P0  BRA `(.L_x_1) ;
        /*0040*/             @!UP1 UIADD3 UR4, UR4, 0x1, URZ ;
        /*0050*/              @P1  BRA `(.L_x_0) ;
        /*0060*/                   STG.E.128 desc[UR4][R2.64], R8 ;
        /*0070*/                   BRA `(.L_x_2) ;
.L_x_2:
        /*0080*/                   EXIT ;
"""
# A loop over tiles. The code that waits for a barrier is placed after the kernel's end, and jumps
# back into the inner loop.
WAITING_APART = """
.L_x_0:
        /*0000*/                   UTMALDG.2D [UR24], [UR28] ;
.L_x_1:
        /*0010*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P4, [UR6], R4 ;
        /*0020*/              @!P4 BRA `(.L_x_4) ;
.L_x_2:
        /*0030*/                   STTM.x32 tmem[UR39], R4 ;
        /*0040*/                   BRA.U UP1, `(.L_x_3) ;
        /*0050*/                   UTCHMMA tmem[UR33], gdesc[UR16], tmem[UR21], tmem[UR6], UPT ;
.L_x_3:
        /*0060*/                   BRA.U !UP0, `(.L_x_1) ;
        /*0070*/                   LDTM.x8 R4, tmem[UR36] ;
        /*0080*/              @!P3 BRA `(.L_x_0) ;
        /*0090*/                   EXIT ;
.L_x_4:
        /*00a0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P4, [UR6], R4 ;
        /*00b0*/              @!P4 BRA `(.L_x_4) ;
        /*00c0*/                   BRA `(.L_x_2) ;
.L_x_5:
        /*00d0*/                   BRA `(.L_x_5) ;
"""
# A loop that repeats an instruction for each operand, because the operand differs between lanes.
LANE_BY_LANE = """
.L_x_0:
        /*0000*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P4, [UR6], R4 ;
.L_x_1:
        /*0010*/               @P4 ELECT P5, URZ, PT ;
        /*0020*/               @P5 R2UR.BROADCAST UR10, R202 ;
        /*0030*/              @UP0 UTCOMMA.4X gdesc[UR12], gdesc[UR10], tmem[UR15], UPT ;
        /*0040*/               @P4 BRA.U.ANY `(.L_x_1) ;
        /*0050*/               @P0 BRA `(.L_x_0) ;
        /*0060*/                   EXIT ;
"""
# The outline of the QKV kernel of one token as the ptxas of Triton 3.8 compiles it. Two registers
# are stored before the main loop and loaded after it. The code that waits for the loads of both is
# placed after the kernel's end.
SPILLS_AROUND = """
.L_x_3:
        /*0000*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR6], R4 ;
        /*0010*/                   BRA.U !UP0, `(.L_x_3) ;
        /*0020*/                   STL [R1+0x4], R2 ;
        /*0030*/                   BRA.U UP1, `(.L_x_4) ;
        /*0040*/                   STL [R1], R15 ;
.L_x_4:
        /*0050*/                   UTCHMMA gdesc[UR12], gdesc[UR16], tmem[UR9], tmem[UR6], UPT ;
.L_x_9:
        /*0060*/              @!P1 BRA `(.L_x_7) ;
.L_x_14:
        /*0070*/                   BRA.U UP2, `(.L_x_8) ;
        /*0080*/                   UTCHMMA gdesc[UR34], gdesc[UR12], tmem[UR9], tmem[UR44], UPT ;
.L_x_8:
        /*0090*/                   BRA.U !UP0, `(.L_x_9) ;
        /*00a0*/              @!P1 BRA `(.L_x_10) ;
.L_x_15:
        /*00b0*/                   LDL.LU R29, [R1+0x4] ;
        /*00c0*/                   LDL.LU R28, [R1] ;
        /*00d0*/                   EXIT ;
.L_x_7:
        /*00e0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR6], R4 ;
        /*00f0*/              @!P1 BRA `(.L_x_7) ;
        /*0100*/                   BRA `(.L_x_14) ;
.L_x_10:
        /*0110*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR6], R4 ;
        /*0120*/              @!P1 BRA `(.L_x_10) ;
        /*0130*/                   BRA `(.L_x_15) ;
"""


def test_registers_spilled_around_the_main_loop_are_in_no_loop():
    counts = count_opcodes(SPILLS_AROUND)
    assert counts.whole["STL"] == counts.whole["LDL"] == 2
    assert counts.main_loop["UTCHMMA"] == 1
    assert not {"STL", "LDL"} & set(counts.in_loops)


def test_registers_spilled_in_a_loop_around_the_main_loop_are_in_a_loop():
    once = "        /*00d0*/                   EXIT ;\n"
    tiles = "        /*00c8*/              @P5  BRA `(.L_x_3) ;\n"
    counts = count_opcodes(SPILLS_AROUND.replace(once, tiles + once))
    assert not {"STL", "LDL"} & set(counts.main_loop)
    assert counts.in_loops["STL"] == counts.in_loops["LDL"] == 2


def test_the_main_loop_is_the_innermost_around_the_mma():
    counts = count_opcodes(PLAIN)
    opcodes = counts.whole
    assert counts.main_loop == {"UTCHMMA": 1, "BRA": 1}
    assert counts.in_loops == {"LDG": 1, "UTCHMMA": 1, "UIADD3": 1, "BRA": 2}
    assert opcodes["BRA"] == 3
    assert opcodes["UIADD3"] == opcodes["STG"] == opcodes["LDG"] == 1


def test_waiting_behind_the_kernel_is_no_loop_around_the_mma():
    counts = count_opcodes(WAITING_APART)
    opcodes, main_loop = counts.whole, counts.main_loop
    assert opcodes["LDTM"] == opcodes["UTMALDG"] == opcodes["UTCHMMA"] == 1
    # The waiting code itself belongs to the loop. The code after the loop does not.
    assert main_loop == {"SYNCS": 2, "STTM": 1, "UTCHMMA": 1, "BRA": 5}


def test_repeating_an_instruction_by_lane_is_no_main_loop():
    main_loop = count_opcodes(LANE_BY_LANE).main_loop
    assert main_loop["SYNCS"] == main_loop["UTCOMMA"] == main_loop["ELECT"] == 1


def test_a_kernel_without_mma_has_no_main_loop():
    counts = count_opcodes(PLAIN.replace("UTCHMMA", "FFMA"))
    assert counts.whole["FFMA"] == 1
    assert counts.main_loop == {}


def test_the_section_of_a_kernel():
    text = f".text.helper:\nx\n//--------------------- .text.k --{PLAIN}//--------------------- y"
    assert section(text, "k") == PLAIN.lstrip("\n")
    with pytest.raises(ValueError, match="no kernel other"):
        section(text, "other")
