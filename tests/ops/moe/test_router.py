"""Tests `moe_router` without a GPU: its kernels on the interpreter, with memory that holds NaN
before the call, and which calls use them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.interpreted import Interpreter, interpret, interpreter  # noqa: F401
from tilewright.codegen.arithmetic import cdiv
from tilewright.codegen.moe.router_kernels import RouterConfig, expert_tiles, router_grid
from tilewright.codegen.moe.router_plan import FEW_TOKENS, LIBRARY_TOKENS, router_config
from tilewright.codegen.targets import SM90, SM100
from tilewright.ops import ArgumentError
from tilewright.ops.moe import router
from tilewright.ops.moe.router import MoeRouterArguments, router_problem
from tilewright.ops.moe.router_cases import ROUTER_CASES, RouterCase
from tilewright.ops.moe.router_lowering import moe_router_steps
from tilewright.ops.runtime.program import drive
from tilewright.ops.runtime.replay import repeat

NAN, INF = float("nan"), float("inf")
PLAIN = RouterCase("case", num_experts=20, num_slots=3, normalise=True)
# Tiles that divide neither tokens, experts nor columns. The kernel of the product also chooses, or
# a separate kernel chooses.
TILES = (
    RouterConfig(16, 16, 32, 3, 2, 4, 2),
    RouterConfig(16, 32, 64, 1, 4, 4, 2),
    RouterConfig(32, 16, 32, 2, 1, 4, 2, chooses=False),
)


def given_logits(rows, **options):
    """Returns a call that chooses from rows of logits."""
    return MoeRouterArguments(torch.tensor(rows), None, **{"num_slots": 2, **options})


def same(got, want):
    weights, ids = got
    assert torch.equal(ids, want[1])
    torch.testing.assert_close(weights, want[0], rtol=2e-6, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("config", TILES, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 37])
def test_any_tiles_give_the_same_choice(config, num_tokens):
    a = router.sample_inputs(replace(PLAIN, num_tokens=num_tokens, hidden=200))
    machine = Interpreter()
    program = drive(moe_router_steps(a, machine.target, config), machine)
    same(program.outcome.result, router.reference(a))
    assert machine.kernels == ["moe_router"] + ["moe_choose"] * (not config.chooses)


def test_of_equal_experts_the_lower_number_comes_first():
    a = given_logits([[1.0, 3.0, 3.0, 0.0, 3.0], [0.0, -0.0, 0.0, -0.0, -1.0]], num_slots=4)
    _, ids = interpret(router.OP, a).outcome.result
    assert ids.tolist() == [[1, 2, 4, 0], [0, 1, 2, 3]]
    same(interpret(router.OP, a).outcome.result, router.reference(a))


@pytest.mark.parametrize("scores", router.SCORES)
@pytest.mark.parametrize("groups", [(1, 1, 1), (2, 1, 1), (2, 1, 2)])
def test_numbers_that_are_none_come_first_and_infinite_ones_are_ordered(scores, groups):
    rows = [[0.5, NAN, 1.0, 2.0, -1.0, 3.0], [-INF, 1.0, INF, 2.0, 0.0, 0.5], [-INF] * 5 + [1.0]]
    num_groups, top_groups, group_top = groups
    a = given_logits(
        rows, scores=scores, num_groups=num_groups, top_groups=top_groups, group_top=group_top
    )
    got, want = interpret(router.OP, a).outcome.result, router.reference(a)
    assert torch.equal(got[1][:2], want[1][:2])
    # Whatever the scores are, each chosen expert exists, and no expert is chosen twice.
    assert all(len({*row}) == 2 and min(row) >= 0 and max(row) < 6 for row in got[1].tolist())


@pytest.mark.parametrize("scores", router.SCORES)
def test_places_that_fill_a_power_of_two_have_no_expert(scores):
    """A tile of three groups has places for a fourth one, which has no experts. Behind the first
    row's logits are those of the second row, which are larger."""
    rows = [[0.5, 1.0, 2.0, -1.0, 3.0, 0.0], [8.0, 9.0, 7.0, 6.0, 5.0, 4.0]]
    a = given_logits(rows, scores=scores, num_groups=3, top_groups=2, num_slots=3)
    same(interpret(router.OP, a).outcome.result, router.reference(a))


def test_a_sum_of_weights_is_bounded_only_where_a_bound_is_given():
    """A sum of weights is bounded only if a bound is given. Sums of logits may be below zero. A
    bound leaves NaN as it is."""
    rows = [[-1.0, -3.0, -2.0], [2.0, 1.0, 0.5], [1.0, NAN, 0.0]]
    a = given_logits(rows, scores="logits", normalise=True, norm_eps=0.5)
    weights, _ = interpret(router.OP, a).outcome.result
    torch.testing.assert_close(weights[0], torch.tensor([-1.0, -2.0]) / -2.5)
    same((weights, router.reference(a)[1]), router.reference(a))
    least = replace(a, norm_min=1e-12)
    same(interpret(router.OP, least).outcome.result, router.reference(least))
    assert router.reference(least)[0][2].isnan().all()


def test_a_token_of_nan_leaves_the_others_alone():
    a = router.sample_inputs(replace(PLAIN, num_tokens=5))
    clean = interpret(router.OP, a).outcome.result
    a.x[2] = NAN
    weights, ids = interpret(router.OP, a).outcome.result
    others = [0, 1, 3, 4]
    assert torch.equal(weights[others], clean[0][others])
    assert torch.equal(ids[others], clean[1][others])
    assert weights[2].isnan().all()
    assert ids[2].tolist() == [0, 1, 2]


def test_a_call_made_again_is_the_same_call_over_new_memory():
    a = router.sample_inputs(PLAIN)
    machine = Interpreter()
    program = drive(moe_router_steps(a, machine.target), machine)
    args, kwargs = router.OP.split(a)
    again = repeat(program, args, kwargs, machine)
    assert again is not None
    kept = [t.clone() for t in program.outcome.result]
    a.x.copy_(-a.x)
    second = again(*args, **kwargs)
    same(second, router.reference(a))
    assert not torch.equal(second[1], kept[1])
    assert all(torch.equal(t, k) for t, k in zip(program.outcome.result, kept, strict=True))


def test_fp32_numbers_of_many_tokens_are_multiplied_by_the_library():
    case = replace(PLAIN, weight_dtype=torch.float32)
    for num_tokens, kernels in ((3, ["moe_router"]), (LIBRARY_TOKENS + 1, ["moe_choose"])):
        a = router.sample_inputs(replace(case, num_tokens=num_tokens))
        machine = Interpreter()
        program = drive(moe_router_steps(a, machine.target), machine)
        assert machine.kernels == kernels
        same(program.outcome.result, router.reference(a))


@pytest.mark.parametrize("target", [SM90, SM100])
@pytest.mark.parametrize("num_tokens", [1, 16, 64, 256, 1024, 8192])
@pytest.mark.parametrize(("experts", "hidden"), [(8, 4096), (128, 2048), (256, 7168), (32, 2880)])
def test_a_few_tokens_are_one_launch_and_every_part_of_the_sum_has_columns(
    experts, hidden, num_tokens, target
):
    weight = torch.empty(experts, hidden, dtype=torch.bfloat16, device="meta")
    problem = router_problem(MoeRouterArguments(weight[:1], weight, 2))
    config = router_config(problem, num_tokens, target)
    assert config.chooses == (num_tokens <= FEW_TOKENS)
    steps = cdiv(cdiv(hidden, config.block_k), config.splits)
    assert (config.splits - 1) * steps * config.block_k < hidden
    (programs,) = router_grid(problem, config, num_tokens)
    tiles = programs // config.splits
    assert programs <= max(2 * target.num_sms, tiles)
    assert expert_tiles(problem, config) * config.block_e >= experts


BENT = {
    "weight": {"weight": torch.ones(12, 95).bfloat16()},
    "num_slots": {"num_slots": 13},
    "scores": {"scores": "entmax"},
    "bias": {"bias": torch.ones(11)},
    "correction": {"correction": torch.ones(12).long()},
    "num_groups": {"num_groups": 5},
    "top_groups": {"num_groups": 2, "top_groups": 3},
    "group_top": {"num_groups": 12, "top_groups": 6, "group_top": 2},
    "norm_eps": {"normalise": True, "norm_eps": -1.0},
    "norm_min": {"norm_min": NAN},
    "scaling": {"scaling": INF},
    "weights_dtype": {"weights_dtype": torch.int32},
}


@pytest.mark.parametrize("argument", BENT)
def test_what_an_argument_may_not_be_is_said(argument):
    a = router.sample_inputs(RouterCase("case"))
    router.validate(a)
    with pytest.raises(ArgumentError, match=f"moe_router: {argument}: expected"):
        router.validate(replace(a, **BENT[argument]))


def test_slots_have_to_fit_the_groups_that_are_kept():
    a = router.sample_inputs(replace(ROUTER_CASES[0], num_slots=5))
    with pytest.raises(ArgumentError, match="num_slots: expected 1 to 4, the experts of"):
        router.validate(replace(a, num_groups=3, top_groups=1))


def test_too_many_experts_or_slots_are_the_reference_s():
    meta = torch.empty(4, 4096, device="meta")
    assert "columns of logits" in router.unsupported(MoeRouterArguments(meta, None, 2))
    assert "slots" in router.unsupported(MoeRouterArguments(meta[:, :512], None, 33))
    assert router.unsupported(MoeRouterArguments(meta[:, :1024], None, 32)) is None
