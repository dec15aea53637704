"""Parts of models that are sharded by hand: sending tokens to the ranks of their experts and back,
sequence parallelism, and pipeline stages. tests/compiler/sharded.py starts the ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from tilewright.compiler import backend, reports

TOKENS, WIDTH, INNER, EXPERTS, SLOTS, ROOM = 8, 64, 128, 8, 2, 8
_COMPILED: dict[str, Any] = {"backend": "tilewright", "options": {"inner": "eager"}}


def _random(seed: int, *shape: int) -> torch.Tensor:
    """Returns random numbers that are equal on every rank, and exact in bfloat16."""
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / shape[-1] ** 0.5
    return made.bfloat16().double()


def _of_this_rank(whole: torch.Tensor, dim: int = 0) -> torch.Tensor:
    return whole.chunk(dist.get_world_size(), dim)[dist.get_rank()]


def _sent(x: torch.Tensor, *splits: Any) -> torch.Tensor:
    given = splits or (None, None)
    return functional.all_to_all_single(x.contiguous(), *given, dist.group.WORLD)


def _chosen(x: torch.Tensor, router: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scores, ids = (x @ router.t()).softmax(-1).topk(SLOTS, -1)
    return scores, ids


# --- experts on other ranks -----------------------------------------------------------------------


def dispatched(x: torch.Tensor, router: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> Any:
    """Sorts rows by expert, sends them and their counts to the ranks that have the experts, and
    sends the results back."""
    ranks, here = dist.get_world_size(), up.shape[0]
    scores, ids = _chosen(x, router)
    order = ids.flatten().argsort(stable=True)
    counts = torch.histc(ids.flatten().float(), EXPERTS, 0, EXPERTS).to(torch.int32)
    theirs = _sent(counts).view(ranks, here)
    given, taken = counts.view(ranks, here).sum(1).tolist(), theirs.sum(1).tolist()
    rows = _sent(x[order // SLOTS], taken, given)
    owners = torch.arange(here).repeat(ranks)
    owners = owners.repeat_interleave(theirs.flatten(), output_size=rows.shape[0])
    place, ends = owners.argsort(stable=True), theirs.sum(0).cumsum(0).to(torch.int32)
    gate, linear = torch._grouped_mm(rows[place], up, offs=ends).chunk(2, -1)
    made = torch._grouped_mm(F.silu(gate) * linear, down, offs=ends)
    back = torch.empty_like(made)
    back[place] = made
    home = _sent(back, given, taken)
    out = torch.empty_like(home)
    out[order] = home
    return (out.view(-1, SLOTS, WIDTH) * scores[..., None].to(x.dtype)).sum(1)


def padded(x: torch.Tensor, router: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> Any:
    """Sends an equal number of rows from each rank to each expert. Some of the rows are padding."""
    ranks, here = dist.get_world_size(), up.shape[0]
    scores, ids = _chosen(x, router)
    flat = ids.flatten()
    place = (F.one_hot(flat, EXPERTS).cumsum(0) - 1).gather(1, flat[:, None]).flatten()
    slot = flat * ROOM + place
    rows = x.new_zeros(EXPERTS * ROOM, WIDTH).index_copy(0, slot, x.repeat_interleave(SLOTS, 0))
    taken = _sent(rows).view(ranks, here, ROOM, WIDTH).transpose(0, 1).flatten(1, 2)
    gate, linear = torch.bmm(taken, up).chunk(2, -1)
    made = torch.bmm(F.silu(gate) * linear, down).view(here, ranks, ROOM, WIDTH).transpose(0, 1)
    home = _sent(made.reshape(EXPERTS * ROOM, WIDTH))[slot]
    return (home.view(-1, SLOTS, WIDTH) * scores[..., None].to(x.dtype)).sum(1)


def _mixture(share: Callable[..., Any]) -> Any:
    """Returns (function, its arguments on this rank, the result in float64)."""
    x, router = _random(1 + dist.get_rank(), TOKENS, WIDTH), _random(3, EXPERTS, WIDTH)
    up, down = _random(4, EXPERTS, WIDTH, 2 * INNER), _random(5, EXPERTS, INNER, WIDTH)
    scores, ids = _chosen(x, router)
    gate, linear = torch.einsum("td,tkdi->tki", x, up[ids]).chunk(2, -1)
    made = torch.einsum("tki,tkid->tkd", F.silu(gate) * linear, down[ids])
    return (
        share,
        (x, router, _of_this_rank(up), _of_this_rank(down)),
        (made * scores[..., None]).sum(1),
    )


# --- sequence parallel ----------------------------------------------------------------------------


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, weight.shape, weight, 1e-5)


def by_token(x: torch.Tensor, norm: torch.Tensor, *weights: torch.Tensor) -> Any:
    """Computes an MLP between two norms. The norms see only this rank's tokens, as in Megatron's
    sequence parallelism."""
    (gate, up, down), world = weights, dist.group.WORLD
    gathered = functional.all_gather_tensor(_norm(x, norm), 0, world)
    part = F.linear(F.silu(F.linear(gathered, gate)) * F.linear(gathered, up), down)
    total = x + functional.reduce_scatter_tensor(part, "sum", 0, world)
    return functional.all_gather_tensor(_norm(total, norm), 0, world)


def _sequence() -> Any:
    x, layer = _random(1, TOKENS, WIDTH), Layer(2)
    weights = _of_this_rank(layer.gate), _of_this_rank(layer.up), _of_this_rank(layer.down, 1)
    return by_token, (_of_this_rank(x), layer.norm, *weights), _norm(layer(x), layer.norm)


# --- stages of a pipeline -------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.norm = nn.Parameter(1 + _random(seed, WIDTH), requires_grad=False)
        self.gate = nn.Parameter(_random(seed + 1, 2 * INNER, WIDTH), requires_grad=False)
        self.up = nn.Parameter(_random(seed + 2, 2 * INNER, WIDTH), requires_grad=False)
        self.down = nn.Parameter(_random(seed + 3, WIDTH, 2 * INNER), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = _norm(x, self.norm)
        inner = F.silu(F.linear(normed, self.gate)) * F.linear(normed, self.up)
        return x + F.linear(inner, self.down)


def _staged(compiled: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs one layer on each rank. Returns the result on the last rank, and the result in
    float64."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x = _random(9, TOKENS, WIDTH)
    exact = x
    for each in range(ranks):
        exact = Layer(10 * each)(exact)
    layer = Layer(10 * rank).bfloat16()
    step: Any = torch.compile(layer, **_COMPILED) if compiled else layer
    stage = PipelineStage(step, rank, ranks, torch.device("cpu"))
    made = ScheduleGPipe(stage, 2).step(*([x.bfloat16()] if rank == 0 else []))
    return (made if rank == ranks - 1 else exact), exact


# --- what a rank found ----------------------------------------------------------------------------


def _error(made: torch.Tensor, exact: torch.Tensor) -> float:
    return ((made.double() - exact).norm() / exact.norm()).item()


def found(name: str) -> dict[str, Any]:
    """Returns the matches and misses of a part, and the distance of the eager and the fused results
    from float64."""
    torch._dynamo.reset()
    backend._REPORTS.clear()
    if name == "stages":
        errors = [_error(*_staged(compiled)) for compiled in (False, True)]
    else:
        share, args, exact = PARTS[name]()
        given = [t.bfloat16() for t in args]
        with torch._dynamo.config.patch(capture_scalar_outputs=True):
            errors = [
                _error(call(*given), exact) for call in (share, torch.compile(share, **_COMPILED))
            ]
    misses = [miss for report in reports() for miss in report.misses]
    return {
        "fused": sorted(site.pattern for report in reports() for site in report.matches),
        "lost": sorted({f"{miss.pattern} {miss.code}" for miss in misses if miss.is_lost}),
        "advice": sorted({f"{miss.pattern} {miss.code}" for miss in misses if not miss.is_lost}),
        "errors": errors,
    }


PARTS: dict[str, Callable[[], Any]] = {
    "dispatched": lambda: _mixture(dispatched),
    "padded": lambda: _mixture(padded),
    "sequence": _sequence,
    "stages": lambda: None,
}
#: The numbers of ranks for each part. A pipeline of four has stages between the first and the last.
RANKS = {2: ("dispatched", "padded", "sequence"), 4: ("stages",)}
#: For each part, the matches on every rank, the lost misses, and the advice.
WANTED: dict[str, tuple[list[str], list[str], list[str]]] = {
    "dispatched": (["grouped_gemm", "grouped_gemm", "moe_router"], ["moe COLLECTIVE"], []),
    "padded": (["moe_router"], ["moe_dense EXPERT_COMBINE"], []),
    "sequence": (["linear_activation"], [], ["all_reduce_residual_norm COLLECTIVE"]),
    "stages": (["linear_activation", "linear_residual"], [], []),
}
