"""Brings a graph into the form that patterns read, in which each operation is written in one way.

Each pass replaces calls by equal calls, and leaves a call alone if it cannot prove that the
replacement is equal. Only the calls that :mod:`.spelled` spells out are put back if no pattern took
a part of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import fx

from tilewright.compiler.rewrite.bodies import inline_bodies
from tilewright.compiler.rewrite.coded_weights import CodedWeights
from tilewright.compiler.rewrite.declared import DeclaredCalls
from tilewright.compiler.rewrite.dropouts import remove_idle_dropouts
from tilewright.compiler.rewrite.dtensors import make_dtensors_plain
from tilewright.compiler.rewrite.fills import make_fills_plain
from tilewright.compiler.rewrite.flex import FlexAttention
from tilewright.compiler.rewrite.in_place import make_arithmetic_new
from tilewright.compiler.rewrite.last_rows import take_rows_first
from tilewright.compiler.rewrite.spelled import SpelledOut, spell_out
from tilewright.compiler.safety.modes import modes_of
from tilewright.patterns.language import Miss

#: The order matters. A dropout that is off hides that its input and its result share memory. Such
#: dropouts are removed before `make_arithmetic_new` asks which tensors share memory.
_PASSES: tuple[Callable[[fx.Graph], object], ...] = (
    make_fills_plain,
    remove_idle_dropouts,
    make_arithmetic_new,
    make_dtensors_plain,
    take_rows_first,
)


def normalise(graph: fx.Graph, kept: Collection[str]) -> tuple[list[SpelledOut], list[Miss]]:
    """Runs all passes on a graph. Returns the calls that are spelled out, and a miss for each call
    that could not be spelled out.

    `kept` has the names of the calls that must stay as they are.
    """
    inline_bodies(graph, modes_of(graph, torch.is_grad_enabled()))
    for make in _PASSES:
        make(graph)
    return spell_out(graph, (FlexAttention(), DeclaredCalls(), CodedWeights()), kept)
