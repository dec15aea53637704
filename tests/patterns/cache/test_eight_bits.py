"""Tests writes that round to 8-bit floats: numbers that do not fit, scales and clamps give the
results of eager."""

from __future__ import annotations

import pytest
import torch

from tests.compiler.steps import HKV, D, Layer, T, make_args, plain, store
from tests.found import misses_of
from tests.models.fp8_writes import LARGEST
from tests.patterns.cache.reported import codes, patterns, run
from tilewright.compiler import reports
from tilewright.ops.formats.fp8 import SATURATED_BY_TORCH
from tilewright.patterns.cache import eight_bit

FP8 = torch.float8_e4m3fn

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Eight(torch.nn.Module):
    """A layer whose caches have 8-bit floats. `k` and `v` say how keys and values are rounded."""

    def __init__(self, k, v=None, before=lambda heads: heads):
        super().__init__()
        self.layer, self.k, self.v, self.before = Layer(plain), k, v or k, before

    def forward(self, x, k_cache, v_cache, slots, scale):
        q, k, v = self.layer.qkv(x)
        store(k_cache, slots, self.k(self.before(k), scale))
        store(v_cache, slots, self.v(self.before(v), scale))
        return q * 2


def eight_args(scale, dtype=FP8):
    x, k_cache, v_cache, slots = make_args()
    return x, k_cache.to(dtype), v_cache.to(dtype), slots, scale


def bits(cache):
    return cache.view(torch.uint8)


#: For each name: the operations before values are rounded to a dtype, and the patterns that match
#: if PyTorch's cast does not saturate. n is the largest number of the dtype.
HELD = {
    "not": (lambda h, n: h, ["qkv_cache"]),
    "by a bound beyond the range": (lambda h, n: h.clamp(-2 * n, 3 * n), ["qkv_cache"]),
    "by a clamp": (lambda h, n: h.clamp(-n, n), ["qkv_cache"]),
    "by two clamps": (lambda h, n: h.clamp(min=-n).clamp(max=n), ["qkv_cache"]),
    "from above": (lambda h, n: h.clamp(max=n), []),
    "from below, and beyond the range": (lambda h, n: h.clamp(-n, 2 * n), []),
}


@pytest.mark.parametrize(
    ("dtype", "held"),
    [(torch.float8_e5m2, held) for held in HELD] + [(FP8, "not"), (FP8, "from above")],
)
def test_what_does_not_fit_is_what_eager_makes_of_it(dtype, held):
    """Numbers beyond the range become what eager makes of them: infinity in float8_e5m2; in
    float8_e4m3fn NaN in older releases, and the largest number in newer ones."""
    hold, fused = HELD[held]
    eager, ours = (eight_args(torch.tensor(1e-6), dtype) for _ in range(2))
    module = Eight(lambda heads, scale: hold(heads / scale, torch.finfo(dtype).max).to(dtype))
    module(*eager)
    run(module, *ours)
    always = ["qkv_cache"] if dtype in SATURATED_BY_TORCH else fused
    assert patterns() == always
    if not always:
        assert "CAST" in codes()
    for a, b in zip(ours[1:3], eager[1:3], strict=True):
        assert torch.equal(bits(a), bits(b))
        beyond = b.float().abs() >= torch.finfo(dtype).max
        assert beyond.sum() > T * HKV * D * 0.9


def test_an_older_cast_of_e4m3_gives_nan(monkeypatch):
    monkeypatch.setattr(eight_bit, "SATURATED_BY_TORCH", frozenset())
    args = eight_args(torch.tensor(1e-6))
    run(Eight(lambda heads, scale: (heads / scale).to(FP8)), *args)
    assert patterns() == ["qkv_cache"]
    assert args[1].float().isnan().sum() > T * HKV * D * 0.9


def test_keys_are_held_to_the_range_as_values_are():
    def half_held(heads, scale):
        return (heads / scale).clamp(-57344, 57344).to(torch.float8_e5m2)

    def not_held(heads, scale):
        return (heads / scale).to(torch.float8_e5m2)

    run(Eight(half_held, not_held), *eight_args(torch.tensor(0.5), torch.float8_e5m2))
    assert patterns() == ["cache_store"] * 2
    assert "CAST" in codes()


KNOWN = {
    "plain": lambda h, s: h.to(FP8),
    "divided": lambda h, s: (h / s).to(FP8),
    "multiplied": lambda h, s: (s * h).to(FP8),
    "by the reciprocal": lambda h, s: (h * s.reciprocal()).to(FP8),
    "clamped": lambda h, s: (h / s).clamp(-LARGEST, LARGEST).to(FP8),
    "clamped twice": lambda h, s: (h / s).clamp_min(-LARGEST).clamp_max(LARGEST).to(FP8),
    "by a number": lambda h, s: (h * 3).to(FP8),
    "through half": lambda h, s: (h / s).half().to(FP8),
    "there and back": lambda h, s: (h / s).to(FP8).view(torch.uint8).view(FP8),
}


ONE_SCALE, NARROW_SCALE = torch.tensor(0.7), torch.full((1,), 0.7, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "scale"),
    [
        *((name, (ONE_SCALE, NARROW_SCALE)[number % 2]) for number, name in enumerate(KNOWN)),
        ("divided", ONE_SCALE),
        ("clamped", NARROW_SCALE),
    ],
)
def test_scales_and_clamps_are_the_op_s(name, scale):
    eager, ours = eight_args(scale), eight_args(scale)
    module = Eight(KNOWN[name])
    module(*eager)
    run(module, *ours)
    assert patterns() == ["qkv_cache"], misses_of(reports()[-1], "qkv")
    for a, b in zip(ours[1:3], eager[1:3], strict=True):
        near = (a.float() - b.float()).abs() <= b.float().abs() / 8
        assert near.all()
        assert (bits(a) == bits(b)).float().mean() > 0.98


BY_TOKEN = torch.linspace(0.5, 1.5, T)[:, None, None]
REFUSED = {
    "clamped lower": (lambda h, s: (h / s).clamp(-1.0, 1.0).to(FP8), None, "K_PATH"),
    "clamped to tensors": (lambda h, s: (h / s).clamp(-s * 448, s * 448).to(FP8), None, "K_PATH"),
    "scaled twice": (lambda h, s: (h / s * s).to(FP8), None, "K_PATH"),
    "by token": (lambda h, s: (h / BY_TOKEN).to(FP8), None, "CAST"),
    "by element": (lambda h, s: (h * torch.ones(D)).to(FP8), None, "CAST"),
    "one each way": (lambda h, s: (h / s).to(FP8), lambda h, s: (h * s).to(FP8), "CAST"),
    "by its own size": (lambda h, s: (h / h.abs().amax()).to(FP8), None, "K_PATH"),
    "rounded twice": (
        lambda h, s: h.to(torch.float8_e5m2).to(torch.float32).to(FP8),
        None,
        "CAST",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_roundings_are_refused_by_name(name):
    k, v, code = REFUSED[name]
    scale = torch.tensor(0.7)
    eager, ours = eight_args(scale), eight_args(scale)
    module = Eight(k, v)
    module(*eager)
    run(module, *ours)
    assert code in codes()
    assert "qkv_cache" not in patterns()
    for a, b in zip(ours[1:3], eager[1:3], strict=True):
        assert torch.equal(bits(a), bits(b))


@pytest.mark.parametrize("name", ["divided", "clamped"])
def test_the_write_alone_rounds_too(name):
    """If the projection is not recognised, the write is still fused, and rounds."""
    scale = torch.tensor(0.7)
    eager, ours = eight_args(scale), eight_args(scale)
    module = Eight(KNOWN[name], before=torch.nn.functional.gelu)
    module(*eager)
    run(module, *ours)
    assert patterns() == ["cache_store"]
    for a, b in zip(ours[1:3], eager[1:3], strict=True):
        assert torch.equal(bits(a), bits(b))


def test_a_cache_of_bytes_is_not_known():
    """A cache of bytes is not fused, because the op is not told which 8-bit float a byte is. A view
    of the cache as floats can be used."""

    def bytes_of(heads, scale):
        return heads.to(FP8).view(torch.uint8)

    args = eight_args(torch.tensor(1.0), torch.uint8)
    run(Eight(bytes_of), *args)
    assert patterns() == []
    assert codes() == {"K_PATH", "DTYPE"}
