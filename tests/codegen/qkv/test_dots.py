"""Compares projections of one token by quantised weights, without tensor cores, with the op's
reference in float64. The emitted source for SM100 runs on Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.codegen.qkv.test_quantized import in_wide_cache
from tests.codegen.qkv.test_templates import (
    CASES,
    EVERYWHERE,
    OPTIONS,
    check,
    problem_of,
    run_fused,
)
from tests.interpreted import interpret
from tests.ops.qkv import plain
from tilewright.codegen.arithmetic import next_power_of_2
from tilewright.codegen.build import compile_for
from tilewright.codegen.qkv import candidates, plan
from tilewright.codegen.qkv.candidates import dots_config, fits
from tilewright.codegen.qkv.kernels import DotsConfig, SwappedConfig
from tilewright.codegen.qkv.measured import measured_row, read_config, write_config
from tilewright.codegen.qkv.plan import choose
from tilewright.codegen.qkv.problem import QkvProblem, dots_obstacle
from tilewright.codegen.qkv.tune import Case, trials
from tilewright.codegen.targets import SM90, SM100, Target
from tilewright.ops.formats.quantized_weight import AWQ_ORDER
from tilewright.ops.qkv import choices, qkv_cache
from tilewright.ops.qkv.operands import prepare
from tilewright.ops.qkv.samples import AttentionCase
from tilewright.tools.audit.qkv import MODELS, arguments, quantized

BYTES: dict[str, Any] = {"words": torch.uint8}
TABLE = {**BYTES, "nibble_order": (1, 0), "scale_block": (1, 64), "scale_dtype": torch.float32}
INT4 = {"weight_format": "int4_k", "scale_block": (1, 32)}
OFFSET = {"weight_format": "int4_k_offset", "zeros": "float", "zero_point": 8, "factor": True}
INT8 = {"weight_format": "int8", "scale_block": (1, 64)}
FP8 = {"weight_format": "fp8", "scale_block": (1, 256)}
CODES = {"codes": True}
# Every kind of word, order, scale and zero that the kernel supports.
FORMATS: dict[str, dict[str, Any]] = {
    "int4": {**INT4, "zero_point": 8},
    "int4 bytes": {**INT4, **BYTES, "zeros": "float"},
    "int4 in AWQ's order": {**INT4, "nibble_order": AWQ_ORDER, "zeros": "packed"},
    "int4, packed zeros": {**INT4, "zeros": "packed", "zero_point": 1},
    "int4, a scale per row": {**INT4, "scale_block": (1, 256), "zero_point": 8},
    "int4, a zero per row": {**INT4, "scale_block": (1, 256), "zeros": "int"},
    "int4, added zeros": {**OFFSET, **BYTES, "scale_block": (1, 32)},
    "int8": INT8,
    "int8, zeros": {**INT8, "zeros": "int", "zero_point": 1},
    "int8, unsigned": {**INT8, **BYTES, "zero_point": 128, "scale_block": (1, 256)},
    "fp8": FP8,
    "fp8 in blocks": {"weight_format": "fp8", "scale_block": (32, 32)},
    "fp8, x of codes": {**FP8, **CODES, "x_scale": "token"},
    "fp8, x of codes without scales": {**FP8, **CODES, "x_scale": "none"},
    "fp8 and x in blocks": {**FP8, **CODES, "scale_block": (128, 128), "x_scale": "block"},
    "nvfp4": {"weight_format": "nvfp4", **BYTES, "scale_block": (1, 16), "factor": True},
    "mxfp4": {"weight_format": "mxfp4", **BYTES, "scale_block": (1, 32)},
    "nf4": {"weight_format": "nf4", **TABLE},
    "fp4": {"weight_format": "fp4", **TABLE},
}
# `test_templates.py` runs every case of this epilogue. The cases here concern the addresses of
# weights and stores, and heads, norms and tokens that change what a program does.
EPILOGUES = {
    name: (CASES | OPTIONS)[name]
    for name in (
        *EVERYWHERE,
        *("interleaved, partial", "partial, no divisor of the head", "head_dim 96, interleaved"),
        *("norm, head_dim 24", "skipped tokens", "static cache, norm and bias", "norm of rows"),
        *("delta", "layer norm", "norm bias after rope", "norm of v alone", "block table"),
    )
}
# One format for each kind of word: integers of 4 and 8 bits, and floats of 8 and 4 bits.
KINDS = [FORMATS[name] for name in ("int4, packed zeros", "int8", "fp8 in blocks", "nvfp4")]
ONE = AttentionCase(
    "one",
    num_tokens=1,
    hidden=256,
    head_dim=32,
    num_heads=4,
    num_kv_heads=2,
    rope_style="half",
    rotary_dim=32,
)
CONFIGS = {
    "slices of a head": DotsConfig(8, 256, 4),
    "whole heads": DotsConfig(16, 256, 4),
    "split K": DotsConfig(16, 128, 4, split_k=2),
    "masked columns": DotsConfig(8, 512, 4),
}


def check_dots(case: AttentionCase, config: DotsConfig) -> None:
    a = in_wide_cache(case)
    tolerances = plain.LIBRARY if plain.rounds_operands(a) or case.input_norm else None
    assert fits(problem_of(a), config, SM100)
    check(qkv_cache.OP, a, lambda a: run_fused(a, config), tolerances)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.bfloat16) for name in FORMATS]
    + [(name, torch.float16) for name in FORMATS if FORMATS[name] in [*KINDS, FORMATS["nf4"]]],
    ids=str,
)
def test_formats(name: str, dtype: torch.dtype) -> None:
    """With bfloat16, x is also normalised, unless x has codes. With float16, x is not normalised,
    because the range of float16 is too small. The words are read in the same way for both
    dtypes."""
    norm = "rms" if dtype == torch.bfloat16 and "codes" not in FORMATS[name] else ""
    case = replace(ONE, dtype=dtype, input_norm=norm, **FORMATS[name])
    turn = list(FORMATS).index(name) + (dtype == torch.float16)
    check_dots(case, list(CONFIGS.values())[turn % len(CONFIGS)])


@pytest.mark.parametrize("name", EPILOGUES)
def test_epilogues(name: str) -> None:
    """Each token has separate programs. The cases take the kinds of words in turn."""
    turn = list(EPILOGUES).index(name)
    case = EPILOGUES[name]
    if case.new_tokens:  # one sequence crosses a page of 8 slots
        case = replace(case, num_tokens=3, new_tokens=(0, 2, 1), cached_tokens=(4, 7, 5))
    elif case.slots == "token":
        case = replace(case, num_tokens=2, skipped=min(case.skipped, 1))
    projection = "separate" if case.projection == "separate" else "packed"
    case = replace(case, hidden=256, projection=projection, **KINDS[turn % len(KINDS)])
    heads = problem_of(in_wide_cache(case)).epilogue
    if heads.row_norm:
        assert "all heads" in str(dots_obstacle(problem_of(in_wide_cache(case))))
        return
    whole = DotsConfig(next_power_of_2(heads.pairs_per_head), 128, 8, split_k=2)
    check_dots(case, whole if heads.has_norm else CONFIGS["slices of a head"])


def few(fmt: str = "int4", model: int = 0, **changes: Any) -> QkvProblem:
    """Returns the problem of a model's projection of one token, without allocating memory."""
    case = replace(quantized(MODELS[model], fmt), num_tokens=1, **changes)
    return prepare(replace(arguments(case), static_tokens=True)).problem


@pytest.mark.parametrize("fmt", ["int4", "int8", "fp8", "fp8 block", "nvfp4", "nf4", "mxfp4"])
def test_one_token_takes_it_whatever_the_table_says_of_the_other(fmt: str) -> None:
    for model in range(4):
        problem = few(fmt, model)
        choice = choose(problem, 1, SM90)
        assert choice.name == "dots"
        assert choice.reason.startswith(f"one fused kernel, dots {2 * choice.config.block_p}x")
        assert "modelled" in choice.reason
        assert choice.config == dots_config(problem, 1, SM90)
        # The cost model also predicts that this kernel is faster, and that it takes longer than
        # reading the memory.
        assert choice.seconds == plan.ranked(problem, 1, SM90)[0][0]
        assert (
            choice.seconds > problem.codes.code_bytes * problem.hidden * problem.num_rows / 4.3e12
        )
    assert choose(few(fmt), 2, SM90).name == "swapped"


@pytest.mark.parametrize(("fmt", "x_scale"), [("fp8", "token"), ("fp8 block", "block")])
def test_codes_of_x_are_multiplied_by_it(fmt: str, x_scale: str) -> None:
    problem = few(fmt, codes=True, x_scale=x_scale)
    assert problem.coded_x
    assert [choose(problem, tokens, SM90).name for tokens in (1, 2)] == ["dots", "swapped"]


def test_a_measured_row_of_it_is_taken() -> None:
    config = dots_config(few(), 1, SM90)
    assert read_config(write_config(config)) == config
    row = measured_row(few(), 1, SM90)
    assert row is not None
    assert isinstance(read_config(row["config"]), SwappedConfig)


def test_formats_of_the_table_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "DOTTED_FORMATS", ("int8",))
    assert choose(few("int4"), 1, SM90).name == "swapped"
    assert choose(few("int8"), 1, SM90).name == "dots"


def test_tune_tries_both() -> None:
    tried = trials(Case(few(), 1, SM90, packed=False))
    assert {name.split()[0] for name in tried} == {"dots", "swapped", "library"}


@pytest.mark.parametrize("qk_norm", [False, True])
def test_a_norm_of_x_is_a_part_of_it(qk_norm: bool) -> None:
    problem = few(input_norm="rms", qk_norm=qk_norm)
    choice = choose(problem, 1, SM90)
    assert choice.norms_x
    assert choice.reason.startswith("one fused kernel that normalises x, dots")
    assert choice.config == choose(problem.after_norm, 1, SM90).config
    # A norm that is not linear in x stays before the projection. So does a norm in a dtype that is
    # too small for the sums.
    for changes in ({"input_norm": "layer"}, {"dtype": torch.float16}):
        apart = choose(few(**({"input_norm": "rms"} | changes)), 1, SM90)
        assert not apart.norms_x
        assert apart.reason.startswith("x is normalised first, then one fused kernel, dots")


OBSTACLES: dict[str, tuple[dict[str, Any], str]] = {
    "no codes": ({"weight_format": "dense"}, "the weights are not quantised"),
    "rows in words": ({**INT4, "weight_format": "int4_n"}, "the codes of several rows"),
    "columns apart": ({**INT4, "transposed": True}, "the columns are not contiguous"),
    "bytes": ({**INT4, **BYTES, "nibble_order": (1, 0)}, "the codes are stored in bytes"),
    "scales": (
        {**INT8, "scale_block": (1, 24), "hidden": 240},
        "the number of columns that share a scale is 24",
    ),
    "columns": (
        {**INT8, "scale_block": (1, 254), "hidden": 254},
        "254 columns do not fill whole words",
    ),
}


@pytest.mark.parametrize("name", OBSTACLES)
def test_what_it_does_not_take(name: str) -> None:
    changes, said = OBSTACLES[name]
    problem = problem_of(qkv_cache.OP.sample_inputs(replace(ONE, **changes)))
    assert said in str(dots_obstacle(problem))
    assert dots_config(problem, 1, SM90) is None
    assert choose(problem, 1, SM90).name in ("swapped", "library")


@pytest.mark.parametrize("step", [2, 4])
def test_rows_of_bytes_that_begin_inside_a_word(step: int) -> None:
    """The kernel reads four bytes as a word only if every row begins at a word."""
    a = qkv_cache.OP.sample_inputs(replace(ONE, **INT8))
    wide = torch.zeros(*a.q_weight.shape[:2], 256 + step, dtype=torch.int8)
    wide[..., :256] = a.q_weight
    a = replace(a, q_weight=wide[..., :256], static_tokens=True)
    program = interpret(qkv_cache.OP, a)
    assert program.outcome.name == ("dots" if step == 4 else "swapped")
    want = qkv_cache.OP.reference(a)
    assert qkv_cache.OP.tolerances[want.dtype].problem(program.outcome.result, want) is None


@pytest.mark.parametrize(
    ("fmt", "target", "normed"),
    [("int4", SM90, True), ("nf4", SM90, False), ("int4", SM100, False)],
    ids=["int4 sm90 normed", "nf4 sm90", "int4 sm100"],
)
def test_nothing_spills(fmt: str, target: Target, normed: bool) -> None:
    """Nothing spills in programs that compute slices of heads, or whole heads together with a norm
    of x."""
    changes = {"qk_norm": True, "input_norm": "rms"} if normed else {}
    case = replace(quantized(MODELS[0], fmt), num_tokens=1, **changes)
    call = prepare(replace(arguments(case), static_tokens=True))
    choice = choose(call.problem, 1, target)
    (spec,) = choices.specs_of(call, choice, target)
    audit = compile_for(spec, target).audit
    assert (audit.stack_bytes, audit.spills) == (0, 0)
    assert not audit.mma
