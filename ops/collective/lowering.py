"""The CUDA lowering of `all_reduce_residual_norm`: one kernel through the ranks' shared memory, or
the library's collective in front of it.

The op's reference is no way out for a rank whose kernel fails: it would sum once more, or wait for
kernels that never come. Such a rank goes on with torch's own addition and norm behind the one
collective, or raises.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from tilewright.codegen.collective.plan import most_tokens, reduce_config
from tilewright.codegen.collective.specs import (
    ReduceConfig,
    flags_shape,
    reduce_grid,
    reduce_spec,
    shared_bytes,
    shared_form,
)
from tilewright.codegen.spec import KernelSpec
from tilewright.codegen.targets import Target
from tilewright.ops.collective.operands import reduce_problem
from tilewright.ops.reference.norm import apply_norm
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
    chooser,
)

log = logging.getLogger("tilewright")

_chosen = chooser(reduce_config, reduce_spec)
# Kernels of one rank that failed here: none is tried at each call.
_failed: set[KernelSpec] = set()


def all_reduce_residual_norm_steps(
    a: Any, target: Target, config: ReduceConfig | None = None
) -> Steps:
    """The steps of a call. config: in place of the plan's."""
    tokens, most = a.x.shape[0], most_tokens(a.x.shape[1], a.num_ranks)
    results = ((yield Buffer.like(a.x)), (yield Buffer.like(a.x)))
    if tokens == 0:
        return Outcome(results, "nothing", "no tokens, nothing is sent")
    if a.num_ranks > 1 and (config is not None or most is None or tokens <= most):
        shared = yield from _through_peers(a, results, target, config)
        if shared is not None:
            return Outcome(results, "peer kernel", shared)
    x, why = a.x, "of one rank"
    if a.num_ranks > 1:
        x, why = (yield Buffer.like(a.x)), "the library's all-reduce, then the norm"
        yield from _together(a.group, Library(partial(_all_reduce, group=a.group), (x, a.x)))
    alone = replace(a, x=x)
    config, spec = _chosen(reduce_problem(alone, 1), target)
    launch = Launch(spec, reduce_grid(config, tokens), _values(alone, results))
    if (yield from _launched(launch, a.num_ranks > 1)):
        return Outcome(results, "norm kernel", why)
    weight = () if a.norm_weight is None else (a.norm_weight,)
    function = partial(_residual_norm, eps=a.norm_eps, offset=a.norm_offset)
    yield from _together(a.group, Library(function, (*results, x, a.residual, *weight)))
    return Outcome(results, "library", f"{why}, whose kernel failed")


def _launched(launch: Launch, summed: bool) -> Any:
    """Gives whether the kernel runs. summed: what the ranks have summed is not to be lost."""
    if launch.spec in _failed:
        return False
    try:
        yield launch
    except torch.OutOfMemoryError:
        raise
    except Exception:
        if not summed:
            raise
        _failed.add(launch.spec)
        log.exception("%s failed; torch adds the residual and takes the norm", launch.spec.kernel)
        return False
    return True


def _through_peers(
    a: Any, results: tuple[torch.Tensor, ...], target: Target, config: ReduceConfig | None
) -> Any:
    """Gives the tiles, or None where the ranks share no memory."""
    problem, tokens = reduce_problem(a, a.num_ranks), a.x.shape[0]
    config, spec = _chosen(problem, target, config=config)
    form, nbytes = shared_form(problem, config), shared_bytes(problem, config)
    flags = flags_shape(problem, config)
    step = Peers(a.group, form, _kind(a), nbytes, config.blocks, spec, flags)
    shared: PeerMemory | None = yield from _together(a.group, step)
    if shared is None:
        # A captured call has none that a later one may have, and then all ranks must ask for it.
        yield NotRepeatable("the ranks share no memory")
        return None
    peers = {"peers_ptr": shared.addresses, "steps_ptr": shared.sent, "rank": shared.rank}
    launch = Launch(spec, reduce_grid(config, tokens), _values(a, results) | peers)
    yield from _together(a.group, launch)
    return config


def _together(group: str, step: Step) -> Any:
    """Gives the answer of a step that all ranks take, or that follows one. Raises what ends it on
    this rank alone."""
    try:
        return (yield step)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise RankFailedError(group, error) from error


def _kind(a: Any) -> str:
    """What makes kernels of a form differ, and is the same on all ranks. Where tensors lie is
    none of it."""
    weight = "none" if a.norm_weight is None else str(a.norm_weight.dtype)
    return f"norm {weight} {a.norm_eps} {a.norm_offset}"


def _values(a: Any, results: tuple[torch.Tensor, ...]) -> dict[str, Any]:
    return {
        "x_ptr": a.x,
        "residual_ptr": a.residual,
        "norm_weight_ptr": a.norm_weight,
        "summed_ptr": results[0],
        "normed_ptr": results[1],
        "num_tokens": a.x.shape[0],
    }


def _all_reduce(out: torch.Tensor, x: torch.Tensor, group: str) -> None:
    """Into `out`, by the functional collective: PyTorch's own order among streams holds."""
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
    """What the kernel of one rank does."""
    total = x.float() + residual.float()
    summed.copy_(total)
    normed.copy_(apply_norm(total, weight, eps, offset=offset))
