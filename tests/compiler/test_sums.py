"""`y += delta` on a product that nothing read before is the sum, and `w /= total` of the largest
numbers or gathered ones the quotient, and `x *= factor` of a cast or a product the product;
elsewhere they stay what they are."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F

from tests.compiler.running import through
from tilewright.compiler.rewrite.sums import make_sums_new

W = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
found: list[int] = []


def compiled(step):
    """The step with its sums made new, through eager; how many there were goes to found."""

    def backend(gm, inputs):
        found.append(through(make_sums_new, gm))
        return gm.forward

    torch._dynamo.reset()
    found.clear()
    return torch.compile(step, backend=backend)


def once(x, d):
    y = F.linear(x, W)
    y += d
    return y.view(-1, 4), y.sum()


def twice(x, d):
    y = x @ W.t()
    y += d
    return y.add_(d, alpha=3).relu()


def read_before(x, d):
    y = F.linear(x, W)
    z = y * 2
    y += d
    return y, z


def view_of_it(x, d):
    y = F.linear(x, W)
    flat = y.view(-1)
    y += d
    return flat


def added_to_a_view(x, d):
    y = F.linear(x, W)
    y[:2] += d[:2]
    return y


def added_to_an_input(x, d):
    d += x.sum()
    return d


def written_through(x, d):
    y = F.linear(x, W)
    y.add_(d)
    return y


def added_to_itself(x, d):
    y = F.linear(x, W)
    y += y.detach()
    return y


def kept_by_a_list(x, d):
    y = F.linear(x, W)
    parts = [y, y[1:]]
    parts[0].add_(d)
    return parts[1] * 2, y


def number(x, d):
    y = F.linear(x, W)
    y += 1
    return y


def wider(x, d):
    """Rounded to the product's dtype, as in place it is."""
    y = F.linear(x.bfloat16(), W.bfloat16())
    y += d
    return y


@pytest.mark.parametrize(
    ("step", "sums"),
    [(once, 1), (twice, 2), (read_before, 0), (view_of_it, 0), (added_to_a_view, 0),
     (added_to_an_input, 0), (written_through, 1), (added_to_itself, 0), (kept_by_a_list, 0),
     (number, 0), (wider, 0)],
)  # fmt: skip
def test_only_sums_that_nobody_can_tell_apart_change(step, sums):
    x, d = torch.randn(3, 16), torch.randn(3, 8)
    ours, eager = compiled(step)(x, d.clone()), step(x, d.clone())
    torch.testing.assert_close(ours, eager)  # Inductor may round a product and a sum once
    assert found == [sums]


def of_the_largest(x, d):
    top, ids = torch.topk(d, 3)
    top /= top.sum(-1, keepdim=True)
    return top * 2, top, ids


def of_gathered(x, d):
    w = d.gather(1, torch.zeros(3, 2, dtype=torch.int64))
    before = w + 1
    w.div_(before.sum(-1, keepdim=True), rounding_mode="floor")
    return before, w.view(-1)


def of_a_view(x, d):
    top = torch.topk(d, 3)[0]
    first = top[:, :1]
    top /= top.sum(-1, keepdim=True)
    return first, top


def of_an_input(x, d):
    d /= x.sum()
    return d


def of_a_product(x, d):
    y = F.linear(x, W)
    y /= y.sum(-1, keepdim=True)
    return y


def by_wider_numbers(x, d):
    top = torch.topk(d.bfloat16(), 3)[0]
    top /= top.float().sum(-1, keepdim=True)
    return top


@pytest.mark.parametrize(
    ("step", "quotients"),
    [(of_the_largest, 1), (of_gathered, 1), (of_a_view, 0), (of_an_input, 0), (of_a_product, 0),
     (by_wider_numbers, 0)],
)  # fmt: skip
def test_only_quotients_that_nobody_can_tell_apart_change(step, quotients):
    """Who read the numbers before the division has read what they were."""
    x, d = torch.randn(3, 16), torch.randn(3, 8)
    ours, eager = compiled(step)(x, d.clone()), step(x, d.clone())
    torch.testing.assert_close(ours, eager)
    assert found == [quotients]


def of_a_cast(x, d):
    wide = x.double()
    mean = wide.pow(2).mean(-1, keepdim=True)
    wide.mul_(torch.rsqrt(mean + 1e-6))
    return wide.to(x.dtype).mul_(x)


def of_no_cast(x, d):
    same = x.float()
    same.mul_(x.sum())
    return same, x


def of_a_cast_in_parts(x, d):
    wide = x.double()
    part = wide[:, :3]
    wide.mul_(part.sum())
    return part, wide


def of_a_factor(x, d):
    y = x * 2
    y *= d.sum()
    return y


@pytest.mark.parametrize(
    ("step", "products"),
    [(of_a_cast, 2), (of_no_cast, 0), (of_a_cast_in_parts, 0), (of_a_factor, 1)],
)
def test_only_products_that_nobody_can_tell_apart_change(step, products):
    x, d = torch.randn(3, 16), torch.randn(3, 8)
    ours, eager = compiled(step)(x.clone(), d), step(x.clone(), d)
    torch.testing.assert_close(ours, eager)
    assert found == [products]


AT = torch.tensor([2, 0, 2])


def rows_added(x, d):
    out = torch.zeros_like(d)
    out.index_add_(0, AT, d)
    out.scatter_add_(0, AT[:, None].expand(-1, 8), d)
    return out


def rows_added_to_an_input(x, d):
    d.index_add_(0, AT, d.clone())
    return d


def rows_added_beside_a_view(x, d):
    out = torch.zeros_like(d)
    first = out[0]
    out.index_add_(0, AT, d)
    return first, out


def rows_multiplied(x, d):
    out = torch.zeros_like(d)
    return out.scatter_(0, AT[:, None].expand(-1, 8), d, reduce="multiply")


def rows_added_to_a_product(x, d):
    out = F.linear(x, W)
    out.index_add_(0, AT, d)
    return out


def rows_put_back(x, d):
    out = torch.zeros_like(d)
    out[AT] += d
    out[AT] += d
    return out


def rows_put_into_an_input(x, d):
    d[AT] += x[:, :8]
    return d


def rows_put_beside_a_view(x, d):
    out = torch.zeros_like(d)
    first = out[0]
    out[AT] += d
    return first, out


def rows_put_of_a_number(x, d):
    out = torch.zeros_like(d)
    out[AT] = 2.0
    return out


def rows_put_of_more_dims(x, d):
    """Assignment takes leading dimensions of one off."""
    y = torch.zeros_like(x)
    y[torch.tensor([2, 0])] = x[None, :1]
    return y


def rows_put_by_a_mask(x, d):
    out = torch.zeros_like(d)
    out[AT > 0] = d[:2]
    return out


@pytest.mark.parametrize(
    ("step", "sums"),
    [(rows_added, 2), (rows_added_to_an_input, 0), (rows_added_beside_a_view, 0),
     (rows_multiplied, 0), (rows_added_to_a_product, 1), (rows_put_back, 4),
     (rows_put_into_an_input, 0), (rows_put_beside_a_view, 1), (rows_put_of_a_number, 0),
     (rows_put_by_a_mask, 0), (rows_put_of_more_dims, 0)],
)  # fmt: skip
def test_only_sums_of_rows_that_nobody_can_tell_apart_change(step, sums):
    x, d = torch.randn(3, 16), torch.randn(3, 8)
    ours, eager = compiled(step)(x, d.clone()), step(x, d.clone())
    torch.testing.assert_close(ours, eager)
    assert found == [sums]


def test_a_tensor_without_memory_of_its_own_is_passed_by():
    """Sparse tensors have no storage."""
    graph = torch.fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    x.meta["example_value"] = torch.eye(3).to_sparse()
    y = graph.call_function(torch.mm, (x, w))
    w.meta["example_value"], y.meta["example_value"] = torch.ones(3, 3), torch.ones(3, 3)
    z = graph.call_method("add_", (y, w))
    z.meta["example_value"] = y.meta["example_value"]
    graph.output(z)
    assert make_sums_new(graph) == 1


@pytest.mark.parametrize("taken", ["once", "again", "all"])
def test_a_result_that_is_taken_again_by_another_name_stays_in_place(taken):
    """Whoever takes it later must find it divided."""
    graph = torch.fx.Graph()
    d = graph.placeholder("d")
    d.meta["example_value"] = torch.ones(3, 8)
    both = graph.call_function(torch.topk, (d, 2))
    both.meta["example_value"] = tuple(torch.topk(d.meta["example_value"], 2))
    top = graph.call_function(operator.getitem, (both, 0))
    top.meta["example_value"] = both.meta["example_value"][0]
    total = graph.call_method("sum", (top, -1, True))
    total.meta["example_value"] = torch.ones(3, 1)
    divided = graph.call_method("div_", (top, total))
    divided.meta["example_value"] = top.meta["example_value"]
    again = graph.call_function(operator.getitem, (both, 0))
    again.meta["example_value"] = top.meta["example_value"]
    graph.output({"once": divided, "again": again, "all": both}[taken])
    if taken != "again":
        graph.erase_node(again)
    assert make_sums_new(graph) == (taken == "once")
