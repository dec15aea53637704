"""Checks of the values of scales. Each raises ArgumentError; they run where the tensors are, on
a GPU only under TILEWRIGHT_DEBUG=1."""

from __future__ import annotations

import torch

from tilewright.ops.checks import ArgumentError, first, readable


def check_scale_values(op: str, argument: str, scale: torch.Tensor | None) -> None:
    """A weight's or a cache's scale is finite and not zero."""
    if scale is None or not readable([scale]):
        return
    where = first(~scale.isfinite() | (scale == 0))
    if where is not None:
        raise ArgumentError(op, argument, "finite scales other than 0", _at(scale, where))


def check_token_scale_values(
    op: str, argument: str, scale: torch.Tensor | None, codes: torch.Tensor
) -> None:
    """The scale of x's codes [T, K] is finite, and zero only where all the codes it scales are:
    quantising a row of zeros gives that."""
    if scale is None or codes.numel() == 0 or not readable([scale]):
        return
    rows, columns = scale.shape
    width = codes.shape[1] if columns == 1 else 128
    bad = ~scale.isfinite()
    zero = (scale == 0).expand(rows if rows > 1 else codes.shape[0], columns)
    filled = [(part != 0).any(dim=1) for part in codes.split(width, dim=1)]
    bad = bad | (zero & torch.stack(filled, dim=1))
    where = first(bad)
    if where is not None:
        token, block = divmod(where, columns)
        value = float(scale.expand_as(bad)[token, block])
        expected = "a finite scale for every token, not 0 where the token is not"
        raise ArgumentError(op, argument, expected, f"{value} for token {token}, block {block}")


def _at(scale: torch.Tensor, where: int) -> str:
    index = [int(i) for i in torch.unravel_index(torch.tensor(where), scale.shape)]
    value = float(scale.reshape(-1)[where])
    return f"{value} at {index}" if index else str(value)
