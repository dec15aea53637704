"""Tests the kernels of sums over ranks in `make audit`: one of each kind is compiled, for the chips
in turn."""

from __future__ import annotations

from itertools import cycle

import pytest

from tilewright.codegen.audit import check
from tilewright.codegen.build import compile_for
from tilewright.codegen.targets import SM90, SM100
from tilewright.tools.audit.collective import collective_cases

KINDS = ("70B 2 ranks", "V3 8 ranks", "float16")


@pytest.mark.parametrize(("kind", "target"), list(zip(KINDS, cycle((SM90, SM100)), strict=False)))
def test_it_keeps_every_rule(kind, target):
    case = next(case for case in collective_cases(target) if case.name.endswith(kind))
    assert check(compile_for(case.spec).audit, target, case.expectations) == []


def test_flags_follow_what_they_announce_across_gpus():
    case = next(c for c in collective_cases(SM90) if c.name.endswith(KINDS[0]))
    ptx = compile_for(case.spec).ptx
    assert "atom.global.sys.release" in ptx
    assert "ld.global.sys.acquire" in ptx
    assert "ld.global.cg.v4" in ptx
