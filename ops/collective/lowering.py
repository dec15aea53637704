"""The CUDA lowering of `all_reduce_residual_norm`: one kernel through the ranks' shared memory, or
the library's collective in front of it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from tilewright.codegen.collective.plan import most_tokens, reduce_config
from tilewright.codegen.collective.specs import (
    ReduceConfig,
    reduce_grid,
    reduce_spec,
    shared_bytes,
    shared_form,
)
from tilewright.codegen.targets import Target
from tilewright.ops.collective.operands import reduce_problem
from tilewright.ops.runtime.program import (
    Buffer,
    Launch,
    Library,
    NotRepeatable,
    Outcome,
    PeerMemory,
    Peers,
    Steps,
    chooser,
)

_chosen = chooser(reduce_config, reduce_spec)


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
        yield Library(partial(_all_reduce, group=a.group), (x, a.x))
    alone = replace(a, x=x)
    config, spec = _chosen(reduce_problem(alone, 1), target)
    values = _values(alone, results)
    yield Launch(spec, reduce_grid(config, tokens), values)
    return Outcome(results, "norm kernel", why)


def _through_peers(
    a: Any, results: tuple[torch.Tensor, ...], target: Target, config: ReduceConfig | None
) -> Any:
    """Gives the tiles, or None where the ranks share no memory."""
    problem, tokens = reduce_problem(a, a.num_ranks), a.x.shape[0]
    config, spec = _chosen(problem, target, config=config)
    form, nbytes = shared_form(problem, config), shared_bytes(problem, config)
    shared: PeerMemory | None = yield Peers(a.group, form, nbytes, config.blocks, spec)
    if shared is None:
        # A captured call has none that a later one may have, and then all ranks must ask for it.
        yield NotRepeatable("the ranks share no memory")
        return None
    peers = {"peers_ptr": shared.addresses, "steps_ptr": shared.sent, "rank": shared.rank}
    yield Launch(spec, reduce_grid(config, tokens), _values(a, results) | peers)
    return config


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
