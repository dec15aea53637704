"""Compares random programs, whose parts run inside random modes of PyTorch, with eager.

A program is a chain of parts (`PARTS`), each wrapped up to three times in `WRAPPERS`: grad mode,
inference mode, autocast, checkpoints, transforms of torch.func. It is called in a random mode, with
inputs of which some need grad. Results, caches and gradients are compared with eager's.

    python -m tests.programs.modes 0:1000
"""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.agreement import ALLOWANCE
from tests.programs.tally import Outcome, Tally
from tilewright.compiler import reports
from tilewright.compiler.verify import relative_error

WIDTH, TOKENS, HEADS = 64, 3, 2
#: The number of roundings, in the narrowest dtype of autocast, by which two results may differ.
ROUNDINGS = 16
Part = Callable[..., Any]


class Layer(nn.Module):
    """A model with weights for every part, and a cache [slots, heads, width of a head] for each of
    K and V."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name in ("q", "k", "v", "gate", "up", "down"):
            weight = torch.randn(WIDTH, WIDTH, generator=generator) * WIDTH**-0.5
            setattr(self, name, nn.Parameter(weight.to(dtype)))
        for name in ("k_cache", "v_cache"):
            cache = torch.zeros(8, HEADS, WIDTH // HEADS, dtype=dtype)
            self.register_buffer(name, cache)


def heads(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.linear(x, weight).unflatten(-1, (HEADS, -1)).transpose(-2, -3)


def attention(m: Layer, x: torch.Tensor) -> torch.Tensor:
    q, k, v = heads(x, m.q), heads(x, m.k)[..., :1, :, :], heads(x, m.v)[..., :1, :, :]
    k, v = (t.repeat_interleave(HEADS, -3) for t in (k, v))
    y = torch.softmax(q @ k.mT * 0.25, -1).to(v.dtype) @ v
    return y.transpose(-2, -3).flatten(-2)


def own_attention(m: Layer, x: torch.Tensor) -> torch.Tensor:
    q, k, v = (heads(x, weight) for weight in (m.q, m.k, m.v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return y.transpose(-2, -3).flatten(-2)


def mlp(m: Layer, x: torch.Tensor) -> torch.Tensor:
    return F.linear(F.silu(F.linear(x, m.gate)) * F.linear(x, m.up), m.down)


def residual(m: Layer, x: torch.Tensor) -> torch.Tensor:
    return x + F.linear(F.rms_norm(x, (WIDTH,)), m.down)


def stored(m: Layer, x: torch.Tensor) -> torch.Tensor:
    """Writes the keys and values of the first tokens, and reads all keys and values."""
    rows = x.flatten(0, -2)[:4]
    q, k, v = (F.linear(rows, w).view(-1, HEADS, WIDTH // HEADS) for w in (m.q, m.k, m.v))
    slots = torch.arange(rows.shape[0]) + 1
    m.k_cache.index_copy_(0, slots, k.to(m.k_cache.dtype))
    m.v_cache.index_copy_(0, slots, v.to(m.v_cache.dtype))
    return x * 0.5 + (q.sum() + m.k_cache.sum() + m.v_cache.sum()).to(x.dtype) * 0.01


PARTS: tuple[Part, ...] = (attention, own_attention, mlp, residual, stored)


def within(mode: Callable[[], AbstractContextManager[Any]], part: Part) -> Part:
    def run(m: Layer, x: torch.Tensor) -> torch.Tensor:
        with mode():
            return part(m, x)

    return run


def gradient(part: Part) -> Part:
    return lambda m, x: torch.func.grad(lambda t: part(m, t).float().sin().sum())(x) * 0.1


def tangent(part: Part) -> Part:
    return lambda m, x: torch.func.jvp(lambda t: part(m, t), (x,), (torch.ones_like(x),))[1]


def jacobian(part: Part) -> Part:
    def run(m: Layer, x: torch.Tensor) -> torch.Tensor:
        return torch.func.jacfwd(lambda s: part(m, x * s))(x.new_ones(())) * 0.1

    return run


def called(part: Part) -> Part:
    def run(m: Layer, x: torch.Tensor) -> torch.Tensor:
        class Call(nn.Module):
            def forward(self, x):
                return part(m, x)

        return torch.func.functional_call(Call(), {}, (x,))

    return run


def asked_for(part: Part) -> Part:
    """Computes the gradient of a copy by autograd."""

    def run(m: Layer, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            copy = x.detach().clone().requires_grad_()
            (found,) = torch.autograd.grad(part(m, copy).float().sin().sum(), copy)
        return x + 0.1 * found

    return run


#: Functions that wrap a part. Functions of grad mode occur more often.
WRAPPERS: dict[str, Callable[[Part], Part]] = {
    "enable_grad": partial(within, torch.enable_grad),
    "enable_grad again": partial(within, torch.enable_grad),
    "no_grad": partial(within, torch.no_grad),
    "inference": partial(within, torch.inference_mode),
    "no inference": partial(within, lambda: torch.inference_mode(False)),
    "bf16": partial(within, lambda: torch.autocast("cpu", torch.bfloat16)),
    "fp16": partial(within, lambda: torch.autocast("cpu", torch.float16)),
    "no autocast": partial(within, lambda: torch.autocast("cpu", enabled=False)),
    "checkpoint": lambda part: lambda m, x: checkpoint(part, m, x, use_reentrant=False),
    "detached": lambda part: lambda m, x: part(m, x.detach()) + x,
    "vmap": lambda part: lambda m, x: torch.func.vmap(lambda t: part(m, t))(x),
    "grad": gradient,
    "jvp": tangent,
    "jacfwd": jacobian,
    "functional_call": called,
    "autograd.grad": asked_for,
}
ENTRIES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "inference": torch.inference_mode,
}
AROUND: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "": nullcontext,
    "bf16 around": lambda: torch.autocast("cpu", torch.bfloat16),
}


@dataclass
class Program:
    """A program.

    chain: the wrapped parts.
    needing: the tensors of the model that require grad.
    """

    chain: list[Part]
    entry: str
    around: str
    needing: frozenset[str]
    dtype: torch.dtype
    drawn: str

    def outcome(self, compile: Callable[[Part], Part]) -> list[Any]:
        """Returns the result, whether it requires grad, the caches, and the gradients."""
        m = Layer(self.dtype)
        for name, weight in m.named_parameters():
            weight.requires_grad_(name in self.needing)
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(2, TOKENS, WIDTH, generator=generator).to(self.dtype)
        x.requires_grad_("x" in self.needing)

        def chained(m: Layer, x: torch.Tensor) -> torch.Tensor:
            for part in self.chain:
                x = part(m, x)
            return x

        with ENTRIES[self.entry](), AROUND[self.around]():
            y = compile(chained)(m, x)
        if y.requires_grad:
            with torch.enable_grad():
                y.float().cos().sum().backward()
        gradients = [x.grad, *(weight.grad for weight in m.parameters())]
        return [y.detach(), y.requires_grad, m.k_cache.detach(), m.v_cache.detach(), *gradients]


def program(seed: int) -> Program:
    draw = random.Random(f"modes {seed}")
    chain, said = [], []
    for _ in range(draw.choice((1, 2, 2, 3))):
        part = draw.choice(PARTS)
        said.append(part.__name__)
        for name in draw.sample(sorted(WRAPPERS), draw.choice((0, 1, 1, 2, 2, 3))):
            part = WRAPPERS[name](part)
            said.append(f"in {name}")
        chain.append(part)
    entry, around = draw.choice(tuple(ENTRIES)), draw.choice(("", "", "", *AROUND))
    names = ("x", "q", "k", "v", "gate", "up", "down")
    needing = frozenset(n for n in names if draw.random() < draw.choice((0.2, 0.9)))
    dtype = draw.choice((torch.float32, torch.bfloat16))
    drawn = f"{' '.join(said)}; {entry} {around}; {sorted(needing)} {dtype}"
    return Program(chain, entry, around, needing, dtype, drawn)


def compiled(part: Part, backend: str = "tilewright") -> Part:
    options = {"inner": "eager", "everywhere": True} if backend == "tilewright" else None
    return torch.compile(part, backend=backend, dynamic=False, options=options)


def judged(made: Program) -> tuple[str, str]:
    """Returns (verdict, reason). The verdict is "same", "wrong", "raised", or "torch's" if eager,
    or torch.compile without tilewright, gives another result or none."""
    try:
        eager = made.outcome(lambda part: part)
    except Exception as error:
        return "torch's", f"{type(error).__name__}: {error}"
    torch._dynamo.reset()
    try:
        different = _difference(made.outcome(compiled), eager)
    except Exception as error:
        different = f"{type(error).__name__}: {error}"
    failed = [str(m) for report in reports() for m in report.misses if m.code == "INTERNAL"]
    if failed:
        return "raised", failed[0]
    if not different:
        return "same", ""
    torch._dynamo.reset()
    try:
        stock = _difference(made.outcome(partial(compiled, backend="eager")), eager)
    except Exception as error:
        stock = f"{type(error).__name__}: {error}"
    return ("torch's", stock) if stock else ("wrong", different)


def _difference(ours: list[Any], eager: list[Any]) -> str:
    for place, (a, b) in enumerate(zip(ours, eager, strict=True)):
        if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
            if a is not b:
                return f"{place}: {type(a).__name__} {a if a is None else ''}, eager {type(b)}"
            continue
        if a.dtype != b.dtype:
            return f"{place}: {a.dtype}, eager {b.dtype}"
        off = relative_error(a.double(), b.double())
        same_nan = torch.equal(a.isnan(), b.isnan()) and bool(a.isnan().any())
        if not off <= ROUNDINGS * ALLOWANCE[torch.bfloat16] and not same_nan:
            return f"{place}: {off:.1e} from eager"
    return ""


def run(seeds: Iterable[int]) -> Tally:
    from tilewright.compiler import backend

    tally = Tally()
    with warnings.catch_warnings(), torch._dynamo.config.patch(trace_autograd_ops=True):
        warnings.simplefilter("ignore")
        for seed in seeds:
            backend._REPORTS.clear()
            made = program(seed)
            verdict, why = judged(made)
            codes = tuple(m.code for r in reports() for m in r.misses)
            patterns = tuple(m.pattern for r in reports() for m in r.matches)
            tally.count(seed, Outcome(verdict, patterns, codes, why), made.drawn)
    return tally


def main() -> None:
    """Runs the seeds first:stop from the command line."""
    torch.set_num_threads(1)
    first, stop = map(int, sys.argv[1].split(":"))
    tally = run(range(first, stop))
    print(dict(tally.verdicts), dict(tally.patterns), dict(tally.misses))
    for seed, why in tally.found.items():
        print(f"  {seed}: {why}")
    sys.exit(1 if tally.found else 0)


if __name__ == "__main__":
    main()
