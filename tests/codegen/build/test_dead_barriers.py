"""Tests that barriers on which nothing waits are found and removed, and that nothing else is
removed."""

from __future__ import annotations

import re

import pytest

from tests.attention_cases import attention_spec
from tilewright.codegen.attention.prefill_tiles import PrefillConfig
from tilewright.codegen.build import compile_for
from tilewright.codegen.dead_barriers import count_dead_barriers, without_dead_barriers
from tilewright.codegen.mla.attention_kernels import AttentionProblem

BARRIER = "!ttg.memdesc<1x1xi64, #shared, #smem, mutable>"
ONE = "!ttg.memdesc<1xi64, #shared, #smem, mutable>"


def barrier(name: str, count: int = 1) -> str:
    return f"""\
    %{name} = ttg.local_alloc : () -> {BARRIER} loc(#loc)
    %{name}_0 = ttg.memdesc_index %{name}[%c0_i32] : {BARRIER} -> {ONE} loc(#loc)
    ttng.init_barrier %{name}_0, {count} : {ONE} loc(#loc)
"""


TILE = "    %tile = ttg.local_alloc : () -> !ttg.memdesc<2x128x64xbf16, #shared1, #smem, mutable>\n"
PARTED = "    ttg.warp_specialize(%tile, %live) attributes {requestedRegisters = array<i32: 232>}\n"
WAIT = f"      ttng.wait_barrier %waited_0, %c1_i32 : {ONE} loc(#loc)\n"
REUSED = "      %21 = arith.addi %c0_i32, %c1_i32 : i32\n"


def test_a_barrier_that_is_only_initialised_goes_and_all_else_stays():
    rest = barrier("live") + barrier("waited") + TILE + PARTED + WAIT
    text = barrier("7") + rest + barrier("dead", 128)
    assert count_dead_barriers(text) == 2
    assert without_dead_barriers(text) == rest
    assert without_dead_barriers(rest) == rest


def test_two_stages_are_one_allocation():
    second = f"    %a_1 = ttg.memdesc_index %a[%c1_i32] : {BARRIER} -> {ONE}\n"
    second += f"    ttng.init_barrier %a_1, 1 : {ONE}\n"
    text = barrier("a") + second + PARTED
    assert count_dead_barriers(text) == 1
    assert without_dead_barriers(text) == PARTED


@pytest.mark.parametrize(
    "user",
    [
        "    ttg.warp_specialize(%a) attributes {}\n",
        f"    ttng.arrive_barrier %a_0, 128 : {ONE}\n",
        f"    ttng.async_tma_copy_global_to_local %d[%c0_i32] %tile, %a_0, %true : {ONE}\n",
    ],
)
def test_a_barrier_with_any_other_user_stays(user):
    text = barrier("a") + PARTED + user
    assert without_dead_barriers(text) == text


def test_a_name_that_another_region_has_again_keeps_its_barrier():
    text = barrier("21") + PARTED + REUSED
    assert without_dead_barriers(text) == text


def test_warps_that_are_not_parted_are_left_alone():
    text = barrier("a") + TILE
    assert without_dead_barriers(text) == text


def test_attention_with_specialised_warps_on_hopper_has_none():
    """The machine code initialises no barrier at the start of shared memory, where a tile is
    stored."""
    problem = AttentionProblem(
        num_heads=2, nope=64, rope=64, v_dim=64, dtype="bf16", out="bf16",
        mask="none", tma=True, rope_tma=True,
    )  # fmt: skip
    config = PrefillConfig(128, 64, 4, 2, tma=True, warp_specialize=True, one_loop=True)
    built = compile_for(attention_spec(problem, config, 256))
    assert built.audit.warp_specialized
    assert built.audit.dead_barriers == 0
    starts = re.findall(r"mov\.b32\s+(%r\d+), global_smem;", built.ptx)
    initialised = re.findall(r"mbarrier\.init\.shared::cta\.b64 \[(%r\d+)\]", built.ptx)
    assert initialised
    assert not set(initialised) & set(starts)
