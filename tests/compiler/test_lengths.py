"""Tests that the lengths of a cache's layers advance together, if no reader can see the
difference."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from tests.compiler.running import assert_close, compiled
from tests.models.hf import CACHE_LENGTH, build_hf
from tilewright.compiler import lower

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
HEADS, D, SLOTS = 2, 16, 12


class CountingLayer(nn.Module):
    """Projects x, and writes k and v after the tokens that are present. A length counts these
    tokens."""

    def __init__(self, then) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.q, self.k, self.v = (nn.Linear(32, HEADS * D, bias=False) for _ in range(3))
        for weight in self.parameters():
            weight.data = torch.randn(weight.shape, generator=generator) / 8
            weight.requires_grad_(False)
        self.then = then

    def forward(self, x, k_cache, v_cache, length, *rest):
        num_tokens = x.shape[0]
        positions = torch.arange(num_tokens) + length
        q, k, v = (part(x).view(num_tokens, HEADS, D) for part in (self.q, self.k, self.v))
        seen = self.then(length, positions, num_tokens, *rest)
        k_cache.index_copy_(0, positions, k)
        v_cache.index_copy_(0, positions, v)
        return q.sin(), seen


def arguments(num_tokens=1):
    torch.manual_seed(1)
    caches = [torch.randn(SLOTS, HEADS, D) for _ in range(2)]
    return (torch.randn(num_tokens, 32), *caches, torch.tensor(3))


def advanced(length, positions, num_tokens):
    length.add_(num_tokens)


def advanced_by_operator(length, positions, num_tokens):
    length += num_tokens


def also_read_before(length, positions, num_tokens):
    later = length + 7
    length.add_(num_tokens)
    return later


def position_returned(length, positions, num_tokens):
    length.add_(num_tokens)
    return positions


def result_returned(length, positions, num_tokens):
    return length.add_(num_tokens)


def read_afterwards(length, positions, num_tokens):
    length.add_(num_tokens)
    return length + 1


def advanced_twice(length, positions, num_tokens):
    length.add_(num_tokens)
    length.add_(num_tokens)


def multiplied_before(length, positions, num_tokens):
    seen = length * 2
    length.add_(num_tokens)
    return seen


def scaled(length, positions, num_tokens):
    length.add_(num_tokens, alpha=2)


def advanced_by_a_tensor(length, positions, num_tokens, step):
    length.add_(step)


def seen_through_another_name(length, positions, num_tokens, view):
    length.add_(num_tokens)
    return view * 2


@dataclass(frozen=True)
class Seen:
    """Facts about the rewritten graph: how many lengths advance at its end, and how many positions
    it still computes."""

    advances: int
    sums: int


def seen(model, args) -> Seen:
    (graph,) = lower(model, args).graphs
    assert [match.op for match in graph.matches] == ["fused_qkv_paged"]
    *_, last, _ = graph.after.graph.nodes
    ends = len(last.args[0]) if last.target is torch._foreach_add_ else 0
    sources = [n for n in graph.after.graph.nodes if n.target is torch.arange]
    return Seen(ends, sum(len(node.users) for node in sources))


@pytest.mark.parametrize(
    ("then", "num_tokens", "expected"),
    [
        (advanced, 1, Seen(1, 0)),
        (advanced_by_operator, 1, Seen(1, 0)),
        (also_read_before, 1, Seen(1, 0)),
        (advanced, 2, Seen(1, 1)),
        (position_returned, 1, Seen(1, 1)),
    ],
)
def test_a_length_advances_at_the_end(then, num_tokens, expected):
    model, args = CountingLayer(then), arguments(num_tokens)
    assert seen(model, args) == expected
    assert_close(model, args)


@pytest.mark.parametrize(
    ("then", "rest"),
    [
        (result_returned, ()),
        (read_afterwards, ()),
        (advanced_twice, ()),
        (multiplied_before, ()),
        (scaled, ()),
        (advanced_by_a_tensor, (torch.tensor(1),)),
    ],
)
def test_a_length_that_someone_else_sees_stays_where_it_advances(then, rest):
    model, args = CountingLayer(then), (*arguments(), *rest)
    assert seen(model, args) == Seen(0, 1)
    assert_close(model, args)


def test_a_length_with_another_name_stays_where_it_advances():
    args = arguments()
    length = torch.tensor([3])
    model = CountingLayer(seen_through_another_name)
    args = (*args[:3], length[0], length)
    assert seen(model, args) == Seen(0, 1)
    eager = model(*args)[1].clone(), length.clone()
    length.fill_(3)
    ours = compiled(model)(*args)[1], length
    assert [t.item() for t in (*eager, *ours)] == [8, 4, 8, 4]


@pytest.mark.parametrize(
    "write",
    [
        lambda zero: zero.add_(2),
        lambda zero: zero.view(1, 1).fill_(2),
        lambda zero: zero.__setitem__(0, 2),
        lambda zero: torch.add(zero, 2, out=zero),
    ],
)
def test_an_arange_that_is_written_to_is_no_zero(write):
    """Writes into an arange, so that it no longer starts at zero. The position is the length plus
    two."""

    class Later(CountingLayer):
        def forward(self, x, k_cache, v_cache, length):
            zero = torch.arange(1)
            write(zero)
            positions = zero + length
            q, k, v = (part(x).view(1, HEADS, D) for part in (self.q, self.k, self.v))
            k_cache.index_copy_(0, positions, k)
            v_cache.index_copy_(0, positions, v)
            length.add_(1)
            return q.sin()

    model, args = Later(None), arguments()
    assert seen(model, args).advances == 1
    assert_close(model, args)


def test_steps_of_a_static_cache_write_behind_each_other():
    """Three tokens are written, one after another, through a Hugging Face cache of two layers.
    test_hf_models.py runs a cache through Inductor."""
    case = build_hf("llama", batch=1, past_tokens=4, dtype=torch.float32)
    cache, ids = case.kwargs["past_key_values"], torch.arange(7)[None] + 3
    wanted = case.model(ids, use_cache=False).logits[:, 4:]
    cache.reset()
    case.model(ids[:, :4], past_key_values=cache)
    step = compiled(case.model)
    logits = []
    for at in range(4, 7):
        mask = (torch.arange(CACHE_LENGTH) <= at)[None, None, None]
        given = {"position_ids": torch.tensor([[at]]), "attention_mask": mask}
        logits.append(step(ids[:, at : at + 1], past_key_values=cache, **given).logits)
    torch.testing.assert_close(torch.cat(logits, 1), wanted, rtol=1e-4, atol=1e-5)
    assert [layer.cumulative_length.item() for layer in cache.layers] == [7, 7]
