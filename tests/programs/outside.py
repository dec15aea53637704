"""Compares fused programs with eager for indices and numbers outside their usual range.

    python -m tests.programs.outside --seeds 0:2000

Some programs look up experts, adapters or slots by given indices, of 32 or 64 bits, some of which
are negative or too large. Others have ends of groups in any order; routers' scores with NaN,
infinities and equal numbers; codes of every byte; or scales that are zero, NaN, infinite or
negative. The fused graph must give eager's result. If eager raises, the fused graph must raise too,
and change no input.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.models import quantized
from tests.models.moe_dequant import SPELLINGS, E, K, N, stored
from tests.models.moe_idioms import ENDS
from tests.models.quantized import QuantizedLinear
from tests.programs.run import OPTIONS, capture
from tests.programs.tally import Outcome, Tally
from tilewright.compiler.fuse import fuse
from tilewright.compiler.verify import clone_inputs, relative_error
from tilewright.ops.formats import nvfp4

EXPERTS, TOKENS, HIDDEN, INNER, SLOTS, PLACES = 4, 6, 32, 32, 2, 16
#: The largest relative difference from eager's result. A wrong expert makes a difference of about
#: 1.
NEAR = 0.03


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).bfloat16()


class Mixture(nn.Module):
    """Has experts that are chosen by `lookup`, a key of LOOKUPS, or of ENDS for sorted rows."""

    def __init__(self, lookup: str, bias: bool, masked: bool) -> None:
        super().__init__()
        self.lookup, self.masked = lookup, masked
        self.up = nn.Parameter(normal(EXPERTS, INNER, HIDDEN) * 0.2)
        self.down = nn.Parameter(normal(EXPERTS, HIDDEN, INNER) * 0.2)
        self.bias = nn.Parameter(normal(EXPERTS, HIDDEN)) if bias else None

    def forward(self, x, ids, weights):
        if self.lookup in LOOKUPS:
            take = LOOKUPS[self.lookup]
            rows = x.repeat_interleave(SLOTS, 0)
            flat = ids.reshape(-1)
            h = F.silu(torch.bmm(take(self.up, flat), rows.unsqueeze(-1)).squeeze(-1))
            y = torch.bmm(take(self.down, flat), h.unsqueeze(-1)).squeeze(-1)
            if self.bias is not None:
                y = y + take(self.bias, flat)
            return (y.view(*ids.shape, -1) * weights[..., None]).sum(1)
        flat = ids.reshape(-1)
        ordered, order = flat.sort(stable=True)
        ends = COUNTS[self.lookup](flat, ordered, EXPERTS)
        h = F.silu(torch._grouped_mm(x[order // SLOTS], self.up.mT, offs=ends))
        y = torch._grouped_mm(h, self.down.mT, offs=ends)
        if self.bias is not None:
            y = y + self.bias[ordered]
        if self.masked:
            y = y.masked_fill((ordered >= EXPERTS)[:, None], 0)
        y = y * weights.reshape(-1)[order][:, None]
        return y[order.argsort()].view(*ids.shape, -1).sum(1)

    def defined(self, x, ids, weights):
        """Returns the tokens without rows after the last end of a group, because such rows are
        undefined."""
        if self.lookup in LOOKUPS:
            return torch.ones(len(x), dtype=torch.bool)
        ordered, order = ids.reshape(-1).sort(stable=True)
        ends = COUNTS[self.lookup](ids.reshape(-1), ordered, EXPERTS)
        known = torch.arange(len(order)) < ends[-1]
        if self.masked:
            known |= ordered >= EXPERTS
        return known[order.argsort()].view(ids.shape).all(1)


def counted_in_place(ids, ordered, n):
    counts = torch.zeros(n, dtype=torch.int32)
    counts.index_put_((ids,), torch.ones_like(ids, dtype=torch.int32), accumulate=True)
    return counts.cumsum(0, dtype=torch.int32)


COUNTS: dict[str, Callable[..., Any]] = {
    **{name: ends for name, ends in ENDS.items() if "bincount" not in name},
    "counted_in_place": counted_in_place,
}
LOOKUPS: dict[str, Callable[..., Any]] = {
    "indexed": lambda table, ids: table[ids],
    "selected": lambda table, ids: table.index_select(0, ids),
    "gathered": lambda table, ids: table.gather(
        0, _by_number(table, ids).expand(-1, *table.shape[1:])
    ),
    "taken_along": lambda table, ids: table.take_along_dim(_by_number(table, ids).long(), 0),
    "embedded": lambda table, ids: F.embedding(ids, table.reshape(len(table), -1)).view(
        -1, *table.shape[1:]
    ),
}


def _by_number(table, ids):
    return ids.view(-1, *(1 for _ in table.shape[1:]))


class Adapted(nn.Module):
    """Has a projection with an adapter for each row."""

    def __init__(self, take: str, scaled: bool) -> None:
        super().__init__()
        self.take, self.scaled = LOOKUPS[take], scaled
        self.base = nn.Parameter(normal(HIDDEN, HIDDEN) * 0.2)
        self.a = nn.Parameter(normal(EXPERTS, 8, HIDDEN) * 0.2)
        self.b = nn.Parameter(normal(EXPERTS, HIDDEN, 8))
        self.scale = nn.Parameter(normal(EXPERTS))

    def forward(self, x, ids):
        s = torch.bmm(self.take(self.a, ids), x.unsqueeze(-1))
        delta = torch.bmm(self.take(self.b, ids), s).squeeze(-1)
        if self.scaled:
            delta = delta * self.take(self.scale, ids)[:, None]
        return F.linear(x, self.base) + delta


class Written(nn.Module):
    """A statement that writes keys and values into a cache."""

    def __init__(self, write: str) -> None:
        super().__init__()
        self.write = WRITES[write]
        self.k = nn.Parameter(normal(HIDDEN, HIDDEN) * 0.2)
        self.v = nn.Parameter(normal(HIDDEN, HIDDEN) * 0.2)
        self.q = nn.Parameter(normal(HIDDEN, HIDDEN) * 0.2)

    def forward(self, x, slots, k_cache, v_cache):
        q, k, v = (F.linear(x, w).view(-1, 2, HIDDEN // 2) for w in (self.q, self.k, self.v))
        self.write(k_cache, slots, k)
        self.write(v_cache, slots, v)
        return q * 2


def scatter(cache, slots, rows):
    cache.scatter_(0, slots[:, None, None].expand_as(rows), rows)


WRITES: dict[str, Callable[..., Any]] = {
    "setitem": lambda cache, slots, rows: cache.__setitem__(slots, rows),
    "index_put_": lambda cache, slots, rows: cache.index_put_((slots,), rows),
    "index_copy_": lambda cache, slots, rows: cache.index_copy_(0, slots, rows),
    "scatter_": scatter,
}


def numbers(draw: random.Random, count: int, shape: tuple[int, ...], distinct: bool) -> Any:
    """Draws indices, some of which may be outside of 0 to count - 1."""
    total = int(torch.Size(shape).numel())
    given = draw.sample(range(count), total) if distinct else draw.choices(range(count), k=total)
    outside = draw.choice(
        ((), (), (-1,), (-1, -2), (count,), (-1, count), (-count - 1,), (-count,))
    )
    for number in outside:
        given[draw.randrange(total)] = number
    if distinct and len({n % count for n in given if -count <= n < count}) < total - sum(
        not -count <= n < count for n in given
    ):
        return numbers(draw, count, shape, distinct)
    dtype = draw.choice((torch.int64, torch.int64, torch.int64, torch.int32))
    return torch.tensor(given, dtype=dtype).view(shape)


def mixture(draw: random.Random) -> tuple[nn.Module, tuple[Any, ...], str]:
    lookup = draw.choice((*LOOKUPS, *COUNTS))
    bias, masked = draw.random() < 0.25, draw.random() < 0.5
    ids = numbers(draw, EXPERTS, (TOKENS, SLOTS), False)
    weights = normal(TOKENS, SLOTS)
    if lookup in COUNTS and not masked:  # rows of no expert are undefined in eager
        ids = torch.where(ids >= EXPERTS, 0, ids)
    module = Mixture(lookup, bias, masked)
    return module, (normal(TOKENS, HIDDEN), ids, weights), f"{lookup} {bias=} {masked=} {ids}"


def adapted(draw: random.Random) -> tuple[nn.Module, tuple[Any, ...], str]:
    take, scaled = draw.choice(tuple(LOOKUPS)), draw.random() < 0.4
    ids = numbers(draw, EXPERTS, (TOKENS,), False)
    return Adapted(take, scaled), (normal(TOKENS, HIDDEN), ids), f"{take} {scaled=} {ids}"


def written(draw: random.Random) -> tuple[nn.Module, tuple[Any, ...], str]:
    write = draw.choice(tuple(WRITES))
    slots = numbers(draw, PLACES, (TOKENS,), True)
    caches = [normal(PLACES, 2, HIDDEN // 2) for _ in range(2)]
    return Written(write), (normal(TOKENS, HIDDEN), slots, *caches), f"{write} {slots}"


# --- other numbers --------------------------------------------------------------------------------


class Ended(nn.Module):
    """A product of rows with one weight for each group. The caller gives the ends of the groups.

    `decode` is one of SPELLINGS of tests/models/moe_dequant.py, for codes and scales of any bytes;
    None for dense weights.
    """

    def __init__(self, decode: str | None, rows: str) -> None:
        super().__init__()
        self.rows = ROWS[rows]
        self.format, self.decode = (None, None) if decode is None else SPELLINGS[decode]
        if self.format is None:
            self.weight = nn.Parameter(normal(E, N, K) * 0.2)
            return
        codes, scales, factor = stored(self.format, int(torch.randint(100, ())))
        for name, tensor in (("codes", codes), ("scales", scales), ("factor", factor)):
            self.register_buffer(name, tensor)

    def forward(self, x, ends):
        if self.decode is None:
            weight = self.weight
        else:
            weight = self.decode(self.codes, self.scales, self.factor)
        return torch._grouped_mm(self.rows(x), weight.mT, offs=ends)

    def defined(self, x, ends):
        """Returns the rows that belong to a group. Other rows are memory that was never written."""
        known, start = torch.zeros(len(x), dtype=torch.bool), 0
        for end in ends.tolist():
            known[start:end] = True
            start = end
        return known


ROWS: dict[str, Callable[..., Any]] = {
    "plain": lambda x: x,
    "coded": lambda x: nvfp4.dequantize(*nvfp4.quantize(x), dtype=torch.bfloat16),
}


class Router(nn.Module):
    """Returns the weights of a token's experts, and the experts."""

    def __init__(self, choose: str, slots: int) -> None:
        super().__init__()
        self.choose, self.slots = ROUTERS[choose], slots
        self.weight = nn.Parameter(torch.randn(EXPERTS * 2, HIDDEN))
        self.bias = nn.Parameter(torch.randn(EXPERTS * 2))

    def forward(self, x):
        return self.choose(F.linear(x, self.weight, self.bias), self.slots)

    def defined(self, x):
        """Returns all weights, and the experts of tokens without equal scores. Among experts with
        equal scores, eager may choose any."""
        top = self.choose(F.linear(x, self.weight, self.bias), EXPERTS * 2, True)
        apart = top.diff(dim=1).abs() > 1e-5
        return torch.ones(len(x), dtype=torch.bool), apart[:, : self.slots].all(1)


def softmax_router(logits, slots, scored=False):
    scores = logits.softmax(-1, dtype=torch.float32)
    top, ids = scores.topk(slots)
    return top if scored else (top / top.sum(-1, keepdim=True), ids)


def softmax_of_chosen(logits, slots, scored=False):
    top, ids = logits.topk(slots)
    return top if scored else (top.softmax(-1), ids)


def sigmoid_router(logits, slots, scored=False):
    top, ids = logits.sigmoid().topk(slots)
    return top if scored else (top * 2.5, ids)


def bare_router(logits, slots, scored=False):
    top, ids = logits.topk(slots)
    return top if scored else (top, ids)


ROUTERS: dict[str, Callable[..., Any]] = {
    "softmax": softmax_router, "softmax_of_chosen": softmax_of_chosen,
    "sigmoid": sigmoid_router, "logits": bare_router,
}  # fmt: skip


class Paged(nn.Module):
    """Computes attention over the pages of a table, under a mask."""

    def __init__(self, take: str) -> None:
        super().__init__()
        self.take = LOOKUPS[take]

    def forward(self, q, k_cache, v_cache, table, mask):
        k, v = (
            self.take(cache, table.flatten()).view(len(q), -1, *cache.shape[2:]).transpose(1, 2)
            for cache in (k_cache, v_cache)
        )
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


class CodedProjections(nn.Module):
    """Computes keys and values by weights of codes, and writes them into a cache."""

    def __init__(self, form: Callable[..., Any]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(QuantizedLinear(form, 64, 64, seed) for seed in range(3))

    def forward(self, x, slots, k_cache, v_cache):
        q, k, v = (part(x).view(-1, 2, 32) for part in self.parts)
        k_cache[slots] = k
        v_cache[slots] = v
        return q * 2


CODED = (quantized.int8, quantized.int8_after, quantized.nibbles_low_first,
         quantized.fp8_blocks_repeated)  # fmt: skip
ODD = (0.0, -0.0, -0.25, torch.nan, torch.inf, -torch.inf)


def put(draw: random.Random, tensor: torch.Tensor, some: Iterable[float]) -> str:
    """Puts unusual numbers into a few places, and describes them."""
    flat, given = tensor.view(-1), [draw.choice(tuple(some)) for _ in range(draw.choice((0, 1, 3)))]
    for number in given:
        flat[draw.randrange(len(flat))] = number
    return str(given)


def ended(draw: random.Random) -> tuple[nn.Module, tuple[Any, ...], str]:
    decode = draw.choice((None, "nvfp4", "nvfp4", "mxfp4", "fp8", "int4"))
    spelling = decode and draw.choice([n for n, (of, _) in SPELLINGS.items() if of == decode])
    module = Ended(spelling, rows := draw.choice(tuple(ROWS)))
    ends = draw.choice(
        ([4, 6, 12], [4, 4, 12], [4, 9, 12], [4, 6, 30], [14, 20, 30], [0, 0, 5], [6, 3, 12],
         [-2, 5, 12], [3, -1, 12], [0, 0, 0])
    )  # fmt: skip
    drawn = f"{spelling} {rows} {ends}"
    if decode == "nvfp4":
        drawn += put(draw, module.scales.view(torch.uint8), (0, 0x80, 0x7F, 0xFF, 0xB8, 0x01))
        drawn += put(draw, module.codes, (0x08, 0x80, 0x88, 0xFF))
    elif decode == "mxfp4":
        drawn += put(draw, module.scales, (0, 1, 255))
    elif decode in ("fp8", "int4"):
        drawn += put(draw, module.scales, ODD)
    if decode == "fp8":
        drawn += put(draw, module.codes.view(torch.uint8), (0x80, 0x7F, 0xFF, 0xFE))
    return module, (normal(12, K), torch.tensor(ends, dtype=torch.int32)), drawn


def router(draw: random.Random) -> tuple[nn.Module, tuple[Any, ...], str]:
    module = Router(choose := draw.choice(tuple(ROUTERS)), slots := draw.choice((1, 2, 3)))
    x = torch.randn(TOKENS, HIDDEN)
    x[0], x[1, 3] = draw.choice((0.0, 0.0, 1.0, torch.nan)), draw.choice((*ODD, -1e30))
    most = draw.choice((0, 1, EXPERTS, EXPERTS * 2 - slots, EXPERTS * 2 - 1, EXPERTS * 2))
    number = draw.choice((-torch.inf, -torch.inf, torch.inf, torch.nan, 0.5, -1e30))
    module.bias[:most] = number
    return module, (x,), f"{choose} {slots} {x[0, 0]} {x[1, 3]} {most} of {number}"


def paged(draw: random.Random) -> tuple[nn.Module, tuple[Any, ...], str]:
    table = numbers(draw, PLACES, (2, 3), False)
    caches = [normal(PLACES, 4, 2, 32) for _ in range(2)]
    mask = torch.rand(2, 1, 5, 12) < 0.7
    if draw.random() < 0.3:
        mask[0, :, 2] = False
    args = (normal(2, 4, 5, 32), *caches, table, mask)
    return Paged(take := draw.choice(tuple(LOOKUPS))), args, f"{take} {table}"


def coded(draw: random.Random) -> tuple[nn.Module, tuple[Any, ...], str]:
    module, drawn = CodedProjections(form := draw.choice(CODED)), ""
    for part in module.parts:
        drawn += put(draw, part.scale, ODD)
    caches = [normal(PLACES, 2, 32) for _ in range(2)]
    slots = torch.tensor(draw.sample(range(PLACES), TOKENS))
    return module, (normal(TOKENS, 64), slots, *caches), f"{form.__name__} {drawn}"


KINDS = {
    "mixture": mixture, "adapted": adapted, "written": written, "ended": ended, "router": router,
    "paged": paged, "coded": coded,
}  # fmt: skip


def run(seeds: Iterable[int], kinds: Iterable[str] = tuple(KINDS)) -> Tally:
    """Runs the program of each seed and kind."""
    tally = Tally()
    patch = torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
    with torch.no_grad(), patch:
        for seed in seeds:
            for kind in kinds:
                draw = random.Random(f"{kind} {seed}")
                torch.manual_seed(seed)
                module, args, drawn = KINDS[kind](draw)
                verdict, _, why = judged(module, args, drawn).partition(": ")
                tally.count(f"{kind} {seed}", Outcome(verdict, why=why), drawn)
                tally.fused += verdict not in ("nothing fused", "not captured")
    return tally


def ran(run: Callable[..., Any], args: Any) -> tuple[Any, list[Any]]:
    """Returns the result or the error, and the inputs after the call."""
    inputs = clone_inputs(args)
    try:
        return run(*inputs), inputs
    except (IndexError, RuntimeError, ValueError) as error:
        return error, inputs


def _tuple(result: Any) -> tuple[Any, ...]:
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def _one_nan(tensor: torch.Tensor) -> torch.Tensor:
    return torch.where(tensor.isfinite(), tensor, torch.nan)


def judged(module: nn.Module, args: Any, drawn: str) -> str:
    expected, after = ran(module, args)
    try:
        model = capture(module, args, drawn)
    except Exception:  # fake tensors refuse some 32-bit indices, as eager does
        return "not captured"
    report = fuse(model.module, OPTIONS)
    if any(miss.code == "INTERNAL" for miss in report.misses):
        return "wrong: INTERNAL"
    if not report.matches:
        return "nothing fused"
    ours, mine = ran(report.after.forward, model.inputs)
    if isinstance(expected, Exception):
        if not isinstance(ours, Exception):
            return f"wrong: eager raises {expected}"
        same = all(torch.equal(a, b) for a, b in zip(mine, model.inputs, strict=True))
        return "both raise" if same else "wrong: written before the error"
    if isinstance(ours, Exception):
        return f"wrong: raises {ours}"
    # Captured inputs have the order of the graph. The caches are those that eager changed.
    results = list(zip(_tuple(ours), _tuple(expected), strict=False))
    if isinstance(module, (Mixture, Ended, Router)):
        known = _tuple(module.defined(*args))
        results = [(a[rows], b[rows]) for (a, b), rows in zip(results, known, strict=True)]
    if isinstance(module, (Ended, CodedProjections)):
        # A sum of infinities is infinite or NaN, depending on the order of the summands.
        results = [(_one_nan(a), _one_nan(b)) for a, b in results]
    changed = [(b, a) for b, a in zip(after, args, strict=True) if not torch.equal(b, a)]
    for new, old in changed:
        results += [
            (_one_nan(m), _one_nan(new))
            for m, g in zip(mine, model.inputs, strict=True)
            if g.shape == old.shape and torch.equal(g, old)
        ]
    for a, b in results:
        off = relative_error(a.double(), b.double())
        if not off <= NEAR:
            return f"wrong: {off:.1e} from eager"
    return "same"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", nargs="+", choices=sorted(KINDS), default=list(KINDS))
    parser.add_argument("--seeds", default="0:100", help="first:stop")
    given = parser.parse_args()
    logging.disable(logging.ERROR)
    tally = run(range(*map(int, given.seeds.split(":"))), given.kind)
    print(f"{tally.programs} programs  {tally.fused} fused  {dict(tally.verdicts)}")
    for which, why in tally.found.items():
        print(f"  {which}: {why}")
    sys.exit(1 if tally.found else 0)


if __name__ == "__main__":
    main()
