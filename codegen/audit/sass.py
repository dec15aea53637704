"""Reads disassembled kernels (SASS): counts each opcode in a kernel and in its main loop."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

# Opcodes of tensor-core arithmetic, of all generations.
MMA_OPCODES = frozenset(
    {"UTCHMMA", "UTCQMMA", "UTCOMMA", "UTCIMMA", "HGMMA", "QGMMA", "IGMMA"}
    | {"HMMA", "QMMA", "IMMA", "OMMA"}
)

_INSTRUCTION = re.compile(r"/\*[0-9a-f]+\*/\s+(@!?U?P[0-9T]+\s+)?([A-Z][A-Z0-9_.]*)([^;]*);")
_LABEL = re.compile(r"^(\.L_x_\d+):")
_BRANCH_TARGET = re.compile(r"`\((\.L_x_\d+)\)")
# Unless a guard makes them conditional, control never continues after these opcodes.
_ENDS = frozenset({"EXIT", "RET", "BRA", "BRX", "BRXU", "JMP"})


@dataclass(frozen=True)
class OpcodeCounts:
    """How often each opcode, without modifiers, occurs in parts of a kernel.

    Attributes:
        whole: The counts for the whole kernel.
        main_loop: The counts for the shortest loop with tensor-core arithmetic. They are empty if
            there is no such loop.
        in_loops: The counts for the blocks of all loops.
    """

    whole: Counter[str]
    main_loop: Counter[str]
    in_loops: Counter[str]


@dataclass
class _Block:
    """A basic block of instructions. target: the label that a branch at the end of the block jumps
    to."""

    opcodes: list[str]
    target: str = ""
    falls_through: bool = True


def section(sass: str, kernel: str) -> str:
    """Returns the kernel's own code, without the other functions of the file. Raises ValueError if
    the file lacks the kernel."""
    start = sass.find(f".text.{kernel}:")
    if start < 0:
        raise ValueError(f"the disassembly has no kernel {kernel}")
    stop = sass.find("//--------------------- ", start)
    return sass[start : stop if stop >= 0 else len(sass)]


def count_opcodes(sass: str) -> OpcodeCounts:
    """Counts the opcodes in a kernel, in its main loop, and in all its loops.

    A backward jump alone does not make a loop. Compilers move code that waits for a barrier to the
    end of the kernel, and that code jumps back into the middle. A branch with `.ANY` does not make
    a loop either: it repeats an instruction for each value in the lanes of a warp.
    """
    blocks, places = _blocks(sass)
    before = _predecessors(blocks, places)
    heads = [places.get(block.target, len(blocks)) for block in blocks]
    bodies = [_loop(before, head, end) for end, head in enumerate(heads) if head <= end]

    def counted(numbers: Iterable[int]) -> Counter[str]:
        return Counter(opcode for number in numbers for opcode in blocks[number].opcodes)

    holding = [count for count in map(counted, bodies) if MMA_OPCODES & set(count)]
    return OpcodeCounts(
        whole=counted(range(len(blocks))),
        main_loop=min(holding, key=lambda count: count.total(), default=Counter()),
        in_loops=counted(frozenset[int]().union(*bodies)),
    )


def _blocks(sass: str) -> tuple[list[_Block], dict[str, int]]:
    """Returns (the basic blocks in order, the block number of each label)."""
    blocks, places = [_Block([])], {}
    for line in sass.split("\n"):
        label = _LABEL.match(line.strip())
        if label:
            if blocks[-1].opcodes:
                blocks.append(_Block([]))
            places[label.group(1)] = len(blocks) - 1
        found = _INSTRUCTION.search(line)
        if found is None:
            continue
        guard, name, operands = found.groups()
        opcode = name.split(".")[0]
        blocks[-1].opcodes.append(opcode)
        if opcode not in _ENDS:
            continue
        target = _BRANCH_TARGET.search(operands) if opcode == "BRA" else None
        if target and not name.endswith(".ANY"):
            blocks[-1].target = target.group(1)
        # The guard may also be a uniform predicate, which is written before the target of the
        # branch.
        guarded = guard or (opcode == "BRA" and not operands.strip().startswith("`"))
        blocks[-1].falls_through = bool(guarded)
        blocks.append(_Block([]))
    return blocks, places


def _loop(before: list[list[int]], head: int, end: int) -> frozenset[int]:
    """Returns the blocks of the loop that a branch from block `end` to block `head` closes. Returns
    an empty result if the branch closes no loop.

    The branch closes a loop if every path to `end` leads through `head`.
    """
    body, found = {head}, [end]
    while found:
        block = found.pop()
        if block in body:
            continue
        body.add(block)
        if block == 0 or not before[block]:
            return frozenset()
        found += before[block]
    return frozenset(body)


def _predecessors(blocks: list[_Block], places: dict[str, int]) -> list[list[int]]:
    before: list[list[int]] = [[] for _ in blocks]
    for number, block in enumerate(blocks):
        if block.target in places:
            before[places[block.target]].append(number)
        if block.falls_through and number + 1 < len(blocks):
            before[number + 1].append(number)
    return before
