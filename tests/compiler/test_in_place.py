"""Tests that in-place arithmetic becomes out-of-place arithmetic if no reader can see a difference,
also through views. It stays in place if another view, an input or the strides of a result would
show a difference."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from tests.compiler.running import through
from tilewright.compiler.rewrite.bodies import inline_bodies
from tilewright.compiler.rewrite.in_place import make_arithmetic_new
from tilewright.compiler.safety.modes import modes_of

W = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
found: list[int] = []


def compiled(step, dynamic=None):
    """Returns the step, compiled with the eager inner compiler after its in-place arithmetic was
    replaced. Adds the number of replaced calls to `found`."""

    def backend(gm, inputs):
        inline_bodies(gm.graph, modes_of(gm.graph, torch.is_grad_enabled()))
        found.append(through(make_arithmetic_new, gm))
        return gm.forward

    torch._dynamo.reset()
    found.clear()
    return torch.compile(step, backend=backend, dynamic=dynamic)


def through_views(x, d):
    """Scales queries as Gemma does."""
    q = F.linear(x, W).view(3, 2, 4).transpose(0, 1)
    q.mul_(0.5)
    return q.reshape(2, 12) + 1


def in_turn(x, d):
    y = F.linear(x, W)
    before = y * 2
    y *= 3
    y.masked_fill_(d > 0, -1.0)
    y[d < 0] = 2.0
    F.relu(y, inplace=True)
    return before, y


def one_of_three(x, d):
    q, k, v = F.linear(x, W).split([4, 2, 2], -1)
    q.mul_(2)
    k = k.view(3, 2, 1)
    return q @ q.mT, k + 1, v + 1


def one_of_three_then_the_others(x, d):
    """Doubles q in place, and then adds q to k, which is in the same memory. The calls stay in
    place, although they could be replaced."""
    q, k, v = F.linear(x, W).split([4, 2, 2], -1)
    q.mul_(2)
    keys = k.view(3, 2, 1)
    keys.add_(q[:, :2, None])
    return q @ q.mT, k * 2, keys + v[..., None]


def copied(x, d):
    y = F.linear(x, W)
    y.copy_(d)
    return y * 2


def all_columns_by_number(x, d):
    """Pads to 8 columns by number, although d already has 8 columns."""
    y, z = (torch.empty(3, 8).fill_(0.0) for _ in range(2))
    y[:, :8] = d
    z[..., : d.shape[1]] = x[:, :8]
    return y * 2, z.sum()


def some_columns_by_number(x, d):
    y = torch.empty(3, 8).fill_(0.0)
    y[:, :7] = d[:, :7]
    y[:, ::2] = d[:, :4]
    return y * 2


def whole_of_a_part(x, d):
    y = F.linear(x, W)
    y[:2].mul_(2)
    return y


def of_an_input(x, d):
    d.view(-1).mul_(2)
    return d


def by_another_name(x, d):
    y = F.linear(x, W)
    flat = y.view(-1)
    y.mul_(2)
    return flat.sum()


def named_before_and_after(x, d):
    y = F.linear(x, W)
    y.mul_(2)
    flat = y.view(-1)
    flat.add_(1)
    return y


def strides_returned(x, d):
    q = F.linear(x, W)[:, :4]
    q.mul_(2)
    return q


def strides_read(x, d):
    q = F.linear(x, W)[:, :4]
    q.mul_(2)
    return torch.as_strided(q, (3, 2), (8, 1)) + 1


def rounded(x, d):
    y = F.linear(x.bfloat16(), W.bfloat16())
    y.mul_(d)
    return y


def expanded_mask(x, d):
    y = F.linear(x, W)
    y[d[:, 0] > 0] = 1.0
    return y


def viewed_between_changes(x, d):
    """Makes a view of the result of the second change. The third change then changes the view."""
    y = F.linear(x, W)
    y.mul_(2)
    y.add_(d)
    flat = y.view(-1)
    y.sub_(1)
    return flat * 2


def many_changes(x, d):
    q = F.linear(x, W)[:, :4]
    q.mul_(2)
    q.add_(1)
    q.neg_()
    return q.view(-1, 2, 2).transpose(0, 1) @ W[:2, :2]


def overlapping(x, d):
    y = F.linear(x, W).view(-1)[:6].clone().as_strided((5, 2), (1, 1))
    y.mul_(2)
    return y + 1


def beyond_half(x, d):
    y = F.linear(x, W).half()
    y[d > 0] = -1e9
    return y + 0


def with_lowest(x, d):
    y = F.linear(x, W)
    y[d > 0] = float("-inf")
    return y.softmax(-1)


def in_a_checkpoint(x, d):
    """Has a body in which the tensor from outside has another fake tensor."""
    y = checkpoint(F.linear, x, W, use_reentrant=False)
    flat = y.view(-1)
    y.mul_(2)
    return flat + 1


# --- sums, quotients, products, rows ---


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
    """Rounds the result to the product's dtype, as the in-place operation does."""
    y = F.linear(x.bfloat16(), W.bfloat16())
    y += d
    return y


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


def divided_input(x, d):
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


def rows_put_by_name(x, d):
    """Writes the call as torch.export does, with keyword arguments."""
    out = torch.zeros_like(d)
    torch.ops.aten.index_put_.default(out, [AT], out[AT] + d)
    out.index_put_(indices=(AT,), values=d, accumulate=False)
    return out


def rows_put_and_added(x, d):
    out = torch.zeros_like(d)
    out.index_put_((AT,), d, accumulate=True)
    out.index_put_((AT, AT), d[0, 0])
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
    """Assigns a tensor with more leading dimensions, of size one, which the assignment drops."""
    y = torch.zeros_like(x)
    y[torch.tensor([2, 0])] = x[None, :1]
    return y


def filled_by_a_tensor(x, d):
    """Fills with a tensor. When the graph is compiled, it is not known whether the number
    overflows."""
    y = F.linear(x, W)
    y[d < 0] = d.sum()
    return y


def rows_put_by_a_mask(x, d):
    out = torch.zeros_like(d)
    out[AT > 0] = d[:2]
    return out


@pytest.mark.parametrize(
    ("step", "count"),
    [(through_views, 1), (in_turn, 4), (one_of_three, 1), (one_of_three_then_the_others, 0),
     (copied, 1), (all_columns_by_number, 2), (some_columns_by_number, 0), (whole_of_a_part, 0),
     (of_an_input, 0), (by_another_name, 0),
     (named_before_and_after, 1), (strides_returned, 0), (strides_read, 0), (rounded, 0),
     (expanded_mask, 0), (viewed_between_changes, 2), (many_changes, 3), (overlapping, 0),
     (beyond_half, 0), (with_lowest, 1), (in_a_checkpoint, 0),
     (once, 1), (twice, 2), (read_before, 1), (view_of_it, 0), (added_to_a_view, 0),
     (added_to_an_input, 0), (written_through, 1), (added_to_itself, 1), (kept_by_a_list, 0),
     (number, 1), (wider, 0), (of_the_largest, 1), (of_gathered, 1), (of_a_view, 0),
     (divided_input, 0), (of_a_product, 1), (by_wider_numbers, 0), (of_a_cast, 2), (of_no_cast, 0),
     (of_a_cast_in_parts, 0), (of_a_factor, 1), (rows_added, 2), (rows_added_to_an_input, 0),
     (rows_added_beside_a_view, 0), (rows_multiplied, 0), (rows_added_to_a_product, 1),
     (rows_put_back, 4), (rows_put_by_name, 2), (rows_put_and_added, 0),
     (rows_put_into_an_input, 1), (rows_put_beside_a_view, 1),
     (rows_put_of_a_number, 0), (rows_put_by_a_mask, 0), (rows_put_of_more_dims, 0),
     (filled_by_a_tensor, 0)],
)  # fmt: skip
def test_only_arithmetic_that_nobody_can_tell_apart_becomes_new(step, count):
    generator = torch.Generator().manual_seed(1)
    x, d = torch.randn(3, 16, generator=generator), torch.randn(3, 8, generator=generator)
    ours, eager = d.clone(), d.clone()
    results = compiled(step)(x, ours), step(x, eager)
    torch.testing.assert_close(*results, check_stride=True)
    assert torch.equal(ours, eager)
    assert found == [count]


def parts_of_a_batch(x, d):
    """q, k and v of several sequences are next to each other in memory, token by token."""
    q, k, v = F.linear(torch.stack([x, x + 1]), W).split([4, 2, 2], -1)
    q.mul_(2)
    heads = q.view(2, -1, 2, 2).transpose(1, 2)
    heads.add_(1)
    return heads @ heads.mT, k + v


def rows_behind(x, d):
    y = F.linear(x, W)
    y[1:].mul_(2)
    return y[:1] + 1, y[2:] + 1


@pytest.mark.parametrize(("step", "count"), [(parts_of_a_batch, 2), (rows_behind, 0)])
def test_a_number_of_rows_that_changes(step, count):
    ours = compiled(step, dynamic=True)
    for rows in (3, 5):
        x, d = torch.randn(rows, 16), torch.randn(rows, 8)
        torch.testing.assert_close(ours(x, d), step(x, d))
    assert set(found) == {count}


@pytest.mark.parametrize("outside", [True, False])
def test_what_autograd_records_stays(outside):
    """In one case no_grad hides the change from autograd; in the other case autograd records it.
    The change stays in place in both cases."""
    w = W.clone().requires_grad_()

    def step(x, w):
        with torch.enable_grad():
            y = F.linear(x, w)
            with torch.set_grad_enabled(not outside):
                y.mul_(2)
            return y.sum()

    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(2))
    grads = []
    for one in (step, compiled(step)):
        with torch.no_grad():
            y = one(x, w)
        grads += torch.autograd.grad(y, w)
    torch.testing.assert_close(*grads)
    assert found == [0]


def test_later_views_of_what_is_new_and_of_what_is_not_lie_apart():
    """The replaced part gets separate memory. The other parts keep their memory."""
    seen = []

    def backend(gm, inputs):
        make_arithmetic_new(gm.graph)
        views = [n.meta["example_value"] for n in gm.graph.nodes if n.target == "view"]
        parts = [n for n in gm.graph.nodes if n.target is operator.getitem]
        seen.extend((views, [n.meta["example_value"] for n in parts]))
        return gm.forward

    def step(x):
        q, k = F.linear(x, W).split([4, 4], -1)
        q.mul_(2)
        return q.view(3, 2, 2) + 1, k.unsqueeze(0) + 1

    torch._dynamo.reset()
    torch.compile(step, backend=backend)(torch.randn(3, 16))
    (view,), (q, k) = seen
    assert view.untyped_storage()._cdata != q.untyped_storage()._cdata
    assert q.untyped_storage()._cdata == k.untyped_storage()._cdata


def test_a_tensor_without_memory_of_its_own_is_passed_by():
    """Sparse tensors have no storage, so it is not known whether they share memory. They are
    skipped."""
    graph = torch.fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    x.meta["example_value"] = torch.eye(3).to_sparse()
    y = graph.call_function(torch.mm, (x, w))
    w.meta["example_value"], y.meta["example_value"] = torch.ones(3, 3), torch.ones(3, 3)
    z = graph.call_method("add_", (y, w))
    z.meta["example_value"] = y.meta["example_value"]
    graph.output(z)
    assert make_arithmetic_new(graph) == 0


@pytest.mark.parametrize("taken", ["once", "again", "all"])
def test_a_result_that_is_taken_again_by_another_name_stays_in_place(taken):
    """The division stays in place, because a later reader uses the tensor by another name and must
    find it divided."""
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
    assert make_arithmetic_new(graph) == (taken == "once")
