"""An attention with quantised projections, and the comparison that its tests make."""

import torch
from torch import nn

from tests.agreement import assert_no_worse, assert_untouched, cloned, upcast
from tests.found import codes_of, matches_of, misses_of, patterns_in
from tests.models.quantized import STORED, QuantizedLinear
from tilewright.compiler import reports
from tilewright.patterns.language import Stage

K, HQ, HK, D = 64, 4, 2, 32


class Attention(nn.Module):
    """Has three quantised projections, or one that contains all three. Writes K and V, and returns
    q."""

    def __init__(self, make, packed=False, heads_first=False):
        super().__init__()
        widths = (HQ * D, HK * D, HK * D)
        self.packed = packed
        widths = (sum(widths),) if packed else widths
        self.parts = nn.ModuleList(make(width, seed) for seed, width in enumerate(widths))

    def forward(self, x, slots, k_cache, v_cache):
        if self.packed:
            parts = self.parts[0](x).split((HQ * D, HK * D, HK * D), dim=-1)
        else:
            parts = [part(x) for part in self.parts]
        q, k, v = (part.view(*x.shape[:-1], -1, D) for part in parts)
        k_cache.view(-1, HK, D)[slots] = k.reshape(-1, HK, D)
        v_cache.view(-1, HK, D)[slots] = v.reshape(-1, HK, D)
        return q * 2


def arguments(*lead):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(*lead, K, generator=generator).bfloat16()
    caches = [torch.randn(4, 4, HK, D, generator=generator).bfloat16() for _ in range(2)]
    return x, torch.randperm(16, generator=generator)[: x[..., 0].numel()], *caches


def linear_of(form, **options):
    return lambda width, seed: QuantizedLinear(form, K, width, seed, **options)


def check(module, args):
    """Checks that there is one match, that it is no less accurate than eager, and that nothing else
    has changed. Returns the facts of the match."""
    eager, ours, exact = cloned(args), cloned(args), [upcast(a) for a in args]
    expected, reference = module(*eager), upcast(module)(*exact)
    actual = torch.compile(module, backend="tilewright", options={"inner": "eager"})(*ours)
    found = reports()[-1]
    assert patterns_in(found, "qkv") == ["qkv_cache"], [str(m) for m in misses_of(found, "qkv")]
    assert_no_worse(actual, expected, reference, "q")
    for i in (2, 3):
        assert_no_worse(ours[i], eager[i], exact[i], f"cache {i}")
        assert_untouched(args[i], ours[i], exact[i], f"cache {i}")
    return matches_of(found, "qkv")[0].shapes


class Rotated(Attention):
    """The attention with the same heads, whose q and k are rotated by position directly after the
    product."""

    def forward(self, x, slots, k_cache, v_cache):
        q, k, v = (part(x).view(*x.shape[:-1], -1, D) for part in self.parts)
        angles = slots[:, None] / torch.arange(1, D // 2 + 1)
        cos, sin = (
            torch.cat((t, t), -1)[:, None].to(x.dtype) for t in (angles.cos(), angles.sin())
        )
        q, k = (
            t * cos + torch.cat((-t[..., D // 2 :], t[..., : D // 2]), -1) * sin for t in (q, k)
        )
        k_cache.view(-1, HK, D)[slots] = k
        v_cache.view(-1, HK, D)[slots] = v
        return q * 2


def stored(form):
    """Returns a decorator that gives a function the same stored buffers as `form`."""

    def told(function):
        function.stored = STORED[form]
        return function

    return told


def assert_missed(module, args, code):
    eager, ours = cloned(args), cloned(args)
    expected = module(*eager)
    # Without this option, the projections by themselves are fused, too, which adds a rounding.
    options = {"inner": "eager", "patterns": ["-coded_linear"]}
    actual = torch.compile(module, backend="tilewright", options=options)(*ours)
    found = reports()[-1]
    assert "qkv_cache" not in set(patterns_in(found, "qkv"))
    assert code in codes_of(found, "qkv"), [str(m) for m in misses_of(found, "qkv")]
    if code in ("WEIGHT_FORMAT", "SCALE_BLOCK"):  # the weight of q, k or v
        assert {m.stage for m in misses_of(found, "qkv") if m.code == code} == {Stage.GUARDS}
    for a, b in zip((actual, *ours), (expected, *eager), strict=True):
        assert torch.equal(a, b)
