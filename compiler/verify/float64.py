"""Runs a captured graph in float64. The result is the reference for the graph and for its
rewrite."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from tilewright.compiler import _compat

_WIDENED = frozenset({torch.float16, torch.bfloat16, torch.float32})
_CASTS = {"half": "double", "bfloat16": "double", "float": "double"}


class NoFloat64Error(RuntimeError):
    """Raised if an operator of the graph does not take float64. The message names the operator."""


class Float64(fx.Interpreter):
    """Runs a Dynamo graph in float64 where the graph itself computes in 16-bit or 32-bit floats.

    Casts to 8-bit floats and to integers stay, because they are part of the model. Raises
    NoFloat64Error if an operator does not take float64.
    """

    def run_node(self, n: fx.Node) -> Any:
        try:
            return super().run_node(n)
        except Exception as error:  # operators and subclasses may raise any class
            said = (str(error) or type(error).__name__).splitlines()[0]
            raise NoFloat64Error(f"{n.target}: {said}") from error

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> tuple[Any, Any]:
        args, kwargs = super().fetch_args_kwargs_from_env(n)
        return _widened(args), _widened(kwargs)

    def fetch_attr(self, target: str) -> Any:
        return widen(super().fetch_attr(target))

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        return super().call_method(_CASTS.get(target, target), args, kwargs)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target in _compat.GROUPED_MM:
            return _grouped_mm(*args, **kwargs)
        return super().call_function(target, args, kwargs)


def widen(value: Any) -> Any:
    """Returns a tensor of 16-bit or 32-bit floats as float64. Returns any other value as it is."""
    if isinstance(value, torch.Tensor) and value.dtype in _WIDENED:
        return value.double()
    return value


def _widened(items: Any) -> Any:
    """Returns nested arguments with float64 in place of narrower floats, in tensors and in the
    dtypes for which a call asks."""
    if isinstance(items, torch.Tensor):
        return widen(items)
    if isinstance(items, dict):
        return {key: _widened(value) for key, value in items.items()}
    if isinstance(items, (tuple, list)):
        return type(items)(_widened(value) for value in items)
    return torch.float64 if isinstance(items, torch.dtype) and items in _WIDENED else items


def _grouped_mm(
    x: torch.Tensor,
    weight: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Returns the result of torch's grouped_mm for rows [M, K] and weights [groups, K, N]. torch's
    own function takes no float64."""
    if offs is None or x.dim() != 2 or weight.dim() != 3 or bias is not None:
        raise NotImplementedError("expected rows [M, K], weights [groups, K, N] and offsets")
    out = x.new_zeros(x.shape[0], weight.shape[-1])
    start = 0
    for group, end in enumerate(offs.tolist()):
        out[start:end] = x[start:end] @ weight[group]
        start = end
    return out


def run_in_float64(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
    """Returns the outputs of `gm` in float64. Inputs to which the graph writes must be float64
    already."""
    interpreter = Float64(gm)
    interpreter.extra_traceback = False  # an error then names the operator, in one line
    runner: Callable[..., Any] = interpreter.run
    return runner(*inputs)
