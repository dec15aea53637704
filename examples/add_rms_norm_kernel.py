"""Defines the kernel of `examples::add_rms_norm`, from its template to the steps of a call.

This file holds all parts of the kernel. In the package, each part has a separate file in the folder
of the op's family; docs/adding-a-pattern.md explains the parts. Dimension letters: T tokens, K
hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from tilewright.codegen.arithmetic import cdiv, next_power_of_2
from tilewright.codegen.audit import Expectations
from tilewright.codegen.kernel import Kernel
from tilewright.codegen.targets import Target
from tilewright.ops.runtime.kernels import launch
from tilewright.ops.runtime.program import Buffer, Outcome, Steps

# --- template -----------------------------------------------------------------------------------


@triton.jit
def add_rms_norm(
    y_ptr, s_ptr, weight_ptr, out_ptr, num_tokens,
    HIDDEN: tl.constexpr, Y_STRIDE: tl.constexpr, S_STRIDE: tl.constexpr, EPS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Computes out [T, HIDDEN] = RMS norm of y + s, times weight [HIDDEN], in fp32.

    Grid (cdiv(T, BLOCK_T),). Y_STRIDE and S_STRIDE are the strides of the rows; columns are
    contiguous.
    """
    tokens = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)[:, None]
    columns = tl.arange(0, BLOCK_K)[None, :]
    mask = (tokens < num_tokens) & (columns < HIDDEN)
    y = tl.load(y_ptr + tokens * Y_STRIDE + columns, mask=mask, other=0.0).to(tl.float32)
    s = tl.load(s_ptr + tokens * S_STRIDE + columns, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=columns < HIDDEN, other=0.0).to(tl.float32)
    total = y + s
    mean = tl.sum(total * total, axis=1)[:, None] / HIDDEN
    normed = total * tl.rsqrt(mean + EPS) * weight
    out = out_ptr + tokens * HIDDEN + columns
    tl.store(out, normed.to(out_ptr.dtype.element_ty), mask=mask)


# --- kernel -------------------------------------------------------------------------------------

ADD_RMS_NORM = Kernel(
    "add_rms_norm_kernel",  # the module of the template
    "add_rms_norm",
    num_stages=1,
)


@dataclass(frozen=True)
class NormConfig:
    """The tile: the number of tokens of one program."""

    block_t: int
    num_warps: int


def norm_grid(config: NormConfig, num_tokens: int) -> tuple[int]:
    return (cdiv(num_tokens, config.block_t),)


# --- plan ---------------------------------------------------------------------------------------

# The number of elements that one program computes. It is large enough for many loads in flight, and
# small enough for the registers.
TILE = 4096


@cache
def norm_plan(hidden: int, num_tokens: int, target: Target) -> NormConfig:
    """Gives each program as many tokens as fill a tile, or fewer if some multiprocessors would
    otherwise have no program."""
    most = max(TILE // next_power_of_2(hidden), 1)
    while most > 1 and cdiv(num_tokens, most) < target.num_sms:
        most //= 2
    return NormConfig(most, 4 if hidden <= TILE else 8)


# --- lowering -----------------------------------------------------------------------------------

# A program holds whole rows in registers.
MAX_HIDDEN = 16384
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def unsupported(a: Any) -> str | None:
    """Returns the reason why the kernel does not support a call, or None if it does. Reads only the
    metadata of tensors."""
    if a.y.dtype not in DTYPES:
        return f"no kernel for {a.y.dtype}"
    if a.y.shape[1] > MAX_HIDDEN:
        return f"a row has {a.y.shape[1]} columns, but at most {MAX_HIDDEN} fit"
    if any(t.stride(-1) != 1 and t.shape[-1] > 1 for t in (a.y, a.s, a.weight)):
        return "columns are not contiguous"
    return None


def add_rms_norm_steps(a: Any, target: Target) -> Steps:
    """Yields the steps of a call: memory for the result, and one launch."""
    tokens, hidden = a.y.shape
    config = norm_plan(hidden, next_power_of_2(tokens), target)
    out = yield Buffer(a.y.shape, a.y.dtype)
    values = {"y": a.y, "s": a.s, "weight": a.weight, "out": out, "num_tokens": tokens}
    sizes = {"HIDDEN": hidden, "EPS": a.eps, "BLOCK_K": next_power_of_2(hidden)}
    yield launch(ADD_RMS_NORM, target, norm_grid(config, tokens), values, config, **sizes)
    return Outcome(out, "norm kernel", f"{config.block_t} tokens a program")


# --- audit --------------------------------------------------------------------------------------

#: The requirements on the kernel's machine code. The kernel has no GEMM and no loop, so only the
#: chip's limits apply.
CLAIMS = Expectations()
