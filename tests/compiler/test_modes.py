"""Compares grad mode, transforms, autocast and graphs inside the graph with eager, including
gradients."""

from __future__ import annotations

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.compiler.running import compiled
from tests.found import codes_of, patterns_in
from tilewright.compiler import lower, reports
from tilewright.compiler.safety.modes import GRAD_HINT

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def attend(q, k, v):
    """Computes the attention of q [B, H, S, D] to k and v [B, H // 2, K, D] in basic operations."""
    k, v = (t.repeat_interleave(2, 1) for t in (k, v))
    return torch.softmax(q @ k.mT * 0.25, -1) @ v


class Recorded(torch.autograd.Function):
    """An autograd function whose gradient differs from the gradient of the function that it
    computes."""

    @staticmethod
    def forward(ctx, q, k, v):
        return attend(q, k, v)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3, None, None


region = torch.compiler.nested_compile_region(attend)


def with_grad(function):
    return torch.enable_grad()(function)


def half(q, k, v):
    seen = attend(q, k, v)
    with torch.enable_grad():
        return attend(q, k, v) + 0.5 * q + seen


def nested(q, k, v):
    with torch.enable_grad():
        with torch.no_grad():
            seen = attend(q, k, v)
        moved = q * 2 + seen
    return attend(moved.detach(), k, v) + moved


def read_under_grad(q, k, v):
    with torch.enable_grad():
        logits = q @ k.repeat_interleave(2, 1).mT * 0.25
        with torch.no_grad():
            weights = torch.softmax(logits, -1)
        return weights @ v.repeat_interleave(2, 1) + q


def guided(q, k, v):
    with torch.enable_grad():
        moved = q.detach().clone().requires_grad_()
        (gradient,) = torch.autograd.grad(attend(moved, k, v).sum(), moved)
    return attend(q - gradient, k, v)


def backward(q, k, v):
    with torch.enable_grad():
        moved = q.detach().clone().requires_grad_()
        attend(moved, k, v).sum().backward()
    return moved.grad


def dual(q, k, v):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(attend(forward_ad.make_dual(q, q), k, v)).tangent


def inference(q, k, v):
    with torch.inference_mode():
        seen = attend(q, k, v)
    return seen * 1


def no_inference(q, k, v):
    with torch.inference_mode(False):  # this turns grad mode on
        return attend(q, k, v)


def casted(q, k, v):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return attend(q, k, v)


def branches(q, k, v):
    return torch.cond(q.sum() > 0, attend, lambda q, k, v: attend(q, k, v) + 1, (q, k, v))


def kept(q, k, v):
    return checkpoint(attend, q, k, v, use_reentrant=False)


def kept_twice(q, k, v):
    return checkpoint(lambda *a: kept(*a) + kept(*a), q, k, v, use_reentrant=True)


def of_scale(transform, sum_of=lambda y: y):
    def function(q, k, v):
        return transform(lambda scale: sum_of(attend(q * scale, k, v)))(q[0, 0, 0])

    return function


FUSED, GRADIENT, TRANSFORM = "cache_attention", "GRADIENT", "TRANSFORM"
#: The steps. Each has the number of fused sites, and the codes of the other sites.
CASES = {
    "enable_grad": (with_grad(attend), 0, {GRADIENT}),
    "half": (half, 1, {GRADIENT}),
    "nested": (nested, 2, set()),
    "read_under_grad": (read_under_grad, 0, {GRADIENT}),
    "guided": (guided, 1, {GRADIENT}),
    "backward": (backward, 0, {GRADIENT}),
    "function": (Recorded.apply, 1, set()),
    "function_recorded": (with_grad(lambda *a: Recorded.apply(*a)), 0, {GRADIENT}),
    "dual": (dual, 0, {TRANSFORM}),
    "inference": (inference, 1, set()),
    "no_inference": (no_inference, 0, {GRADIENT}),
    "autocast": (casted, 0, {"DTYPE"}),
    "vmap": (lambda *a: torch.func.vmap(lambda *a: attend(*(t[None] for t in a)))(*a), 0,
             {TRANSFORM}),
    "vmap_of_a_mask": (lambda q, k, v: attend(torch.func.vmap(torch.neg)(q), k, v), 1, set()),
    "grad": (of_scale(torch.func.grad, torch.sum), 0, {TRANSFORM}),
    "vjp": (lambda q, k, v: torch.func.vjp(lambda q: attend(q, k, v), q)[1](q)[0], 0, {TRANSFORM}),
    "jvp": (lambda q, k, v: torch.func.jvp(lambda q: attend(q, k, v), (q,), (q,))[1], 0,
            {TRANSFORM}),
    "jacfwd": (of_scale(torch.func.jacfwd), 0, {TRANSFORM}),
    "jacrev": (of_scale(torch.func.jacrev, lambda y: y.sum((0, 1, 2))), 0, {TRANSFORM}),
    "checkpoint": (kept, 1, set()),
    "checkpoints_in_one": (kept_twice, 2, set()),
    "checkpoint_recorded": (with_grad(lambda *a: kept(*a)), 0, {GRADIENT}),
    "regions": (lambda q, k, v: region(region(q, k, v), k, v), 2, set()),
    "cond": (branches, 0, {"SUBGRAPH"}),
}  # fmt: skip


def arguments():
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, 3, 16), (2, 2, 5, 16), (2, 2, 5, 16))
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def outcome(function):
    """Returns the result of a step, and the gradients of the arguments afterwards."""
    given = arguments()
    with torch.no_grad():
        result = function(*given)
    if result.requires_grad:
        with torch.enable_grad():
            result.sin().sum().backward()
    return [result.detach(), *(tensor.grad for tensor in given)]


@torch._dynamo.config.patch(trace_autograd_ops=True)
def assert_same_gradients(function, inner):
    expected = outcome(function)
    for ours, theirs in zip(outcome(compiled(function, inner=inner)), expected, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_eagers(case):
    function, count, codes = CASES[case]
    assert_same_gradients(function, "eager")
    report = reports()[-1]
    assert patterns_in(report, "attention") == [FUSED] * count
    assert codes_of(report, "attention", "tilewright") == codes, [*map(str, report.misses)]


@pytest.mark.parametrize("case", ["half"])
def test_gradients_are_eagers_through_inductor(case):
    assert_same_gradients(CASES[case][0], "inductor")
    assert codes_of(reports()[-1], "attention") == {GRADIENT}


def test_a_model_without_gradient_inside_is_fused_where_grad_mode_is_on():
    """The parameters of the model need grad, but autograd records nothing."""
    q, k, v = arguments()
    frozen = compiled(torch.no_grad()(attend), inner="eager")
    with torch.enable_grad():
        result = frozen(q, k, v)
    assert not result.requires_grad
    torch.testing.assert_close(result, attend(q, k, v).detach())
    assert patterns_in(reports()[-1], "attention") == [FUSED]
    assert not reports()[-1].notes


def test_lower_tells_of_a_gradient_inside():
    (miss,) = (m for m in lower(half, arguments()).misses if m.code == GRADIENT)
    assert "a gradient can flow through this site" in str(miss)
    assert miss.hint == GRAD_HINT


class Steps(nn.Module):
    """Projects in one mode and writes the cache in another mode."""

    def __init__(self, projected, written):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(32, 32) for _ in range(3))
        self.projected, self.written = projected, written

    def forward(self, x, k_cache, v_cache, slots):
        with self.projected():
            parts = self.q_proj, self.k_proj, self.v_proj
            q, k, v = (p(x).view(-1, 2, 16) for p in parts)
        with self.written():
            k_cache.index_copy_(0, slots, k)
            v_cache.index_copy_(0, slots, v)
        return (k_cache + 0).sum() + (q + 0).sum()


@pytest.mark.parametrize(
    ("projected", "written", "fused"),
    [
        (torch.no_grad, torch.no_grad, "qkv_cache"),
        (torch.enable_grad, torch.no_grad, "cache_store"),
        # At the place of the write grad mode is on, and the op would read weights that need grad.
        (torch.no_grad, torch.enable_grad, "cache_store"),
        (torch.enable_grad, torch.enable_grad, ""),
    ],
)
def test_projection_and_write_in_two_modes(projected, written, fused):
    torch.manual_seed(0)
    model, x = Steps(projected, written), torch.randn(3, 32)
    found = []
    for run in (model, compiled(model, inner="eager")):
        caches = [torch.zeros(8, 2, 16) for _ in range(2)]
        with torch.no_grad():
            result = run(x, *caches, torch.tensor([4, 1, 0]))
        if result.requires_grad:
            with torch.enable_grad():
                (result * 1).backward()
        found.append([result.detach(), *caches, *(p.grad for p in model.parameters())])
        model.zero_grad()
    for theirs, ours in zip(*found, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs)
    report = reports()[-1]
    assert patterns_in(report, "qkv") == ([fused] if fused else [])
    assert (GRADIENT in codes_of(report, "qkv")) == (fused != "qkv_cache")
