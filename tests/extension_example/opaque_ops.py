"""Custom operators with functions that declare them, as in a user's file outside the package.
Graphs do not show what the operators compute."""

from __future__ import annotations

import torch
import torch.nn.functional as F

LIBRARY = "tests_opaque"


@torch.library.custom_op(f"{LIBRARY}::scatter_add", mutates_args=())
def scatter_add(out: torch.Tensor, index: torch.Tensor, src: torch.Tensor) -> torch.Tensor:
    """Adds rows one after the other, like torchtitan's deterministic_scatter_add."""
    result = out.clone()
    for row, column in zip(src, index, strict=True):
        result[column[0]] += row
    return result


def scatter_add_meaning(out, index, src):
    return out.scatter_add(0, index, src)


@torch.library.custom_op(f"{LIBRARY}::int8_linear", mutates_args=())
def int8_linear(
    x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Computes a linear for x [..., K], int8 codes [N, K] and scale [N, 1]."""
    y = (x.float() @ (codes.float() * scale.float()).T).to(x.dtype)
    return y if bias is None else y + bias


def int8_linear_meaning(x, codes, scale, bias):
    return F.linear(x, codes.to(x.dtype) * scale, bias)


@torch.library.custom_op(f"{LIBRARY}::tiled_linear", mutates_args=())
def tiled_linear(x: torch.Tensor, tiles: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Computes a linear for x [..., K], int8 tiles [N / 16, K / 16, 16, 16] of codes [N, K], and
    scale [N, 1]."""
    codes = tiles.transpose(1, 2).reshape(len(scale), x.shape[-1])
    return (x.float() @ (codes.float() * scale.float()).T).to(x.dtype)


@torch.library.custom_op(f"{LIBRARY}::store", mutates_args=("k_cache", "v_cache"))
def store(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
    slots: torch.Tensor, workspace: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Writes k and v [T, H, D] at slots [T] of caches [pages, page, H, D]."""
    for cache, new in ((k_cache, k), (v_cache, v)):
        for slot, row in zip(slots.tolist(), new, strict=True):
            cache[slot // cache.shape[1], slot % cache.shape[1]] = row


def store_meaning(k, v, k_cache, v_cache, slots, workspace):
    for cache, new in ((k_cache, k), (v_cache, v)):
        cache.view(-1, *new.shape[1:])[slots] = new


@torch.library.custom_op(f"{LIBRARY}::halves", mutates_args=("out",))
def halves(
    out: torch.Tensor, x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes the sines of both halves of x, [T, W / 2], and two copies of x, in new memory. Also
    writes x to out [T, W]."""
    out.copy_(x)
    one, two = x.sin().chunk(2, dim=-1)
    return one.clone(), two.t().contiguous().t(), x.clone(), x.clone()


def halves_meaning(out, x):
    out.copy_(x)
    return *x.sin().chunk(2, dim=-1), x, x


for op, shape_of in (
    (scatter_add, lambda out, index, src: torch.empty_like(out)),
    (int8_linear, lambda x, codes, scale, bias=None: x.new_empty(*x.shape[:-1], len(codes))),
    (tiled_linear, lambda x, tiles, scale: x.new_empty(*x.shape[:-1], len(scale))),
    (store, lambda *given: None),
    (
        halves,
        lambda out, x: (
            x.new_empty(len(x), x.shape[1] // 2),
            x.new_empty(x.shape[1] // 2, len(x)).t(),
            torch.empty_like(x),
            torch.empty_like(x),
        ),
    ),
):
    op.register_fake(shape_of)
