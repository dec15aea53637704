"""Tests the rules of the audit, each with a kernel that breaks only this rule, and the readers of
PTX, SASS and TTGIR."""

import dataclasses

import pytest

from tilewright.codegen.audit import (
    Audit,
    Expectations,
    check,
    notes,
    repeating_products,
    staged_bytes,
)
from tilewright.codegen.targets import SM100

GOOD = Audit(
    kernel="k",
    sm_target="sm_100a",
    triton="3.9.0",
    ptxas="13.4",
    instructions=1500,
    registers=168,
    stack_bytes=0,
    shared_bytes=150_000,
    tmem_columns=256,
    num_warps=8,
    warp_specialized=True,
    global_scratch_bytes=256,
    opcodes={"UTCHMMA": 8, "UTMALDG": 4, "UTMASTG": 2, "LDTM": 4, "BRA": 10},
    main_loop={"UTCHMMA": 8, "UTMALDG": 4, "BRA": 1},
    looped_spills=0,
    mma_kinds=("tcgen05.mma.cta_group::1.kind::f16",),
    staged_bytes=98_304,
    dead_barriers=0,
    repeating_products=0,
    is_trap=False,
)
CLAIMS = Expectations(
    mma="bf16", tma_loads=True, tma_stores=True, warp_specialized=True, memory_bound=True
)
LEGACY = {"HMMA": 4, "UTCHMMA": 8}
ROUND_TRIP = {"LDTM": 1, "STTM": 1, "UTCHMMA": 8}


def test_a_good_kernel_has_no_problems():
    assert check(GOOD, SM100, CLAIMS) == []
    assert Audit.from_json(GOOD.to_json()) == GOOD
    assert "UTCHMMA=8" in GOOD.summary()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"sm_target": "sm_90a"}, "target: built for sm_90a, not sm_100a"),
        ({"is_trap": True}, "body: Triton replaced the whole kernel by a trap"),
        ({"opcodes": {"UTMALDG": 1, "UTMASTG": 1}}, "tensor core: expected UTCHMMA for bf16"),
        ({"main_loop": LEGACY}, "no legacy tensor core: older tensor-core opcodes"),
        ({"main_loop": ROUND_TRIP}, "accumulator: the accumulator is read from tensor memory"),
        ({"stack_bytes": 24}, "stack: 24 bytes, expected at most 0"),
        ({"main_loop": {"LDL": 2, "STL": 1}}, "spills: 3 in the main loop, expected at most 0"),
        ({"main_loop": {}, "opcodes": {**GOOD.opcodes, "STL": 1}}, "spills: 1, expected at most 0"),
        ({"registers": 256}, "registers: 256, expected at most 255"),
        ({"shared_bytes": 232449}, "shared: 232449 bytes, expected at most 232448"),
        ({"tmem_columns": 576}, "tmem: 576 columns, expected at most 512"),
        ({"opcodes": {"UTCHMMA": 8, "UTMASTG": 1}}, "tma loads: no TMA load"),
        ({"opcodes": {"UTCHMMA": 8, "UTMALDG": 1}}, "tma stores: no TMA store"),
        ({"warp_specialized": False}, "warp specialisation: the warps are not specialised"),
        ({"repeating_products": 4}, "products: 4 that repeat columns, expected at most 0"),
        ({"staged_bytes": 40_000}, "bytes in flight: 40000 per SM"),
    ],
)
def test_each_rule_is_reached(change, problem):
    found = check(dataclasses.replace(GOOD, **change), SM100, CLAIMS)
    assert any(line.startswith(problem) for line in found), found


SPILLED = dataclasses.replace(GOOD, stack_bytes=8, opcodes={**GOOD.opcodes, "STL": 2, "LDL": 2})


def test_a_few_registers_spilled_outside_of_loops_are_a_note():
    assert check(SPILLED, SM100, CLAIMS) == []
    (note,) = notes(SPILLED, SM100, CLAIMS)
    assert note.startswith("stack: 8 bytes of registers are spilled, outside of every loop (4 ")
    assert notes(GOOD, SM100, CLAIMS) == []
    allowed = dataclasses.replace(CLAIMS, stack_bytes=8)
    assert check(SPILLED, SM100, allowed) == notes(SPILLED, SM100, allowed) == []


@pytest.mark.parametrize(
    "change",
    [
        {"looped_spills": 1},
        {"stack_bytes": 20},
        {"opcodes": GOOD.opcodes},  # the stack holds other data
        {"main_loop": {}},
    ],
    ids=("in a loop", "many", "no spills", "no main loop"),
)
def test_what_else_is_on_the_stack_breaks_the_rule(change):
    changed = dataclasses.replace(SPILLED, **change)
    assert any(line.startswith("stack: ") for line in check(changed, SM100, CLAIMS))
    assert notes(changed, SM100, CLAIMS) == []


def test_claims_not_made_are_not_held_against_a_kernel():
    bare = dataclasses.replace(GOOD, opcodes={"FADD": 1}, main_loop={}, staged_bytes=0)
    bare = dataclasses.replace(bare, warp_specialized=False)
    assert check(bare, SM100) == []


def test_occupancy():
    small = dataclasses.replace(GOOD, registers=64, shared_bytes=70_000, num_warps=4)
    assert small.blocks_per_sm(SM100) == 2  # TMEM is the limit
    assert (
        dataclasses.replace(small, tmem_columns=0).blocks_per_sm(SM100) == 3
    )  # shared memory is the limit
    assert dataclasses.replace(small, tmem_columns=512).blocks_per_sm(SM100) == 1
    full = dataclasses.replace(small, registers=255, tmem_columns=0, shared_bytes=0)
    assert full.blocks_per_sm(SM100) == 2  # registers are the limit
    wide = dataclasses.replace(full, registers=16, num_warps=16)
    assert wide.blocks_per_sm(SM100) == 4  # threads are the limit
    assert any("occupancy" in p for p in check(GOOD, SM100, Expectations(blocks_per_sm=2)))


def test_nvfp4_needs_scales_on_the_fast_path():
    kinds = ("tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.scale_vec::4X",)
    opcodes = {"UTCOMMA": 8, "UTCCP": 24}
    claims = Expectations(mma="nvfp4")
    good = dataclasses.replace(GOOD, opcodes=opcodes, main_loop=opcodes, mma_kinds=kinds)
    assert check(good, SM100, claims) == []
    slow = dataclasses.replace(good, opcodes={"UTCOMMA": 8})
    assert check(slow, SM100, claims) == [
        "block scales: no copy of scales from shared to tensor memory (UTCCP)"
    ]
    by_hand = dataclasses.replace(good, main_loop={**opcodes, "STTM": 4})
    assert check(by_hand, SM100, claims) == [
        "block scales: scales are copied to tensor memory through registers (STTM in the main loop)"
    ]
    allowed = dataclasses.replace(claims, row_scales_reason="a few rows")
    assert check(by_hand, SM100, allowed) == []
    upcast = dataclasses.replace(good, mma_kinds=GOOD.mma_kinds)
    assert check(upcast, SM100, claims)[0].startswith("block scales: no kind::mxf4nvf4")


def test_staging_buffers():
    alloc = "    %x = ttg.local_alloc : () -> !ttg.memdesc<{}, #shared, #smem, mutable> loc(#l)\n"
    text = "".join(alloc.format(t) for t in ("3x128x64xbf16", "4x16x128xf8E4M3FN", "3x1xi64"))
    text += "    %y = ttg.local_alloc %z : (tensor<8x8x8xf32, #b>) -> !ttg.memdesc<8x8x8xf32, #s>\n"
    assert staged_bytes(text) == 3 * 128 * 64 * 2 + 4 * 16 * 128


DOT = (
    "%p = tt.dot %a, %b, %c, inputPrecision = tf32 : tensor<32x{0}xbf16, #ttg.dot_op<{{opIdx = 0, "
    "parent = #mma, kWidth = {1}}}>> * tensor<{0}x128xbf16, #ttg.dot_op<{{opIdx = 1, "
    "parent = #mma, kWidth = {1}}}>> -> tensor<32x128xf32, #mma>\n"
)


@pytest.mark.parametrize(
    ("columns", "held", "repeats"), [(16, 8, 1), (32, 8, 0), (16, 4, 0), (16, 2, 0), (32, 16, 1)]
)
def test_products_of_fewer_columns_than_threads_hold_are_counted(columns, held, repeats):
    assert repeating_products(DOT.format(columns, held) * 3) == 3 * repeats
