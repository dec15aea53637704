"""Removes unused barriers that Triton 3.6 and 3.7 make when they specialise warps on Hopper.

A pass of Triton separates producers from consumers, and makes an mbarrier for each value that a
producer hands over. Some of these barriers are not used, because TMA's own barriers replace them.
The pass initialises the unused barriers too, and never invalidates them. Until a barrier is
invalidated, nothing else may be stored in its memory (PTX ISA, `mbarrier.inval`), but Triton stores
a tile of keys in the same shared memory. On an H200, 2 to 40 of a hundred calls returned tiles of
NaN, because the keys had the bits of a barrier. Without the unused barriers, all of 37,000 calls
were correct. Triton 3.9 gives every barrier its own memory.

This module needs only the standard library and Triton, as `worker.py` does.
"""

import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

_PARTED = "ttg.warp_specialize("
_NAME = re.compile(r"%\w+")
_ALLOC = re.compile(r"\s*(%\w+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<(?:\d+x)*1xi64,")
_INDEX = re.compile(r"\s*(%\w+) = ttg\.memdesc_index (%\w+)\[")
_INIT = re.compile(r"\s*ttng\.(?:init|inval)_barrier (%\w+)")


def without_dead_barriers(ttgir: str) -> str:
    """Returns the text of a TTGIR module without the barriers that are initialised and never used.
    If there are no such barriers, returns the text unchanged."""
    lines = ttgir.split("\n")
    dead = _dead_lines(lines) if _PARTED in ttgir else set()
    return "\n".join(line for number, line in enumerate(lines) if number not in dead)


def count_dead_barriers(ttgir: str) -> int:
    """Counts the allocations of barriers that are initialised and never used."""
    lines = ttgir.split("\n")
    return sum(1 for number in _dead_lines(lines) if _ALLOC.match(lines[number]))


def _dead_lines(lines: list[str]) -> set[int]:
    """Returns the numbers of the lines that allocate, index and initialise unused barriers. Another
    region may give a barrier's name to another value. This function then counts the barrier as
    used."""
    users: dict[str, list[int]] = defaultdict(list)
    for number, line in enumerate(lines):
        for name in set(_NAME.findall(line)):
            users[name].append(number)
    dead: set[int] = set()
    for number, line in enumerate(lines):
        made = _ALLOC.match(line)
        if made is not None:
            dead |= _own_lines(lines, users, number, made[1])
    return dead


def _own_lines(
    lines: list[str], users: dict[str, list[int]], made_at: int, barriers: str
) -> set[int]:
    """Returns the numbers of all lines that allocate, index and initialise `barriers`, which the
    line `made_at` allocates. Returns an empty set if one of these barriers is used."""
    own = {made_at}
    for indexed_at in users[barriers]:
        if indexed_at == made_at:
            continue
        indexed = _INDEX.match(lines[indexed_at])
        if indexed is None or indexed[2] != barriers:
            return set()
        own.add(indexed_at)
        others = [number for number in users[indexed[1]] if number != indexed_at]
        if not all(_INIT.match(lines[number]) for number in others):
            return set()
        own.update(others)
    return own


def compile_without_dead_barriers(
    source: Any,
    target: Any,
    options: dict[str, Any],
    keep: Callable[[str], Path],
    note: Callable[[Any], None] = lambda kernel: None,
) -> Any:
    """Calls `triton.compile`. If the TTGIR of the compiled kernel has unused barriers, removes them
    from its text and compiles this text.

    keep: a function that writes a text to a file and returns the path. Triton compiles texts only
    from files. note: a function that is called with each kernel that Triton compiled.
    """
    import triton

    compiled = triton.compile(source, target=target, options=options)
    note(compiled)
    ttgir = str(compiled.asm["ttgir"])
    mended = without_dead_barriers(ttgir)
    if mended == ttgir:
        return compiled
    again = triton.compile(str(keep(mended)), target=target, options=options)
    note(again)
    again.asm["ttir"] = compiled.asm.get("ttir", "")
    return again
