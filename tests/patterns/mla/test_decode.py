"""Tests the pattern `mla_decode`: absorbed attention in every spelling is fused.

No result is less accurate than eager's against float64, and no key is read that no query sees.
Attention that is only similar is missed by name.
"""

from __future__ import annotations

import pytest
import torch

from tests.agreement import assert_no_worse, cloned, upcast
from tests.found import codes_of, matches_of, misses_of, patterns_in
from tests.models.mla_absorbed import HIDDEN, SPELLINGS, build
from tilewright.compiler import lower, reports

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

WEIGHTS = ("joined", "apart", "fp8")


def in_float64(model, args):
    """Computes the result of the same model with the same numbers in float64."""
    exact, _ = build_like(model, dtype=torch.float64)
    wide = dict(model.named_parameters())
    for name, parameter in exact.named_parameters():
        if parameter.dtype == torch.float64:
            parameter.data = wide[name].double()
    return exact(*(upcast(a) for a in args))


def build_like(model, **changes):
    axes = {**vars(model.axes), **changes}
    return build(model.attend.__name__, **axes)


def check_fused(model, args):
    """Returns the fused site of a model, after a check that the result is no less accurate than
    eager's."""
    expected, exact = model(*cloned(args)), in_float64(model, args)
    compiled = torch.compile(model, backend="tilewright", options={"inner": "eager"})
    actual = compiled(*cloned(args))
    assert_no_worse(actual, expected, exact, model.attend.__name__)
    return site_of(reports()[-1])


def site_of(report):
    assert misses_of(report, "mla", "attention") == []
    (site,) = matches_of(report, "mla", "attention")
    assert site.pattern == "mla_decode"
    return site


@pytest.mark.parametrize(
    ("spelling", "weight"),
    [
        (spelling, weight)
        for row, spelling in enumerate(SPELLINGS)
        for column, weight in enumerate(WEIGHTS)
        if spelling in ("einsum", "bmm") or row % 3 == column
    ],
)
def test_every_spelling_is_fused_and_no_worse_than_eager(spelling, weight):
    site = check_fused(*build(spelling, weight=weight))
    assert site.shapes["mask"] == "causal by position"
    assert site.shapes["weight"] == ("fp8" if weight == "fp8" else "dense")


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.float32], ids=lambda dtype: str(dtype).removeprefix("torch.")
)
def test_other_dtypes_are_fused_too(dtype):
    check_fused(*build("matmul", dtype=dtype))


SIZES = ({"queries": 1}, {"batch": 1}, {"batch": 1, "queries": 1})


@pytest.mark.parametrize(
    ("spelling", "sizes"),
    [
        pytest.param(spelling, sizes, id=f"{spelling}-{'-'.join(sizes)}")
        for row, spelling in enumerate(SPELLINGS)
        for column, sizes in enumerate(SIZES)
        if spelling == "matmul" or row % 3 == column
    ],
)
def test_one_query_or_one_sequence(spelling, sizes):
    check_fused(*build(spelling, **sizes))


@pytest.mark.parametrize("weight", WEIGHTS)
def test_weights_reach_the_op_without_a_copy(weight):
    """Weights reach the op without a copy: rows of one parameter, and codes, are passed as they
    are. Separate halves are passed as two tensors."""
    model, args = build("bmm", weight=weight)
    (graph,) = lower(model, args).graphs
    (call,) = (n for n in graph.after.graph.nodes if "mla_decode" in str(n.target))
    given = [call.args[3], *(call.kwargs[n] for n in ("v_weight",) if n in call.kwargs)]
    assert [n.op for n in given] == ["placeholder"] * (2 if weight == "apart" else 1)


def test_keys_that_nobody_sees_may_hold_anything():
    model, (x, entries, positions) = build("einsum")
    planted = entries.clone()
    planted[:, int(positions.max()) + 1 :] = torch.nan
    assert planted.isnan().any()
    with torch.no_grad():
        compiled = torch.compile(model, backend="tilewright", options={"inner": "eager"})
        expected, actual = (compiled(x, e, positions) for e in (entries, planted))
    assert site_of(reports()[-1])
    assert torch.equal(actual, expected)


def test_counts_may_be_symbols():
    """One graph serves every number of queries and keys."""
    compiled = None
    for queries, keys in ((3, 12), (5, 17)):
        model, args = build("matmul", queries=queries, keys=keys)
        if compiled is None:
            compiled = torch.compile(
                model, backend="tilewright", dynamic=True, options={"inner": "eager"}
            )
        torch._dynamo.mark_dynamic(args[0], 1)
        torch._dynamo.mark_dynamic(args[1], 1)
        torch.testing.assert_close(compiled(*args), model(*args), rtol=0.05, atol=0.02)
    assert site_of(reports()[-1]).shapes["keys"] == "T"


def test_a_query_put_into_fresh_memory_is_fused():
    """A query is assembled in new memory. The writes of its two parts disappear together with this
    memory."""

    def attend(model, q_nope, q_rope, entries, seen):
        w_uk, w_uv = model.halves
        rank = model.axes.kv_rank
        q = q_rope.new_empty(*q_rope.shape[:-1], entries.shape[-1])
        q[..., :rank] = torch.einsum("bshn,hnl->bshl", q_nope, w_uk)
        q[..., rank:] = q_rope
        scores = torch.einsum("bshd,bkd->bhsk", q, entries) * model.scale
        out = weighted(scores.masked_fill(~seen, HIDDEN), entries[..., :rank])
        return torch.einsum("bshl,hvl->bshv", out, w_uv)

    model, args = build("wide_values")
    model.attend = attend
    expected = model(*args)
    found = lower(model, args)
    assert site_of(found)
    names = {str(node.target) for node in found.graphs[0].after.graph.nodes}
    assert not names & {"new_empty", "_operator.setitem", "<built-in function setitem>"}
    compiled = torch.compile(model, backend="tilewright", options={"inner": "eager"})
    torch.testing.assert_close(compiled(*args), expected, rtol=0.05, atol=0.02)


# --- near misses ----------------------------------------------------------------------------------


def attend_of(change):
    """Returns a model whose attention is `change`, a function from (q_latent, q_rope, latents,
    rope_keys, seen, scale) to o_latent [B, S, H, L]."""

    def attend(model, q_nope, q_rope, entries, seen):
        w_uk, w_uv = model.halves
        q_latent = torch.einsum("bshn,hnl->bshl", q_nope, w_uk)
        latents, rope_keys = entries.split([model.axes.kv_rank, model.axes.rotated], dim=-1)
        out = change(q_latent, q_rope, latents, rope_keys, seen, model.scale)
        return torch.einsum("bshl,hvl->bshv", out, w_uv)

    model, args = build("bmm")
    model.attend = attend
    return model, args


def logits_of(q_latent, q_rope, latents, rope_keys):
    logits = torch.einsum("bshl,bkl->bhsk", q_latent, latents)
    return logits + torch.einsum("bshr,bkr->bhsk", q_rope, rope_keys)


def weighted(logits, latents):
    return torch.einsum("bhsk,bkl->bshl", logits.softmax(-1), latents)


def plain(q_latent, q_rope, latents, rope_keys, seen, scale):
    logits = logits_of(q_latent, q_rope, latents, rope_keys) * scale
    return weighted(logits.masked_fill(~seen, HIDDEN), latents)


def keys_of_each_head(q_latent, q_rope, latents, rope_keys, seen, scale):
    numbers = torch.arange(1, 5, dtype=latents.dtype)[:, None, None]
    logits = torch.einsum("bshl,bhkl->bhsk", q_latent, latents.unsqueeze(1) * numbers)
    of_heads = rope_keys.unsqueeze(1) * numbers
    logits = (logits + torch.einsum("bshr,bhkr->bhsk", q_rope, of_heads)) * scale
    return weighted(logits.masked_fill(~seen, HIDDEN), latents)


def other_values(q_latent, q_rope, latents, rope_keys, seen, scale):
    logits = logits_of(q_latent, q_rope, latents, rope_keys) * scale
    return weighted(logits.masked_fill(~seen, HIDDEN), latents * 2)


def shifted_values(q_latent, q_rope, latents, rope_keys, seen, scale):
    """Uses other columns of the entries as values than as keys."""
    entries = torch.cat([latents, rope_keys], dim=-1)
    logits = logits_of(q_latent, q_rope, latents, rope_keys) * scale
    weights = logits.masked_fill(~seen, HIDDEN).softmax(-1)
    return torch.einsum("bhsk,bkl->bshl", weights, entries)[..., 1 : 1 + latents.shape[-1]]


def written_between(q_latent, q_rope, latents, rope_keys, seen, scale):
    logits = logits_of(q_latent, q_rope, latents, rope_keys) * scale
    latents[:, 0] = 1.0
    return weighted(logits.masked_fill(~seen, HIDDEN), latents)


def three_parts(q_latent, q_rope, latents, rope_keys, seen, scale):
    logits = logits_of(q_latent, q_rope, latents, rope_keys)
    logits = (logits + torch.einsum("bshr,bkr->bhsk", q_rope.cos(), rope_keys)) * scale
    return weighted(logits.masked_fill(~seen, HIDDEN), latents)


def no_rope(q_latent, q_rope, latents, rope_keys, seen, scale):
    logits = torch.einsum("bshl,bkl->bhsk", q_latent, latents) * scale
    return weighted(logits.masked_fill(~seen, HIDDEN), latents)


def scaled_apart(q_latent, q_rope, latents, rope_keys, seen, scale):
    logits = logits_of(q_latent * scale, q_rope, latents, rope_keys)
    return weighted(logits.masked_fill(~seen, HIDDEN), latents)


def some_heads(q_latent, q_rope, latents, rope_keys, seen, scale):
    logits = logits_of(q_latent[:, :, 1:], q_rope[:, :, 1:], latents, rope_keys) * scale
    out = weighted(logits.masked_fill(~seen, HIDDEN), latents)
    return torch.cat([out, out[:, :, :1]], dim=2)


def capped(q_latent, q_rope, latents, rope_keys, seen, scale):
    logits = torch.tanh(logits_of(q_latent, q_rope, latents, rope_keys) * scale) * 30.0
    return weighted(logits.masked_fill(~seen, HIDDEN), latents)


def large_negative_fill(q_latent, q_rope, latents, rope_keys, seen, scale):
    logits = logits_of(q_latent, q_rope, latents, rope_keys) * scale
    return weighted(logits.masked_fill(~seen, -1e4), latents)


def weights_dropped(q_latent, q_rope, latents, rope_keys, seen, scale):
    logits = logits_of(q_latent, q_rope, latents, rope_keys) * scale
    weights = torch.dropout(logits.masked_fill(~seen, HIDDEN).softmax(-1), 0.1, True)
    return torch.einsum("bhsk,bkl->bshl", weights, latents)


def result_dropped(q_latent, q_rope, latents, rope_keys, seen, scale):
    return torch.dropout(plain(q_latent, q_rope, latents, rope_keys, seen, scale), 0.1, True)


def wide_result_dropped(q_latent, q_rope, latents, rope_keys, seen, scale):
    """Rounds the result only after a dropout."""
    wide = plain(q_latent.float(), q_rope.float(), latents.float(), rope_keys.float(), seen, scale)
    return torch.dropout(wide, 0.1, True).to(latents.dtype)


def wide_result(q_latent, q_rope, latents, rope_keys, seen, scale):
    """Rounds the result of attention only after further operations."""
    wide = plain(q_latent.float(), q_rope.float(), latents.float(), rope_keys.float(), seen, scale)
    return (wide * 1.1).to(latents.dtype)


def result_escapes(q_latent, q_rope, latents, rope_keys, seen, scale):
    out = plain(q_latent, q_rope, latents, rope_keys, seen, scale)
    return out + 0 * out.sum()


def query_escapes(q_latent, q_rope, latents, rope_keys, seen, scale):
    out = plain(q_latent, q_rope, latents, rope_keys, seen, scale * 1.0)
    KEPT[:] = [q_latent.sum()]
    return out


KEPT: list[torch.Tensor] = []

NEAR_MISSES = {
    keys_of_each_head: "ABSORBED_DECODE",
    three_parts: "ABSORBED_DECODE",
    no_rope: "ABSORBED_DECODE",
    scaled_apart: "ABSORBED_DECODE",
    other_values: "LATENT_VALUES",
    shifted_values: "LATENT_VALUES",
    written_between: "LATENT_VALUES",
    capped: "ATTENTION_FORM",
    large_negative_fill: "ATTENTION_FORM",
    weights_dropped: "ATTENTION_FORM",
    result_dropped: "ATTENTION_FORM",
    wide_result_dropped: "ATTENTION_FORM",
}


def test_the_model_that_near_misses_bend_is_fused():
    model, args = attend_of(plain)
    assert site_of(lower(model, args))


@pytest.mark.parametrize("change", NEAR_MISSES, ids=lambda change: change.__name__)
def test_near_misses_say_what_is_wrong(change):
    found = lower(*attend_of(change))
    assert patterns_in(found, "mla") == []
    assert codes_of(found, "mla") == {NEAR_MISSES[change]}


def written_after(q_latent, q_rope, latents, rope_keys, seen, scale):
    out = plain(q_latent, q_rope, latents, rope_keys, seen, scale)
    latents[:, 0] = 1.0
    return out


def test_a_cache_that_is_written_before_the_last_product_is_read_as_it_was():
    """A cache that is written before the last product must be read as it was before the write. The
    op would come after it."""
    model, args = attend_of(written_after)
    with torch.no_grad():
        expected = model(*cloned(args))
        actual = torch.compile(model, backend="tilewright", options={"inner": "eager"})(
            *cloned(args)
        )
    found = reports()[-1]
    assert (patterns_in(found, "mla"), codes_of(found, "mla")) == ([], {"INPUT_MUTATED"})
    assert torch.equal(actual, expected)


@pytest.mark.parametrize(
    "change", [some_heads, wide_result, result_escapes], ids=lambda c: c.__name__
)
def test_what_something_was_done_to_is_no_absorbed_attention(change):
    """A change of the attention's result before the last product makes it no absorbed attention.
    Nothing shows that the product belongs to the attention, so no miss is reported."""
    found = lower(*attend_of(change))
    assert (patterns_in(found, "mla"), codes_of(found, "mla")) == ([], set())


def test_a_query_that_others_read_is_not_absorbed():
    class Kept(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, *args):
            return self.model(*args) + KEPT[0]

    model, args = attend_of(query_escapes)
    found = lower(Kept(model), args)
    assert (patterns_in(found, "mla"), codes_of(found, "mla")) == ([], {"ESCAPES"})
