"""Tests that a request for the derivative or the batching rule of an op raises an error which says
that the op has none."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from torch.autograd import forward_ad

from tilewright.ops import ArgumentError, contract
from tilewright.ops.schema import ordered_fields

# The largest number of elements for which a hessian is computed, since it starts with a square
# matrix of this size.
MOST_ELEMENTS = 2048
OPS = {op.name: op for op in contract.all_ops() if op.namespace == "tilewright"}


def wide_float(op):
    """Returns a sample, and the name of its smallest argument that could be differentiated."""
    for case in op.cases:
        arguments = op.sample_inputs(case)
        held = {field.name: getattr(arguments, field.name) for field in fields(arguments)}
        sizes = {
            name: value.numel()
            for name, value in held.items()
            if isinstance(value, torch.Tensor) and value.dtype in (torch.float32, torch.bfloat16)
        }
        if min(sizes.values(), default=MOST_ELEMENTS + 1) <= MOST_ELEMENTS:
            return arguments, min(sizes, key=sizes.__getitem__)
    return None


FLOATING = {name: op for name, op in OPS.items() if wide_float(op)}


def of_one(op, arguments, name):
    """Returns the op as a function of one argument with a single number as its result, and that
    argument."""

    def function(value):
        result = op.call(replace(arguments, **{name: value}))
        first = result[0] if isinstance(result, tuple) else result
        return value.float().sum() if first is None else first.float().sum()

    return function, getattr(arguments, name)


TRANSFORMS = {
    "grad": lambda f, x: torch.func.grad(f)(x),
    "vjp": lambda f, x: torch.func.vjp(f, x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "hessian": lambda f, x: torch.func.hessian(f)(x),
    "grad of vmap": lambda f, x: torch.func.grad(lambda y: torch.vmap(f)(y[None]).sum())(x),
    "dual tensor": lambda f, x: dual(f, x),
    "backward": lambda f, x: f(x.clone().requires_grad_()).backward(),
}


def dual(f, x):
    with torch.no_grad(), forward_ad.dual_level():
        f(forward_ad.make_dual(x, x))


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("op", FLOATING.values(), ids=FLOATING)
def test_a_derivative_is_refused_before_a_write(op, transform):
    arguments, name = wide_float(op)
    function, x = of_one(op, arguments, name)
    caches = [cache for n in op.mutated if (cache := getattr(arguments, n)) is not None]
    before = [cache.clone() for cache in caches]
    words = "torch.vmap" if "vmap" in transform else "inference only"
    with pytest.raises(ArgumentError, match=rf"{op.name}: {name}: .*{words}"):
        TRANSFORMS[transform](function, x)
    for cache, held in zip(caches, before, strict=True):
        assert torch.equal(cache.view(torch.uint8), held.view(torch.uint8))


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_vmap_is_refused(op):
    arguments = op.sample_inputs(op.cases[0])
    name = ordered_fields(type(arguments))[0].name
    function, x = of_one(op, arguments, name)
    with pytest.raises(ArgumentError, match=rf"{op.name}: {name}: .*torch.vmap"):
        torch.vmap(function)(x[None])


def test_what_a_transform_does_not_differentiate_goes_through():
    """Arguments that a transform does not differentiate work as usual, including writes into a
    cache. torch.func wraps every argument of a function."""
    op = OPS["paged_kv_store"]
    given, expected = (op.sample_inputs(op.cases[0]) for _ in range(2))
    op.call(expected)

    def loss(w, k, k_cache):
        op.call(replace(given, k=k.detach(), k_cache=k_cache))
        with torch.no_grad():
            op.call(replace(given, k=k, k_cache=k_cache))
        return (w * k_cache.float().sum()).sum()

    gradient = torch.func.grad(loss)(torch.ones(2), given.k, given.k_cache)
    assert torch.equal(given.k_cache, expected.k_cache)
    assert torch.equal(gradient, expected.k_cache.float().sum().expand(2))


def test_inference_mode_records_nothing_whatever_the_grad_mode():
    op = OPS["fused_moe"]
    arguments, name = wide_float(op)
    function, x = of_one(op, arguments, name)
    expected = function(x)
    needing = x.clone().requires_grad_()
    with torch.inference_mode(), torch.enable_grad():
        assert torch.equal(function(needing), expected)


def test_a_compiled_graph_loses_no_gradient():
    """A compiled graph does not silently lose a gradient. Before, a backward pass through a
    compiled op gave no gradient and no error."""
    torch._dynamo.reset()
    op = OPS["fused_moe"]
    arguments, name = wide_float(op)
    function, x = of_one(op, arguments, name)
    compiled = torch.compile(function, backend="aot_eager")
    with pytest.raises(Exception, match="inference only"):
        compiled(x.clone().requires_grad_())
    torch._dynamo.reset()
    with torch.no_grad():
        assert torch.equal(compiled(x.clone().requires_grad_()), function(x))
    torch._dynamo.reset()
