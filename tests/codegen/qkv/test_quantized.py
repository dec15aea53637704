"""Tests the kernels for weights of 4-bit and 8-bit codes, as emitted for SM100, on Triton's
interpreter.

They are compared with the op's reference in float64, which decodes the codes and multiplies the
numbers.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.codegen.qkv.test_plan import extents_of
from tests.codegen.qkv.test_templates import (
    check,
    fused_spec,
    problem_of,
    run_fused,
    with_rows_apart,
)
from tests.interpreted import Interpreter
from tests.ops.qkv import plain
from tilewright.codegen.build import compile_for
from tilewright.codegen.emit import emit
from tilewright.codegen.qkv.candidates import MOST_TOKENS_IN_REGISTERS, candidates, fits
from tilewright.codegen.qkv.kernels import SwappedConfig
from tilewright.codegen.qkv.plan import library_choice
from tilewright.codegen.qkv.problem import swapped_obstacle
from tilewright.codegen.targets import SM90, SM100, SM120
from tilewright.ops.formats.quantized_weight import AWQ_ORDER
from tilewright.ops.qkv import qkv_cache
from tilewright.ops.qkv.arguments import LETTERS, FusedQkvArguments
from tilewright.ops.qkv.cases import CODE_CASES
from tilewright.ops.qkv.library import dequantized_weights
from tilewright.ops.qkv.operands import prepare
from tilewright.ops.qkv.samples import AttentionCase
from tilewright.ops.runtime.program import drive

NIBBLES = AttentionCase(
    "nibbles",
    hidden=96,
    weight_format="int4_k",
    scale_block=(1, 32),
    rope_style="half",
    rotary_dim=32,
)
ROWS = replace(NIBBLES, weight_format="int4_n", transposed=True)
SIXTEENS = replace(NIBBLES, words=torch.uint8, scale_block=(1, 16), hidden=128)
CASES = {case.name: case for case in CODE_CASES} | {
    "a scale per row": replace(NIBBLES, scale_block=(1, 96), zero_point=8),
    "a zero per row": replace(NIBBLES, scale_block=(1, 96), zeros="int", hidden=192),
    "bytes read as words": replace(NIBBLES, words=torch.uint8, zeros="float", zero_point=3),
    "bytes, high nibble first": replace(NIBBLES, words=torch.uint8, nibble_order=(1, 0)),
    "bytes, groups of 16": replace(SIXTEENS, zeros="int", zero_point=3),
    "bytes of rows, groups of 16": replace(SIXTEENS, weight_format="int4_n", zero_point=8),
    "K packed in AWQ's order": replace(NIBBLES, nibble_order=AWQ_ORDER, zeros="packed"),
    "groups beyond the last step": replace(NIBBLES, hidden=160, scale_block=(1, 32)),
    "a group of two steps": replace(NIBBLES, hidden=128, scale_block=(1, 128), zeros="int"),
    "rows of interleaved pairs": replace(ROWS, rope_style="interleaved", zeros="packed"),
    "rows in bytes": replace(ROWS, words=torch.uint8, num_tokens=18, qk_norm=True, bias=True),
    "rows, K contiguous": replace(ROWS, transposed=False, nibble_order=AWQ_ORDER),
    "k alone": replace(NIBBLES, writes_v=False, zeros="packed"),
    "a delta": replace(NIBBLES, delta=True, bias=True),
    "half precision": replace(NIBBLES, dtype=torch.float16, zeros="packed", transposed=True),
}
CONFIGS = {
    "slices of a head": SwappedConfig(8, 16, 32, 4, 2),
    "whole heads": SwappedConfig(16, 16, 64, 4, 2),
    "split K": SwappedConfig(16, 16, 32, 4, 2, split_k=2),
    "groups of a step": SwappedConfig(16, 16, 128, 4, 2),
}


def in_wide_cache(case: AttentionCase) -> FusedQkvArguments:
    # The interpreter has its own rule for rounding to 8-bit floats. Other tests cover the epilogue.
    return qkv_cache.OP.sample_inputs(replace(case, cache_dtype=None))


def check_fused(case: AttentionCase, config: SwappedConfig) -> None:
    a = in_wide_cache(case)
    tolerances = plain.LIBRARY if plain.rounds_operands(a) else None
    check(qkv_cache.OP, a, lambda a: run_fused(a, config), tolerances)


@pytest.mark.parametrize("tokens", [1, 33, 65, 300])
@pytest.mark.parametrize("case", [NIBBLES, ROWS], ids=lambda case: case.weight_format)
def test_candidates_are_distinct_and_powers_of_two(case: AttentionCase, tokens: int) -> None:
    found = candidates(problem_of(in_wide_cache(case)), tokens, SM90)
    assert len(found) == len(set(found)) > 0
    for config in found:
        assert all(extent.bit_count() == 1 for extent in extents_of(config)), config


def test_registers_hold_a_tile_of_no_more_tokens_than_that() -> None:
    """Tests the largest number of tokens for which registers hold a tile, on a chip whose tensor
    cores read codes from registers. The next larger tile is for other chips."""
    problem = problem_of(in_wide_cache(NIBBLES))
    held = SwappedConfig(16, MOST_TOKENS_IN_REGISTERS, 32, 4, 2)
    assert fits(problem, held, SM120)
    assert not fits(problem, replace(held, block_t=2 * held.block_t), SM120)
    assert fits(problem, replace(held, block_t=2 * held.block_t), SM100)


@pytest.mark.parametrize("index", range(len(CASES)), ids=CASES)
def test_fused(index: int) -> None:
    """Every case runs with one config, and each config with many cases."""
    case = list(CASES.values())[index]
    problem = problem_of(in_wide_cache(case))
    fitting = [config for config in CONFIGS.values() if fits(problem, config, SM100)]
    assert (swapped_obstacle(problem) is None) == bool(fitting)
    if fitting:
        check_fused(case, fitting[index % len(fitting)])
    else:
        assert swapped_obstacle(problem) == "the number of columns that share a scale is 16"


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_fused_with_every_config(config: SwappedConfig) -> None:
    check_fused(replace(NIBBLES, zeros="packed", num_tokens=18), config)


@pytest.mark.parametrize("block_k", [32, 64])
@pytest.mark.parametrize("weight_format", ["int4_k", "int4_n", "nvfp4"])
def test_groups_of_16_in_bytes(weight_format: str, block_k: int) -> None:
    """A step has two or four groups. Two groups are multiplied as one tile of 32 columns."""
    case = replace(SIXTEENS, weight_format=weight_format, num_tokens=18)
    check_fused(case, SwappedConfig(16, 32, block_k, 4, 2))


def test_groups_of_16_in_bytes_keep_the_rules_of_mma_sync() -> None:
    """Tests groups of 16 columns on a chip without wgmma. A tile has fewer rows there. If groups
    were not multiplied in pairs, each product would count half of its columns twice."""
    spec = fused_spec(in_wide_cache(SIXTEENS), SwappedConfig(16, 16, 32, 4, 2))
    audit = compile_for(spec, SM90).audit
    assert audit.mma.keys() == {"HMMA"}
    assert audit.repeating_products == 0


def test_no_step_is_one_group_of_16_bytes() -> None:
    """A step of one group of 16 bytes is never used. Groups of 48 columns would need it."""
    problem = problem_of(in_wide_cache(replace(SIXTEENS, scale_block=(1, 48), hidden=96)))
    assert not any(problem.codes.step_fits(96, size) for size in (16, 32, 64, 128))
    words = replace(problem.codes, per_word=1)
    assert words.step_fits(96, 16)


ODD_ORDER = replace(NIBBLES, nibble_order=(7, 3, 5, 1, 0, 2, 6, 4), zeros="packed")


@pytest.mark.parametrize(
    "case",
    [*CASES.values(), ODD_ORDER, replace(NIBBLES, hidden=80, scale_block=(4, 40))],
    ids=[*CASES, "any order of nibbles", "blocks of any size"],
)
def test_numbers_are_those_of_the_reference(case: AttentionCase) -> None:
    a = qkv_cache.OP.sample_inputs(case)
    made = decoded_by_kernels(a)
    assert len(made) == 2 + case.writes_v
    for letter, got in zip(LETTERS, made, strict=False):
        assert got.dtype == (torch.float32 if case.codes else a.x.dtype)
        want = dequantized(a, letter)
        assert torch.equal(got.view(want.shape), want.to(got.dtype))


FORMATS = {case.weight_format: case for case in CASES.values()}


@pytest.mark.parametrize("case", FORMATS.values(), ids=FORMATS)
def test_scales_and_codes_at_the_edges_of_their_dtypes(case: AttentionCase) -> None:
    """Tests NaN and infinity as scales, and every code of eight bits."""
    a = qkv_cache.OP.sample_inputs(case)
    changes = {f"{x}_scale": filled_with_edges(getattr(a, f"{x}_scale")) for x in LETTERS}
    if case.weight_format in ("fp8", "int8"):
        bytes_ = torch.arange(256).to(torch.uint8)
        changes |= {f"{x}_weight": repeated(bytes_, getattr(a, f"{x}_weight")) for x in LETTERS}
    a = replace(a, **changes)
    for letter, got in zip(LETTERS, decoded_by_kernels(a), strict=False):
        want = dequantized(a, letter)
        assert not want.isfinite().all()
        torch.testing.assert_close(
            got.view(want.shape), want.to(got.dtype), rtol=0, atol=0, equal_nan=True
        )


def filled_with_edges(scale: torch.Tensor) -> torch.Tensor:
    if scale.dtype in (torch.uint8, torch.float8_e4m3fn):
        return repeated(torch.tensor([255, 0, 1, 120, 126, 254]).to(torch.uint8), scale)
    info = torch.finfo(scale.dtype)
    numbers = [torch.nan, torch.inf, 0, -1, 1.1, info.max, info.tiny * info.eps, info.tiny]
    return repeated(torch.tensor(numbers, dtype=scale.dtype), scale)


def repeated(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Repeats values, as bytes or in their own dtype, until they fill the shape of a tensor with
    its dtype."""
    whole = values.repeat(like.numel() // len(values) + 1)[: like.numel()]
    return whole.view(like.dtype).view(like.shape)


def decoded_by_kernels(a: FusedQkvArguments) -> tuple[torch.Tensor, ...]:
    """Returns the weights as kernels decode them in front of a library's product."""
    call = prepare(a)
    problem = replace(call.problem, scaled_by="")
    choice = library_choice(problem, a.x.shape[0], SM100, True, None)
    steps = dequantized_weights(a, call.values, call.rows, choice.statics[1:], SM100)
    return drive(steps, Interpreter(SM100)).outcome


def dequantized(a: FusedQkvArguments, letter: str) -> torch.Tensor:
    weight = dict(zip(LETTERS, a.projections, strict=True))[letter]
    return weight.dequantize(torch.float32).flatten(0, -2)


def words_of(a: FusedQkvArguments) -> torch.dtype:
    return prepare(a).values["q_weight"].dtype


def test_bytes_are_read_as_words_only_where_they_are() -> None:
    a = in_wide_cache(CASES["bytes read as words"])
    assert words_of(a) == torch.int32
    odd = replace(a, q_weight=torch.cat((a.q_weight[..., :1], a.q_weight), -1)[..., 1:])
    assert words_of(odd) == torch.uint8


def test_an_order_without_a_kernel_says_so() -> None:
    problem = problem_of(in_wide_cache(ODD_ORDER))
    assert swapped_obstacle(problem) == "the nibbles are in the order [7, 3, 5, 1, 0, 2, 6, 4]"


@pytest.mark.parametrize("what", ["scale", "zero"])
def test_weights_of_several_kinds_are_left_to_the_reference(what: str) -> None:
    """If Q, K and V have weights in different formats, neither the fused kernel nor the kernel that
    decodes a weight can read them."""
    a = in_wide_cache(replace(NIBBLES, zeros="float"))
    assert qkv_cache.OP.choose("cuda", a).lowering.name == "emitted_kernel"
    other = {f"k_{what}": getattr(a, f"k_{what}").double()}
    choice = qkv_cache.OP.choose("cuda", replace(a, **other))
    assert choice.lowering.name == "reference"
    assert f"{what}s of several" in choice.rejected[0][1]


@pytest.mark.parametrize("stride", [2**15, 2**24])
def test_rows_far_apart_are_counted_in_64_bits(stride: int) -> None:
    source = emit(fused_spec(with_rows_apart(NIBBLES, stride), CONFIGS["whole heads"]))
    (line,) = [line for line in source.splitlines() if "x_ptrs =" in line]
    assert ("int64" in line) == (stride > 2**15)


def test_codes_that_mma_sync_takes_in_another_order_go_through_shared_memory() -> None:
    """The heads are 256 wide. For 16 tokens, the compiled kernel takes 106496 bytes, and sm120 has
    101376."""
    case = AttentionCase(
        "gptq", weight_format="int4_k", transposed=True, scale_block=(1, 128), zeros="packed",
        hidden=2560, head_dim=256, dtype=torch.float16,
    )  # fmt: skip
    problem = problem_of(qkv_cache.OP.sample_inputs(case, "meta"))
    whole = SwappedConfig(128, 16, 128, 4, 3)
    assert fits(problem, whole, SM90)
    assert not fits(problem, whole, SM120)
    assert fits(problem, replace(whole, block_p=64), SM120)
