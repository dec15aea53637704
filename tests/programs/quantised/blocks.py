"""Scales and zeros by block: how many codes share a number, and how the graph spreads the number
over them."""

from __future__ import annotations

from collections.abc import Callable

import torch

#: The (rows, columns) that share a number. None stands for all rows or all columns.
BLOCKS = {
    "tensor": (None, None),
    "row": (1, None),
    "group": (1, 16),
    "wide group": (1, 32),
    "uneven group": (1, 24),
    "block": (32, 32),
    "uneven block": (24, 32),
    "column": (None, 1),
    "group of rows": (16, 1),
}
WEIGHED = ("tensor", "row", "row", "group", "group", "group", "wide group", "block", *BLOCKS)


def repeated(t: torch.Tensor, block: tuple[int, int], shape: torch.Size) -> torch.Tensor:
    for dim in range(2):
        t = t.repeat_interleave(block[dim], dim) if block[dim] > 1 else t
    return t[: shape[0], : shape[1]]


def expanded(t: torch.Tensor, block: tuple[int, int], shape: torch.Size) -> torch.Tensor:
    (rows, columns), (a, b) = t.shape, block
    wide = t[:, None, :, None].expand(rows, a, columns, b).reshape(rows * a, columns * b)
    return wide[: shape[0], : shape[1]]


def looked_up(t: torch.Tensor, block: tuple[int, int], shape: torch.Size) -> torch.Tensor:
    for dim in range(2):
        if block[dim] > 1:
            t = t.index_select(dim, torch.arange(shape[dim], device=t.device) // block[dim])
    return t


def in_tiles(t: torch.Tensor, block: tuple[int, int], shape: torch.Size) -> torch.Tensor:
    """Spreads numbers so that codes which are not neighbours share one."""
    return t.repeat(*block)[: shape[0], : shape[1]]


SPREADS = {"repeated": repeated, "expanded": expanded, "looked_up": looked_up, "tiles": in_tiles}
#: Ways to spread a number over its codes. "broadcast": by the arithmetic itself. "grouped": on a
#: view of the codes by group. "flat": on a view with one group in each row (HQQ).
WAYS = ("repeated", "expanded", "looked_up", "grouped", "broadcast", "flat") * 4 + ("tiles",)
#: Wrong scales or zeros for a block: those of an adjacent block, or changed ones.
BENT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "next group": lambda t: t.roll(1, -1),
    "next row": lambda t: t.roll(1, 0),
    "backwards": lambda t: t.flip(-1),
    "negated": lambda t: -t,
    "doubled": lambda t: t * 2,
    "one more": lambda t: t + 1,
}


def at_every(
    op: Callable[..., torch.Tensor],
    codes: torch.Tensor,
    t: torch.Tensor,
    block: str,
    spread: str,
) -> torch.Tensor:
    """Computes op(codes [N, K], t [N / rows, K / columns]). Every code is combined with the number
    of its block."""
    pairs = zip(codes.shape, t.shape, BLOCKS[block], strict=True)
    rows, columns = sizes = [-(-n // have) if b is None else b for n, have, b in pairs]
    even = [b * have for b, have in zip(sizes, t.shape, strict=True)] == list(codes.shape)
    if spread == "broadcast" and all(1 in pair for pair in zip(sizes, t.shape, strict=True)):
        return op(codes, t)
    if spread == "flat" and even and rows == 1:
        return op(codes.reshape(-1, columns), t.reshape(-1, 1)).reshape(codes.shape)
    if spread in ("grouped", "broadcast", "flat") and even:
        tiles = codes.reshape(t.shape[0], rows, t.shape[1], columns)
        return op(tiles, t[:, None, :, None]).reshape(codes.shape)
    return op(codes, SPREADS.get(spread, repeated)(t, (rows, columns), codes.shape))
