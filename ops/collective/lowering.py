"""The CUDA lowering of `all_reduce_residual_norm`: one kernel that uses memory shared by the ranks,
or the library's collective followed by a kernel.

If a kernel fails on a rank, the op's reference cannot replace the kernel: the reference would sum
again, or wait for ranks that run the kernel. If the kernel after the library's collective fails,
the rank continues with torch's own addition and norm. If the kernel that uses shared memory fails,
the rank raises RankFailedError.
"""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from tilewright.codegen.arithmetic import next_power_of_2
from tilewright.codegen.collective.kernels import (
    PATIENCE,
    REDUCE,
    ReduceConfig,
    flags_shape,
    reduce_grid,
    shared_bytes,
)
from tilewright.codegen.collective.plan import most_tokens, reduce_config
from tilewright.codegen.operand import Operand
from tilewright.codegen.spec import KernelSpec
from tilewright.codegen.targets import Target
from tilewright.ops.reference.norm import apply_norm
from tilewright.ops.runtime.dtypes import TRITON_TYPES
from tilewright.ops.runtime.kernels import launch
from tilewright.ops.runtime.peers import RankFailedError
from tilewright.ops.runtime.program import (
    Buffer,
    Launch,
    Library,
    NotRepeatable,
    Outcome,
    PeerMemory,
    Peers,
    Step,
    Steps,
)

log = logging.getLogger("tilewright")

# Kernels that need no other rank and that failed in this process. Later calls do not launch them.
_failed: set[KernelSpec] = set()
# Operands that stand for the ranks' shared memory as long as that memory does not exist.
_SHARED = {"peers": Operand("i64"), "steps": Operand("i32"), "rank": 0}
# The same operands for a kernel that uses no shared memory.
_NOT_SHARED = {"peers": None, "steps": None, "rank": None}


def all_reduce_residual_norm_steps(
    a: Any, target: Target, config: ReduceConfig | None = None
) -> Steps:
    """Performs the steps of an `all_reduce_residual_norm` call. config: tile sizes to use instead
    of the plan's."""
    tokens, most = a.x.shape[0], most_tokens(a.x.shape[1], a.num_ranks)
    results = ((yield Buffer.like(a.x)), (yield Buffer.like(a.x)))
    if tokens == 0:
        return Outcome(results, "nothing", "there are no tokens, so nothing is sent")
    if a.num_ranks > 1 and (config is not None or most is None or tokens <= most):
        shared = yield from _through_peers(a, results, target, config)
        if shared is not None:
            return Outcome(results, "peer kernel", shared)
    x, why = a.x, "there is only one rank"
    if a.num_ranks > 1:
        x, why = (yield Buffer.like(a.x)), "the library's all-reduce, then the norm"
        yield from _together(a.group, Library(partial(_all_reduce, group=a.group), (x, a.x)))
    config = config or reduce_config(x.shape[1], 1)
    step = _reduce(a, (x, 1), results, _NOT_SHARED, target, config)
    if (yield from _launched(step, a.num_ranks > 1)):
        return Outcome(results, "norm kernel", why)
    weight = () if a.norm_weight is None else (a.norm_weight,)
    function = partial(_residual_norm, eps=a.norm_eps, offset=a.norm_offset)
    yield from _together(a.group, Library(function, (*results, x, a.residual, *weight)))
    return Outcome(results, "library", f"{why}; the kernel failed, so PyTorch computes the norm")


def _reduce(
    a: Any,
    summed: tuple[torch.Tensor, int],
    results: tuple[torch.Tensor, ...],
    shared: dict[str, Any],
    target: Target,
    config: ReduceConfig,
) -> Launch:
    """Returns the launch of the kernel. summed: x, and the number of ranks whose parts the kernel
    adds. shared: the memory that the ranks share."""
    x, num_ranks = summed
    tokens, columns = x.shape
    values = {
        "x": x,
        "residual": a.residual,
        "norm_weight": a.norm_weight,
        "summed": results[0],
        "normed": results[1],
        "num_tokens": tokens,
        **shared,
    }
    return launch(
        REDUCE,
        target,
        reduce_grid(config, tokens),
        values,
        config,
        N=columns,
        NORM_EPS=a.norm_eps,
        NORM_OFFSET=a.norm_offset,
        BLOCK=next_power_of_2(columns),
        RANKS=num_ranks,
        FLAGS=math.prod(flags_shape(config, num_ranks)),
        LIMIT=PATIENCE,
    )


def _launched(step: Launch, summed: bool) -> Any:
    """Performs a launch and returns whether it succeeded. summed: whether the ranks have already
    summed x. If they have, a failure must not lose the sum."""
    if step.spec in _failed:
        return False
    try:
        yield step
    except torch.OutOfMemoryError:
        raise
    except Exception:
        if not summed:
            raise
        _failed.add(step.spec)
        log.exception("%s failed; torch adds the residual and computes the norm", step.spec.kernel)
        return False
    return True


def _through_peers(
    a: Any, results: tuple[torch.Tensor, ...], target: Target, config: ReduceConfig | None
) -> Any:
    """Runs the kernel that uses shared memory and returns its tile sizes. Returns None if the ranks
    share no memory."""
    columns, ranks = a.x.shape[1], a.num_ranks
    config = config or reduce_config(columns, ranks)
    step = _reduce(a, (a.x, ranks), results, _SHARED, target, config)
    # The properties that all kernels with the same shared memory have in common. Addresses of
    # tensors are not included.
    form = f"{ranks} x {TRITON_TYPES[a.x.dtype]}[{columns}] x{config.blocks}"
    nbytes = shared_bytes(config, ranks, a.x.element_size() * columns)
    flags = flags_shape(config, ranks)
    peers = Peers(a.group, form, _kind(a), nbytes, config.blocks, step.spec, flags)
    shared: PeerMemory | None = yield from _together(a.group, peers)
    if shared is None:
        # During a capture, the ranks share no memory. In a later call, they may share memory, and
        # all ranks must then request it.
        yield NotRepeatable("the ranks share no memory")
        return None
    memory = {"peers_ptr": shared.addresses, "steps_ptr": shared.sent, "rank": shared.rank}
    yield from _together(a.group, replace(step, values={**step.values, **memory}))
    return config


def _together(group: str, step: Step) -> Any:
    """Returns the result of a step that all ranks perform, or that follows such a step. Raises
    RankFailedError if the step fails on this rank."""
    try:
        return (yield step)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise RankFailedError(group, error) from error


def _kind(a: Any) -> str:
    """Returns the properties of a kernel that are not part of its form (see `_through_peers`). The
    properties are the same on all ranks, because they include no addresses of tensors."""
    weight = "none" if a.norm_weight is None else str(a.norm_weight.dtype)
    return f"norm {weight} {a.norm_eps} {a.norm_offset}"


def _all_reduce(out: torch.Tensor, x: torch.Tensor, group: str) -> None:
    """Sums x over ranks and writes the result to `out`. Uses the functional collective, which keeps
    PyTorch's order of streams."""
    out.copy_(x)
    torch.ops._c10d_functional.all_reduce_(out, "sum", group)
    torch.ops._c10d_functional.wait_tensor(out)


def _residual_norm(
    summed: torch.Tensor,
    normed: torch.Tensor,
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    eps: float,
    offset: float,
) -> None:
    """Computes the results of the kernel of a single rank with PyTorch's own functions."""
    total = x.float() + residual.float()
    summed.copy_(total)
    normed.copy_(apply_norm(total, weight, eps, offset=offset))
