"""Tests keys and values in caches of 8-bit floats, with the scales of a checkpoint.

`cache_attention` reads the codes in place, and `qkv_cache` writes them. No result is less accurate
than eager's.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.agreement import assert_no_worse, cloned, upcast
from tests.found import codes_of, matches_of, misses_of
from tilewright.compiler import reports

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BATCH, KEYS, HEADS, KV_HEADS, WIDTH, HIDDEN = 2, 16, 4, 2, 16, 64
GROUP = HEADS // KV_HEADS
PAGE = 4

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def parameter(number):
    return nn.Parameter(number, requires_grad=False)


#: The scales of K and V, which differ, as in checkpoints.
SCALES = {
    "parameters": lambda: (parameter(torch.tensor(0.021)), parameter(torch.tensor(0.034))),
    "of one element": lambda: (torch.tensor([0.021]), torch.tensor([0.034])),
    "bfloat16": lambda: (torch.tensor([0.0212]).bfloat16(), torch.tensor([0.0339]).bfloat16()),
    "float16": lambda: (torch.tensor(0.021).half(), torch.tensor(0.034).half()),
    "by head": lambda: (torch.tensor([0.02, 0.05]), torch.tensor([0.04, 0.01])),
    "by head, of keys alone": lambda: (torch.tensor([0.02, 0.05]), torch.tensor(0.03)),
}


def repeated(x):
    """Returns [B, Hkv, K, D] as [B, Hq, K, D]."""
    b, h, length, width = x.shape
    return x[:, :, None].expand(b, h, GROUP, length, width).reshape(b, h * GROUP, length, width)


def of_heads(scale):
    """Returns a scale in the shape for heads [B, Hkv, K, D]."""
    return scale.view(-1, 1, 1) if scale.numel() > 1 else scale


# --- reading ------------------------------------------------------------------------------------


def in_its_dtype(q, cache, scale):
    return repeated(cache.to(q.dtype) * of_heads(scale).to(q.dtype))


def in_single(q, cache, scale):
    return repeated((of_heads(scale).to(wide(q)) * cache.to(wide(q))).to(q.dtype))


def wide(q):
    return torch.promote_types(q.dtype, torch.float32)


def by_the_inverse(q, cache, scale):
    return repeated((cache.to(wide(q)) / (1 / of_heads(scale).to(wide(q)))).to(q.dtype))


def behind_the_repetition(q, cache, scale):
    scale = scale.to(q.dtype)
    scale = scale.view(-1, 1).expand(-1, GROUP).reshape(-1, 1, 1) if scale.numel() > 1 else scale
    return repeated(cache.view(torch.uint8)).view(cache.dtype).to(q.dtype) * scale


class Reader(nn.Module):
    """Attends with q [B, Hq, S, D] to caches [B, Hkv, K, D] in 8 bits."""

    def __init__(self, decode, scales, attend=F.scaled_dot_product_attention):
        super().__init__()
        self.decode, self.attend = decode, attend
        for name, scale in zip(("k_scale", "v_scale"), scales, strict=True):
            if isinstance(scale, nn.Parameter):
                self.register_parameter(name, scale)
            else:
                self.register_buffer(name, scale)

    def forward(self, q, k_cache, v_cache, mask):
        k = self.decode(q, k_cache, self.k_scale)
        v = self.decode(q, v_cache, self.v_scale)
        return self.attend(q, k, v, attn_mask=mask)


def spelled_out(q, k, v, attn_mask):
    logits = (q @ k.transpose(2, 3) * WIDTH**-0.5).masked_fill(~attn_mask, float("-inf"))
    return logits.softmax(-1, dtype=wide(q)).to(v.dtype) @ v


def reader_args(queries=1, dtype=torch.bfloat16, codes=E4M3):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    caches = [(normal(BATCH, KV_HEADS, KEYS, WIDTH) * 40).to(codes) for _ in range(2)]
    mask = torch.arange(KEYS) <= torch.arange(7, 7 + queries)[:, None]
    return [normal(BATCH, HEADS, queries, WIDTH).to(dtype), *caches, mask[None, None]]


def exact(item):
    """Returns the item in float64. Codes stay as they are."""
    eight = isinstance(item, torch.Tensor) and item.dtype in (E4M3, E5M2, torch.int8)
    return item.clone() if eight else upcast(item)


def run(module, args, what=""):
    """Runs a compiled module and returns its report. The result must be no less accurate than
    eager's; both are compared with float64 of the same codes."""
    ours, eager, best = cloned(args), cloned(args), [exact(a) for a in args]
    expected, reference = module(*eager), upcast(module)(*best)
    compiled = torch.compile(module, backend="tilewright", options={"inner": "eager"})
    assert_no_worse(compiled(*ours), expected, reference, what)
    for cache, theirs in zip(ours[1:3], eager[1:3], strict=True):
        # A projection that is rounded once instead of twice may become the other one of two
        # adjacent codes.
        assert (cache.view(torch.uint8) == theirs.view(torch.uint8)).float().mean() > 0.97
        assert ((cache.float() - theirs.float()).abs() <= theirs.float().abs() / 4).all()
    return reports()[-1]


def site_of(report):
    (site,) = matches_of(report, "cache_attention")
    assert misses_of(report, "attention", "qkv") == []
    return site


DECODES = (in_its_dtype, in_single, by_the_inverse, behind_the_repetition)


@pytest.mark.parametrize(
    ("scales", "decode", "queries"),
    [
        pytest.param(scales, decode, queries, id=f"{scales}-{decode.__name__}-{queries}")
        for row, scales in enumerate(SCALES)
        for column, decode in enumerate(DECODES)
        for queries in (1 if (row + column) % 4 else 5,)
        if scales.startswith(("parameters", "by head")) or row % 4 == column
    ],
)
def test_codes_are_read_with_the_checkpoints_scales(scales, decode, queries):
    site = site_of(run(Reader(decode, SCALES[scales]()), reader_args(queries), scales))
    assert site.shapes["cache"] == "float8_e4m3fn"
    assert site.shapes["heads"] == f"{HEADS}/{KV_HEADS}x{WIDTH}"


@pytest.mark.parametrize(
    ("dtype", "codes", "attend"),
    [
        (torch.float16, E4M3, spelled_out),
        (torch.bfloat16, E5M2, spelled_out),
        (torch.float16, E5M2, F.scaled_dot_product_attention),
        (torch.float32, E4M3, F.scaled_dot_product_attention),
        (torch.float32, E4M3, spelled_out),
    ],
)
def test_dtypes_and_spellings(dtype, codes, attend):
    module = Reader(in_single, SCALES["parameters"](), attend)
    site = site_of(run(module, reader_args(3, dtype, codes)))
    assert site.shapes["cache"] == str(codes).removeprefix("torch.")
    assert site.shapes["q"] == str(dtype).removeprefix("torch.")


def unscaled(q, cache, scale):
    return repeated(cache.to(q.dtype))


def by_a_number(q, cache, scale):
    return repeated(cache.to(q.dtype) * 0.25)


@pytest.mark.parametrize("decode", [unscaled, by_a_number])
def test_codes_without_a_tensor_of_scales(decode):
    assert "cache" in site_of(run(Reader(decode, SCALES["parameters"]()), reader_args())).shapes


def test_queries_in_eight_bits_stay_rounded():
    """With q_scale, the op gets the queries that the graph has rounded."""

    def attend(q, k, v, attn_mask):
        q = (q / 0.02).clamp(-448, 448).to(E4M3).to(q.dtype) * 0.02
        return F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask)

    report = run(Reader(in_its_dtype, SCALES["parameters"](), attend), reader_args(3))
    assert "cache" in site_of(report).shapes


# --- what stays decoded in the graph ------------------------------------------------------------


def by_token(q, cache, scale):
    return repeated(cache.to(q.dtype) * torch.linspace(0.01, 0.03, KEYS, dtype=q.dtype)[:, None])


def by_element(q, cache, scale):
    return repeated(cache.to(q.dtype) * torch.linspace(0.01, 0.03, WIDTH, dtype=q.dtype))


def scaled_twice(q, cache, scale):
    return repeated(cache.to(q.dtype) * scale.to(q.dtype) * of_heads(SCALES["by head"]()[0]).to(q))


def by_query_head(q, cache, scale):
    return repeated(cache.to(q.dtype)) * torch.linspace(0.01, 0.04, HEADS).view(-1, 1, 1).to(q)


def shifted(q, cache, scale):
    return repeated((cache.to(q.dtype) - 1) * scale.to(q.dtype))


def over_codes(q, cache, scale):
    return repeated(scale.to(q.dtype) / (cache.to(q.dtype) + 1000))


@pytest.mark.parametrize(
    "decode", [by_token, by_element, scaled_twice, by_query_head, shifted, over_codes]
)
def test_what_the_op_does_not_scale_is_decoded_in_the_graph(decode):
    report = run(Reader(decode, SCALES["parameters"]()), reader_args(3), decode.__name__)
    assert "cache" not in site_of(report).shapes


def test_keys_and_values_of_two_types_are_decoded_in_the_graph():
    q, k, v, mask = reader_args()
    report = run(Reader(in_single, SCALES["parameters"]()), [q, k, v.float().to(E5M2), mask])
    assert "cache" not in site_of(report).shapes


def test_integers_are_decoded_in_the_graph():
    q, k, v, mask = reader_args()
    caches = (c.float().clamp(-127, 127).to(torch.int8) for c in (k, v))
    report = run(Reader(in_its_dtype, SCALES["by head"]()), [q, *caches, mask])
    assert "cache" not in site_of(report).shapes


def test_codes_that_are_overwritten_before_they_are_read_are_those_of_before():
    def decode(q, cache, scale):
        k = in_its_dtype(q, cache, scale)
        cache.view(torch.uint8).zero_()
        return k

    report = run(Reader(decode, SCALES["parameters"]()), reader_args())
    assert not report.matches
    assert [miss.code for miss in report.misses] == ["INPUT_MUTATED"]


# --- pages --------------------------------------------------------------------------------------


def pages_of_floats(pool, table):
    return pool[table]


def pages_of_bytes(pool, table):
    return pool.view(torch.uint8)[table].view(pool.dtype)


def pages_by_number(pool, table):
    return pool.view(torch.uint8).index_select(0, table.flatten()).view(pool.dtype)


class Pages(Reader):
    """Attends to pools [N, P, Hkv, D] in 8 bits."""

    def forward(self, q, k_pool, v_pool, mask, table):
        def keys(pool, scale):
            codes = self.gather(codes_in(pool), table).reshape(BATCH, KEYS, KV_HEADS, WIDTH)
            return self.decode(q, codes.transpose(1, 2), scale)

        k, v = keys(k_pool, self.k_scale), keys(v_pool, self.v_scale)
        return self.attend(q, k, v, attn_mask=mask)


def codes_in(pool):
    """Engines keep 8-bit floats in a pool of bytes."""
    return pool.view(E4M3) if pool.dtype == torch.uint8 else pool


def paged_args(queries=1, stored=E4M3):
    q, *_, mask = reader_args(queries)
    generator = torch.Generator().manual_seed(1)
    shape = (9, PAGE, KV_HEADS, WIDTH)
    pools = [(torch.randn(shape, generator=generator) * 40).to(E4M3) for _ in range(2)]
    table = torch.tensor([[4, 7, 0, 2], [1, 8, 3, 5]])
    return [q, *(pool.view(stored) for pool in pools), mask, table]


@pytest.mark.parametrize(
    ("gather", "stored", "scales"),
    [
        (pages_of_floats, E4M3, "parameters"),
        (pages_of_floats, torch.uint8, "by head"),
        (pages_of_bytes, E4M3, "by head"),
        (pages_of_bytes, torch.uint8, "parameters"),
        (pages_by_number, E4M3, "parameters"),
        (pages_by_number, torch.uint8, "by head"),
    ],
)
def test_codes_are_read_in_their_pages(gather, stored, scales):
    module = Pages(in_its_dtype, SCALES[scales]())
    module.gather = gather
    site = site_of(run(module, paged_args(3, stored)))
    assert (site.shapes["page"], site.shapes["cache"]) == (PAGE, "float8_e4m3fn")


# --- written and read ---------------------------------------------------------------------------


def clamped(heads, scale):
    return (heads / of_rows(scale).to(heads.dtype)).clamp(-448, 448)


def in_single_by_the_reciprocal(heads, scale):
    return (heads.float() * (1 / of_rows(scale).float())).clamp(min=-448, max=448)


def of_rows(scale):
    """Returns a scale in the shape for heads [T, Hkv, D]."""
    return scale.view(-1, 1) if scale.numel() > 1 else scale


class Layer(Reader):
    """Writes x [B, S, K] into caches [B, Hkv, K, D], and attends to them."""

    def __init__(self, scales, round_with, decode=in_its_dtype):
        super().__init__(decode, scales)
        self.round_with = round_with
        torch.manual_seed(0)
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            linear = nn.Linear(HIDDEN, heads * WIDTH, bias=False, dtype=torch.bfloat16)
            self.add_module(f"{name}_proj", linear.requires_grad_(False))

    def forward(self, x, k_cache, v_cache, mask, positions):
        q, k, v = (getattr(self, f"{name}_proj")(x).view(*x.shape[:2], -1, WIDTH) for name in "qkv")
        for cache, heads, scale in ((k_cache, k, self.k_scale), (v_cache, v, self.v_scale)):
            codes = self.round_with(heads, scale).to(cache.dtype).transpose(1, 2)
            cache.view(torch.uint8).index_copy_(2, positions, codes.view(torch.uint8))
        return super().forward(q.transpose(1, 2), k_cache, v_cache, mask)


@pytest.mark.parametrize(
    ("scales", "round_with", "tokens"),
    [
        pytest.param(scales, round_with, tokens, id=f"{scales}-{round_with.__name__}-{tokens}")
        for row, scales in enumerate(SCALES)
        for round_with, tokens in zip(
            (clamped, in_single_by_the_reciprocal), (1, 6) if row % 2 else (6, 1), strict=True
        )
    ],
)
def test_a_layer_writes_and_reads_with_the_checkpoints_scales(scales, round_with, tokens):
    _, *caches, mask = reader_args(tokens)
    x = torch.randn(BATCH, tokens, HIDDEN, generator=torch.Generator().manual_seed(2)).bfloat16()
    positions = torch.arange(7, 7 + tokens)
    report = run(Layer(SCALES[scales](), round_with), [x, *caches, mask, positions], scales)
    assert site_of(report).shapes["cache"] == "float8_e4m3fn"
    assert len(matches_of(report, "qkv_cache")) == 1


def test_values_scaled_the_other_way_round_are_stored_apart():
    """The op divides both by their scales, or multiplies both."""
    _, *caches, mask = reader_args()

    def round_with(heads, scale):
        return heads / scale if scale is module.k_scale else heads * (1 / scale)

    module = Layer(SCALES["parameters"](), round_with)
    x = torch.randn(BATCH, 1, HIDDEN, generator=torch.Generator().manual_seed(2)).bfloat16()
    report = run(module, [x, *caches, mask, torch.tensor([7])])
    assert codes_of(report, "qkv") == {"CAST"}
    assert len(matches_of(report, "cache_attention")) == 1
