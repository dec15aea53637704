"""Turns products over a single column into elementwise products: `a[M, 1] @ b[1, N]` into `a * b`.

Rotary embeddings compute their angles in this way: frequencies [D / 2, 1] times positions [1, T]. A
library computes a matmul in a separate kernel, with copies of its operands before it and of its
result after it. An elementwise product is part of the kernel that computes cosine and sine. Both
ways round a single product once, so their results agree in every bit, with one exception: a sum is
0.0 where the product is -0.0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from tilewright.compiler import _compat
from tilewright.compiler.dataflow.spelling import argument, calls_of
from tilewright.compiler.rewrite.strides import same_steps, unbacked
from tilewright.compiler.rewrite.writer import Writer
from tilewright.ops.checks import proven

_PRODUCTS = ("matmul", "bmm", "mm")
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def multiply_single_columns(graph: fx.Graph) -> int:
    """Replaces products over one column, and returns the number of replacements.

    `graph` is the rewritten graph, because patterns recognise angles as products of matrices. A
    product stays in four cases: it is not a product of two plain floating-point tensors of one
    dtype; the product has another dtype than its operands (autocast); the product has another
    argument (`out`); or the elementwise product would have other strides.
    """
    return sum(_multiply(node) for node in calls_of(graph, _PRODUCTS) if _sums_one_product(node))


def _sums_one_product(product: fx.Node) -> bool:
    """Whether a node multiplies matrices with one column by matrices with one row. Each operand is
    a matrix or a stack of matrices."""
    given = _operands(product)
    if given is None:
        return False
    tensors: list[Any] = [node.meta.get("example_value") for node in (product, *given)]
    if not all(map(_compat.is_plain, tensors)):
        return False
    held, a, b = tensors
    if a.dim() < 2 or b.dim() < 2 or held.dtype not in _FLOATS:
        return False
    alike = a.dtype == b.dtype == held.dtype and a.device == b.device == held.device
    return alike and _is_one(a.shape[-1]) and _is_one(b.shape[-2]) and not unbacked(product)


def _operands(product: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Returns the two factors of a product. Returns None if the product has any other argument."""
    second = "other" if "other" in product.kwargs else "mat2"
    given = argument(product, 0, "input"), argument(product, 1, second)
    if len(product.args) + len(product.kwargs) != 2:
        return None
    return given if all(isinstance(one, fx.Node) for one in given) else None


def _is_one(size: object) -> bool:
    return type(size) is int and size == 1


def _multiply(product: fx.Node) -> bool:
    """Puts an elementwise product in the place of a product. Returns False if the elementwise
    product would have other strides."""
    write = Writer(product)
    made = write.call(torch.mul, *(_operands(product) or ()))
    now, old = (node.meta["example_value"] for node in (made, product))
    if not _has_layout(now, old):
        write.undo()
        return False
    product.replace_all_uses_with(made)
    product.graph.erase_node(product)
    return True


def _has_layout(now: torch.Tensor, old: torch.Tensor) -> bool:
    same = now.dim() == old.dim() and now.dtype == old.dtype and same_steps(now, old)
    return same and all(proven(a == b) for a, b in zip(now.shape, old.shape, strict=True))
