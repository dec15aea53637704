"""The steps of linears: one kernel for few tokens, and the library's GEMM for more tokens."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any

import torch

from tilewright.codegen.arithmetic import next_power_of_2
from tilewright.codegen.kernel import Statics
from tilewright.codegen.mlp.kernels import (
    ACTIVATE,
    ACTIVATE_BLOCK,
    CODE_NAMES,
    DOTTED,
    LINEAR,
    NORM_BLOCK,
    NORM_ROWS,
    DotConfig,
    LinearConfig,
    activate_grid,
    dot_constants,
    dot_grid,
    linear_constants,
    linear_grid,
    order_of,
    workspace_elements,
)
from tilewright.codegen.mlp.plan import (
    dot_config,
    dot_obstacle,
    linear_config,
    multiplies_apart,
    orders_x,
    takes_library,
    takes_norm,
)
from tilewright.codegen.mlp.problem import LinearProblem
from tilewright.codegen.spec import Constant
from tilewright.codegen.targets import Target
from tilewright.ops.checks import given
from tilewright.ops.formats.code_operands import code_words, dot_words, fills_words
from tilewright.ops.mlp.arguments import (
    LinearActivationArguments,
    LinearArguments,
    LinearResidualArguments,
    ScaledLinearArguments,
)
from tilewright.ops.mlp.mixed import decodes_many, decoding_pair, decoding_product
from tilewright.ops.mlp.operands import activation_problem, residual_problem, scaled_operands
from tilewright.ops.reference.norm import RowNorm
from tilewright.ops.runtime.kernels import launch
from tilewright.ops.runtime.norms import normed, ordered, without_norm
from tilewright.ops.runtime.products import linear
from tilewright.ops.runtime.program import Buffer, Library, Outcome, SplitK, Step, Steps
from tilewright.ops.runtime.scaled_products import scaled_product

TENSORS = ("x", "norm_weight", "norm_bias", *CODE_NAMES, "bias", "up_bias", "residual")


@cache
def _chosen(
    problem: LinearProblem,
    num_tokens: int,
    target: Target,
    config: LinearConfig | DotConfig | None,
    bytes_fill_words: bool,
) -> tuple[LinearConfig | DotConfig, Statics]:
    """Returns the tile sizes (`config`, if it is given) and the constants of the kernel, for up to
    `num_tokens` tokens. bytes_fill_words: whether codes can be read four bytes at a time."""
    if config is None and dot_obstacle(problem, num_tokens, bytes_fill_words) is None:
        config = dot_config(problem)
    config = config or linear_config(problem, num_tokens, target)
    if isinstance(config, DotConfig):
        return config, Statics(config, **dot_constants(problem))
    return config, Statics(config, **linear_constants(problem, config, target))


@dataclass(frozen=True)
class _Call:
    """A call of an op. If a separate step normalises x, `a` and `problem` have no norm.

    Attributes:
        problem: The static problem of the call.
        a: The arguments of the call.
        target: The target of the call.
        config: The tile sizes. If it is None, the plan chooses them.
        norm: The norm that the separate step computes; None if there is no such step.
    """

    problem: LinearProblem
    a: LinearArguments
    target: Target
    config: LinearConfig | DotConfig | None = None
    norm: RowNorm | None = None

    @property
    def num_tokens(self) -> int:
        return self.a.x.shape[0]

    @cached_property
    def chosen(self) -> tuple[LinearConfig | DotConfig, Statics]:
        """The tile sizes and the constants of the kernel."""
        bytes_fill_words = all(fills_words(one.data) for one in self.a.weights if one is not None)
        tokens = next_power_of_2(self.num_tokens)
        return _chosen(self.problem, tokens, self.target, self.config, bytes_fill_words)


def linear_activation_steps(
    a: LinearActivationArguments, target: Target, config: LinearConfig | DotConfig | None = None
) -> Steps:
    """Performs the steps of a `linear_activation` call. config: the tile sizes. If it is None, the
    plan chooses them."""
    if config is None and decodes_many(a, target):
        return (yield from _activation_by_decoding(a, target))
    call = _Call(activation_problem(a), a, target, config)
    if config is None and call.problem.norm is not None and not _norms_x(call):
        bare = replace(a, **without_norm(a.x, a.norm))
        call = _Call(activation_problem(bare), bare, target, norm=a.norm)
    x = yield from _x(call)
    if config is None and _are_many(call.problem, call.num_tokens, target):
        return (yield from _activation_by_library(call, x))
    if config is None and multiplies_apart(call.problem, call.num_tokens, target):
        return (yield from _apart(call, x))
    return (yield from _streamed(call, x))


def linear_residual_steps(
    a: LinearResidualArguments, target: Target, config: LinearConfig | DotConfig | None = None
) -> Steps:
    """Performs the steps of a `linear_residual` call. config: the tile sizes. If it is None, the
    plan chooses them."""
    call = _Call(residual_problem(a), a, target, config)
    if config is None and _are_many(call.problem, call.num_tokens, target):
        return (yield from _residual_by_library(a))
    if config is None and decodes_many(a, target):
        out, tiles = yield from decoding_product(call.problem, a, 0, target)
        return Outcome(out, "decoding kernel", tiles)
    x = yield from _x(call)
    return (yield from _streamed(call, x))


def _x(call: _Call) -> Generator[Step, Any, torch.Tensor]:
    """Returns x in the form in which the product needs it. If there is a separate norm, it has been
    applied. The columns are in the order of the kernel's codes."""
    order = None
    if call.problem.quantization is not None:
        order = order_of(call.problem, call.chosen[0])
    if call.norm is not None:
        return (yield from normed(call.a.x, call.norm, call.target, order))
    if order is not None:
        return (yield from ordered(call.a.x, order, call.target))
    return call.a.x


def scaled_linear_steps(a: ScaledLinearArguments, target: Target) -> Steps:
    """Performs the step of a `scaled_linear` call, which is a product of PyTorch's library."""
    operands = scaled_operands(a)
    assert a.out_dtype is not None
    out = yield from scaled_product(operands, a.out_dtype, target, a.bias)
    return Outcome(out, "library", f"a product of codes, scaled by {operands.kind}")


def _norms_x(call: _Call) -> bool:
    """Whether one kernel that computes the norm of x and the product is faster than two kernels."""
    problem, num_tokens = call.problem, call.num_tokens
    assert problem.norm is not None
    if _are_many(problem, num_tokens, call.target) or orders_x(problem, num_tokens, call.target):
        return False
    if multiplies_apart(problem, num_tokens, call.target):
        return False
    coded = problem.quantization is not None
    return takes_norm(problem.norm.kind, num_tokens, problem.k, coded)


def _are_many(problem: LinearProblem, num_tokens: int, target: Target) -> bool:
    """Whether the library's GEMM is faster and may be used.

    The library cannot read quantised weights. The library is not used before a norm of the result
    either, because the library rounds the numbers that the norm reads.
    """
    alone = problem.quantization is None and problem.post_norm is None
    return alone and takes_library(problem, num_tokens, target)


def _apart(call: _Call, x: torch.Tensor) -> Steps:
    """Multiplies x by the gate's weight and by the up weight in separate launches. Both weights are
    quantised. The two products stay in fp32 until the activation is computed."""
    a = call.a
    assert isinstance(a, LinearActivationArguments)
    alone = replace(
        a,
        activation="",
        up_weight=None,
        up_scale=None,
        up_zero=None,
        up_factor=None,
        up_bias=None,
    )
    second = replace(
        alone,
        weight=given(a.up_weight),
        weight_scale=a.up_scale,
        weight_zero=a.up_zero,
        weight_factor=a.up_factor,
        bias=a.up_bias,
    )
    results = []
    for one in (alone, second):
        part = _Call(activation_problem(one), replace(one, x=x), call.target)
        results.append((yield from _streamed(part, (yield from _x(part)), torch.float32)))
    gate, up = (each.result for each in results)
    assert isinstance(gate, torch.Tensor)
    assert isinstance(up, torch.Tensor)
    out = yield Buffer((call.num_tokens, call.problem.n), a.x.dtype)
    yield _activated(call, gate, up, out)
    return Outcome(out, "streaming kernel", f"each weight by itself, {results[0].reason}")


def _activated(call: _Call, gate: torch.Tensor, up: torch.Tensor | None, out: torch.Tensor) -> Step:
    values = {"gate": gate, "up": up, "out": out, "num_elements": out.numel()}
    constants: dict[str, Constant] = {"ACTIVATION": call.problem.activation}
    constants["BLOCK"] = ACTIVATE_BLOCK
    return launch(ACTIVATE, call.target, activate_grid(out.numel()), values, **constants)


def _streamed(call: _Call, x: torch.Tensor, dtype: torch.dtype | None = None) -> Steps:
    """Launches the streaming kernel. x: a result of `_x`. dtype: the dtype of the result; None for
    x's dtype."""
    problem, a, target, num_tokens = call.problem, call.a, call.target, call.num_tokens
    norm, (config, statics) = problem.post_norm, call.chosen
    stored = torch.float32 if norm else dtype or x.dtype
    out = yield Buffer((num_tokens, problem.n), stored)
    own = vars(a)
    values: dict[str, Any] = {name: own.get(name) for name in TENSORS} | {"x": x}
    words = code_words(a.weights) if problem.quantization else (a.weight, own.get("up_weight"))
    values["weight"], values["up_weight"] = words
    values |= {"out": out, "workspace": None, "counters": None, "num_tokens": num_tokens}
    residual = values["residual"]
    stride = 0 if residual is None else residual.stride(0)
    later = ("norm_weight", "norm_bias", "residual") if norm else ()
    now = values | dict.fromkeys(later)
    if isinstance(config, DotConfig):
        assert problem.quantization is not None
        per = problem.quantization.per_int32
        now |= {name: dot_words(now[name], per) for name in ("weight", "up_weight")}
        grid = dot_grid(problem, config, num_tokens)
        yield launch(DOTTED, target, grid, now, statics, RESIDUAL_STRIDE=stride)
    else:
        grid = linear_grid(problem, config, num_tokens)
        if config.split_k > 1:
            tiles = grid[0] // config.split_k * grid[1]
            scratch = yield SplitK(tiles, workspace_elements(problem, config))
            now["workspace"], now["counters"] = scratch
        yield launch(LINEAR, target, grid, now, statics, RESIDUAL_STRIDE=stride)
    if norm is not None:
        made, out = out, (yield Buffer((num_tokens, problem.n), x.dtype))
        constants = {"N": problem.n, "SCALE": problem.scale, "BLOCK": NORM_BLOCK}
        constants |= {"NORM_EPS": norm.eps, "NORM_OFFSET": norm.offset}
        values |= {"made": made, "out": out}
        yield launch(NORM_ROWS, target, (num_tokens,), values, **constants)
    return Outcome(out, "streaming kernel", config)


# --- many tokens ----------------------------------------------------------------------------------

_MANY = "many tokens: the library's GEMM"


def _residual_by_library(a: LinearResidualArguments) -> Steps:
    """Performs the library's GEMM, which also adds the residual."""
    start = a.residual
    if a.bias is not None:
        start = yield Buffer.like(a.residual)
        yield Library(partial(_add_scaled, scale=a.scale), (start, a.residual, a.bias))
    out = yield Buffer.like(a.residual)
    yield Library(partial(_add_product, scale=a.scale), (out, start, a.x, a.weight))
    return Outcome(out, "library", _MANY)


def _activation_by_library(call: _Call, x: torch.Tensor) -> Steps:
    a = call.a
    assert isinstance(a, LinearActivationArguments)
    out = yield from linear(x, a.weight, a.bias)
    up = None
    if a.up_weight is not None:
        up = yield from linear(x, a.up_weight, a.up_bias)
    if a.activation:
        yield _activated(call, out, up, out)
    return Outcome(out, "library", _MANY)


def _activation_by_decoding(a: LinearActivationArguments, target: Target) -> Steps:
    """Multiplies x by both weights, with one kernel that decodes both weights, or with one kernel
    for each weight."""
    if a.norm.kind:
        x = yield from normed(a.x, a.norm, target)
        a = replace(a, **without_norm(x, a.norm))
    call = _Call(activation_problem(a), a, target)
    if a.up_weight is None:
        activation = call.problem.activation
        out, tiles = yield from decoding_product(call.problem, a, 0, target, activation)
        return Outcome(out, "decoding kernel", tiles)
    if (pair := (yield from decoding_pair(call.problem, a, target))) is not None:
        return Outcome(pair[0], "decoding kernel", pair[1])
    out, tiles = yield from decoding_product(call.problem, a, 0, target)
    up, _ = yield from decoding_product(call.problem, a, 1, target)
    yield _activated(call, out, up, out)
    return Outcome(out, "decoding kernel", tiles)


def _add_scaled(out: torch.Tensor, start: torch.Tensor, bias: torch.Tensor, scale: float) -> None:
    torch.add(start, bias, alpha=scale, out=out)


def _add_product(
    out: torch.Tensor, start: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, scale: float
) -> None:
    torch.addmm(start, x, weight.t(), alpha=scale, out=out)
