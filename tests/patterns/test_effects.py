"""Compares effects with PyTorch's views, for random chains of views.

The oracle evaluates an effect by plain index arithmetic. PyTorch evaluates the chain itself.
"""

import itertools
import random
from contextlib import suppress

import pytest
import sympy
import torch

from tilewright.patterns import effects
from tilewright.patterns.effects import Atom, Effect, InexpressibleError


def evaluate(effect: Effect, base: torch.Tensor) -> torch.Tensor:
    """Returns the elements that `effect` selects from `base`, one by one."""
    shape = effect.shape
    out = torch.empty(shape, dtype=base.dtype)
    for index in itertools.product(*(range(n) for n in shape)):
        place = list(effect.start)
        for position, dim in zip(index, effect.dims, strict=True):
            for atom in reversed(dim):
                position, digit = divmod(position, atom.length)
                if atom.axis is not None:
                    place[atom.axis] += digit * atom.step
        out[index] = base[tuple(place)]
    return out


def random_view(tensor: torch.Tensor, effect: Effect, rng: random.Random):
    """Applies one random view operation on both sides."""
    rank = tensor.dim()
    kind = rng.choice(["permute", "reshape", "narrow", "select", "unsqueeze", "expand", "squeeze"])
    dim = rng.randrange(rank)
    if kind == "permute":
        order = rng.sample(range(rank), rank)
        return tensor.permute(order), effects.permute(effect, order)
    if kind == "reshape":
        sizes = list(tensor.shape)
        if rng.random() < 0.5 and rank > 1:
            at = rng.randrange(rank - 1)
            sizes[at : at + 2] = [sizes[at] * sizes[at + 1]]
        else:
            factors = [f for f in (2, 3, 4) if sizes[dim] % f == 0]
            if factors:
                f = rng.choice(factors)
                sizes[dim : dim + 1] = [f, sizes[dim] // f]
        return tensor.reshape(sizes), effects.reshape(effect, sizes)
    if kind == "narrow":
        start = rng.randrange(tensor.shape[dim])
        length = rng.randint(1, tensor.shape[dim] - start)
        step = rng.choice([1, 1, 2])
        index = (slice(None),) * dim + (slice(start, start + length, step),)
        picked = tensor[index]
        return picked, effects.narrow(effect, dim, start, picked.shape[dim], step)
    if kind == "select" and rank > 1:
        at = rng.randrange(tensor.shape[dim])
        return tensor.select(dim, at), effects.select(effect, dim, at)
    if kind == "unsqueeze":
        return tensor.unsqueeze(dim), effects.unsqueeze(effect, dim)
    if kind == "expand" and 1 in tensor.shape:
        sizes = [2 if n == 1 else n for n in tensor.shape]
        return tensor.expand(sizes), effects.expand(effect, sizes)
    if kind == "squeeze" and rank > 1:
        return tensor.squeeze(dim), effects.squeeze(effect, [dim])
    return tensor, effect


def chain(seed: int):
    """Makes a random chain of views. Returns (base, the view, its effect), without inexpressible
    steps."""
    rng, shape = random.Random(seed), (2, 6, 12)
    base = torch.arange(torch.Size(shape).numel()).view(shape)
    tensor, effect, skipped = base, effects.identity(shape), 0
    for _ in range(7):
        try:
            tensor, effect = random_view(tensor, effect, rng)
        except InexpressibleError:
            skipped += 1
        if tensor.dim() == 0 or tensor.numel() > 400:
            break
    return base, tensor, effect, skipped


@pytest.mark.parametrize("block", range(8))
def test_random_chains_agree_with_torch(block):
    for seed in range(block * 50, block * 50 + 50):
        base, tensor, effect, _ = chain(seed)
        assert effect.shape == tuple(tensor.shape), seed
        assert torch.equal(evaluate(effect, base), tensor), seed


def test_most_chains_are_expressible():
    skipped = sum(chain(seed)[3] for seed in range(400))
    assert skipped < 400 * 7 * 0.1


@pytest.mark.parametrize("block", range(4))
def test_composition_is_a_view_of_a_view(block):
    compared = 0
    for seed in range(block * 50, block * 50 + 50):
        base, middle, inner, _ = chain(seed)
        if middle.dim() == 0:
            continue
        rng = random.Random(seed + 1000)
        tensor, outer = middle, effects.identity(tuple(middle.shape))
        try:
            for _ in range(3):
                tensor, outer = random_view(tensor, outer, rng)
            both = effects.compose(outer, inner)
        except (InexpressibleError, IndexError, ValueError):
            continue
        compared += 1
        assert torch.equal(evaluate(both, base), tensor), seed
    assert compared > 20


def test_different_spellings_have_one_effect():
    base = effects.identity((2, 7, 96))
    by_view = effects.permute(effects.reshape(base, (2, 7, 3, 32)), (0, 2, 1, 3))
    by_chunk = [effects.narrow(base, 2, 32 * i, 32) for i in range(3)]
    for head, chunk in enumerate(by_chunk):
        assert effects.select(by_view, 1, head) == chunk


def test_size_one_dimensions_do_not_matter():
    assert effects.identity((1, 4)) == Effect(((), (Atom(1, 1, 4),)), (0, 0))


def test_a_split_that_does_not_divide_is_refused():
    with pytest.raises(InexpressibleError, match="cannot split 6 by 4"):
        effects.reshape(effects.identity((6,)), (2, 4))


def test_sizes_known_to_be_as_many_are_regrouped_as_others():
    """If sizes are known to have as many elements, regroup splits them like reshape. For numbers,
    it accepts at least what reshape accepts."""
    rng = random.Random(3)
    for _ in range(300):
        base = torch.arange(48).view(rng.choice([(48,), (2, 24), (4, 3, 4), (6, 8)]))
        view, effect = base, effects.identity(base.shape)
        for _ in range(2):
            view, effect = random_view(view, effect, rng)
        sizes, left = [], view.numel()
        while left > 1:
            sizes.append(rng.choice([n for n in range(2, left + 1) if left % n == 0]))
            left //= sizes[-1]
        try:
            regrouped = effects.regroup(effect, sizes)
        except InexpressibleError:
            continue
        assert torch.equal(evaluate(regrouped, base), view.reshape(sizes))
        with suppress(InexpressibleError):
            assert regrouped == effects.reshape(effect, sizes)


def test_a_symbol_is_split_where_the_sizes_are_known_to_be_as_many():
    """A symbol is split if a view shows that it can be. A view of rows as blocks of 24 shows that
    their number is a multiple of 24."""
    rows = sympy.Symbol("s0", positive=True, integer=True)
    blocks = sympy.Function("FloorDiv")(rows, 24)
    whole = effects.identity((rows, 5))
    with pytest.raises(InexpressibleError):
        effects.reshape(whole, (blocks, 6, 4, 5))
    assert effects.regroup(whole, (blocks, 6, 4, 5)) == Effect(
        ((Atom(0, 24, blocks),), (Atom(0, 4, 6),), (Atom(0, 1, 4),), (Atom(1, 1, 5),)), (0, 0)
    )


def test_symbols_that_must_all_be_one_are_not_regrouped():
    """Both symbols must be 1, but only the data can show it. The shape (1,) has no second
    dimension."""
    one, other = (sympy.Symbol(name, integer=True) for name in ("u0", "u1"))
    with pytest.raises(InexpressibleError, match="cannot view"):
        effects.regroup(effects.identity((one, other)), (1,))


def test_a_slice_across_a_merged_dimension_is_refused():
    merged = effects.reshape(effects.permute(effects.identity((4, 6)), (1, 0)), (24,))
    with pytest.raises(InexpressibleError, match="merged"):
        effects.narrow(merged, 0, 3, 7)


def test_every_second_of_a_merged_dimension():
    """A nibble is picked in this way: the odd elements of [4, 6, 2] read as [4, 12]."""
    merged = effects.reshape(effects.identity((4, 6, 2)), (4, 12))
    odd = effects.select(effects.reshape(effects.identity((4, 12)), (4, 6, 2)), 2, 1)
    assert effects.compose(odd, merged) == effects.select(effects.identity((4, 6, 2)), 2, 1)


def test_an_index_that_carries_over_is_refused():
    merged = effects.reshape(effects.permute(effects.identity((3, 4)), (1, 0)), (12,))
    shifted = effects.narrow(effects.identity((12,)), 0, 1, 5, step=2)
    with pytest.raises(InexpressibleError):
        effects.compose(shifted, merged)
