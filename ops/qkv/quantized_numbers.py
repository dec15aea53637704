"""Quantised weights made numbers by an emitted kernel: rows of one tensor, for one library GEMM."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from tilewright.codegen.qkv.quantized_specs import (
    DequantizeProblem,
    dequantize_grid,
    dequantize_problems,
    dequantize_spec,
)
from tilewright.codegen.qkv.specs import QkvProblem
from tilewright.codegen.spec import KernelSpec
from tilewright.ops.formats.quantized_weight import expand_blocks
from tilewright.ops.qkv.checks import ACTIVATION_BLOCK
from tilewright.ops.qkv.library import WeightRows
from tilewright.ops.qkv.quantized_operands import LETTERS, head_dim
from tilewright.ops.runtime.launch import launch


def numbers_rows(a: Any) -> WeightRows:
    """How q, k and v lie in the tensor that `weight_numbers` makes: one after the other."""
    dim = head_dim(a)
    heads = [w.shape[:-2] for w in (a.q_weight, a.k_weight, a.v_weight) if w is not None]
    firsts = [0]
    for shape in heads:
        firsts.append(firsts[-1] + shape.numel() * dim)
    steps = tuple((shape[1] * dim, dim) if len(shape) == 2 else (dim,) for shape in heads)
    return WeightRows(firsts[-1], tuple(firsts[:-1]), steps)


def weight_numbers(a: Any, problem: QkvProblem, values: dict[str, Any], target: str) -> list[Any]:
    """q, k and v weights [H, D, K] (v left out where there is none); on meta tensors empty ones."""
    rows, dim, hidden = numbers_rows(a), head_dim(a), a.x.shape[1]
    whole = a.x.new_empty((rows.total, hidden), dtype=x_numbers_dtype(a))
    weights = []
    for weight, first in zip(dequantize_problems(problem), rows.firsts, strict=True):
        letter = LETTERS[weight.index]
        heads = values[f"{letter}_weight_ptr"].shape[:-2]
        made = whole[first : first + weight.num_rows].view(*heads, dim, hidden)
        given = {f"{what}_ptr": values[f"{letter}_{what}_ptr"] for what in _INPUTS}
        if a.x.is_cuda:
            spec, grid = cached_dequantize(weight, target)
            launch(spec, grid, given | {"out_ptr": made}, a.x.device)
        weights.append(made)
    return weights


_INPUTS: Sequence[str] = ("weight", "scale", "zero")


@cache
def cached_dequantize(problem: DequantizeProblem, target: str) -> tuple[KernelSpec, Sequence[int]]:
    return dequantize_spec(problem, target), dequantize_grid(problem)


def x_numbers_dtype(a: Any) -> torch.dtype:
    """As `number_dtype` of the weights has it."""
    return torch.float32 if a.x.dtype.itemsize == 1 else a.x.dtype


def x_numbers(a: Any) -> torch.Tensor:
    """x as numbers: its codes times their scales, in fp32; or x itself."""
    x = a.x.to(x_numbers_dtype(a))
    if a.x_scale is None:
        return x
    block = (1, x.shape[1] if a.x_scale.shape[1] == 1 else ACTIVATION_BLOCK)
    return x * expand_blocks(a.x_scale.to(x.dtype), x.shape, block)
