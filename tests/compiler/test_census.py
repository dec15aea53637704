"""The census of a graph: every product with a weight, softmax, write into memory from outside and
choice of the largest is in a match, in a miss, of no interest for a reason, or unaccounted."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tilewright.compiler import lower

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

K, N, T = 64, 128, 4


@torch.library.custom_op("census_test::scrambled", mutates_args=())
def scrambled(x: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """A product that nothing but its name tells of."""
    return x @ codes.T


@scrambled.register_fake
def _(x, codes):
    return x.new_empty(*x.shape[:-1], codes.shape[0])


class Program(nn.Module):
    """`step(m, x)` with weights to use, x [T, K]."""

    def __init__(self, step):
        super().__init__()
        self.step = step
        self.up = nn.Linear(K, N, bias=False)
        self.down = nn.Linear(N, K, bias=False)
        self.square = nn.Linear(K, K, bias=False)
        self.stack = nn.Parameter(torch.zeros(2, K, K))
        self.router = nn.Parameter(torch.zeros(K, 2))
        self.wide = nn.Parameter(torch.zeros(K, K, dtype=torch.float32))
        self.conv = nn.Conv1d(K, K, 1, bias=False)
        self.vocabulary = nn.Linear(K, 2048, bias=False)
        self.register_buffer("count", torch.zeros(1, dtype=torch.long), persistent=False)
        self.register_buffer("turns", torch.ones(16, 2, 2), persistent=False)
        self.register_buffer("cache", torch.zeros(8, 32), persistent=False)
        self.register_buffer("positions", torch.zeros(T, dtype=torch.long), persistent=False)

    def forward(self, x):
        return self.step(self, x)


def census(step, tokens=T):
    torch._dynamo.reset()
    model = Program(step).bfloat16().requires_grad_(False)
    model.wide.data = model.wide.float()
    return lower(model, (torch.zeros(tokens, K, dtype=torch.bfloat16),)).census


def accounts(step, kind, tokens=T):
    """(account, why) of each point of one kind."""
    points = census(step, tokens).points
    return [(point.account, point.why) for point in points if point.kind == kind]


def mlp(m, x):
    return x + m.down(F.silu(m.up(x)))


def head(m, x):
    return m.up(x).float() * 0.5


def convolved(m, x):
    return m.conv(x.T[None]).relu()


def of_activations(m, x):
    return x @ x.T


def attention(m, x):
    q, k, v = (m.square(t).view(1, T, 2, 32).transpose(1, 2) for t in (x, x + 1, x + 2))
    return F.scaled_dot_product_attention(q, k, v)


def other_activation(m, x):
    return x + m.down(torch.tanh(m.up(x)))


def gated_result(m, x):
    return x + m.square(x) * torch.sigmoid(x.sum(-1, keepdim=True))


def counted(m, x):
    m.count.add_(1)
    return mlp(m, x)


def sampled(m, x):
    logits = m.vocabulary(x)
    values, ids = logits.topk(4)
    return values.softmax(-1), ids


def greedy(m, x):
    return m.vocabulary(x).argmax(-1)


def sorted_integers(m, x):
    return mlp(m, x) * m.positions.sort().values[:, None]


def computed_weight(m, x):
    return x + F.linear(x, (m.wide * 2).to(x.dtype))


def shared_expert(m, x):
    """Two experts, and one for all tokens to whose result theirs are added."""
    best, ids = (x @ m.router).topk(1, dim=1)
    scores = torch.full_like(x[:, :2], -float("inf")).scatter_(1, ids, best).sigmoid()
    rows = torch.arange(T).repeat(2)[:, None].expand(-1, K)
    routed = (torch.gather(x, 0, rows) * scores.T.reshape(-1, 1)).view(2, T, K)
    inner = F.silu(torch.bmm(routed, m.stack)) * torch.bmm(routed, m.stack)
    out = m.square(x)
    out.scatter_add_(0, rows, torch.bmm(inner, m.stack).view(-1, K))
    return x + out


def spelled_softmax(m, x):
    q = m.square(x).view(1, T, K)
    scores = (q @ q.mT).float()
    e = torch.exp(scores - scores.amax(-1, keepdim=True))
    return (e / e.sum(-1, keepdim=True)).to(x.dtype) @ q


#: Program -> the kind of its points that is meant, their accounts, words of the reason.
CASES = {
    mlp: ("product", {"match"}, "linear_"),
    head: ("product", {"no interest"}, "a head"),
    convolved: ("product", {"no interest"}, "a convolution"),
    of_activations: ("product", {"no interest"}, "two activations"),
    attention: ("softmax", {"no interest"}, "without a mask"),
    other_activation: ("product", {"no interest", "match"}, ""),
    gated_result: ("product", {"no interest"}, "a gate behind it"),
    counted: ("write", {"no interest"}, "count"),
    sampled: ("top-k", {"no interest"}, "words"),
    greedy: ("top-k", {"no interest"}, "words"),
    sorted_integers: ("top-k", {"no interest"}, "integers"),
    computed_weight: ("product", {"miss"}, "linear_residual LINEAR_FORM"),
    spelled_softmax: ("softmax", {"miss"}, "cache_attention ATTENTION_FORM"),
}


@pytest.mark.parametrize("step", CASES, ids=lambda step: step.__name__)
def test_a_point_has_its_account(step):
    kind, told, words = CASES[step]
    found = accounts(step, kind)
    assert found
    assert {account for account, _ in found} == told
    assert all(words in why for _, why in found)


def test_many_tokens_are_the_library_s():
    assert {account for account, _ in accounts(mlp, "product", 16)} == {"match"}
    told = accounts(mlp, "product", 1024)
    assert {account for account, _ in told} == {"no interest"}
    assert all("tokens" in why for _, why in told)


def turned_heads(m, x):
    """Halves of heads of 32 columns are read, of weights of 64 rows."""
    q, k, v = (m.square(t).view(-1, 2, 32).transpose(0, 1) for t in (x, x + 1, x + 2))
    q = torch.cat((q[..., 16:], q[..., :16]), -1)
    k = (k.unflatten(-1, (16, 1, 2)) * m.turns).sum(-1).flatten(-2)
    return F.scaled_dot_product_attention(q, k, v)


def ungated(m, x):
    return m.down(F.mish(m.up(x)))


@pytest.mark.parametrize("tokens", [4, 32])
@pytest.mark.parametrize("step", [turned_heads, ungated])
def test_what_is_neither_gated_nor_narrow_is_not_called_so(step, tokens):
    reasons = [why for account, why in accounts(step, "product", tokens) if account != "match"]
    assert reasons
    assert not any("multiplied" in why or "fewer" in why for why in reasons), reasons


def test_what_the_results_of_a_match_are_added_to_is_read_by_it():
    why = [why for account, why in accounts(shared_expert, "product") if account != "match"]
    assert why
    assert all("a fused op reads" in reason for reason in why), why
    assert census(shared_expert).unaccounted == ()


def opaque(m, x):
    return scrambled(F.silu(m.up(x)), m.down.weight).tanh()


def test_an_unknown_product_with_a_parameter_is_unaccounted():
    (left,) = census(opaque).unaccounted
    assert (left.kind, left.account, left.why) == ("product", "unaccounted", "")
    assert "scrambled" in left.op
    assert left.source.startswith("test_census.py:")


def test_an_unknown_operator_without_a_weight_is_no_point():
    assert census(lambda m, x: scrambled(mlp(m, x), x)).unaccounted == ()


def test_an_attention_that_no_pattern_reads_is_no_head():
    """The near miss of what is sampled: another product reads the softmax."""

    def near(m, x):
        return m.square(m.square(x).softmax(-1))

    assert [p.kind for p in census(near).unaccounted] == ["softmax"]


def test_a_write_without_an_account_is_told():
    """The near miss of a count: numbers of a projection, into memory that is no cache."""

    def near(m, x):
        m.cache[0].copy_(m.square(x)[0, :32].float().cos())
        return mlp(m, x)

    assert [p.kind for p in census(near).unaccounted if p.kind == "write"] == ["write"]


def test_a_miss_speaks_for_its_writes_and_their_projections():
    class Squared(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(64, 64, bias=False) for _ in range(3))

        def forward(self, x, keys, values, at):
            k, v = self.k(x).view(2, 2, 32) ** 2, self.v(x).view(2, 2, 32)
            keys.index_copy_(0, at, k)
            values.index_copy_(0, at, v)
            q = self.q(x).view(2, 2, 32)
            return F.scaled_dot_product_attention(*(t.transpose(0, 1) for t in (q, keys, values)))

    caches = [torch.zeros(8, 2, 32) for _ in range(2)]
    lowered = lower(Squared(), (torch.zeros(2, 64), *caches, torch.arange(2)))
    told = {(p.kind, p.why) for p in lowered.census.points if p.account == "miss"}
    assert told == {("product", "qkv_cache K_PATH")}
    assert lowered.census.unaccounted == ()


def test_counts_and_json_hold_every_point():
    found = census(counted)
    assert sum(found.counts().values()) == len(found.points) == 3
    data = found.as_dict()
    assert sum(entry["count"] for entry in data["counts"]) == len(found.points)
    products = [entry for entry in data["counts"] if entry["kind"] == "product"]
    assert {entry["account"] for entry in products} == {"match"}
    assert data["unaccounted"] == []


def test_a_break_speaks_for_what_is_left_of_its_graphs():
    def broken(m, x):
        y = opaque(m, x)
        torch._dynamo.graph_break()
        return y + 1

    whole = census(opaque)
    assert len(whole.unaccounted) == 1
    cut = census(broken)
    assert cut.unaccounted == ()
    assert ("miss", "capture GRAPH_BREAK") in {(p.account, p.why) for p in cut.points}


def test_a_projection_in_front_of_a_break_is_not_called_a_head_alone():
    def broken(m, x):
        q = m.square(x)
        torch._dynamo.graph_break()
        m.cache.index_copy_(0, m.positions[:T], q[:, :32].cos())
        return mlp(m, q)

    points = census(broken).points
    (why,) = {p.why for p in points if (p.kind, p.account) == ("product", "no interest")}
    assert "a head, or what a graph break parts" in why
