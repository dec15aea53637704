"""Tests the census of a graph.

The census looks at each product with a weight, softmax, write into memory from outside, and choice
of the largest. Each of these is in a match, is in a miss, is of no interest for a stated reason, or
is unaccounted.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tilewright.compiler import fuse, lower, reports

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

K, N, T = 64, 128, 4


@torch.library.custom_op("census_test::scrambled", mutates_args=())
def scrambled(x: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Computes a product that is recognisable only by its name."""
    return x @ codes.T


@scrambled.register_fake
def _(x, codes):
    return x.new_empty(*x.shape[:-1], codes.shape[0])


class Program(nn.Module):
    """Runs `step(m, x)`. It has weights to use; x is [T, K]."""

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
        self.register_buffer("last", torch.zeros(K), persistent=False)
        self.register_buffer("window", torch.zeros(2, K), persistent=False)
        self.register_buffer("positions", torch.zeros(T, dtype=torch.long), persistent=False)

    def forward(self, x):
        return self.step(self, x)


def lowered_step(step, tokens=T, **given):
    torch._dynamo.reset()
    model = Program(step).bfloat16().requires_grad_(False)
    model.wide.data = model.wide.float()
    return lower(model, (torch.zeros(tokens, K, dtype=torch.bfloat16),), **given)


def census(step, tokens=T):
    return lowered_step(step, tokens).census


def accounts(step, kind, tokens=T):
    """Returns (account, reason) for each point of one kind."""
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
    """Has two experts, and a shared expert that processes all tokens. The experts' results are
    added to its result."""
    best, ids = (x @ m.router).topk(1, dim=1)
    scores = torch.full_like(x[:, :2], -float("inf")).scatter_(1, ids, best).sigmoid()
    rows = torch.arange(T).repeat(2)[:, None].expand(-1, K)
    routed = (torch.gather(x, 0, rows) * scores.T.reshape(-1, 1)).view(2, T, K)
    inner = F.silu(torch.bmm(routed, m.stack)) * torch.bmm(routed, m.stack)
    out = m.square(x)
    out.scatter_add_(0, rows, torch.bmm(inner, m.stack).view(-1, K))
    return x + out


def heads_for_other_keys(m, x):
    """Normalises each head by a power of -1/2, which is no activation."""
    q = m.square(x).view(T, 2, 32).float()
    q = (q * torch.pow(q.pow(2).mean(-1, keepdim=True) + 1e-6, -0.5)).to(x.dtype)
    k = x.view(T, 2, 32)
    return F.scaled_dot_product_attention(*(t.transpose(0, 1) for t in (q, k, k)))


def gate_before_an_mlp(m, x):
    """Has a gate before an MLP, whose activation belongs to another linear than the gate."""
    y = x * torch.sigmoid(m.square(x))
    return m.down(y.repeat(1, 2) * F.gelu(m.up(x)))


def gate_in_float32(m, x):
    return m.up((x.float() * F.silu(m.square(x).float())).to(x.dtype))


def gate_rounded(m, x):
    return m.up(x * F.silu(m.square(x).float()).to(x.dtype))


def above_a_threshold(m, x):
    """Keeps the numbers above a threshold, which is computed from the row's mean and deviation."""
    gate = m.up(x)
    least = gate.mean(-1, keepdim=True) + 1.5 * gate.std(-1, keepdim=True)
    return m.down(F.gelu(F.relu(gate - least)))


def below_the_largest(m, x):
    gate = m.up(x)
    return m.down(F.gelu(F.relu(gate - gate.amax(-1, keepdim=True))))


def of_another_length(m, x):
    """Has a tensor whose length differs from that of the product."""
    y = m.square(x)
    return x + y * x.norm(dim=-1, keepdim=True) / y.pow(2).mean(-1, keepdim=True).sqrt()


def of_its_own_length(m, x):
    y = m.square(x)
    return x + y * y.amax(-1, keepdim=True)


def recurrence(m, x):
    key = m.square(x)
    return x + key * x.sigmoid(), key.T @ x


def indexed(m, x, read=F.scaled_dot_product_attention):
    """Lets each token attend to one key: the key with the largest of the token's own scores."""
    x = x.view(2, 2, K)
    scores = F.relu(x @ x.mT)
    chosen = scores.topk(1).indices
    hidden = torch.ones_like(scores, dtype=torch.bool).scatter(-1, chosen, False)
    return read(x, x, x, ~hidden)


def indexed_for_a_linear(m, x):
    return indexed(m, x, lambda q, k, v, mask: m.square(mask.to(q.dtype) @ v))


def indexed_by_others(m, x):
    """The near miss of scores of tokens with each other: here the scores are of two activations,
    and a linear reads them."""
    chosen = F.relu(x @ m.square(x).mT).topk(1).indices
    return m.square(torch.zeros(T, T, dtype=x.dtype).scatter(-1, chosen, 1.0) @ x)


def no_tokens(m, x):
    rows = torch.addmm(m.last, x[:0], m.square.weight.t())
    return m.square(F.silu(rows.view(2, 0, K))) + 1


def changed_in_slices(m, x):
    m.cache[..., -1] = 0.5
    F.relu(m.cache[0], inplace=True)
    torch._foreach_mul_([m.last], 2)
    torch.add(m.last, m.last, out=m.last)
    return mlp(m, x)


def sum_put_into_a_cache(m, x):
    """The near miss of a sum: `out=` writes the result of a linear into a cache."""
    made = m.square(x)
    torch.add(made[0], made[1], out=m.last)
    return x


def mixed_streams(m, x):
    """Has four streams for each token. Numbers that a linear computes mix the streams."""
    weights = m.square(x)[:, :16].view(T, 4, 4).softmax(-1) + 1e-6
    return (weights / weights.sum(-2, keepdim=True)) @ x.view(T, 4, 16)


def mixed_experts(m, x):
    """The near miss of streams: the weighted values are results of linears."""
    weights = m.square(x)[:, :2].softmax(-1)
    return m.up(weights[:, :1] * m.square(x + 1) + weights[:, 1:] * m.square(x + 2))


def looked_up(m, x):
    return x @ F.embedding(x.argmax(-1), m.square.weight).T


def decoded(m, x):
    """The near miss of tokens: codes of the model choose the rows of a weight."""
    return F.silu(x @ F.embedding(m.positions.repeat(32), m.square.weight).T) @ m.down.weight.T


def looked_up_matrices(m, x):
    """The near miss of tokens: each token looks up a matrix of the model."""
    chosen = F.embedding(x.argmax(-1), m.stack.flatten(1)).view(T, K, K)
    return m.up(F.silu(torch.bmm(chosen, x[:, :, None])[..., 0]))


def token_shift(m, x):
    out = mlp(m, x + m.last)
    m.last.copy_(m.square(x)[-1])
    return out


def left_by_a_product(m, x):
    """Nothing reads the product except a value that one step keeps for the next step."""
    m.last.copy_(m.square(x).cos()[-1])
    return x


def put_into_memory(m, x):
    """The near miss: a write that no rule knows reads the product."""
    m.cache[0].copy_(m.square(x)[0, :32].float().cos())
    return x


def last_tokens(m, x):
    """The near miss of one token: a window of a cache, without the cache's earlier contents."""
    out = mlp(m, x + m.window.sum(0))
    m.window.copy_(m.square(x)[-2:])
    return out


def spelled_softmax(m, x):
    q = m.square(x).view(1, T, K)
    scores = (q @ q.mT).float()
    e = torch.exp(scores - scores.amax(-1, keepdim=True))
    return (e / e.sum(-1, keepdim=True)).to(x.dtype) @ q


def unread(m, x):
    m.square(x).softmax(-1).topk(2)
    return mlp(m, x)


def read_from_memory(m, x):
    """The near miss of a value that nothing reads: here a write reads it, and the graph reads the
    written memory."""
    held = torch.zeros_like(x)
    held.copy_(m.square(m.square(x).softmax(-1)))
    return mlp(m, x) + held.cos()


#: Maps a program to the kind of points that are tested, the accounts of these points, and words of
#: the reasons.
CASES = {
    mlp: ("product", {"match"}, "linear_"),
    head: ("product", {"no interest"}, "a head"),
    convolved: ("product", {"no interest"}, "a convolution"),
    of_activations: ("product", {"no interest"}, "two activations"),
    attention: ("softmax", {"no interest"}, "without a mask"),
    other_activation: ("product", {"no interest", "match"}, ""),
    gated_result: ("product", {"no interest"}, "a gate: another tensor"),
    counted: ("write", {"no interest"}, "count"),
    no_tokens: ("product", {"no interest"}, ""),
    changed_in_slices: ("write", {"no interest"}, "element by element"),
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


#: Maps a program to the kind of the first tested point, its account, and words of the reason. The
#: programs come in pairs: in one the point is of no interest, and in the other a similar point is.
PAIRS = {
    heads_for_other_keys: ("product", "no interest", "a product alone"),
    gate_before_an_mlp: (
        "product",
        "no interest",
        "the activation that reads it is one that no op",
    ),
    gate_in_float32: ("product", "no interest", "a wider dtype"),
    gate_rounded: ("product", "match", "linear_activation"),
    above_a_threshold: ("product", "no interest", "a statistic or an extreme"),
    below_the_largest: ("product", "unaccounted", ""),
    of_another_length: ("product", "no interest", "a gate: another tensor"),
    of_its_own_length: ("product", "unaccounted", ""),
    recurrence: ("product", "no interest", ""),
    indexed: ("top-k", "no interest", "a sparse indexer"),
    indexed_for_a_linear: ("top-k", "no interest", "tokens with each other"),
    indexed_by_others: ("top-k", "unaccounted", ""),
    sum_put_into_a_cache: ("write", "unaccounted", ""),
    mixed_streams: ("softmax", "no interest", "not scores of queries with keys"),
    mixed_experts: ("softmax", "unaccounted", ""),
    looked_up: ("product", "no interest", "two activations"),
    decoded: ("product", "unaccounted", ""),
    looked_up_matrices: ("product", "unaccounted", ""),
    unread: ("softmax", "no interest", "nothing reads it"),
    read_from_memory: ("softmax", "unaccounted", ""),
    token_shift: ("write", "no interest", "one step leaves for the next"),
    left_by_a_product: ("product", "no interest", "a product alone"),
    put_into_memory: ("product", "unaccounted", ""),
    last_tokens: ("write", "unaccounted", ""),
}


@pytest.mark.parametrize("step", PAIRS, ids=lambda step: step.__name__)
def test_what_is_of_no_interest_and_what_looks_like_it(step):
    kind, told, words = PAIRS[step]
    account, why = accounts(step, kind)[0]
    assert (account, words in why) == (told, True), why


def test_many_tokens_are_the_library_s():
    assert {account for account, _ in accounts(mlp, "product", 16)} == {"match"}
    told = accounts(mlp, "product", 1024)
    assert {account for account, _ in told} == {"no interest"}
    assert all("tokens" in why for _, why in told)


def turned_heads(m, x):
    """Halves of heads of 32 columns are read. The weights have 64 rows."""
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
    """The near miss of a value from which tokens are sampled: here another product reads the
    softmax."""

    def near(m, x):
        return m.square(m.square(x).softmax(-1))

    assert [p.kind for p in census(near).unaccounted] == ["softmax"]


def test_a_write_without_an_account_is_told():
    """The near miss of a count: here numbers of a projection are written into memory that is no
    cache."""

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


def unrecognised(lowered):
    return [miss for miss in lowered.misses if miss.code == "UNRECOGNISED"]


def test_what_nothing_accounts_for_is_told_by_a_miss():
    lowered = lowered_step(opaque)
    (point,) = lowered.census.unaccounted
    (miss,) = unrecognised(lowered)
    assert (miss.pattern, miss.weight) == ("census", "advice")
    assert [node.name for node in miss.nodes] == [point.node]
    assert point.op in miss.message
    assert "inspect" in miss.hint
    assert unrecognised(lowered_step(mlp)) == []


def compiled_report(step, **options):
    torch._dynamo.reset()
    model = Program(step).bfloat16().requires_grad_(False)
    given = {"inner": "eager", "everywhere": True, **options}
    torch.compile(model, backend="tilewright", options=given)(
        torch.zeros(T, K, dtype=torch.bfloat16)
    )
    return reports()[-1]


@pytest.mark.parametrize("left_out", [{}, {"patterns": ["moe"]}, {"only": ["x.*"]}, {"fuel": 0}])
def test_what_options_leave_out_is_not_called_unrecognised(left_out):
    report = compiled_report(opaque, **left_out)
    assert "unaccounted" in {point.account for point in report.points}
    assert len(unrecognised(report)) == (not left_out)


def test_a_graph_break_speaks_for_what_is_not_recognised():
    def broken(m, x):
        y = opaque(m, x)
        torch._dynamo.graph_break()
        return y + 1

    lowered = lowered_step(broken)
    assert unrecognised(lowered) == []
    assert "GRAPH_BREAK" in {miss.code for miss in lowered.misses}


def test_a_census_that_fails_costs_no_fusion(monkeypatch):
    def fails(*_):
        raise RuntimeError("no count")

    monkeypatch.setattr(fuse, "census_of", fails)
    lowered = lowered_step(mlp)
    assert [miss.code for miss in lowered.misses if miss.pattern == "census"] == ["INTERNAL"]
    assert lowered.matches

    def broken(m, x):
        y = mlp(m, x)
        torch._dynamo.graph_break()
        return y + 1

    assert "INTERNAL" in {miss.code for miss in lowered_step(broken).misses}


def test_kept_reports_have_the_census():
    assert {point.kind for point in compiled_report(mlp).points} == {"product"}


def test_a_projection_in_front_of_a_break_is_not_called_a_head_alone():
    def broken(m, x):
        q = m.square(x)
        torch._dynamo.graph_break()
        m.cache.index_copy_(0, m.positions[:T], q[:, :32].cos())
        return mlp(m, q)

    points = census(broken).points
    (why,) = {p.why for p in points if (p.kind, p.account) == ("product", "no interest")}
    assert "it is a head, or a graph break separates" in why
