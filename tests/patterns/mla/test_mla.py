"""Tests the patterns `mla_prefill`, `mla_decode` and `mla_latent_store`.

Every idiom of engines is fused and no less accurate than eager against float64, or is missed by
name. Attention that is only similar to latent attention is left as it is.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.agreement import assert_no_worse, assert_untouched, cloned, upcast
from tests.found import codes_of, matches_of, misses_of, patterns_in
from tests.models import mla_attention
from tests.models.mla_idioms import IDIOMS, MODULES, build
from tests.scaled_products import ROW_SCALES
from tilewright.compiler import lower, reports, rewrite
from tilewright.patterns.recognise import attention_varlen
from tilewright.patterns.recognise.attention_varlen import VarlenForm, register_varlen

STORE, PREFILL, DECODE = "mla_latent_store", "mla_prefill", "mla_decode"

#: Idioms whose attention is over the latents themselves.
ABSORBED = {name for name in IDIOMS if name.startswith("absorbed")}

#: Idioms whose attention is not fused, with the reason.
MISSED = {
    "chunked": "CHUNKED_PREFIX",
    "kv_b_separate": "LATENT_WEIGHT",
    "attention_own_varlen": "ATTENTION_FORM",
    "attention_own_varlen_padded": "ATTENTION_FORM",
}

#: For each idiom, the mask that the pattern proves.
MASKS = {
    "attention_causal": "causal",
    "attention_causal_later": "causal",
    "no_context": "causal",
    "attention_unmasked": "none",
    "attention_masked_float": "tensor",
}

#: For each idiom, what PyTorch must support to run it.
NEEDS = {"kv_b_fp8_product": ROW_SCALES}

OWN_VARLEN = VarlenForm("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "softmax_scale")


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.fixture
def known_varlen(monkeypatch):
    monkeypatch.setattr(attention_varlen, "FORMS", dict(attention_varlen.FORMS))
    monkeypatch.setattr("tilewright.patterns.recognise.attention.FORMS", attention_varlen.FORMS)
    register_varlen("mla_idioms::varlen", OWN_VARLEN)


def in_float64(name, module, args, **changes):
    """Returns (result, arguments after) of the same module with the same numbers in float64."""
    exact, _ = build(name, dtype=torch.float64, **changes)
    wide = dict(module.named_parameters())
    for key, parameter in exact.named_parameters():
        if parameter.dtype == torch.float64:
            parameter.data = wide[key].double()
    arguments = [upcast(a) for a in args]
    return exact(*arguments), arguments


def check_fused(name, patterns, **changes):
    """Compares an idiom with eager and float64. Returns the report."""
    module, args = build(name, **changes)
    eager, ours = cloned(args), cloned(args)
    expected = module(*eager)
    reference, exact = in_float64(name, module, args, **changes)
    compiled = torch.compile(module, backend="tilewright", options={"inner": "eager"})
    actual = compiled(*ours)
    found = reports()[-1]
    assert patterns_in(found, "mla", "qkv") == patterns, misses_of(found, "mla", "qkv")
    assert_no_worse(actual, expected, reference, name)
    for i in range(5, len(args)):
        assert_no_worse(ours[i], eager[i], exact[i], f"{name} cache {i - 5}")
        assert_untouched(args[i], ours[i], exact[i], f"{name} cache {i - 5}")
    return found


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=NEEDS.get(name, ())) for name in MODULES if name not in MISSED],
)
def test_every_idiom_is_fused_and_no_worse_than_eager(name):
    attention = DECODE if name in ABSORBED else PREFILL
    found = check_fused(name, [STORE, attention])
    assert misses_of(found, "mla", "qkv") == []
    (site,) = matches_of(found, attention)
    assert site.shapes["mask"] == MASKS.get(name, "causal by position")


@ROW_SCALES
def test_later_rows_of_coded_latents_have_the_scales_of_those_rows():
    check_fused("kv_b_fp8_product", [STORE, PREFILL], attention="causal_later")


@pytest.mark.parametrize("name", MISSED)
def test_what_is_not_fused_is_named_and_its_write_still_is(name):
    found = check_fused(name, [STORE])
    assert codes_of(found, "mla", "qkv") == {MISSED[name]}
    assert all(miss.hint for miss in misses_of(found, "mla", "qkv"))


@pytest.mark.parametrize("name", ["attention_own_varlen", "attention_own_varlen_padded"])
def test_an_engines_own_operator_is_fused_once_it_is_known(name, known_varlen):
    found = check_fused(name, [STORE, PREFILL])
    assert matches_of(found, "mla", "qkv")[1].shapes["batch"] == "ragged"


def test_an_operator_is_known_as_one_thing(known_varlen):
    register_varlen("mla_idioms::varlen", OWN_VARLEN)
    with pytest.raises(ValueError, match="mla_idioms::varlen"):
        register_varlen("mla_idioms::varlen", VarlenForm("k", "q", "v", "a", "b", "c"))


@pytest.mark.parametrize("length", ["num_tokens", "context"])
def test_token_counts_may_be_symbols(length):
    """One graph serves every number of tokens: the pattern proves the masks with symbolic sizes."""
    compiled = None
    for count in (9, 13):
        module, args = build("plain", **{length: count})
        torch._dynamo.mark_dynamic(args[0], 0)
        if compiled is None:
            compiled = torch.compile(
                module, backend="tilewright", dynamic=True, options={"inner": "eager"}
            )
        eager, ours = cloned(args), cloned(args)
        expected, actual = module(*eager), compiled(*ours)
        torch.testing.assert_close(actual, expected, rtol=0.05, atol=0.02)
        torch.testing.assert_close(ours[5], eager[5], rtol=0.02, atol=0.01)
    assert patterns_in(reports()[-1], "mla", "qkv") == [STORE, PREFILL]


@pytest.mark.parametrize(
    ("dtype", "patterns"),
    [(torch.bfloat16, [STORE, PREFILL]), (torch.float32, [STORE])],
)
def test_a_gpu_without_a_kernel_for_it_keeps_its_graph(monkeypatch, dtype, patterns):
    monkeypatch.setattr(rewrite, "_device_type", lambda match: "cuda")
    module, args = build("plain", dtype=dtype)
    found = lower(module, args)
    assert patterns_in(found, "mla", "qkv") == patterns
    refused = [m.message for m in misses_of(found, "mla", "qkv") if m.code == "UNSUPPORTED"]
    assert len(refused) == (PREFILL not in patterns)
    assert all("no kernel for torch.float32" in message for message in refused)


# --- near misses ----------------------------------------------------------------------------------


def missed(change, name="plain", **changes):
    """Returns (matched patterns, codes) of an idiom after `change` has changed one step of it."""
    module, args = build(name, **changes)
    change(module)
    found = lower(module, args)
    return patterns_in(found, "mla", "qkv"), codes_of(found, "mla", "qkv")


def rope_key_per_head(module):
    def concat(k_nope, rope_key):
        k_pe = rope_key.unsqueeze(1) * torch.arange(1, 5, dtype=rope_key.dtype)[:, None]
        return torch.cat((k_nope, k_pe), dim=-1)

    module.concat = concat


def rope_key_first(module):
    def concat(k_nope, rope_key):
        k_pe = rope_key.unsqueeze(1).expand(-1, k_nope.shape[1], -1)
        return torch.cat((k_pe, k_nope), dim=-1)

    module.concat = concat


def three_pieces(module):
    def concat(k_nope, rope_key):
        k_pe = rope_key.unsqueeze(1).expand(-1, k_nope.shape[1], -1)
        return torch.cat((k_nope, k_pe[..., :8], k_pe[..., 8:].neg()), dim=-1)

    module.concat = concat


def values_first(module):
    module.split_of = lambda kv: kv.split([module.axes.v_dim, module.axes.nope], dim=-1)[::-1]


def values_of_x(module):
    module.other = torch.nn.Linear(64, 4 * 32, bias=False).to(torch.bfloat16)
    module.values_of = lambda values, x: module.other(x.repeat(2, 1)[: len(values)]).unflatten(
        -1, (4, 32)
    )


def values_scaled(module):
    module.values_of = lambda values, x: values * 2


def keys_scaled(module):
    module.keys_of = lambda keys: keys * 1.1


def bias_on_kv_b(module):
    weight = module.kv_b.weight
    module.kv_b.bias = torch.nn.Parameter(weight[:, 0].clone(), requires_grad=False)


def dropout(module):
    def attend(q, keys, values, positions, scale):
        parts = (t.transpose(0, 1) for t in (q, keys, values))
        return torch.nn.functional.scaled_dot_product_attention(
            *parts, dropout_p=0.1, scale=scale
        ).transpose(0, 1)

    module.attend = attend


def large_negative_fill(module):
    def attend(q, keys, values, positions, scale):
        q, keys, values = (t.transpose(0, 1) for t in (q, keys, values))
        scores = (q @ keys.transpose(-1, -2)) * scale
        scores = scores.masked_fill(mla_attention.seen(keys[0], positions).logical_not(), -1e4)
        return (scores.float().softmax(-1).to(q.dtype) @ values).transpose(0, 1)

    module.attend = attend


def keys_escape(module):
    def attend(q, keys, values, positions, scale):
        return mla_attention.masked(q, keys, values, positions, scale) + keys.sum()

    module.attend = attend


NEAR_MISSES = {
    rope_key_first: "LATENT_KEYS",
    three_pieces: "LATENT_KEYS",
    values_first: "LATENT_WEIGHT",
    values_of_x: "LATENT_VALUES",
    values_scaled: "LATENT_VALUES",
    bias_on_kv_b: "UNSUPPORTED",
    dropout: "ATTENTION_FORM",
    large_negative_fill: "ATTENTION_FORM",
    keys_escape: "ESCAPES",
}


@pytest.mark.parametrize("change", NEAR_MISSES, ids=lambda change: change.__name__)
def test_near_misses_say_what_is_wrong(change):
    patterns, codes = missed(change)
    assert patterns == [STORE]
    assert codes == {NEAR_MISSES[change]}


def scaled_twice(kv_b, product):
    return product * kv_b.scale * kv_b.scale


def scaled_wider(kv_b, product):
    return (product * kv_b.scale.float()).to(product.dtype)


def scaled_by_row_of_values(kv_b, product):
    return product


def biased_behind(kv_b, product):
    return product * kv_b.scale + kv_b.scale


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (scaled_twice, "LATENT_KEYS"),
        (scaled_wider, "LATENT_KEYS"),
        (scaled_by_row_of_values, "LATENT_VALUES"),
        (biased_behind, "LATENT_KEYS"),
    ],
)
def test_sums_of_codes_that_are_changed_otherwise_are_told(change, code):
    def bend(module):
        kv_b, (heads, v_dim) = module.kv_b, (module.axes.num_heads, module.axes.v_dim)
        kv_b.forward = lambda x: change(kv_b, torch.nn.functional.linear(x, kv_b.codes.to(x.dtype)))
        if change is scaled_by_row_of_values:
            scale = kv_b.scale.view(heads, -1)[:, -v_dim:]
            module.values_of = lambda values, x: values * scale

    assert missed(lambda module: None, "kv_b_int8_behind") == ([STORE, PREFILL], set())
    assert missed(bend, "kv_b_int8_behind") == ([STORE], {code})


@pytest.mark.parametrize("change", [rope_key_per_head, keys_scaled], ids=lambda c: c.__name__)
def test_keys_that_no_head_shares_are_ordinary_attention(change):
    """Keys without a part that all heads share are ordinary attention, and no miss is reported."""
    assert missed(change) == ([STORE], set())


# --- the write ------------------------------------------------------------------------------------


def latent_bent(how):
    def change(module):
        norm = module.kv_norm.forward
        module.kv_norm.forward = lambda x: how(norm(x))

    return change


def rope_key_normed(module):
    rope = module.key_rope
    module.key_rope = lambda x, cos, sin: rope(
        torch.nn.functional.rms_norm(x, (16,), eps=1e-6), cos, sin
    )


def other_slots(module):
    def write(caches, latent, rope_key, slots, page_size):
        flat = caches[0].view(-1, 56)
        flat[slots, :40] = latent
        flat[slots + 1, 40:] = rope_key

    module.write = write


def read_between(module):
    kept = []

    def write(caches, latent, rope_key, slots, page_size):
        flat = caches[0].view(-1, 56)
        flat[slots, :40] = latent
        kept[:] = [flat.sum()]
        flat[slots, 40:] = rope_key

    module.write = write
    module.values_of = lambda values, x: values + kept[0]


def written_twice(module):
    def write(caches, latent, rope_key, slots, page_size):
        flat = caches[0].view(-1, 56)
        flat[slots, :40] = latent
        flat[slots] = 0
        flat[slots, 40:] = rope_key

    module.write = write


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (read_between, "CACHE_READ"),
        (written_twice, "CACHE_WRITE"),
        (other_slots, "LONE_WRITE"),
    ],
    ids=lambda item: getattr(item, "__name__", item),
)
def test_a_write_that_is_not_one_says_why(change, code):
    patterns, codes = missed(change)
    assert STORE not in patterns
    assert code in codes


def norm_without_weight(module):
    module.kv_norm.forward = lambda x: torch.nn.functional.rms_norm(x, (40,), eps=1e-6)


@pytest.mark.parametrize(
    ("change", "norm"),
    [(lambda module: None, "rms"), (norm_without_weight, "none")],
    ids=["with", "without"],
)
def test_the_write_normalises_the_latent_if_the_norm_has_a_weight(change, norm):
    """The op has no norm without a weight. In that case it takes the latent that the graph has
    normalised."""
    module, args = build("plain")
    change(module)
    (site,) = matches_of(lower(module, args), STORE)
    assert (site.shapes["norm"], site.shapes["rope"]) == (norm, "half")
    check_with(change)


def test_a_latent_finished_in_its_own_way_is_stored_as_it_comes():
    """If the graph changes the latent after its norm, the latent is stored as the graph computes
    it, and only the rotation is absorbed."""
    assert missed(latent_bent(lambda x: x.sin())) == ([STORE, PREFILL], set())
    check_with(latent_bent(lambda x: x.sin()))


def test_a_rope_key_finished_in_its_own_way_is_stored_as_it_comes():
    """If the graph normalises the rope key, the rope key is stored as the graph computes it,
    because the op has no norm of it."""
    assert missed(rope_key_normed) == ([STORE, PREFILL], set())
    check_with(rope_key_normed)


def test_a_normed_latent_that_others_read_is_stored_as_it_comes():
    """If other values read the normalised latent, the op stores it as the graph computes it.
    Attention reads the latents of the new tokens directly here."""

    def change(module):
        kept = []
        norm = module.kv_norm.forward

        def remember(x):
            kept[:] = [norm(x)]
            return kept[0]

        module.kv_norm.forward = remember
        module.latents_of = lambda latents: torch.cat((latents[:6], kept[0]))

    assert missed(change) == ([STORE, PREFILL], set())
    check_with(change)


def check_with(change):
    """Checks that a changed model gives eager's results, including its caches."""
    module, args = build("plain", dtype=torch.float32)
    change(module)
    eager, ours = cloned(args), cloned(args)
    expected = module(*eager)
    torch._dynamo.reset()
    actual = torch.compile(module, backend="tilewright", options={"inner": "eager"})(*ours)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours[5], eager[5], rtol=1e-4, atol=1e-5)


class RotatedWhole(nn.Module):
    """Computes as Falcon does, with one KV head of 16 features. The first `rotated` of them are
    rotated."""

    def __init__(self, rotated):
        super().__init__()
        self.rotated = rotated
        self.qkv = nn.Linear(64, 6 * 16, bias=False)

    def rope(self, x, cos, sin):
        turned, rest = x[..., : self.rotated], x[..., self.rotated :]
        a, b = turned.chunk(2, -1)
        return torch.cat((turned * cos + torch.cat((-b, a), -1) * sin, rest), -1)

    def forward(self, x, cos, sin, k_cache, v_cache, positions):
        q, k, v = self.qkv(x).view(1, -1, 6, 16).transpose(1, 2).split([4, 1, 1], 1)
        k_cache.index_copy_(2, positions, self.rope(k, cos, sin))
        v_cache.index_copy_(2, positions, v)
        q = self.rope(q, cos, sin)
        return F.scaled_dot_product_attention(q, k_cache, v_cache, enable_gqa=True)


@pytest.mark.parametrize("rotated", [16, 8])
def test_a_rotated_key_with_an_empty_rest_is_no_latent(rotated):
    """A rotated key without an unrotated part is no latent. The whole key is fused, so nothing is
    lost and strict does not raise."""
    table, cache = torch.randn(3, rotated).bfloat16(), torch.zeros(1, 1, 32, 16).bfloat16()
    args = torch.randn(3, 64).bfloat16(), table, table + 1, cache, cache.clone(), torch.arange(3)
    model = RotatedWhole(rotated).bfloat16().requires_grad_(False)
    found = lower(model, args, strict=True)
    assert patterns_in(found, "qkv", "attention", "mla") == ["qkv_cache", "cache_attention"]
    assert not codes_of(found, "mla")
