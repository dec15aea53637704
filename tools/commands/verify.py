"""The command `tilewright verify MODEL`, which compares each rewrite and the original graph with
float64."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from tilewright.tools.commands.common import (
    FAILED,
    CommandError,
    DebugOption,
    DynamicOption,
    JsonOption,
    ModelArgument,
    PatternsOption,
    errors_for_people,
    print_json,
)
from tilewright.tools.console import make_console
from tilewright.tools.zoo import PREFILL, is_zoo_name

if TYPE_CHECKING:
    from tilewright.compiler.verify.sites import SiteError

#: The number of new tokens of a zoo model's prefill, and the length of a zoo model's cache, when
#: the model is verified. The sizes of its layers stay as published.
TOKENS, CACHE_LENGTH = 16, 64


def verify(
    model: ModelArgument,
    patterns: PatternsOption = None,
    dynamic: DynamicOption = None,
    layers: Annotated[
        int, typer.Option(min=1, help="For a zoo model: the number of layers, with random weights.")
    ] = 2,
    experts: Annotated[
        int, typer.Option(min=1, help="For a zoo model: the maximum number of experts.")
    ] = 16,
    seed: Annotated[int, typer.Option(help="The seed of the random weights and tokens.")] = 0,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Run each kind of rewrite next to the original, and compare both with float64.

    The model needs real tensors, on the CPU or a GPU. A zoo model is built with random weights,
    true sizes and few layers. The exit code is 1 if a rewrite is less accurate than the graph that
    it replaces.
    """
    import torch

    from tilewright.compiler.verify.sites import verify_sites
    from tilewright.tools.commands.models import load, pattern_names, traced

    with errors_for_people(debug):
        torch.manual_seed(seed)
        with contextlib.redirect_stdout(sys.stderr):
            loaded = load(model, **(_cut(model, layers, experts) if is_zoo_name(model) else {}))
            chosen = pattern_names(patterns)
            _check_real(model, [*loaded.args, *loaded.kwargs.values()])
            with traced(model, debug):
                found = verify_sites(
                    loaded.model, loaded.args, loaded.kwargs, patterns=chosen, dynamic=dynamic
                )
        if as_json:
            print_json({"model": model, "sites": [_as_dict(error) for error in found]})
        else:
            _print(found)
    if not all(error.good for error in found):
        raise typer.Exit(FAILED)


def _cut(name: str, layers: int, experts: int) -> dict[str, Any]:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    return {
        "layers": layers,
        "experts": experts,
        "tokens": TOKENS if name.endswith(PREFILL) else 1,
        "cache_length": CACHE_LENGTH,
        "device": device,
    }


def _as_dict(error: SiteError) -> dict[str, Any]:
    """Returns JSON-ready data. An error that is infinite or NaN becomes null."""
    data = asdict(error)
    for name in ("plain_error", "fused_error", "allowed"):
        data[name] = data[name] if math.isfinite(data[name]) else None
    return data | {"good": error.good}


def _check_real(model: str, arguments: Sequence[Any]) -> None:
    import torch

    if any(isinstance(item, torch.Tensor) and item.is_meta for item in arguments):
        raise CommandError(
            f"{model}: verify runs the model, so its arguments need data; they are on the meta "
            "device. Hint: write a second function that makes the model on the CPU or a GPU, such "
            "as `real` in docs/command-line.md"
        )


def _print(found: Sequence[SiteError]) -> None:
    console = make_console()
    if not found:
        console.print("nothing was fused, so there is nothing to verify")
        return
    columns = ("pattern", "place", "sites", "error of the graph", "fused", "allowed", "")
    table = Table(*columns, box=None, pad_edge=False, header_style="dim")
    for error in found:
        numbers = (error.plain_error, error.fused_error, error.allowed)
        verdict = "[green]good[/]" if error.good else f"[red]{error.note or 'worse'}[/]"
        table.add_row(
            error.pattern, error.scope, str(error.count), *(f"{n:.2e}" for n in numbers), verdict
        )
    console.print(table, markup=True)
    console.print("errors: ||x - float64|| / ||float64||, for the worst of all outputs and caches")
    bad = sum(error.count for error in found if not error.good)
    total = sum(error.count for error in found)
    said = (
        f"{bad} of them are less accurate than allowed"
        if bad
        else ("none of them is less accurate than allowed")
    )
    console.print(f"verified: {total} {'site' if total == 1 else 'sites'}, {said}")
