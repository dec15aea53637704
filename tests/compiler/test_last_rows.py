"""Tests selections of rows of a product. The rows are selected before the product if no other node
reads the product."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.agreement import assert_no_worse
from tests.compiler.running import through
from tilewright.compiler import lower
from tilewright.compiler.rewrite.last_rows import take_rows_first

GENERATOR = torch.Generator().manual_seed(0)
W = torch.randn(40, 16, generator=GENERATOR)
BIAS = torch.randn(40, generator=GENERATOR)
BATCH, TOKENS = 3, 7
found: list[tuple[int, list[tuple]]] = []


def compiled(step, inner="eager"):
    """Returns the step, compiled after its selections were moved before the products. Adds the
    number of moved selections, and the shapes of the graph's products, to `found`."""

    def backend(gm, inputs):
        moved = through(take_rows_first, gm)
        products = [n for n in gm.graph.nodes if "linear" in str(n.target) or "matmul" in n.name]
        found.append((moved, [tuple(n.meta["example_value"].shape) for n in products]))
        if inner == "eager":
            return gm.forward
        return torch._inductor.compile(gm, inputs)

    torch._dynamo.reset()
    found.clear()
    return torch.compile(step, backend=backend)


def with_symbols(x):
    """Returns the same tensor with a symbolic number of sequences and tokens."""
    for dim in (0, 1):
        torch._dynamo.mark_dynamic(x, dim)
    return x


def head(x):
    return F.linear(x, W.to(x.dtype))


def last(x):
    return head(x)[:, -1]


def last_whole(x):
    return head(x)[:, -1, :]


def last_as_one(x):
    return head(x)[:, -1:, :]


def last_few(x):
    return head(x)[:, -3:]


def with_bias(x):
    return F.linear(x, W.to(x.dtype), bias=BIAS.to(x.dtype))[:, -1]


def by_matmul(x):
    return (x @ W.to(x.dtype).t())[:, -1]


def by_ellipsis(x):
    return head(x)[..., -2:, :]


def by_steps(x):
    return head(x)[:, ::2]


def by_select(x):
    return head(x).select(1, -1)


def by_narrow(x):
    return head(x).narrow(1, 2, 3)


def of_two_tokens(x):
    return head(x)[:, -2:]


def of_one_sequence(x):
    return head(x)[1]


def as_float(x):
    """Casts logits as transformers does, and caps them as Gemma does."""
    logits = head(x).float()
    return (torch.tanh(logits / 30.0) * 30.0)[:, -1, :]


def changed_behind(x):
    """In both cases, the write changes only the memory of the selection."""
    logits = head(x)[:, -1]
    logits[:, 3] = -1.0
    return logits.argmax(-1), logits


MOVED = [last, last_whole, last_as_one, last_few, with_bias, by_matmul, by_ellipsis, by_steps,
         by_select, by_narrow, of_one_sequence, as_float, changed_behind]  # fmt: skip


def tensors(made):
    return made if isinstance(made, tuple) else (made,)


def same_layout(ours, theirs):
    for one, other in zip(tensors(ours), tensors(theirs), strict=True):
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)


@pytest.mark.parametrize("step", MOVED, ids=lambda step: step.__name__)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_rows_are_taken_first_and_nobody_can_tell(step, dynamic):
    x = torch.randn(BATCH, TOKENS, 16, dtype=torch.bfloat16)
    ours = compiled(step)(with_symbols(x.clone()) if dynamic else x)
    eager, exact = step(x), step(x.double())
    ((moved, shapes),) = found
    assert moved == 1
    if not dynamic:
        assert torch.Size(shapes[0]).numel() < BATCH * TOKENS * 40
    same_layout(ours, eager)
    for one, other, true in zip(*map(tensors, (ours, eager, exact)), strict=True):
        if one.dtype.is_floating_point:
            assert_no_worse(one, other, true, step.__name__)


def test_other_numbers_of_tokens_take_the_same_graph():
    forward = compiled(last_few)
    for tokens in (5, 9, 4):
        x = torch.randn(BATCH, tokens, 16)
        ours, eager = forward(with_symbols(x)), last_few(x)
        same_layout(ours, eager)
        torch.testing.assert_close(ours, eager)
    assert [moved for moved, _ in found] == [1]


def test_as_many_rows_as_the_traced_run_has_do_not_make_that_number_the_only_one():
    for step in (of_two_tokens, by_steps):
        forward = compiled(step)
        for tokens in (2, 5):
            x = torch.randn(BATCH, tokens, 16)
            torch._dynamo.mark_dynamic(x, 1)
            torch.testing.assert_close(forward(x), step(x))
        assert len(found) == 1, step.__name__


def test_through_inductor():
    x = torch.randn(BATCH, TOKENS, 16)
    ours, eager = compiled(changed_behind, inner="inductor")(x), changed_behind(x)
    same_layout(ours, eager)
    torch.testing.assert_close(ours, eager)


def read_twice(x):
    logits = head(x)
    return logits[:, -1], logits.sum()


def returned_whole(x):
    logits = head(x)
    return logits, logits[:, -1]


def two_selections(x):
    logits = head(x)
    return logits[:, -1] + logits[:, 0]


def of_columns(x):
    return head(x)[..., -1]


def of_some_columns(x):
    return head(x)[:, -1, :7]


def by_tensor(x):
    return head(x)[:, torch.tensor([2, 1])]


def by_mask(x):
    return head(x)[:, torch.arange(TOKENS) > 4]


def with_a_new_dim(x):
    return head(x)[:, None, -1]


def all_of_it(x):
    return head(x)[:, :]


def behind_a_softmax_of_rows(x):
    """Applies a softmax over tokens, so each number depends on other tokens."""
    return head(x).softmax(1)[:, -1]


def behind_a_sum_with_others(x):
    return (head(x) + x.sum(-1, keepdim=True))[:, -1]


def written_before(x):
    logits = head(x)
    logits.mul_(2.0)
    return logits[:, -1]


def of_a_vector(x):
    """Multiplies a vector, so that the last dimension of the result is the tokens."""
    return F.linear(x, W[0].to(x.dtype))[:, -1]


def two_of_activations(x):
    return (x @ x.transpose(1, 2))[:, -1]


def with_a_bias_of_each_row(x):
    return F.linear(x[0], W.to(x.dtype), x.sum((0, 2))[:, None].expand(-1, 40))[-1:]


def into_a_given_tensor(x):
    """Writes the product into a given tensor, which is also returned."""
    room = x.new_zeros(TOKENS, 40)
    found = torch.matmul(x[0], W.to(x.dtype).t(), out=room)[-1:]
    return found, room


def of_a_square(x):
    square = x[0, :, :TOKENS]
    return (square @ square)[-1:]


def with_strides_of_the_whole(x):
    """Reads rows beyond the selection by the strides of the whole product."""
    return head(x)[:, 2:4].as_strided((BATCH, TOKENS, 40), (TOKENS * 40, 40, 1), 0)


def from_a_tensor_with_a_number(x):
    logits = head(x)
    return logits.narrow(1, torch.tensor(2), 2)


def inside_of_vmap(x):
    return torch.vmap(lambda one: F.linear(one, W.to(x.dtype))[-2:])(x)


def at_a_place_known_later(x):
    logits = head(x)
    at = int(x.shape[1] - 1)
    return logits.select(2, at)


STAY = [read_twice, returned_whole, two_selections, of_columns, of_some_columns, by_tensor, by_mask,
        with_a_new_dim, all_of_it, behind_a_softmax_of_rows, behind_a_sum_with_others,
        written_before, of_a_vector, two_of_activations, at_a_place_known_later,
        with_a_bias_of_each_row, into_a_given_tensor, of_a_square, with_strides_of_the_whole,
        from_a_tensor_with_a_number, inside_of_vmap]  # fmt: skip


@pytest.mark.parametrize("step", STAY, ids=lambda step: step.__name__)
def test_what_others_read_or_what_is_no_row_stays(step):
    x = torch.randn(BATCH, TOKENS, 16)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        ours = compiled(step)(x)
    assert [moved for moved, _ in found] == [0]
    for one, other in zip(tensors(ours), tensors(step(x)), strict=True):
        assert torch.equal(one, other)


def test_a_copy_to_another_device_is_no_arithmetic():
    made = compiled(lambda x: head(x).to("meta")[:, -1])(torch.randn(BATCH, TOKENS, 16))
    assert made.shape == (BATCH, 40)
    assert [moved for moved, _ in found] == [0]


def test_one_token_stays_as_it_is():
    x = torch.randn(BATCH, 1, 16)
    ours = compiled(last)(x)
    assert found[0][0] == 0
    assert torch.equal(ours, last(x))


def test_under_autocast_it_has_that_dtype():
    """Under autocast, the product has another dtype than its operands imply."""

    def step(x):
        with torch.autocast("cpu", torch.bfloat16):
            return head(x)[:, -1]

    x = torch.randn(BATCH, TOKENS, 16)
    ours = compiled(step)(x)
    assert found[0][0] == 1
    assert ours.dtype == torch.bfloat16
    assert torch.equal(ours, step(x))


def test_the_backend_takes_them():
    with torch.device("meta"):
        model = torch.nn.Linear(16, 40).requires_grad_(False)
    (graph,) = lower(lambda x: model(x)[:, -1], [torch.zeros(2, 7, 16, device="meta")]).graphs
    shapes = {
        name: [tuple(n.meta["example_value"].shape) for n in module.graph.nodes
               if "linear" in str(n.target)]
        for name, module in (("before", graph.before), ("after", graph.after))
    }  # fmt: skip
    assert shapes == {"before": [(2, 7, 40)], "after": [(2, 40)]}
