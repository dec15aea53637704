"""Tests `round_rows` without a GPU: the kernel must give the same bits as the formula for every
option and number of programs, and for NaN and infinity."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.interpreted import Interpreter, interpret
from tilewright.codegen.emit import emit
from tilewright.codegen.mlp.kernels import RoundConfig
from tilewright.codegen.mlp.plan import (
    MOST_READERS_OF_ROW,
    MOST_ROUNDED_COLUMNS,
    round_config,
)
from tilewright.codegen.targets import SM90
from tilewright.ops.checks import ArgumentError
from tilewright.ops.mlp.cases import RoundCase
from tilewright.ops.mlp.round_rows import OP
from tilewright.ops.mlp.rounding_lowering import round_rows_steps
from tilewright.ops.runtime.program import Launch, drive
from tilewright.ops.runtime.replay import repeat

E4M3 = torch.float8_e4m3fn
HALF_CASES = [case for case in OP.cases if case.dtype.itemsize == 2]


def by_token(x):
    """Rounds tokens as compressed-tensors does. Returns the codes, the scale and the decoded
    numbers."""
    zero = torch.zeros((), dtype=x.dtype)
    largest = torch.maximum(x.amax(-1, True).clamp(min=0), -x.amin(-1, True).clamp(max=0))
    scale = largest / 448
    scale = torch.where(scale == zero, torch.finfo(x.dtype).eps, scale)
    codes = (x / scale).clamp(-448, 448).to(E4M3)
    return codes, scale, codes.to(x.dtype) * scale


def by_block(x):
    """Rounds blocks of 128 columns as finegrained-fp8 does."""
    blocks = x.float().unflatten(-1, (-1, 128))
    scale = blocks.abs().amax(-1, keepdim=True) / 448
    codes = (blocks / scale.clamp(min=1e-12)).to(E4M3)
    decoded = (codes.float() * scale).flatten(-2).to(x.dtype)
    return codes.flatten(-2), scale.squeeze(-1), decoded


LIBRARIES = {
    "token": (by_token, RoundCase("", n=384, rounded=True, zero_scale=2.0**-7)),
    "block": (by_block, RoundCase("", n=384, group=128, least_divisor=1e-12)),
}


def same(one, other):
    """Whether two tensors have the same bits, except for the bits of NaN."""
    one, other = one.float(), other.float()
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def rows(case, tokens=6):
    a = OP.sample_inputs(replace(case, num_tokens=tokens))
    for row, value in enumerate((0.0, 1e-30, 3e4, 1e-7), 1):
        a.x[row, ::3] *= value
    return a


@pytest.mark.parametrize("decoded", [False, True])
@pytest.mark.parametrize("name", LIBRARIES)
def test_it_has_the_bits_of_the_library(name, decoded):
    library, case = LIBRARIES[name]
    a = rows(replace(case, decoded=decoded))
    codes, scale, numbers = library(a.x)
    for made, scales in (interpret(OP, a).outcome.result, OP.reference(a)):
        assert same(made, numbers if decoded else codes)
        assert same(scales, scale.t())


@pytest.mark.parametrize("case", HALF_CASES, ids=lambda case: case.name)
def test_the_kernel_has_the_bits_of_the_reference(case):
    a = OP.sample_inputs(case)
    for made, expected in zip(interpret(OP, a).outcome.result, OP.reference(a), strict=True):
        if a.x.numel():
            assert made.dtype == expected.dtype
            assert same(made, expected)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", LIBRARIES)
def test_what_is_no_number_is_as_in_the_graph(name, value):
    library, case = LIBRARIES[name]
    a = rows(case)
    a.x[0, 5] = value
    codes, scale, _ = library(a.x)
    made, scales = interpret(OP, a).outcome.result
    assert same(made, codes)
    assert same(scales, scale.t())
    assert made[0].float().isnan().any()


def test_a_row_of_zeros_without_a_bound_is_no_number():
    a = OP.sample_inputs(RoundCase("", num_tokens=2, n=128))
    assert not a.x[1].any()
    made, scales = interpret(OP, a).outcome.result
    assert made[1].float().isnan().all()
    assert scales[0, 1] == 0


@pytest.mark.parametrize("width", [64, 128, 512])
@pytest.mark.parametrize("norm", ["", "rms"])
@pytest.mark.parametrize("group", [0, 64])
def test_programs_that_share_a_row(group, norm, width):
    """Several programs share a row. Some of their columns are past the end of the row."""
    case = RoundCase("", num_tokens=3, n=448, norm=norm, group=group, rounded=True, least=1e-6)
    a = OP.sample_inputs(case)
    machine = Interpreter()
    steps = round_rows_steps(a, machine.target, RoundConfig(width, 512, 4))
    for made, expected in zip(drive(steps, machine).outcome.result, OP.reference(a), strict=True):
        assert same(made, expected)


def test_few_rows_are_shared_by_programs():
    one, many = (round_config(4096, 0, True, tokens, SM90) for tokens in (1, 64))
    assert (one.width, many.width) == (512, 2048)
    assert round_config(14336, 128, False, 1, SM90).width == 512
    assert round_config(64, 0, True, 1, SM90) == RoundConfig(64, 64, 4)


@pytest.mark.parametrize(
    ("options", "programs"),
    [
        ({}, MOST_READERS_OF_ROW),
        ({"norm": "rms"}, MOST_READERS_OF_ROW),
        ({"norm": "rms", "group": 128}, MOST_READERS_OF_ROW),
        ({"norm": "rms", "scale": torch.float32}, MOST_READERS_OF_ROW),
        ({"group": 128}, 32),
        ({"scale": torch.float32}, 32),
    ],
)
def test_few_programs_read_the_same_row(options, programs):
    """A program reads the whole row if the row has one scale that must be computed, or a norm."""
    a = OP.sample_inputs(RoundCase("", num_tokens=1, n=16384, **options))
    program = drive(round_rows_steps(a, SM90), Interpreter(SM90, runs=False))
    (launch,) = (step for step, _ in program.steps if isinstance(step, Launch))
    assert tuple(launch.grid) == (1, programs)


def test_the_next_kernel_starts_before_this_one_waits():
    a = OP.sample_inputs(RoundCase("", norm="rms", n=4096), "meta")
    (spec,) = OP.plan_for(a, "sm90").specs
    source = emit(spec)
    wait = source.index("cuda.gdc_wait()")
    assert source.index("cuda.gdc_launch_dependents()") < wait < source.index("tl.load(")
    assert source.index("prefetch.global.L2") < wait


def test_a_call_made_again_rounds_other_rows():
    a = OP.sample_inputs(RoundCase("", n=200, rounded=True, least=1e-6))
    machine = Interpreter()
    program = drive(round_rows_steps(a, machine.target), machine)
    args, kwargs = OP.split(a)
    again = repeat(program, args, kwargs, machine)
    assert again is not None
    a.x.mul_(-0.5)
    made, scales = again(*args, **kwargs)
    assert same(made, OP.reference(a)[0])
    assert same(scales, OP.reference(a)[1])


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"group": 48}, "group"),
        ({"group": 128}, "group"),
        ({"group": -64}, "group"),
        ({"up": torch.zeros(5, 64, dtype=torch.bfloat16)}, "up"),
        ({"activation": "tanh"}, "activation"),
        ({"zero_scale": -1.0}, "zero_scale"),
        ({"scale": torch.ones(2)}, "scale"),
        ({"scale": torch.ones(1), "rounded": True}, "scale"),
        ({"scale": torch.ones(1), "least": 1e-6}, "least"),
    ],
)
def test_arguments_that_do_not_fit_are_named(changes, name):
    a = OP.sample_inputs(RoundCase(""))
    with pytest.raises(ArgumentError, match=name):
        OP.call(replace(a, **changes))


def test_rows_that_no_kernel_takes():
    wide = RoundCase("", num_tokens=1, n=MOST_ROUNDED_COLUMNS + 1)
    assert "columns" in OP.plan_for(OP.sample_inputs(wide, "meta"), "sm90").reason
    single = replace(wide, n=64, dtype=torch.float32)
    assert OP.plan_for(OP.sample_inputs(single, "meta"), "sm90").name == "reference"
