"""Compares the bits of a word that an expression holds with PyTorch's result."""

from __future__ import annotations

import random

import pytest
import torch

from tests.compiler.flow_check import returned, selected
from tilewright.patterns.quantised.words import bits_of, follow

DTYPES = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


def words(dtype):
    """Returns numbers of all sizes and both signs, converted to the dtype."""
    generator = torch.Generator().manual_seed(0)
    whole = torch.randint(-(2**63), 2**63 - 1, (64,), generator=generator)
    return whole.to(dtype)


def told(bits, held):
    """Returns the numbers that these bits of the words form."""
    mask = (1 << bits.width) - 1
    size = bits.word.value.dtype.itemsize * 8
    numbers = [(n % 2**size >> bits.shift) & mask for n in held.flatten().tolist()]
    half = 1 << (bits.width - 1) if bits.signed else 1 << bits.width
    return [n - (1 << bits.width) if n >= half else n for n in numbers]


def assert_right(expression, dtype):
    """Returns whether the bits are known. Asserts that known bits are right."""
    held = words(dtype)
    view, expected = returned(expression, held), expression(held)
    bits = bits_of(view)
    if bits is None or bits.word.value.op != "input":
        return False
    assert bits.word.value.dtype == dtype
    assert told(bits, selected(bits.word.effect, held)) == expected.tolist()
    return True


KNOWN = {
    "the word": lambda w: w[3:],
    "shifted": lambda w: w >> 3,
    "floored": lambda w: w // 8,
    "masked": lambda w: w & 7,
    "masked by a number before it": lambda w: 7 & w,
    "the rest": lambda w: w % 16,
    "one bit": lambda w: w & 1,
    "shifted and masked": lambda w: (w >> 4) & 3,
    "masked and shifted": lambda w: (w & 63) >> 2,
    "a wider number": lambda w: (w & 15).to(torch.int64),
    "a narrower number": lambda w: (w & 15).to(torch.uint8),
    "all bits below the sign": lambda w: w & torch.iinfo(w.dtype).max,
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", KNOWN)
def test_bits_are_those_of_the_word(name, dtype):
    assert assert_right(KNOWN[name], dtype)


UNKNOWN = {
    "not a power of two": lambda w: w // 6,
    "a rest by no power": lambda w: w % 6,
    "a number modulo a word": lambda w: 16 % (w | 1),
    "holes": lambda w: w & 5,
    "nothing": lambda w: w & 0,
    "a sum": lambda w: w + 1,
    "by words": lambda w: w >> (w & 1),
    "no integer": lambda w: (w & 7).float(),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_no_field_of_bits(name):
    assert not assert_right(UNKNOWN[name], torch.int32)


def test_a_negative_number_in_a_wider_unsigned_one_is_no_field():
    assert not assert_right(lambda w: (w >> 28).to(torch.uint8), torch.int32)
    assert assert_right(lambda w: (w >> 28).to(torch.int8), torch.int32)


def random_step(rng):
    n = rng.randrange(1, 9)
    return rng.choice(
        (
            lambda w: w >> n,
            lambda w: w // 2 ** min(n, 6),
            lambda w: w & (2 ** min(n, 7) - 1),
            lambda w: w % 2 ** min(n, 6),
            lambda w: w.to(DTYPES[n % len(DTYPES)]),
        )
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_random_chains(dtype):
    rng, known = random.Random(str(dtype)), 0
    for _ in range(25):
        steps = [random_step(rng) for _ in range(rng.randrange(1, 5))]

        def chain(w, steps=tuple(steps)):
            for step in steps:
                w = step(w)
            return w

        known += assert_right(chain, dtype)
    assert known > 5


WRITTEN = slice(2, 8, 2)


@pytest.mark.parametrize(
    ("read", "found"),
    [
        (slice(4, 8, 2), "input"),
        (slice(2, 8, 4), "input"),
        (slice(3, 8, 2), "aten.zeros"),
        (slice(0, 2), "aten.zeros"),
        (slice(8, 10), "aten.zeros"),
        (slice(0, 6, 2), "store"),
        (slice(4, 10, 2), "store"),
        (slice(2, 8, 3), "store"),
        (slice(2, 8), "store"),
    ],
    ids=str,
)
def test_a_read_after_a_strided_write_is_followed_if_all_of_it_is_inside_or_outside(read, found):
    def expression(w):
        memory = torch.zeros(10, dtype=w.dtype)
        memory[WRITTEN] = w
        return memory[read]

    held = torch.arange(1, 4)
    view = follow(returned(expression, held))
    assert view.value.op == found
    if found == "input":
        assert selected(view.effect, held).tolist() == expression(held).tolist()


GATHERED = {
    "a run": ([2, 3, 4], slice(None), True),
    "one row": ([-1], slice(None), True),
    "every other row": ([0, 2, 4], slice(1, None), True),
    "rows that repeat": ([1, 1, 3, 3], slice(None), True),
    "runs": ([0, 1, 4, 5], slice(None), True),
    "a part of runs": ([0, 1, 4, 5, 8, 9], slice(2, None), True),
    "a run of what has none": ([0, 7, 2, 3, 4], slice(2, None), True),
    "columns of runs": ([0, 4, 8, 1, 5, 9], slice(None), True),
    "a descending run": ([5, 3, 1], slice(None), False),
    "a longer last run": ([0, 1, 4, 5, 6], slice(None), False),
    "runs at other distances": ([0, 1, 4, 5, 7, 8], slice(None), False),
    "other runs": ([0, 1, 4, 6, 8, 9], slice(None), False),
}


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", GATHERED)
def test_a_gather_by_constants_is_followed_if_its_rows_form_runs(name, dim):
    rows, read, known = GATHERED[name]

    def selected_rows(w):
        return w.index_select(dim, torch.tensor(rows) % 10).narrow(1 - dim, 1, 3)

    def indexed_rows(w):
        return w[rows] if dim == 0 else w[:, rows]

    held = torch.arange(100).view(10, 10)
    for gather in (selected_rows, indexed_rows):

        def expression(w, gather=gather):
            return gather(w).transpose(0, dim)[read]

        view = follow(returned(expression, held))
        assert (view.value.op == "input") == known
        if known:
            assert torch.equal(selected(view.effect, held), expression(held))
