"""Rewrites arithmetic of a captured graph as in-place operations, where this does not change
eager's result: the graph allocated the memory that is written, and nothing reads it after the write
under another name.

    python -m tests.programs.in_place 0:40 [family ...]     # matches of models, spelled both ways
"""

from __future__ import annotations

import operator
import random
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from tests.programs.breakages import calls, held, told_again
from tests.programs.families import FAMILIES
from tests.programs.run import OPTIONS, Captured, Program, captured, compared, copied
from tests.programs.tally import JUDGED, Outcome, Tally
from tilewright.compiler import _compat
from tilewright.compiler.fuse import fuse
from tilewright.compiler.verify import clone_inputs

#: The in-place form of each operation: an operator or a method.
_IN_PLACE: dict[Any, tuple[Any, ...]] = {
    operator.add: (operator.iadd, "add_"),
    operator.sub: (operator.isub, "sub_"),
    operator.mul: (operator.imul, "mul_"),
    operator.truediv: (operator.itruediv, "div_"),
    torch.add: ("add_",),
    torch.mul: ("mul_",),
    torch.sigmoid: ("sigmoid_",),
    torch.tanh: ("tanh_",),
    "add": ("add_",),
    "mul": ("mul_",),
    "div": ("div_",),
    "sub": ("sub_",),
    "neg": ("neg_",),
    "clamp": ("clamp_",),
    "sigmoid": ("sigmoid_",),
    "tanh": ("tanh_",),
    "masked_fill": ("masked_fill_",),
}
_ACTIVATIONS = (F.relu, F.silu, torch.relu)


def spell_in_place(draw: random.Random, graph: fx.Graph, share: float = 1.0) -> list[str]:
    """Rewrites a share of the arithmetic in place, and returns the names of the rewritten nodes."""
    found = []
    for node in calls(graph):
        if draw.random() < share and _may_write(node, graph) and _spell(draw, node):
            told_again(graph)
            found.append(node.name)
    return found


def _spell(draw: random.Random, node: fx.Node) -> bool:
    if node.target in (F.relu, F.silu):
        node.kwargs = {**node.kwargs, "inplace": True}
        return True
    spellings = _IN_PLACE.get(node.target)
    if spellings is None:
        return False
    chosen = draw.choice(spellings)
    node.op = "call_method" if isinstance(chosen, str) else "call_function"
    node.target = chosen
    return True


def _may_write(node: fx.Node, graph: fx.Graph) -> bool:
    base = node.args[0] if node.args else None
    if not isinstance(base, fx.Node) or node.target not in {*_IN_PLACE, *_ACTIVATIONS}:
        return False
    one, made = held(base), held(node)
    if not isinstance(one, torch.Tensor) or not isinstance(made, torch.Tensor):
        return False
    if (one.shape, one.dtype) != (made.shape, made.dtype) or base in node.args[1:]:
        return False
    if any(stride == 0 and size > 1 for size, stride in zip(one.shape, one.stride(), strict=True)):
        return False
    if one.stride() != made.stride() and any(user.op == "output" for user in node.users):
        return False  # the reader could see the difference
    storage = set(_compat.storages_of(base))
    names = [n for n in graph.nodes if storage & set(_compat.storages_of(n))]
    behind = (user for name in names for user in name.users if node < user)
    fresh = all(name.op in ("call_function", "call_method") for name in names)
    return fresh and not any(behind)


@dataclass(frozen=True)
class Both:
    """A model in its original form and with in-place arithmetic: the outcome, the patterns that
    match in each form, the rewritten nodes, and the codes of misses that only the second form
    has."""

    outcome: Outcome
    found: tuple[str, ...]
    plain: tuple[str, ...]
    spelled: tuple[str, ...]
    told: tuple[str, ...]

    @property
    def same(self) -> bool:
        return self.outcome.verdict not in JUDGED and self.found == self.plain


def beside(family: str, number: int, model: Captured, share: float = 1.0) -> Both | None:
    """Runs both forms of a model. Returns None if eager refuses its values."""
    draw = random.Random(f"{family} in place {number}")
    try:
        model.module.forward(*clone_inputs(model.inputs))
    except Exception:
        return None
    graph = copied(model.module.graph)
    inputs = clone_inputs(model.inputs)
    try:
        spelled = spell_in_place(draw, graph, share)
        module = fx.GraphModule(model.module, graph)
        result = module.forward(*inputs)
    except Exception:  # a tensor now has another layout, which an operator refuses
        return None
    made = Program(module, model.inputs, model.drawn, tuple(spelled))
    outcome = compared(made, result, inputs)
    report = fuse(model.module, OPTIONS)
    plain = sorted(match.pattern for match in report.matches)
    told = set(outcome.codes) - {miss.code for miss in report.misses}
    return Both(
        outcome, tuple(sorted(outcome.patterns)), tuple(plain), tuple(spelled), tuple(sorted(told))
    )


def run(seeds: Iterable[int]) -> Tally:
    """Compares both forms of a model for each seed, one family after the other."""
    tally, names = Tally(), list(FAMILIES)
    with torch.no_grad():
        for seed in seeds:
            family, number = names[seed % len(names)], seed // len(names)
            model = captured(family, number)
            both = beside(family, number, model)
            if both is None:
                continue
            outcome = both.outcome
            if not both.same and outcome.verdict not in JUDGED:
                why = f"matches {both.plain}, in place {both.found}"
                verdict = "lost, told" if both.told else "wrong"
                outcome = replace(outcome, verdict=verdict, why=why)
            tally.models += 1
            tally.count(f"{family} {number}", outcome, model.drawn, bool(both.spelled))
    return tally


def main() -> None:
    first, _, last = sys.argv[1].partition(":")
    for family in sys.argv[2:] or FAMILIES:
        count = fused = 0
        for number in range(int(first), int(last)):
            with torch.no_grad():
                both = beside(family, number, captured(family, number))
            if both is None:
                continue
            count += len(both.spelled)
            fused += len(both.plain)
            if not both.same:
                print(family, number, both, flush=True)
        print(f"{family}: {count} spelled in place, {fused} matches", flush=True)


if __name__ == "__main__":
    main()
