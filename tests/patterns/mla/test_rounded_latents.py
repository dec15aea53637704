"""Tests latents of a cache that the graph rounds in each step, in front of a quantised
up-projection. For few queries, the op reads the latents in place and rounds them itself."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("transformers.integrations.finegrained_fp8")

from transformers.integrations import finegrained_fp8 as library

from tests.agreement import assert_no_worse
from tests.found import matches_of
from tests.models import finegrained
from tests.scaled_products import ROW_SCALES
from tilewright.compiler import lower, reports
from tilewright.patterns.mla import rounded_latents

HEADS, NOPE, ROPE, V, RANK, KEYS, BATCH = 16, 128, 64, 128, 256, 300, 2

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "kernel")


@pytest.fixture
def kernel(monkeypatch):
    """Loads the stand-ins in place of the hub's kernels."""
    monkeypatch.setattr(library, "_FINEGRAINED_FP8", finegrained.KERNEL)


class Latents(nn.Module):
    """Attention to latents that an `FP8Linear` up-projects, as in transformers' DeepSeek."""

    def __init__(self, **options):
        super().__init__()
        self.kv_b = finegrained.linear(HEADS * (NOPE + V), RANK, 0, **options)

    def up(self, latents):
        return self.kv_b(latents)

    def forward(self, q, latents, rope_keys, seen):
        kv = self.up(latents).unflatten(-1, (HEADS, NOPE + V)).transpose(1, 2)
        k_nope, v = kv.split((NOPE, V), dim=-1)
        rope = rope_keys[:, None].expand(-1, HEADS, -1, -1)
        k = torch.cat((k_nope, rope.to(k_nope.dtype)), dim=-1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=0.07)
        return out.transpose(1, 2).flatten(2)


class Exact(Latents):
    """Computes the up-projection of `Latents` from the same codes, in float64."""

    def up(self, latents):
        weight = finegrained.decoded(self.kv_b.weight, self.kv_b.weight_scale_inv)
        return finegrained.rounded(latents, 128) @ weight.T


def arguments(queries=1, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(BATCH, HEADS, queries, NOPE + ROPE, generator=generator)
    latents = torch.randn(BATCH, KEYS, RANK, generator=generator)
    rope_keys = torch.randn(BATCH, KEYS, ROPE, generator=generator)
    last = torch.tensor([[KEYS - 9], [KEYS // 2]]) + torch.arange(queries)
    seen = torch.arange(KEYS) <= last[:, None, :, None]
    return *(t.to(dtype) for t in (q, latents, rope_keys)), seen


def compiled(module, *args):
    run = torch.compile(module, backend="tilewright", options={"inner": "eager"}, dynamic=False)
    with torch.no_grad():
        return run(*args)


def site_of(report):
    (site,) = matches_of(report, "mla")
    return site


@pytest.mark.parametrize("queries", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_few_queries_read_the_latents_themselves(queries, dtype):
    module, args = Latents(), arguments(queries, dtype)
    with torch.no_grad():
        eager = module(*args)
        exact = Exact()(*(arg.double() if arg.is_floating_point() else arg for arg in args))
    assert_no_worse(compiled(module, *args), eager, exact, "out")
    site = site_of(reports()[-1])
    assert (site.pattern, site.op) == ("mla_prefill", "mla_decode")
    assert site.shapes["latents"] == "rounded to fp8"


def test_the_graph_rounds_no_key_of_the_cache():
    with torch.no_grad():
        lowered = lower(Latents(), arguments(), dynamic=False)
    (report,) = lowered.graphs
    (fused,) = [node for node in report.after.graph.nodes if "mla_decode" in str(node.target)]
    assert fused.kwargs["round_latents"]
    assert fused.kwargs["latent_group"] == 128
    assert lowered.census.unaccounted == ()
    codes = [n for n in report.after.graph.nodes if "float8_e4m3fn" in str(n.args)]
    assert codes == []


def test_keys_that_no_query_sees_may_hold_anything():
    q, latents, rope_keys, seen = arguments()
    expected = compiled(Latents(), q, latents, rope_keys, seen)
    hidden = ~seen[:, 0, 0]
    latents, rope_keys = latents.clone(), rope_keys.clone()
    latents[hidden], rope_keys[hidden] = torch.nan, torch.inf
    torch.testing.assert_close(compiled(Latents(), q, latents, rope_keys, seen), expected)


def test_the_sizes_of_the_attention_decide(monkeypatch):
    decided = []
    monkeypatch.setattr(rounded_latents, "is_faster", lambda **sizes: decided.append(sizes))
    with torch.no_grad():
        lower(Latents(), arguments(queries=3), dynamic=False)
    sizes = {"queries": 3, "keys": KEYS, "heads": HEADS, "nope": NOPE, "rope": ROPE, "v_dim": V}
    assert decided == [sizes | {"rank": RANK, "sequences": BATCH}]


def test_many_queries_take_the_codes_of_the_graph():
    with torch.no_grad():
        lowered = lower(Latents(), arguments(queries=200), dynamic=False)
    site = site_of(lowered.graphs[0])
    assert (site.op, site.shapes["latents"]) == ("mla_prefill_dense", "fp8")


def test_a_short_cache_takes_the_codes_of_the_graph():
    q, latents, rope_keys, seen = arguments()
    short = q, latents[:, :64], rope_keys[:, :64], seen[..., :64]
    with torch.no_grad():
        lowered = lower(Latents(), short, dynamic=False)
    assert site_of(lowered.graphs[0]).op == "mla_prefill_dense"


def test_a_stored_scale_is_left_to_the_graph():
    module = Latents(activation_scheme="static")
    module.kv_b.activation_scale.data = torch.tensor(0.02)
    with torch.no_grad():
        lowered = lower(module, arguments(), dynamic=False)
    assert [site.op for site in matches_of(lowered.graphs[0], "mla")] != ["mla_decode"]


def test_codes_that_the_graph_reads_too_stay():
    class Kept(Latents):
        def forward(self, q, latents, rope_keys, seen):
            out = super().forward(q, latents, rope_keys, seen)
            return out, self.up(latents)

    module, args = Kept(), arguments()
    with torch.no_grad():
        eager = module(*args)
    out, kv = compiled(module, *args)
    torch.testing.assert_close(kv, eager[1])
    torch.testing.assert_close(out, eager[0], rtol=0.03, atol=0.03)


def test_a_write_between_the_rounding_and_the_attention_is_seen():
    class Written(Latents):
        def forward(self, q, latents, rope_keys, seen):
            kv = self.up(latents).unflatten(-1, (HEADS, NOPE + V)).transpose(1, 2)
            latents.fill_(3.0)
            k_nope, v = kv.split((NOPE, V), dim=-1)
            k = torch.cat((k_nope, rope_keys[:, None].expand(-1, HEADS, -1, -1)), dim=-1)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=0.07)

    q, latents, rope_keys, seen = arguments()
    with torch.no_grad():
        eager = Written()(q, latents.clone(), rope_keys, seen)
    out = compiled(Written(), q, latents.clone(), rope_keys, seen)
    torch.testing.assert_close(out, eager, rtol=0.03, atol=0.03)
    assert [site.op for site in matches_of(reports()[-1], "mla")] != ["mla_decode"]


#: Functions that make, from the scale by which latents were rounded, the scale by which the graph
#: multiplies the codes.
MULTIPLIED = {
    "its own": lambda scale: scale,
    "a part": lambda scale: scale * 0.25,
    "a bound": lambda scale: scale.clamp(min=0.01),
    "sixteen bits": lambda scale: scale.bfloat16().float(),
    "other rows": lambda scale: scale.flip(0),
    "none": torch.ones_like,
}


class Scaled(Latents):
    """Rounds each latent by one scale, and multiplies the codes by another scale."""

    def __init__(self, multiplied, least=0.0):
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        rows = HEADS * (NOPE + V)
        codes = torch.randn(rows, RANK, generator=generator).mul(40).to(torch.float8_e4m3fn)
        self.kv_b = nn.Parameter(codes, requires_grad=False)
        scale = torch.rand(1, rows, generator=generator) * 1e-3 + 1e-3
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.multiplied, self.least = multiplied, least

    def up(self, latents):
        x = latents.reshape(-1, RANK).float()
        scale = x.abs().amax(-1, keepdim=True) / 448
        if self.least:
            scale = scale.clamp(min=self.least)
        codes = (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        options = {"scale_b": self.scale, "out_dtype": latents.dtype}
        kv = torch._scaled_mm(codes, self.kv_b.t(), scale_a=self.multiplied(scale), **options)
        return kv.reshape(*latents.shape[:-1], -1)


@pytest.mark.skipif(not ROW_SCALES, reason="torch._scaled_mm takes no scale for each row here")
@pytest.mark.parametrize("name", MULTIPLIED)
@pytest.mark.parametrize("least", [0.0, 0.02])
def test_codes_are_multiplied_by_the_scale_that_rounded_them(name, least):
    module, args = Scaled(MULTIPLIED[name], least), arguments()
    with torch.no_grad():
        eager = module(*args)
    torch.testing.assert_close(compiled(module, *args), eager, rtol=0.03, atol=0.03)
    (site,) = matches_of(reports()[-1], "mla")
    assert (site.op == "mla_decode") == (name == "its own" and not least)
