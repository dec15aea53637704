"""Integer codes, and ways to pack them into words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

COUNTING, AWQ = tuple(range(8)), (0, 4, 1, 5, 2, 6, 3, 7)


def nibbles(words: torch.Tensor, order: tuple[int, ...], spelling: str) -> torch.Tensor:
    """Unpacks words [R, W] to codes [R, W * len(order)]. The nibbles of a word are taken in
    `order`."""
    if spelling == "shifts":
        shifts = torch.tensor(order, dtype=torch.int32, device=words.device) * 4
        found = (words.unsqueeze(-1) >> shifts) & 15
    elif spelling == "divided":
        found = torch.stack([words // 16**n % 16 for n in order], -1)
    elif spelling == "of_a_list":
        shifts = torch.arange(0, 4 * len(order), 4, device=words.device)
        found = torch.bitwise_right_shift(words[:, :, None], shifts).to(torch.int8)
        found = torch.bitwise_and(found[..., list(order)], 0xF)
    else:
        parts = [torch.bitwise_and(words >> 4 * n, 15) for n in order]
        if spelling == "cat":
            return torch.cat([part.unsqueeze(2) for part in parts], 2).view(words.shape[0], -1)
        found = torch.stack(parts, dim=-1)
    return found.flatten(-2)


def with_sign(words: torch.Tensor, order: tuple[int, ...], spelling: str) -> torch.Tensor:
    """Reads nibbles as two's-complement numbers."""
    if spelling == "divided":
        return (nibbles(words, order, spelling).to(torch.int8) ^ 8) - 8
    parts = [(words << 4) >> 4, words >> 4]
    return torch.stack([parts[n] for n in order], -1).flatten(-2)


def in_halves(words: torch.Tensor, order: tuple[int, ...], spelling: str) -> torch.Tensor:
    """Unpacks bytes with row n in one nibble and row n + N / 2 in the other (HQQ)."""
    parts = [words & 15, (words & 0b11110000) >> 4]
    if spelling in ("cat", "stack"):
        return torch.cat([parts[n] for n in order], 0)
    half, found = len(words), words.new_empty(2 * len(words), words.shape[1])
    found[:half], found[half:] = (parts[n] for n in order)
    return found


@dataclass(frozen=True)
class Packing:
    """A way to pack codes.

    stored: the dtype of the words.
    per: the (rows, columns) of codes in a word. Codes [N, K] are words [N / rows, K / columns],
        transposed if `turned`.
    codes: a function that unpacks words, for an order and a spelling.
    order: the number of nibbles in a word, whose order varies.
    size: the typical size of a code.
    """

    stored: torch.dtype
    codes: Callable[[torch.Tensor, tuple[int, ...], str], torch.Tensor]
    per: tuple[int, int] = (1, 1)
    turned: bool = False
    order: int = 0
    size: float = 70.0

    @property
    def is_float(self) -> bool:
        return self.size == FLOATS["size"]


def turned(codes: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda words, order, spelling: codes(words, order, spelling).t()


def along_rows(words: torch.Tensor, order: tuple[int, ...], spelling: str) -> torch.Tensor:
    """Unpacks GPTQ's words [K / 8, N]."""
    return nibbles(words.t(), order, spelling)


def as_bytes(words: torch.Tensor, order: tuple[int, ...], spelling: str) -> torch.Tensor:
    return nibbles(words.view(torch.uint8), order, spelling)


def as_they_are(words: torch.Tensor, order: tuple[int, ...], spelling: str) -> torch.Tensor:
    return words


I32, U8, I8, E4M3 = torch.int32, torch.uint8, torch.int8, torch.float8_e4m3fn
FLOATS, TWO, EIGHT = {"size": 1.0}, {"order": 2, "size": 5.0}, {"order": 8, "size": 5.0}
PACKINGS = {
    "int4 bytes": Packing(U8, nibbles, (1, 2), **TWO),
    "int4 signed": Packing(I8, with_sign, (1, 2), **TWO),
    "int4 halves": Packing(U8, in_halves, (2, 1), **TWO),
    "int4 words": Packing(I32, nibbles, (1, 8), **EIGHT),
    "int4 gptq": Packing(I32, along_rows, (1, 8), turned=True, **EIGHT),
    "int4 awq": Packing(I32, turned(nibbles), (8, 1), turned=True, **EIGHT),
    "int4 of words": Packing(I32, as_bytes, (1, 8), **TWO),
    "int8": Packing(I8, as_they_are),
    "int8 turned": Packing(I8, turned(as_they_are), turned=True),
    "uint8": Packing(U8, as_they_are),
    "uint8 of words": Packing(I32, lambda words, *_: words.view(U8), (1, 4)),
    "int8 of words": Packing(I32, lambda words, *_: words.view(I8), (1, 4)),
    "e4m3": Packing(E4M3, as_they_are, **FLOATS),
    "e4m3 turned": Packing(E4M3, turned(as_they_are), turned=True, **FLOATS),
}
#: Packings that are drawn only half as often as the others.
ODD = {
    "signed as unsigned": Packing(I8, lambda words, *_: words.view(U8)),
    "unsigned as signed": Packing(U8, lambda words, *_: words.view(I8)),
    "e5m2": Packing(torch.float8_e5m2, as_they_are, **FLOATS),
    "e4m3 of bytes": Packing(U8, lambda words, *_: words.view(E4M3), **FLOATS),
}
DRAWN = (*PACKINGS, *PACKINGS, *ODD)
PACKINGS |= ODD
ORDERS = {2: ((0, 1), (0, 1), (1, 0)), 8: (COUNTING, COUNTING, AWQ, AWQ, COUNTING[::-1])}
SPELLINGS = ("stack", "stack", "shifts", "divided", "of_a_list", "cat")


def random_words(shape: tuple[int, ...], dtype: torch.dtype, generator: Any) -> torch.Tensor:
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    info = torch.iinfo(dtype)
    return torch.randint(info.min, info.max + 1, shape, generator=generator).to(dtype)
