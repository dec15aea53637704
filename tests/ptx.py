"""Executes PTX without branches on 32-bit registers, such as inline assembly."""

from __future__ import annotations

import struct

import torch


def bf16(half: int) -> float:
    """Returns the number that the bits of a bfloat16 stand for."""
    return struct.unpack("<f", struct.pack("<I", half << 16))[0]


def bits(number: float) -> int:
    """Returns the bits of a number after rounding it to bfloat16."""
    made = torch.tensor(number, dtype=torch.float64).bfloat16()
    return made.view(torch.int16).item() & 0xFFFF


def halves(word: int) -> tuple[int, int]:
    return word & 0xFFFF, word >> 16


def pair(even: float, odd: float) -> int:
    """A register of two bfloat16 numbers."""
    return bits(even) | bits(odd) << 16


def numbers(word: int, unit: float = 1.0) -> tuple[float, ...]:
    """Returns the two bfloat16 numbers of a register, divided by `unit`."""
    return tuple(bf16(half) / unit for half in halves(word))


def _by_halves(of, *words: int) -> int:
    low, high = (of(*map(bf16, some)) for some in zip(*map(halves, words), strict=True))
    return low | high << 16


def _rounded(of):
    """Makes an instruction on pairs of bfloat16 numbers that rounds once."""
    return lambda *words: _by_halves(lambda *given: bits(of(*given)), *words)


def _selected(a: int, b: int, places: int) -> int:
    """Chooses four of eight bytes. If the number of a byte has bit 3, its sign is repeated."""
    all_bytes, made = a | b << 32, 0
    for n in range(4):
        place = places >> 4 * n
        byte = all_bytes >> 8 * (place & 7) & 0xFF
        made |= (0xFF * (byte >> 7) if place & 8 else byte) << 8 * n
    return made


def _by_bits(a: int, b: int, c: int, table: int) -> int:
    """Combines the bits of three words by a table of eight bits."""
    return sum(
        (table >> ((a >> n & 1) << 2 | (b >> n & 1) << 1 | (c >> n & 1)) & 1) << n
        for n in range(32)
    )


INSTRUCTIONS = {
    "mov.b32": lambda a: a,
    "prmt.b32": _selected,
    "lop3.b32": _by_bits,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "shl.b32": lambda a, b: a << b & 0xFFFFFFFF,
    "shr.b32": lambda a, b: a >> b,
    "mul.rn.bf16x2": _rounded(lambda x, y: x * y),
    "fma.rn.bf16x2": _rounded(lambda x, y, z: x * y + z),
    "set.ge.u32.bf16x2": lambda a, b: _by_halves(lambda x, y: 0xFFFF * (x >= y), a, b),
}


def executed(text: str, **operands: int) -> int:
    """Returns the first result of inline assembly. operands: the values of its operands by number,
    as `_1`."""
    return results(text, **operands)[0]


def results(text: str, count: int = 1, **operands: int) -> tuple[int, ...]:
    """Returns the first `count` results of inline assembly, whose operands are those of
    `executed`."""
    registers = {name.replace("_", "$"): value for name, value in operands.items()}
    for line in filter(None, map(str.strip, text.strip().strip("{}").split(";"))):
        if line.startswith(".reg"):
            continue
        name, _, rest = line.partition(" ")
        out, *given = [one.strip() for one in rest.split(",")]
        values = [registers[one] if one in registers else int(one, 0) for one in given]
        registers[out] = INSTRUCTIONS[name](*values)
    return tuple(registers[f"${number}"] for number in range(count))
