"""Compares random models with the same models as torch.export writes them, with ATen's overloads.

    python -m tests.programs.exported --seeds 0:100

A model is drawn from `families.FAMILIES` and not changed. Its matches and misses must be the same
after `torch.export.export(model, args).module()`, and the exported graph must give eager's results.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from tests.programs.families import FAMILIES
from tests.programs.run import Captured, Program, capture, compared
from tests.programs.tally import JUDGED, Outcome, Tally
from tilewright.compiler.verify import clone_inputs

#: Export turns a table that the model makes in its forward pass into a buffer. The graph does not
#: show the numbers of a buffer. So a weight that is decoded with such a table is treated like any
#: computed weight. These are the codes of misses that then differ.
TABLES = ("WEIGHT_FORMAT", "LATENT_WEIGHT", "LINEAR_FORM")
#: Lists of positions become buffers, too. Evenly spaced positions in a list are read as a slice,
#: but evenly spaced positions in a buffer are not. A projection is not recognised through such a
#: buffer, and rows are gathered where rows of a slice would be changed in place.
LISTS = ("K_PATH", "V_PATH")
#: The census may find a point to be of no interest in one spelling but not in the other. This is
#: counted as "unrecognised", and is not a difference of matches.
ADVICE = "UNRECOGNISED"


def run(family: str, seeds: Iterable[int]) -> Tally:
    """Compares the models of some seeds. Models that cannot be exported are counted and left
    out."""
    tally = Tally()
    with torch.no_grad():
        for seed in seeds:
            _count(tally, family, seed)
    return tally


def run_all(seeds: Iterable[int]) -> Tally:
    """Calls `run` for each family in turn, seed by seed."""
    tally, names = Tally(), list(FAMILIES)
    with torch.no_grad():
        for seed in seeds:
            _count(tally, names[seed % len(names)], seed)
    return tally


def _count(tally: Tally, family: str, seed: int) -> None:
    draw = random.Random(f"{family} exported {seed}")
    torch.manual_seed(seed)
    try:
        module, args, drawn = FAMILIES[family](draw)
        here = _outcome(capture(module, args, drawn))
    except Exception:  # eager refuses the drawn program
        return
    tally.models += 1
    try:
        aten = capture(spelled(module, args), tree_leaves(args), drawn)
    except Exception:
        tally.count(f"{family} {seed}", Outcome("not exported"), drawn)
        return
    there = _outcome(aten)
    differs = difference(here, there, indexes_by_lists(aten), _has_no_elements(args))
    outcome = replace(there, verdict="wrong", why=differs) if differs else there
    tally.count(f"{family} {seed}", outcome, drawn)


def spelled(module: torch.nn.Module, args: Sequence[Any]) -> Callable[..., Any]:
    """Returns a function of the leaves of the arguments, which calls the exported module without
    its checks of inputs."""
    found = torch.export.export(module, tuple(clone_inputs(args))).module(check_guards=False)
    found.graph.eliminate_dead_code()  # Dynamo cannot trace a question for a dtype
    found.graph.set_codegen(torch.fx.graph.CodeGen())
    found.recompile()
    graph = torch.fx.GraphModule(found, found.graph)
    return lambda *leaves: graph(*leaves)  # Dynamo does not take a graph module as a whole


def _outcome(model: Captured) -> Outcome:
    inputs = clone_inputs(model.inputs)
    result = model.module.forward(*inputs)
    return compared(Program(model.module, model.inputs, model.drawn, ()), result, inputs)


def indexes_by_lists(exported: Captured) -> bool:
    """Whether an exported graph indexes by a buffer of numbers that the model itself has as a
    list."""
    copies = exported.module.graph.find_nodes(
        op="call_function", target=torch.ops.aten.lift_fresh_copy.default
    )
    reads = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default)
    return any(
        user.target in reads and copy in user.args[1] for copy in copies for user in copy.users
    )


def _has_no_elements(args: Sequence[Any]) -> bool:
    return any(isinstance(t, torch.Tensor) and t.numel() == 0 for t in tree_leaves(args))


def difference(plain: Outcome, exported: Outcome, lists: bool = False, empty: bool = False) -> str:
    """Describes the differences between a model and the exported model. Returns "" if there are
    none.

    `lists` says whether positions that Dynamo knows are tensors in the exported model, which may
    then have more matches. `empty` says whether an input has no elements; then only numbers are
    compared.
    """
    if exported.verdict in JUDGED:
        return f"{exported.verdict}: {exported.why}"
    if empty:
        return ""
    if set(Counter(exported.codes) - Counter(plain.codes)) & {*TABLES, *(LISTS if lists else ())}:
        return ""
    if lists and Counter(exported.patterns) > Counter(plain.patterns):
        return ""
    for what, *both in (
        ("matches", plain.patterns, exported.patterns),
        ("misses", plain.codes, exported.codes),
    ):
        here, there = (sorted(name for name in names if name != ADVICE) for names in both)
        if here != there:
            return f"{what} {here}, exported {there}"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", nargs="+", choices=sorted(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--seeds", default="0:20", help="first:stop")
    given = parser.parse_args()
    failed = 0
    logging.disable(logging.ERROR)  # fake tensors warn about models that are drawn again
    for family in given.family:
        tally = run(family, range(*map(int, given.seeds.split(":"))))
        print(f"{family:12} {tally.models} models  {tally.fused} fused  {dict(tally.verdicts)}")
        for which, why in tally.found.items():
            print(f"  {which}: {why}")
        failed += len(tally.found)
    with suppress(BrokenPipeError):
        sys.stdout.flush()
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
