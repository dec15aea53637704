"""The kernel spec of `streamed_linear`, and its grid."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.codegen.arithmetic import ELEMENT_BYTES, cdiv
from tilewright.codegen.mlp.problem import LinearProblem
from tilewright.codegen.operand import Operand, first_strides
from tilewright.codegen.row_norm import squares_a_row
from tilewright.codegen.spec import Constant, KernelSpec, constants_of, operands_of
from tilewright.codegen.targets import get_target


@dataclass(frozen=True)
class LinearConfig:
    """block_n rows of each weight by block_t tokens; split_k programs share a tile's K.

    prefetch: columns of a row that are asked for while the kernel before this one ends, a multiple
    of 64; of codes, as many bytes as 16-bit numbers would be. lets_in: the next kernel's programs
    may take their places early.
    """

    block_n: int
    block_t: int
    block_k: int
    split_k: int
    num_warps: int
    num_stages: int
    prefetch: int = 0
    lets_in: bool = False

    def __str__(self) -> str:
        marks = f" p{self.prefetch}" * bool(self.prefetch) + " early" * self.lets_in
        return (
            f"{self.block_n}x{self.block_t}x{self.block_k} /{self.split_k} "
            f"w{self.num_warps} s{self.num_stages}{marks}"
        )


def linear_spec(problem: LinearProblem, config: LinearConfig, target: str) -> KernelSpec:
    """`streamed_linear`. Where the result is normed, it leaves fp32 sums to `norm_rows`."""
    scratch, normed = config.split_k > 1, problem.post_norm is not None
    in_registers = problem.norm is not None or problem.quantization is not None
    return KernelSpec.of(
        "mlp.linear",
        "streamed_linear",
        {
            **_constants(problem),
            **_layer_constants(problem),
            **_code_constants(problem, config),
            **constants_of(config, "block_n", "block_t", "block_k", "split_k", "lets_in"),
            "PREFETCH": config.prefetch if problem.k_major else 0,
            "APART": in_registers and get_target(target).tmem_columns > 0,
        },
        {
            **_weights(problem),
            **operands_of(problem, "bias", "up_bias"),
            "residual_ptr": None if normed else problem.residual,
            "out_ptr": Operand("fp32" if normed else problem.x.dtype),
            "workspace_ptr": Operand("fp32") if scratch else None,
            "counters_ptr": Operand("i32", aligned=False) if scratch else None,
            "num_tokens": "i32",
            **_norm_bias(problem),
        },
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        target=target,
        ranges=("num_tokens",),
        dependent=True,
    )


def _constants(problem: LinearProblem) -> dict[str, Constant]:
    norm = problem.norm
    return {
        **constants_of(problem, "n", "k", "activation"),
        "SCALE": problem.scale if problem.post_norm is None else 1.0,  # else behind the norm
        "X_STRIDE": problem.x.strides[0],
        "NORM_STRIDE": first_strides(norm.weight if norm else None)[0],
        "LINE": 128 // int(ELEMENT_BYTES[problem.weight.dtype]),
        "WEIGHT_STRIDES": problem.weight.strides,
        "UP_STRIDES": problem.up_weight.strides if problem.up_weight else (0, 0),
        "BIAS_STRIDES": first_strides(problem.bias, problem.up_bias),
        "RESIDUAL_STRIDE": first_strides(problem.residual)[0],
        "NORM": squares_a_row(norm),
        "NORM_EPS": norm.eps if norm else 0.0,
        "NORM_OFFSET": norm.offset if norm else 0.0,
    }


def _layer_constants(problem: LinearProblem) -> dict[str, Constant]:
    norm = problem.norm
    if norm is None or norm.follows:
        return {}
    return {
        "LAYER_ROW": norm.layer_row(problem.k),
        "NORM_BIAS_STRIDE": first_strides(norm.bias)[0],
    }


def _norm_bias(problem: LinearProblem) -> dict[str, Operand]:
    norm = problem.norm
    return {"norm_bias_ptr": norm.bias} if norm is not None and norm.bias is not None else {}


# Of a norm of the result: columns of a row at a time.
NORM_BLOCK = 2048


def norm_rows_spec(problem: LinearProblem, target: str) -> KernelSpec:
    """What is left of a problem with a norm of the result, once that is made."""
    norm, residual = problem.post_norm, problem.residual
    assert norm is not None
    assert residual is not None
    return KernelSpec.of(
        "mlp.finish",
        "norm_rows",
        {
            "N": problem.n,
            "RESIDUAL_STRIDE": residual.strides[0],
            "NORM_STRIDE": norm.weight.strides[0] if norm.weight else 0,
            "NORM_EPS": norm.eps,
            "NORM_OFFSET": norm.offset,
            "SCALE": problem.scale,
            "BLOCK": NORM_BLOCK,
        },
        {
            "made_ptr": Operand("fp32"),
            "norm_weight_ptr": norm.weight,
            "residual_ptr": residual,
            "out_ptr": Operand(problem.x.dtype),
        },
        target=target,
        dependent=True,
    )


def _code_constants(problem: LinearProblem, config: LinearConfig) -> dict[str, Constant]:
    q = problem.quantization
    if q is None:
        return {}
    return {
        **q.block_constants(problem.k, config.block_k),
        "BLOCK_STRIDES": q.block_strides(0),
        "UP_BLOCK_STRIDES": q.block_strides(1),
    }


def _weights(problem: LinearProblem) -> dict[str, Operand | None]:
    q, norm = problem.quantization, problem.norm
    weights = {
        "x_ptr": problem.x,
        "norm_weight_ptr": norm.weight if norm else None,
        **operands_of(problem, "weight", "up_weight"),
    }
    blocks = (*q.scales, *q.zeros) if q else (None,) * len(CODE_NAMES)
    return weights | {f"{x}_ptr": block for x, block in zip(CODE_NAMES, blocks, strict=True)}


# What codes are scaled with and shifted by, of the weight and of the up weight.
CODE_NAMES = ("weight_scale", "up_scale", "weight_zero", "up_zero")


def linear_grid(problem: LinearProblem, config: LinearConfig, num_tokens: int) -> tuple[int, int]:
    tiles = cdiv(problem.n, config.block_n)
    return tiles * config.split_k, cdiv(num_tokens, config.block_t)


def workspace_elements(problem: LinearProblem, config: LinearConfig) -> int:
    """Numbers that the parts of one tile take."""
    sums = problem.num_weights * config.block_n + squares_a_row(problem.norm)
    return config.split_k * sums * config.block_t


# Of `activate_products`: elements of a program.
ACTIVATE_BLOCK = 2048


def activate_spec(problem: LinearProblem, target: str) -> KernelSpec:
    """What is left of a problem where the products are a library's, in memory of their own."""
    rows = Operand(problem.x.dtype)
    return KernelSpec.of(
        "mlp.linear",
        "activate_products",
        {"ACTIVATION": problem.activation, "BLOCK": ACTIVATE_BLOCK},
        {
            "gate_ptr": rows,
            "up_ptr": rows if problem.up_weight else None,
            "out_ptr": rows,
            "num_elements": "i64",
        },
        target=target,
        dependent=True,
    )


def activate_grid(num_elements: int) -> tuple[int]:
    return (cdiv(num_elements, ACTIVATE_BLOCK),)
