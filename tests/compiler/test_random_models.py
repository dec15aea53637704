"""Runs random attention steps with additional reads, writes and in-place changes. The results must
always equal eager's.

These tests do not check whether a step is fused, stored or missed, only that no number differs.
"""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F

from tests.compiler import steps
from tests.compiler.running import copies
from tilewright.compiler import backend, reports

STREWN = (
    "kc.view(-1, HKV, D)[at] = 7.0",
    "kc[0].mul_(2)",
    "vc.zero_()",
    "kc.copy_(vc)",
    "vc[at // 8, at % 8] = v",
    "kc.view(-1, HKV, D).index_add_(0, at, k)",
    "flat = kc.view(48, HKV, D); flat[1] = flat[2].clone()",
    "s.append(kc.clone())",
    "s.append(kc.mT.contiguous())",
    "s.append(vc.sum())",
    "s.append(kc[1])",
    "s.append(kc.view(-1, HKV, D)[at])",
    "s.append(torch.cat((kc.view(-1), vc.view(-1))))",
    "h.mul_(1.5)",
    "h[0].add_(1)",
    "h = h * 1.0",
    "F.relu(h, inplace=True)",
    "s.append(h.view(-1))",
    "at.add_(1)",
    "at = at + 1",
    "s.append(at.clone())",
    "s.append(q.sum())",
    "s.append(q.reshape(-1)[:7])",
    "q.mul_(2)",
    "q = q.clone()",
    "s.append(k)",
    "k.add_(1)",
    "k = k.contiguous()",
    "s.append(v * 1)",
    "v.mul_(3)",
    "v = v.transpose(0, 1).contiguous().transpose(0, 1)",
    "cos.mul_(0.5)",
    "sin.neg_()",
    "w.mul_(1.1)",
)
WRITES = (
    "store({cache}, at, {heads})",
    "{cache}[at // 8, at % 8] = {heads}",
    "{cache}.view(-1, HKV, D).index_copy_(0, at, {heads})",
)


def source(seed: int) -> str:
    """Returns the source of a step: one or two layers, with random operations between their
    statements."""
    draw = random.Random(seed)
    lines = []

    def strew(chance):
        if draw.random() < chance:
            lines.append(draw.choice(STREWN))

    for _ in range(draw.choice((1, 1, 2))):
        for name in draw.sample("qkv", 3):
            lines.append(f"{name} = m.{name}_proj(h).view(T, -1, D)")
        weight = draw.choice(("m.norm", "w", None, None))
        if weight:
            lines.extend(f"{x} = rms_norm({x}, {weight})" for x in "qk")
        if draw.random() < 0.5:
            lines.extend(f"{x} = rotate({x}, cos, sin)" for x in "kq")
        strew(0.4)
        write = draw.choice(WRITES)
        lines.append(write.format(cache="kc", heads="k"))
        strew(0.3)
        lines.append(write.format(cache="vc", heads="v"))
        strew(0.4)
        lines.append("s.append(q * 2)")
        strew(0.3)
        lines.append(draw.choice(("h = h + 1", "h = q.reshape(T, -1) * 0.5")))
    body = "\n    ".join(lines)
    start = "s = []; h = x + 0; at = slots + 0; cos, sin = cos_sin()"
    return f"def step(m, x, kc, vc, slots, w):\n    {start}\n    {body}\n    return s, kc.sum()"


def layer_of(seed: int) -> steps.Layer:
    space = {name: thing for name, thing in vars(steps).items() if not name.startswith("_")}
    space["F"] = F
    exec(source(seed), space)
    return steps.Layer(space["step"])


def numbers_in(items):
    if isinstance(items, torch.Tensor):
        return [items]
    return [t for item in items for t in numbers_in(item)]


def run(seed: int) -> set[str]:
    """Runs the step of a seed, which must give eager's numbers. Returns the patterns that
    matched."""
    layer = layer_of(seed)
    eager = (*steps.make_args(), torch.linspace(0.5, 1.5, steps.D))
    ours = copies(eager)
    expected = layer(*eager)
    torch._dynamo.reset()
    backend._REPORTS.clear()
    actual = torch.compile(layer, backend="tilewright", options={"inner": "eager"})(*ours)
    for a, b in zip(numbers_in([actual, ours]), numbers_in([expected, eager]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4, equal_nan=True, msg=source(seed))
    assert not any(report.notes for report in reports())
    return {m.pattern for report in reports() for m in report.matches}


@pytest.mark.parametrize("first", range(0, 24, 12))
def test_a_random_step_gives_eagers_answer(first):
    with torch.no_grad():
        used = set().union(*(run(seed) for seed in range(first, first + 12)))
    assert used == {"qkv_cache", "cache_store"}
