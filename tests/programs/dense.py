"""Dense layers that are built from independent parts: a norm, gate and up with their activation, a
down projection, a sum, and the readers of the result."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.models.norms import gemma_row_norm, hf_row_norm


@dataclass(frozen=True)
class DenseAxes:
    """The variants of a layer.

    norm, post: the norms before the linears and before the sum.
    form: the way in which gate and up are stored.
    sum: the way in which the residual is added.
    head: the reader of the last tokens.
    tokens: the number of tokens of each of two sequences.
    """

    norm: str = "none"
    form: str = "separate"
    activation: str = "silu"
    bias: bool = False
    post: str = "none"
    scale: float = 1.0
    sum: str = "residual_first"
    head: str = "none"
    tokens: int = 3
    hidden: int = 64
    inner: int = 96
    dtype: torch.dtype = torch.bfloat16


def spelled_layer_norm(x, weight):
    wide = x.float()
    wide = wide - wide.mean(-1, keepdim=True)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    return (wide * weight.float()).to(x.dtype)


NORMS: dict[str, Callable[..., Any]] = {
    "none": lambda x, weight: x,
    "hf": hf_row_norm,
    "gemma": lambda x, weight: gemma_row_norm(x, weight, 1e-6),
    "own": lambda x, weight: F.rms_norm(x, weight.shape, weight, 1e-5),
    "weightless": lambda x, weight: F.rms_norm(x, weight.shape, eps=1e-5),
    "layer": lambda x, weight: F.layer_norm(x, weight.shape, weight),
    "layer_biased": lambda x, weight: F.layer_norm(x, weight.shape, weight, weight * 0.5),
    "layer_bare": lambda x, weight: F.layer_norm(x, weight.shape),
    "layer_spelled": spelled_layer_norm,
}


def cubic(x):
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


ACTIVATIONS: dict[str, Callable[..., Any]] = {
    "silu": F.silu,
    "sigmoid": lambda x: x * torch.sigmoid(x),
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "cubic": cubic,
    "relu": F.relu,
    "squared": lambda x: F.relu(x).square(),
    "wide": lambda x: F.silu(x.float()).to(x.dtype),
    "in_place": lambda x: F.silu(x, inplace=True),
}


def added_in_place(residual, y):
    y += residual
    return y


def residual_in_place(residual, y):
    residual += y
    return residual


SUMS: dict[str, Callable[..., Any]] = {
    "none": lambda residual, y: y,
    "residual_first": lambda residual, y: residual + y,
    "residual_last": lambda residual, y: y + residual,
    "in_place": added_in_place,
    "residual_in_place": residual_in_place,
    "wide": lambda residual, y: residual.float() + y,
    "of_both": lambda residual, y: residual + y + 1.0,
}
HEADS: dict[str, Callable[..., Any]] = {
    "none": lambda m, x: x,
    "last": lambda m, x: F.linear(x, m.head)[:, -1:],
    "first_then_linear": lambda m, x: F.linear(x[:, -1], m.head),
    "selected": lambda m, x: F.linear(x, m.head).select(1, -1).float(),
    "all": lambda m, x: F.linear(x, m.head),
    "normed_last": lambda m, x: F.linear(hf_row_norm(x, m.norms[0]), m.head)[:, 1:],
}
FORMS = ("separate", "packed", "up_first", "in_turn", "matmul", "rows", "plain", "addmm")


class Dense(nn.Module):
    def __init__(self, axes: DenseAxes) -> None:
        super().__init__()
        self.axes = axes
        generator = torch.Generator().manual_seed(0)

        def random(*shape, shift=0.0):
            values = torch.randn(shape, generator=generator) * shape[-1] ** -0.5 + shift
            return nn.Parameter(values.to(axes.dtype), requires_grad=False)

        self.both = random(2 * axes.inner, axes.hidden)
        self.gate, self.up = (random(axes.inner, axes.hidden) for _ in range(2))
        self.down = random(axes.hidden, axes.inner)
        self.biases = nn.ParameterList([random(2 * axes.inner), random(axes.hidden)])
        self.norms = nn.ParameterList([random(axes.hidden, shift=1.0) for _ in range(2)])
        self.head = random(40, axes.hidden)

    def inner(self, x):
        """Computes the inner activations [B, S, inner]."""
        axes, n = self.axes, self.axes.inner
        act, bias = ACTIVATIONS[axes.activation], self.biases[0] if axes.bias else None
        if axes.form == "plain":
            return act(F.linear(x, self.gate, None if bias is None else bias[:n]))
        if axes.form == "addmm":
            rows = torch.addmm(self.biases[0][:n], x.reshape(-1, axes.hidden), self.gate.t())
            return act(rows.view(*x.shape[:-1], n))
        if axes.form == "separate":
            parts = (None, None) if bias is None else bias.split(n)
            return act(F.linear(x, self.gate, parts[0])) * F.linear(x, self.up, parts[1])
        if axes.form == "matmul":
            return (x @ self.up.t()) * act(x @ self.gate.mT)
        if axes.form == "rows":
            rows = x.reshape(-1, axes.hidden)
            made = act(F.linear(rows, self.gate)) * F.linear(rows, self.up)
            return made.view(*x.shape[:-1], n)
        both = F.linear(x, self.both, bias)
        if axes.form == "packed":
            gate, up = both.chunk(2, -1)
        elif axes.form == "up_first":
            up, gate = both.split(n, -1)
        else:
            gate, up = both[..., ::2], both[..., 1::2]
        return act(gate) * up

    def forward(self, x, residual):
        axes = self.axes
        y = self.inner(NORMS[axes.norm](x, self.norms[0]))
        y = F.linear(y, self.down, self.biases[1] if axes.bias else None)
        y = NORMS[axes.post](y, self.norms[1])
        y = SUMS[axes.sum](residual, y if axes.scale == 1.0 else y * axes.scale)
        return HEADS[axes.head](self, y.to(axes.dtype))


def build(axes: DenseAxes):
    """Returns (module, (x, residual)); both tensors are [2, tokens, hidden]."""
    generator = torch.Generator().manual_seed(1)
    shape = (2, axes.tokens, axes.hidden)
    x, residual = (torch.randn(shape, generator=generator).to(axes.dtype) for _ in range(2))
    return Dense(axes).eval(), (x, residual)
