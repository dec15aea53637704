"""Benchmark of one float32 adapter, as PEFT keeps it. It compares shrink and expand with pairs of
products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from lora_shapes import COLD_BYTES, MOST_CALLS, LoraShape, chosen, error, timed

from tilewright.codegen.lora.plan import takes_row_kernel
from tilewright.codegen.spec import KernelSpec
from tilewright.ops.contract import LoweringReport
from tilewright.ops.lora import expand as lora_expand
from tilewright.ops.lora import shrink as lora_shrink

SCALE = 2.0


@dataclass(frozen=True)
class Delta:
    """One float32 adapter, with A of q, k and v [1, R, K] and B [1, W, R]."""

    x: torch.Tensor
    a: tuple[torch.Tensor, ...]
    b: tuple[torch.Tensor, ...]

    def shrink(self) -> lora_shrink.ShrinkArguments:
        q, k, v = self.a
        return lora_shrink.ShrinkArguments(self.x, q_weight=q, k_weight=k, v_weight=v)

    def expand(self, s: torch.Tensor) -> lora_expand.ExpandArguments:
        bases = (None, None, None)
        return lora_expand.ExpandArguments(s, *bases, *self.b, scale=[SCALE], packed=True)


def make_delta(shape: LoraShape, device: str = "cuda") -> Delta:
    def made(*sizes: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*sizes, device=device).mul_(scale)

    wide, narrow = shape.hidden**-0.5, shape.rank**-0.5
    return Delta(
        made(shape.tokens, shape.hidden),
        tuple(made(1, shape.rank, shape.hidden, scale=wide) for _ in range(3)),
        tuple(made(1, width, shape.rank, scale=narrow) for width in shape.widths),
    )


def pairs(x: torch.Tensor, one: Delta) -> torch.Tensor:
    """Computes the deltas as pairs of products, in x's dtype."""
    product = torch.nn.functional.linear
    made = [
        SCALE * product(product(x, a[0].to(x.dtype)), b[0].to(x.dtype))
        for a, b in zip(one.a, one.b, strict=True)
    ]
    return torch.cat(made, 1)


def reports_of(one: Delta) -> tuple[LoweringReport, LoweringReport]:
    shrink = one.shrink()
    expand = one.expand(lora_shrink.fake(shrink))
    return lora_shrink.OP.plan_for(shrink, "sm90"), lora_expand.OP.plan_for(expand, "sm90")


def delta_specs(shapes: list[LoraShape]) -> list[KernelSpec]:
    """Returns the kernels that will be timed. No GPU is needed."""
    made = [make_delta(shape, "meta") for shape in shapes]
    return list(dict.fromkeys(s for one in made for r in reports_of(one) for s in r.specs))


def measure_delta(shape: LoraShape) -> dict[str, Any]:
    touched = 4 * shape.hidden * (shape.tokens + 3 * shape.rank)
    sets = [make_delta(shape) for _ in range(min(MOST_CALLS, 2 + int(COLD_BYTES / touched)))]

    def ours(i: int) -> torch.Tensor:
        s = lora_shrink.OP.call(sets[i].shrink())
        made: torch.Tensor = lora_expand.OP.call(sets[i].expand(s))[0]
        return made

    want = pairs(sets[0].x.double(), sets[0])
    errors = {
        "tilewright_error": error(ours(0), want),
        "linears_error": error(pairs(sets[0].x, sets[0]), want),
    }
    times = timed({"tilewright": ours, "linears": lambda i: pairs(sets[i].x, sets[i])}, len(sets))
    return {
        "op": "delta",
        "hidden": shape.hidden,
        "rank": shape.rank,
        "adapters": 1,
        "tokens": shape.tokens,
        "dtype": "float32",
        **{name: round(us, 2) for name, us in times.items()},
        "speedup_over_best": round(times["linears"] / times["tilewright"], 2),
        "taken": takes_row_kernel(shape.tokens, 3 * shape.rank, shape.hidden),
        **errors,
        **chosen(*reports_of(sets[0])),
    }
