"""Tests how collectives and DTensors between a projection and its cache writes affect a match.

There are two ranks, and one of them is this process. torch's fake process group moves nothing. A
step without a collective must therefore compute what eager computes. For a step with a collective,
the tests only look at the report.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.agreement import flat
from tests.compiler.steps import HKV, D, Layer, T, make_args, store
from tests.fake_ranks import MESH, two_ranks  # noqa: F401  a fixture
from tests.found import codes_of, misses_of, patterns_in
from tilewright.compiler import lower, reports

pytestmark = pytest.mark.usefixtures("two_ranks", "fresh_dynamo")


def wrapped(tensor, placement=None):
    return DTensor.from_local(tensor, MESH[0], [placement or Replicate()], run_check=False)


def projected(m, name, x, placement=None):
    """Projects x as a DTensor. The weight is sharded by columns, or by `placement`."""
    weight = getattr(m, f"{name}_proj").weight
    return F.linear(wrapped(x), wrapped(weight, placement or Shard(0)))


def heads(tensor):
    return tensor.view(T, -1, D)


def stored(caches, slots, k, v):
    for cache, given in zip(caches, (k, v), strict=True):
        store(cache, slots, given)


# --- steps ----------------------------------------------------------------------------------------


def by_columns(m, x, k_cache, v_cache, slots):
    q, k, v = (heads(projected(m, name, x).to_local()) for name in "qkv")
    stored((k_cache, v_cache), slots, k, v)
    return q


def placements_that_differ(m, x, k_cache, v_cache, slots):
    """Each rank has the whole weight of K, but only a part of the weights of Q and V."""
    placements = (Shard(0), Replicate(), Shard(0))
    parts = zip("qkv", placements, strict=True)
    q, k, v = (heads(projected(m, name, x, p).to_local()) for name, p in parts)
    stored((k_cache, v_cache), slots, k, v)
    return q


def partial_sums_as_they_are(m, x, k_cache, v_cache, slots):
    def part(name):
        weight = getattr(m, f"{name}_proj").weight
        return heads(F.linear(wrapped(x, Shard(1)), wrapped(weight, Shard(1))).to_local())

    stored((k_cache, v_cache), slots, part("k"), part("v"))
    return part("q")


def activation_under_another_name(m, x, k_cache, v_cache, slots):
    x = x + 0
    other = wrapped(x)
    x.mul_(2)
    q, k, v = (F.linear(other, wrapped(getattr(m, f"{n}_proj").weight, Shard(0))) for n in "qkv")
    stored((k_cache, v_cache), slots, heads(k.to_local()), heads(v.to_local()))
    return heads(q.to_local())


FUSED = (
    by_columns,
    placements_that_differ,
    partial_sums_as_they_are,
    activation_under_another_name,
)


def activation_changed_between(m, x, k_cache, v_cache, slots):
    other = wrapped(x)
    q = projected(m, "q", x)
    other.mul_(2)
    k, v = (heads(projected(m, name, x).to_local()) for name in "kv")
    stored((k_cache, v_cache), slots, k, v)
    return heads(q.to_local())


def weight_changed_behind(m, x, k_cache, v_cache, slots):
    weight = wrapped(m.k_proj.weight, Shard(0))
    k = F.linear(wrapped(x), weight)
    weight.to_local().mul_(2)
    stored((k_cache, v_cache), slots, heads(k.to_local()), heads(projected(m, "v", x).to_local()))
    return heads(projected(m, "q", x).to_local())


def result_changed_under_another_name(m, x, k_cache, v_cache, slots):
    q, k, v = (projected(m, name, x) for name in "qkv")
    one, other = k.to_local(), k.to_local()
    one.mul_(2)
    stored((k_cache, v_cache), slots, heads(other), heads(v.to_local()))
    return heads(q.to_local())


def cache_read_between(m, x, k_cache, v_cache, slots):
    q, k, v = (heads(projected(m, name, x).to_local()) for name in "qkv")
    sharded = wrapped(k_cache, Shard(2))
    store(sharded.to_local(), slots, k)
    seen = (sharded * 2).to_local()
    store(v_cache, slots, v)
    return q, seen


def cache_written_between(m, x, k_cache, v_cache, slots):
    q, k, v = (heads(projected(m, name, x).to_local()) for name in "qkv")
    sharded = wrapped(k_cache, Shard(2))
    store(sharded.to_local(), slots, k)
    sharded.mul_(2)
    store(v_cache, slots, v)
    return q


def replicated_cache(m, x, k_cache, v_cache, slots):
    """Each rank has whole caches, but only a part of the heads. DTensor decides which elements a
    rank writes."""
    q, k, v = (heads(projected(m, name, x).to_local()) for name in "qkv")
    for cache, given in ((k_cache, k), (v_cache, v)):
        wrapped(cache).view(-1, HKV, D)[wrapped(slots)] = wrapped(given)
    return q


#: The steps that are not fused, and the code of each miss.
REFUSED = {
    activation_changed_between: "Q_PATH",
    weight_changed_behind: "INPUT_MUTATED",
    result_changed_under_another_name: "ESCAPES",
    cache_read_between: "CACHE_READ",
    cache_written_between: "CACHE_READ",
    replicated_cache: "SUBCLASS",
}


def gathered(m, x, k_cache, v_cache, slots):
    q, k, v = (projected(m, name, x) for name in "qkv")
    k = heads(k.redistribute(placements=[Replicate()]).to_local())[:, :HKV]
    stored((k_cache, v_cache), slots, k, heads(v.to_local()))
    return heads(q.to_local())


def made_whole(m, x, k_cache, v_cache, slots):
    q, k, v = (projected(m, name, x) for name in "qkv")
    stored((k_cache, v_cache), slots, heads(k.full_tensor())[:, :HKV], heads(v.to_local()))
    return heads(q.to_local())


def reduced_under_another_name(m, x, k_cache, v_cache, slots):
    q, _, v = m.qkv(x)
    part = m.k_proj(x)
    k = heads(part)
    dist.all_reduce(part)
    stored((k_cache, v_cache), slots, k, v)
    return q


def gathered_into_the_cache_between(m, x, k_cache, v_cache, slots):
    q, k, v = m.qkv(x)
    store(k_cache, slots, k)
    dist.all_gather_into_tensor(k_cache.view(-1), k_cache.view(-1)[::2].clone())
    store(v_cache, slots, v)
    return q


def activation_sent_between(m, x, k_cache, v_cache, slots):
    q, _, v = m.qkv(x)
    dist.all_reduce(x)
    stored((k_cache, v_cache), slots, heads(m.k_proj(x)), v)
    return q


#: The steps with a collective that are not fused.
COLLECTIVES = {
    gathered: {"COLLECTIVE"},
    made_whole: {"COLLECTIVE"},
    reduced_under_another_name: {"COLLECTIVE"},
    gathered_into_the_cache_between: {"CACHE_READ", "MOVED_CACHE"},
    activation_sent_between: {"ACTIVATION"},
}


# --- tests ----------------------------------------------------------------------------------------


def name_of(step):
    return getattr(step, "__name__", None)


def assert_as_eager(step):
    eager, ours = Layer(step), Layer(step)
    theirs, mine = make_args(), make_args()
    expected = eager(*theirs)
    actual = torch.compile(ours, backend="tilewright", options={"inner": "eager"})(*mine)
    pairs = zip(
        flat([actual, *mine, *ours.parameters()]),
        flat([expected, *theirs, *eager.parameters()]),
        strict=True,
    )
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("step", FUSED, ids=name_of)
def test_a_rank_s_own_part_is_fused(step):
    assert_as_eager(step)
    (report,) = reports()
    assert patterns_in(report, "qkv") == ["qkv_cache"]


@pytest.mark.parametrize(("step", "code"), REFUSED.items(), ids=name_of)
def test_a_write_under_another_name_is_seen(step, code):
    assert_as_eager(step)
    (report,) = reports()
    assert "qkv_cache" not in patterns_in(report, "qkv")
    assert code in codes_of(report, "qkv_cache")


@pytest.mark.parametrize(("step", "codes"), COLLECTIVES.items(), ids=name_of)
def test_no_match_crosses_a_collective(step, codes):
    lowered = lower(Layer(step), make_args())
    assert "qkv_cache" not in patterns_in(lowered, "qkv")
    assert codes_of(lowered, "qkv_cache") == codes


def test_a_linear_whose_parts_are_summed_says_why_its_residual_is_apart():
    def summed(x, residual, weight):
        part = F.linear(x, weight.to_local())
        dist.all_reduce(part)
        return residual + part

    def by_dtensor(x, residual, weight):
        return residual + F.linear(wrapped(x, Shard(1)), weight).full_tensor()

    def gathered(x, residual, weight):
        made = F.linear(wrapped(x), weight)
        return residual.repeat(1, 2) + made.full_tensor()

    def alone(x, residual, weight):
        return residual + F.linear(x, weight.to_local())

    x, residual, weight = (torch.randn(n, 64).bfloat16() for n in (T, T, 64))
    found = {}
    for step, placement in zip((summed, by_dtensor, gathered, alone), (1, 1, 0, 0), strict=True):
        torch._dynamo.reset()
        lowered = lower(step, (x, residual, wrapped(weight, Shard(placement))))
        misses = misses_of(lowered, "linear_residual")
        assert not any(miss.is_lost for miss in misses)
        found[step.__name__] = [m.code for m in misses], patterns_in(lowered, "linear_residual")
    assert found == {
        "summed": (["COLLECTIVE"], []),
        "by_dtensor": (["COLLECTIVE"], []),
        "gathered": ([], []),
        "alone": ([], ["linear_residual"]),
    }


def test_what_one_call_writes_is_not_said_of_another_placement():
    """A write in one call says nothing about another placement. A lookup in rows that two ranks
    share is masked in place when it is summed. A DTensor of the same shape that sums the parts of a
    linear is not."""

    def step(ids, table, x, weight):
        looked_up = F.embedding(wrapped(ids), table)
        looked_up = looked_up.redistribute(placements=[Replicate()]).to_local()
        made = F.linear(wrapped(x, Shard(1)), weight)
        return looked_up + made.redistribute(placements=[Replicate()]).to_local()

    table, x, weight = (torch.randn(n, 64).bfloat16() for n in (8, 2, 64))
    args = torch.tensor([1, 5]), wrapped(table, Shard(0)), x, wrapped(weight, Shard(1))
    assert codes_of(lower(step, args), "linear_residual") == {"COLLECTIVE"}


def test_pieces_that_are_joined_again_are_the_whole():
    """Splits a tensor and joins its pieces again, as transformers' plan for latents does."""

    def step(order):
        def run(m, x, k_cache, v_cache, slots):
            q, k, v = m.qkv(x)
            pieces = k.split([D - 4, 4], dim=-1)
            stored((k_cache, v_cache), slots, torch.cat([pieces[i] for i in order], -1), v)
            return q

        return run

    assert_as_eager(step((0, 1)))
    assert patterns_in(reports()[-1], "qkv") == ["qkv_cache"]
    torch._dynamo.reset()
    assert_as_eager(step((1, 0)))
    assert "qkv_cache" not in patterns_in(reports()[-1], "qkv")
