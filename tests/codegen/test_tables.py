"""Tests tables of 16 numbers: the words in which kernels look the numbers up, and the results."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from tilewright.codegen.build.interpreter import interpret
from tilewright.codegen.formats import TABLES, table_words
from tilewright.codegen.templates.codes import codes_in_order, number_unit, x_in_order
from tilewright.codegen.templates.tables import chosen_bytes, table_number

DTYPES = [torch.bfloat16, torch.float16]


@triton.jit
def decode(
    words_ptr, order_ptr, out_ptr, in_order_ptr, unit_ptr,
    PER: tl.constexpr, REVERSED: tl.constexpr, NUMBER: tl.constexpr, GROUPS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    rows, columns = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    packed = tl.arange(0, COLUMNS // PER)[None, :]
    words = tl.load(words_ptr + rows * (COLUMNS // PER) + packed)
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    numbers = codes_in_order(words, DTYPE, PER, REVERSED, 0, GROUPS, NUMBER)
    tl.store(out_ptr + rows * COLUMNS + columns, numbers)
    x = tl.load(order_ptr + rows * COLUMNS + columns)
    tl.store(in_order_ptr + rows * COLUMNS + columns, x_in_order(x, PER, True, GROUPS))
    tl.store(unit_ptr, number_unit(DTYPE, PER, False, NUMBER))


@pytest.mark.parametrize("per", [2, 8])
@pytest.mark.parametrize("reversed_", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", TABLES)
def test_all_codes_in_all_places_become_their_numbers(name, dtype, reversed_, per):
    """The numbers are at least as near as the rounded numbers themselves, and the numbers of the
    second table are exact."""
    rows, columns = 16, 128
    made = torch.Generator().manual_seed(0)
    packed = torch.randint(0, 256, (rows, columns // 2), generator=made).to(torch.uint8)
    pair = (packed >> 4, packed & 15) if reversed_ else (packed & 15, packed >> 4)
    codes = torch.stack(pair, -1).flatten(-2)
    assert len({(int(c), i % 8) for row in codes for i, c in enumerate(row)}) == 128
    out, ordered = (torch.full((rows, columns), torch.nan, dtype=dtype) for _ in range(2))
    unit = torch.zeros(1)
    words = packed.view(torch.int32) if per == 8 else packed
    arguments = (words, codes.to(dtype), out, ordered, unit)
    constants = (per, reversed_, table_words(name), 2, rows, columns)
    interpret(decode)[(1,)](*arguments, *constants)
    exact = torch.tensor(TABLES[name], dtype=torch.float64)
    error = (out.double() * unit.double() - exact[ordered.long()]).abs()
    assert error.max() <= (exact - exact.to(dtype).double()).abs().max()
    if name == "fp4":
        assert error.max() < 2.0**-24


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_lose_less_than_half_of_what_they_would_if_rounded(dtype):
    exact = torch.tensor(TABLES["nf4"], dtype=torch.float64)
    factor = 1 / table_words("nf4")[16 + DTYPES.index(dtype)]
    error = (exact * factor).to(dtype).double() / factor - exact
    assert error.norm() < 0.6 * (exact.to(dtype).double() - exact).norm()


@pytest.mark.parametrize("name", TABLES)
def test_numbers_are_exact_in_fp32(name):
    numbers = torch.tensor(TABLES[name], dtype=torch.float64)
    assert torch.equal(numbers.float().double(), numbers)


def test_the_tables_are_those_of_the_library():
    functional = pytest.importorskip("bitsandbytes.functional")
    for name, numbers in TABLES.items():
        theirs = functional.get_4bit_type(name, device="cpu")
        assert torch.equal(theirs, torch.tensor(numbers, dtype=torch.float32))


@triton.jit
def in_fp32(codes_ptr, out_ptr, TABLE: tl.constexpr):
    places = tl.arange(0, 16)
    tl.store(out_ptr + places, table_number(tl.load(codes_ptr + places), TABLE))


def test_numbers_in_fp32():
    codes, out = torch.arange(15.0, -1.0, -1.0), torch.zeros(16)
    interpret(in_fp32)[(1,)](codes, out, TABLES["nf4"])
    assert torch.equal(out, torch.tensor(TABLES["nf4"]).flip(0))


@triton.jit
def permute(low_ptr, high_ptr, selector_ptr, out_ptr, N: tl.constexpr):
    places = tl.arange(0, N)
    parts = tl.load(low_ptr + places), tl.load(high_ptr + places)
    tl.store(out_ptr + places, chosen_bytes(parts[0], parts[1], tl.load(selector_ptr + places)))


def test_bytes_are_chosen_as_ptx_says():
    """In `prmt.b32`, nibble i of the selector gives the number of byte i. The top bit of the nibble
    selects the byte's sign."""
    numbers = np.random.default_rng(0).integers(0, 2**32, (3, 64), dtype=np.uint32)
    low, high, selectors = (torch.from_numpy(row.view(np.int32)) for row in numbers)
    out = torch.zeros(64, dtype=torch.int32)
    interpret(permute)[(1,)](low, high, selectors, out, 64)
    for a, b, selector, got in zip(*numbers, out.numpy().view(np.uint32), strict=True):
        both = [*int(a).to_bytes(4, "little"), *int(b).to_bytes(4, "little")]
        for place, byte in enumerate(int(got).to_bytes(4, "little")):
            nibble = int(selector) >> (4 * place) & 15
            chosen = both[nibble & 7]
            assert byte == (255 * (chosen >> 7) if nibble & 8 else chosen)
