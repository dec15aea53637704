"""Tests the pattern `moe_router`: every spelling of a router becomes one op that chooses no worse
than the model. A graph that only looks like a router is not changed, and the miss says why."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.agreement import assert_no_worse
from tests.found import codes_of, matches_of
from tests.models.moe_idioms import build
from tilewright.compiler import lower

T, K, E, S = 6, 32, 16, 3
GROUPS, KEPT = 4, 2


def tensors(dtype=torch.bfloat16):
    """Returns x [T, K], weight [E, K], bias and correction [E]. The logits differ by about 2."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(T, K, generator=generator)
    weight = torch.randn(E, K, generator=generator) * 0.5
    bias, correction = torch.randn(2, E, generator=generator) * 0.1
    return tuple(t.to(dtype) for t in (x, weight, bias, correction))


def mask_of(ids, scores):
    groups = torch.zeros_like(scores).scatter_(1, ids, 1)
    return groups.unsqueeze(-1).expand(-1, GROUPS, E // GROUPS).reshape(-1, E).bool()


def best_groups(choice):
    scores = choice.view(-1, GROUPS, E // GROUPS).topk(2, -1)[0].sum(-1)
    return mask_of(scores.topk(KEPT, -1, sorted=False)[1], scores)


def qwen(x, w, b, c):
    logits = F.linear(x, w)
    top, ids = torch.topk(F.softmax(logits, dtype=torch.float, dim=-1), S, dim=-1)
    top /= top.sum(dim=-1, keepdim=True)
    return top.to(logits.dtype), ids


def mixtral(x, w, b, c):
    top, ids = torch.topk((x @ w.t()).float().softmax(-1), S)
    return top / top.sum(-1, keepdim=True), ids


def gpt_oss(x, w, b, c):
    top, ids = torch.topk(F.linear(x, w, b), S, dim=-1)
    return F.softmax(top, dim=1, dtype=top.dtype), ids


def granite(x, w, b, c):
    top, ids = F.linear(x, w).float().topk(S, dim=-1)
    return torch.softmax(top, dim=-1).type_as(x), ids


def deepseek_v2(x, w, b, c):
    scores = F.linear(x.float(), w.float()).softmax(-1, dtype=torch.float32)
    groups = scores.view(-1, GROUPS, E // GROUPS).max(dim=-1).values
    mask = mask_of(groups.topk(KEPT, -1)[1], groups)
    top, ids = scores.masked_fill(~mask, 0.0).topk(S, -1, sorted=False)
    return top * 16.0, ids


def deepseek_v3(x, w, b, c):
    scores = F.linear(x.float(), w.float()).sigmoid()
    choice = scores + c
    choice = choice.masked_fill(~best_groups(choice), float("-inf"))
    ids = torch.topk(choice, S, dim=-1, sorted=False)[1]
    top = scores.gather(1, ids)
    top /= top.sum(dim=-1, keepdim=True) + 1e-20
    return top * 2.5, ids


def where_kept(x, w, b, c):
    scores = F.linear(x, w).float().sigmoid()
    choice = torch.where(best_groups(scores), scores, -torch.inf)
    top, ids = choice.topk(S)
    return 2.5 * top, ids


def ernie(x, w, b, c):
    scores = F.softmax(F.linear(x.float(), w.float()), dim=1, dtype=torch.float)
    ids = torch.topk(scores + c.float(), S, dim=-1)[1]
    top = torch.gather(scores, dim=-1, index=ids)
    return top / torch.clamp(top.sum(dim=-1, keepdim=True), min=1e-12), ids


def llama4(x, w, b, c):
    top, ids = torch.topk(F.linear(x, w), 1, dim=1)
    return torch.sigmoid(top.float()), ids


def sigmoid_of_one_group_s(x, w, b, c):
    logits = F.linear(x, w)
    by_group = logits.view(-1, GROUPS, E // GROUPS).amax(-1)
    mask = mask_of(by_group.topk(KEPT)[1], by_group)
    top, ids = logits.masked_fill(~mask, float("-inf")).topk(S)
    return top.sigmoid(), ids


def sigmoid_of_groups_by_logits(x, w, b, c):
    logits = F.linear(x, w)
    top, ids = logits.masked_fill(~best_groups(logits), float("-inf")).topk(S)
    return top.sigmoid(), ids


def bare(x, w, b, c):
    top, ids = torch.topk(F.linear(x, w), S)
    return torch.tanh(top), ids


def divided_by_sums_of_logits(x, w, b, c):
    """Divides by sums that may be below zero."""
    top, ids = (F.linear(x, w) - 8.0).topk(S)
    return top / top.sum(-1, keepdim=True), ids


def logits_read(x, w, b, c):
    logits = F.linear(x, w)
    top, ids = torch.topk(logits.float().softmax(-1), S)
    return top, ids, logits


#: For each spelling, the facts that reports show in addition to `logits="computed"`.
SPELLINGS = {
    qwen: {"scores": "softmax", "normalised": "yes"},
    mixtral: {"scores": "softmax", "normalised": "yes", "weights": "float32"},
    gpt_oss: {"scores": "softmax_of_chosen", "weights": "bfloat16"},
    granite: {"scores": "softmax_of_chosen"},
    deepseek_v2: {"scores": "softmax", "groups": "2 of 4", "x": "bfloat16[6,32]"},
    deepseek_v3: {"scores": "sigmoid", "groups": "2 of 4", "correction": "yes",
                  "normalised": "yes"},
    where_kept: {"scores": "sigmoid", "groups": "2 of 4", "correction": "no"},
    ernie: {"scores": "softmax", "correction": "yes", "normalised": "yes"},
    llama4: {"scores": "sigmoid", "slots": 1},
    sigmoid_of_one_group_s: {"scores": "sigmoid", "groups": "2 of 4"},
    # The order of sums of two logits may differ from the order of sums of their sigmoids.
    sigmoid_of_groups_by_logits: {"scores": "logits", "groups": "2 of 4"},
    bare: {"scores": "logits"},
    divided_by_sums_of_logits: {"scores": "logits", "normalised": "yes", "logits": "given"},
    logits_read: {"scores": "softmax", "logits": "given", "x": "bfloat16[6,16]"},
}  # fmt: skip


def fused(step, args, **options):
    torch._dynamo.reset()
    options = {"inner": "eager", "patterns": ["moe_router"]} | options
    with torch.no_grad():
        return torch.compile(step, backend="tilewright", options=options)(*args)


def dense(weights, ids):
    """Returns the weights [T, E] by expert, because top-k need not be in order."""
    return torch.zeros(T, E, dtype=weights.dtype).scatter(1, ids, weights)


@pytest.mark.parametrize("step", SPELLINGS, ids=lambda step: step.__name__)
def test_every_spelling_is_one_op_that_chooses_no_worse(step):
    torch._dynamo.reset()
    (site,) = matches_of(lower(step, tensors()), "moe_router")
    wanted = {"logits": "computed"} | SPELLINGS[step]
    assert {name: site.shapes[name] for name in wanted} == wanted
    ours, eager = fused(step, tensors()), step(*tensors())
    exact = step(*(t.double() for t in tensors()))
    assert torch.equal(ours[1].sort(1)[0], exact[1].sort(1)[0])
    assert ours[1].dtype == eager[1].dtype
    assert ours[0].dtype == eager[0].dtype
    assert_no_worse(*(dense(*run[:2]) for run in (ours, eager, exact)), step.__name__)


def test_experts_that_eager_s_rounding_makes_equal_are_told_apart():
    """bfloat16 would round two logits to the same number. The op chooses the larger one, at any
    position."""
    x = torch.tensor([[1.0, 2.0**-9]]).bfloat16()
    for best in (0, 1):
        weight = torch.full((E, 2), -1.0)
        weight[:2] = torch.tensor([[1.0, float(best == 0)], [1.0, float(best == 1)]])
        weight = weight.bfloat16()
        logits = F.linear(x, weight)
        assert logits[0, 0] == logits[0, 1]
        step = lambda x, w, b, c: torch.topk(F.linear(x, w).float().softmax(-1), 1)  # noqa: E731
        assert int(fused(step, (x, weight, None, None))[1]) == best


def test_a_router_and_the_experts_behind_it_are_both_fused():
    module, args = build("plain")
    torch._dynamo.reset()
    with torch.no_grad():
        lowered = lower(module, args)
    assert {site.op for site in matches_of(lowered, "moe")} == {"fused_moe", "moe_router"}
    names = {node.name.partition("_default")[0] for node in lowered.graphs[0].after.graph.nodes}
    assert {"moe_router", "fused_moe"} <= names
    assert not names & {"topk", "softmax"}, "the choice is still computed by the graph"


# --- near misses ----------------------------------------------------------------------------------


def smallest(x, w, b, c):
    return torch.topk(F.linear(x, w).softmax(-1), S, largest=False)


def over_tokens(x, w, b, c):
    return torch.topk(F.linear(x, w).softmax(0), S)


def some_experts(x, w, b, c):
    return torch.topk(F.linear(x, w).softmax(-1)[:, :8], S)


def corrected_weights(x, w, b, c):
    return torch.topk(F.linear(x, w).sigmoid() + c, S)


def zeros_for_other_groups(x, w, b, c):
    scores = F.linear(x, w).sigmoid()
    choice = scores + c
    ids = choice.masked_fill(~best_groups(choice), 0.0).topk(S)[1]
    return scores.gather(1, ids), ids


def worst_groups(x, w, b, c):
    scores = F.linear(x, w).sigmoid()
    by_group = scores.view(-1, GROUPS, E // GROUPS).amax(-1)
    mask = mask_of(by_group.topk(KEPT, -1, largest=False)[1], by_group)
    return scores.masked_fill(~mask, float("-inf")).topk(S)


def groups_of_others(x, w, b, c):
    """Repeats the number of each group for other experts than those of the group."""
    scores = F.linear(x, w).sigmoid()
    by_group = scores.view(-1, GROUPS, E // GROUPS).amax(-1)
    kept = torch.zeros_like(by_group).scatter(1, by_group.topk(KEPT)[1], 1).bool()
    mask = kept.unsqueeze(1).expand(-1, E // GROUPS, GROUPS).reshape(-1, E)
    return scores.masked_fill(~mask, float("-inf")).topk(S)


def three_of_a_group(x, w, b, c):
    scores = F.linear(x, w).sigmoid()
    by_group = scores.view(-1, GROUPS, E // GROUPS).topk(3, -1)[0].sum(-1)
    mask = mask_of(by_group.topk(KEPT)[1], by_group)
    return scores.masked_fill(~mask, float("-inf")).topk(S)


def groups_of_other_tokens(x, w, b, c):
    """Chooses the best tokens of each group instead of the best groups of each token."""
    scores = F.linear(x[:KEPT], w).sigmoid()
    by_group = scores.view(-1, GROUPS, E // GROUPS).amax(-1)
    mask = mask_of(by_group.topk(KEPT, 0)[1], by_group)
    return scores.masked_fill(~mask, 0.0).topk(S)


def ones_multiplied_with_zeros(x, w, b, c):
    scores = F.linear(x, w).sigmoid()
    by_group = scores.view(-1, GROUPS, E // GROUPS).amax(-1)
    zeros, ids = torch.zeros_like(by_group), by_group.topk(KEPT)[1]
    kept = zeros.scatter(1, ids, 1.0, reduce="multiply").unsqueeze(-1)
    mask = kept.expand(-1, -1, E // GROUPS).reshape(-1, E).bool()
    return scores.masked_fill(~mask, 0.0).topk(S)


def some_experts_behind_a_mask(x, w, b, c):
    scores = F.linear(x, w).sigmoid()
    choice = scores.masked_fill(~best_groups(scores), float("-inf"))
    return choice[:, E // 2 :].float().topk(S)


def in_float64(x, w, b, c):
    top, ids = F.linear(x.double(), w.double()).softmax(-1).topk(S)
    return top.float() * 2.0, ids


def too_few_kept(x, w, b, c):
    scores = F.linear(x, w).softmax(-1)
    by_group = scores.view(-1, GROUPS, E // GROUPS).amax(-1)
    mask = mask_of(by_group.topk(1)[1], by_group)
    return scores.masked_fill(~mask, 0.0).topk(E // GROUPS + 1)


def other_scores(x, w, b, c):
    logits = F.linear(x, w)
    ids = torch.topk(logits.sigmoid() + c, S)[1]
    return logits.softmax(-1).gather(1, ids), ids


def scores_changed_in_place(x, w, b, c):
    """Changes the scores in place through a view, which hides other groups. The gathered scores
    change, too."""
    scores = F.linear(x, w).sigmoid()
    by_group = scores.view(-1, GROUPS, E // GROUPS).amax(-1)
    mask = mask_of(by_group.topk(KEPT)[1], by_group)
    ids = scores.view(-1, E).masked_fill_(~mask, float("-inf")).topk(S)[1]
    return scores.gather(1, ids), ids


def probabilities_read(x, w, b, c):
    scores = F.linear(x, w).softmax(-1)
    return (*torch.topk(scores, S), scores.mean(0))


NEAR_MISSES = {
    smallest: "ROUTER_CHOICE",
    over_tokens: "ROUTER_CHOICE",
    some_experts: "ROUTER_CHOICE",
    corrected_weights: "ROUTER_WEIGHTS",
    other_scores: "ROUTER_WEIGHTS",
    zeros_for_other_groups: "ROUTER_GROUPS",
    worst_groups: "ROUTER_GROUPS",
    groups_of_others: "ROUTER_GROUPS",
    three_of_a_group: "ROUTER_GROUPS",
    groups_of_other_tokens: "ROUTER_GROUPS",
    ones_multiplied_with_zeros: "ROUTER_GROUPS",
    some_experts_behind_a_mask: "ROUTER_CHOICE",
    in_float64: "DTYPE",
    too_few_kept: "ROUTER_GROUPS",
    probabilities_read: "ESCAPES",
    scores_changed_in_place: "ROUTER_WEIGHTS",
}


@pytest.mark.parametrize("step", NEAR_MISSES, ids=lambda step: step.__name__)
def test_near_misses_say_what_is_wrong(step):
    torch._dynamo.reset()
    lowered = lower(step, tensors())
    assert not matches_of(lowered, "moe_router"), str(lowered)
    assert codes_of(lowered, "moe_router") == {NEAR_MISSES[step]}
    misses = [miss for miss in lowered.misses if miss.pattern == "moe_router"]
    assert not any(miss.is_lost for miss in misses)
    changed = any("changed in place" in miss.message for miss in misses)
    assert changed == (step is scores_changed_in_place)


def test_float64_is_refused():
    torch._dynamo.reset()
    lowered = lower(mixtral, tensors(torch.float64))
    assert codes_of(lowered, "moe_router") == {"DTYPE"}


def test_experts_that_are_sorted_by_but_not_chosen_by_a_topk_are_told():
    """Experts by which rows are sorted, but which no topk chose, are reported. phimoe chooses the
    largest score, and then the largest of the others."""

    def step(x, w, b, c):
        scores = F.linear(x, w)
        top, first = scores.max(-1, keepdim=True)
        others = scores.scatter(-1, first, float("-inf"))
        second = others.max(-1, keepdim=True)[1]
        ids = torch.cat((first, second), -1)
        weights = scores.softmax(-1).gather(-1, first), others.softmax(-1).gather(-1, second)
        return top, torch.argsort(ids.flatten()), torch.cat(weights, -1)

    torch._dynamo.reset()
    lowered = lower(step, tensors())
    assert codes_of(lowered, "moe_router") == {"ROUTER_CHOICE"}
    softmaxes = [point.why for point in lowered.census.points if point.kind == "softmax"]
    assert softmaxes == ["moe_router ROUTER_CHOICE"] * 2


def test_a_choice_of_words_is_no_router():
    def step(x, w, b, c):
        return torch.topk(F.linear(x, w).softmax(-1), S)

    torch._dynamo.reset()
    lowered = lower(step, (torch.ones(T, K), torch.ones(2048, K), None, None))
    assert not matches_of(lowered, "moe_router") + list(codes_of(lowered, "moe_router"))


@pytest.mark.parametrize("projected", [False, True])
def test_scores_of_tokens_with_each_other_are_no_router(projected):
    """Scores of tokens with each other are no router. They may belong to a sparse mask, which an
    attention or another operation reads."""

    def step(x, w, b, c):
        x = F.linear(x, w).relu() if projected else x
        chosen = F.relu(x @ x.T).topk(2).indices
        return F.silu(torch.zeros(T, T, dtype=x.dtype).scatter(1, chosen, 1.0) @ x)

    torch._dynamo.reset()
    lowered = lower(step, tensors())
    assert not matches_of(lowered, "moe_router") + list(codes_of(lowered, "moe_router"))
    choices = [point.account for point in lowered.census.points if point.kind == "top-k"]
    assert choices == ["no interest"]


def test_a_choice_that_nothing_reads_is_no_router():
    """A choice that nothing reads is no router. Dynamo keeps the call, and export drops it."""

    def step(x, w, b, c):
        scores = F.linear(x, w).softmax(-1)
        torch.topk(scores, S)
        return scores

    torch._dynamo.reset()
    lowered = lower(step, tensors())
    assert not matches_of(lowered, "moe_router") + list(codes_of(lowered, "moe_router"))


def test_what_follows_the_weights_and_is_not_known_stays():
    """Unknown operations after the weights stay in the graph. Here the weights are normalised
    twice, and the second norm stays."""

    def step(x, w, b, c):
        top, ids = mixtral(x, w, b, c)
        top = top * 2.0
        return top / top.sum(-1, keepdim=True), ids

    ours, eager = fused(step, tensors()), step(*tensors())
    exact = step(*(t.double() for t in tensors()))
    assert_no_worse(*(dense(*run) for run in (ours, eager, exact)), "normalised twice")


def test_a_sum_of_logits_that_is_bounded_by_zero_stays():
    def step(x, w, b, c):
        top, ids = (F.linear(x, w) - 8.0).topk(S)
        return top / (top.sum(-1, keepdim=True).clamp(min=0.0) + 0.5), ids

    ours, eager = fused(step, tensors(torch.float32)), step(*tensors(torch.float32))
    torch.testing.assert_close(ours, eager)
    (site,) = matches_of(lower(step, tensors(torch.float32)), "moe_router")
    assert site.shapes["normalised"] == "no"


def test_weights_divided_in_place_under_two_names_stay_what_they_are():
    """Divides the weights in place through a view, and then reads them as the topk's own values.
    The result must have the divided weights."""

    def step(x, w, b, c):
        top, ids = torch.topk(F.linear(x, w).float().softmax(-1), S)
        again = top[:]
        again /= top.sum(-1, keepdim=True)
        return top * 2.0, ids

    ours, eager = fused(step, tensors()), step(*tensors())
    torch.testing.assert_close(ours[0], eager[0], rtol=2**-6, atol=2**-6)
    assert torch.equal(ours[1], eager[1])
