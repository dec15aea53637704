"""Tests sums over ranks with residual and norm: the matches, and near misses.

This process is one of two ranks. torch's fake process group moves nothing, so only reports are
checked. tests/compiler/test_sharded.py compares numbers.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed import _functional_collectives as functional
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from tests.fake_ranks import MESH, two_ranks  # noqa: F401  a fixture
from tests.found import codes_of, patterns_in
from tilewright.compiler import lower

pytestmark = pytest.mark.usefixtures("two_ranks", "fresh_dynamo")

NAME = "all_reduce_residual_norm"


def rms(x, weight, eps=1e-5):
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def summed(part):
    return functional.all_reduce(part, "sum", dist.group.WORLD)


def shared_linear(x, w):
    x = DTensor.from_local(x, MESH[0], [Shard(-1)], run_check=False)
    return F.linear(x, DTensor.from_local(w, MESH[0], [Shard(1)], run_check=False))


# --- steps ----------------------------------------------------------------------------------------


def functionally(x, w, residual, norm):
    total = residual + summed(F.linear(x, w))
    return total, rms(total, norm)


def in_place(x, w, residual, norm):
    part = F.linear(x, w)
    dist.all_reduce(part)
    total = part + residual
    return total, rms(total, norm)


def by_dtensor(x, w, residual, norm):
    part = shared_linear(x, w).redistribute(placements=[Replicate()]).to_local()
    total = residual + part
    return total, rms(total, norm)


def made_whole(x, w, residual, norm):
    total = residual + shared_linear(x, w).full_tensor()
    return total, rms(total, norm)


def in_another_shape(x, w, residual, norm):
    total = residual[None] + summed(F.linear(x, w)).view(1, *residual.shape)
    return total, rms(total, norm)


def of_no_linear(x, w, residual, norm):
    """Sums the results of experts over ranks."""
    total = residual + summed(residual.sigmoid())
    return total, F.rms_norm(total, norm.shape, norm, 1e-5)


def before_gate_and_up(x, w, residual, norm):
    """The linears read the norm's result as it is, and leave the norm in the graph."""
    total = residual + summed(F.linear(x, w))
    y = rms(total, norm)
    return total, F.silu(F.linear(y, w.T)) * F.linear(y, 2 * w.T)


def residual_changed_for_itself(x, w, residual, norm):
    residual = residual + 0
    total = residual + summed(F.linear(x, w))
    residual.mul_(2)
    return total, rms(total, norm), residual


FUSED = (
    functionally,
    in_place,
    by_dtensor,
    made_whole,
    in_another_shape,
    of_no_linear,
    before_gate_and_up,
    residual_changed_for_itself,
)


def of_a_product(x, w, residual, norm):
    total = residual + functional.all_reduce(F.linear(x, w), "product", dist.group.WORLD)
    return total, rms(total, norm)


def average(x, w, residual, norm):
    total = residual + functional.all_reduce(F.linear(x, w), "avg", dist.group.WORLD)
    return total, rms(total, norm)


def turned_between(x, w, residual, norm):
    """Exchanges dimensions, which is no reshape."""
    total = (residual.t() + summed(F.linear(x, w)).t()).t()
    return total, rms(total, norm)


def without_a_norm(x, w, residual, norm):
    return residual + summed(F.linear(x, w))


def layer_norm(x, w, residual, norm):
    total = residual + summed(F.linear(x, w))
    return total, F.layer_norm(total, norm.shape, norm)


def norm_of_half_a_row(x, w, residual, norm):
    total = residual + summed(F.linear(x, w))
    return total, rms(total[:, :32], norm[:32])


def scattered_without_a_norm(x, w, residual, norm):
    part = functional.reduce_scatter_tensor(F.linear(x, w), "sum", 0, dist.group.WORLD)
    return residual[:2] + part


def scaled_between(x, w, residual, norm):
    total = residual + 0.5 * summed(F.linear(x, w))
    return total, rms(total, norm)


def added_twice(x, w, residual, norm):
    total = torch.add(residual, summed(F.linear(x, w)), alpha=2)
    return total, rms(total, norm)


def gathered(x, w, residual, norm):
    whole = functional.all_gather_tensor(F.linear(x, w)[:, :32].contiguous(), 1, dist.group.WORLD)
    total = residual + whole
    return total, rms(total, norm)


def doubled_as_a_dtensor(x, w, residual, norm):
    whole = shared_linear(x, w).redistribute(placements=[Replicate()])
    total = residual + (whole * 2).to_local()
    return total, rms(total, norm)


def scattered(x, w, residual, norm):
    part = shared_linear(x, w).redistribute(placements=[Shard(1)]).to_local()
    total = residual[:, :32] + part
    return total, rms(total, norm[:32])


def averaged_dtensor(x, w, residual, norm):
    part = DTensor.from_local(F.linear(x, w), MESH[0], [Partial("avg")], run_check=False)
    total = residual + part.full_tensor()
    return total, rms(total, norm)


NOT_FOUND = (
    doubled_as_a_dtensor,
    scattered,
    scattered_without_a_norm,
    averaged_dtensor,
    of_a_product,
    average,
    turned_between,
    without_a_norm,
    layer_norm,
    norm_of_half_a_row,
    scaled_between,
    added_twice,
    gathered,
)


def sum_read_elsewhere(x, w, residual, norm):
    part = summed(F.linear(x, w))
    total = residual + part
    return total, rms(total, norm), part


def part_read_behind(x, w, residual, norm):
    """Reads the part after the in-place sum, when it holds the sum."""
    part = F.linear(x, w)
    dist.all_reduce(part)
    total = residual + part
    return total, rms(total, norm), part * 2


def residual_changed_between(x, w, residual, norm):
    total = residual + summed(F.linear(x, w))
    residual.mul_(2)
    return total, rms(total, norm)


def other_dtypes(x, w, residual, norm):
    total = residual.float() + summed(F.linear(x, w))
    return total, rms(total, norm.float())


def scattered_by_token(x, w, residual, norm):
    """Uses sequence parallelism: each rank has some of the tokens between its linears."""
    part = functional.reduce_scatter_tensor(F.linear(x, w), "sum", 0, dist.group.WORLD)
    total = residual[:2] + part
    return total, functional.all_gather_tensor(rms(total, norm), 0, dist.group.WORLD)


REFUSED = {
    scattered_by_token: "COLLECTIVE",
    sum_read_elsewhere: "ESCAPES",
    part_read_behind: "ESCAPES",
    residual_changed_between: "INPUT_MUTATED",
    other_dtypes: "DTYPE",
}


# --- tests ----------------------------------------------------------------------------------------


def name_of(step):
    return getattr(step, "__name__", None)


def lowered(step, tokens=4):
    shapes = (tokens, 128), (64, 128), (tokens, 64), (64,)
    return lower(step, [torch.randn(shape).bfloat16() for shape in shapes])


@pytest.mark.parametrize("step", FUSED, ids=name_of)
def test_it_is_found(step):
    found = lowered(step)
    assert patterns_in(found, NAME) == [NAME]
    (site,) = [site for site in found.matches if site.pattern == NAME]
    assert site.lowering == "peer kernel"
    assert site.shapes["ranks"] == 2
    assert "all_reduce" not in {str(node.target) for node in found.graphs[0].after.graph.nodes}


@pytest.mark.parametrize("step", NOT_FOUND, ids=name_of)
def test_what_is_no_such_sum_is_none(step):
    found = lowered(step)
    assert patterns_in(found, NAME) == []
    assert codes_of(found, NAME) == set()


@pytest.mark.parametrize(("step", "code"), REFUSED.items(), ids=name_of)
def test_what_cannot_be_taken_says_why(step, code):
    found = lowered(step)
    assert patterns_in(found, NAME) == []
    assert codes_of(found, NAME) == {code}
    assert not any(miss.is_lost for miss in found.misses)


def test_the_linears_behind_leave_the_norm():
    found = lowered(before_gate_and_up)
    (site,) = [site for site in found.matches if site.pattern == "linear_activation"]
    assert site.shapes["norm"] == "no"
