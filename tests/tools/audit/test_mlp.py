"""Tests the kernels of dense layers' linears in `make audit`: one of each kind is compiled, for the
chips in turn.

test_chips.py compiles codes by block and the codes of GPTQ.
"""

from __future__ import annotations

import re
from itertools import cycle

import pytest

from tilewright.codegen.audit import check
from tilewright.codegen.build import compile_for
from tilewright.codegen.targets import SM90, SM100
from tilewright.tools.audit.mlp import mlp_cases

KINDS = (
    r"Llama-3-8B gate and up T=1$",
    r"Llama-3-8B down T=64$",
    r"GPT-2 XL",
    r"Gemma-2-9B down T=1$",
    r"Bloom-176B up",
    r"Llama-3-8B awq gate and up T=1$",
    r"Llama-3-8B int4 down T=1$",
)


@pytest.mark.parametrize(("kind", "target"), list(zip(KINDS, cycle((SM100, SM90)), strict=False)))
def test_it_keeps_every_rule(kind, target):
    case = next(case for case in mlp_cases(target) if re.search(kind, case.name))
    assert check(compile_for(case.spec).audit, target, case.expectations) == []
