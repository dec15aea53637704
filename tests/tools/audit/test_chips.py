"""Tests which kernels there are for each chip, and compiles some kernels for chips on which nothing
was measured."""

from __future__ import annotations

import functools
import re

import pytest

from tilewright.codegen.audit import check
from tilewright.codegen.build import compile_for
from tilewright.codegen.targets import TARGETS, gpu_targets
from tilewright.tools.audit.families import FAMILIES, all_cases

#: For each chip, the cases that would be the first to lack registers, shared memory or an
#: instruction.
CASES = {
    "sm120": r"awq T=64: qkv_projection|mask tensor, 1 x 1024",
    "sm103": r"llama3-8b T=1: qkv_projection",
    "sm89": r"fp8 block gate and up T=1$",
    "sm86": r"gptq gate and up T=1$",
    "sm80": r"awq down T=1$",
}


#: The cases of a chip, for both tests: making them takes up to two seconds.
cases_of = functools.cache(all_cases)


@pytest.mark.parametrize("target", gpu_targets(), ids=lambda target: target.name)
def test_cases_are_those_that_the_chip_may_have(target):
    cases = cases_of(target)
    # A template that all families share has no folder in its name.
    names = (case.spec.template.split(".") for case in cases)
    families = {folders[0] for *folders, _ in names if folders}
    assert families - {"grouped"} == set(FAMILIES) & target.families
    assert {case.spec.target for case in cases} == {target.name}
    kinds = {kind for case in cases for _, kind in case.spec.signature}
    assert ("*fp8e4nv" in kinds) is target.has("fp8")


@pytest.mark.parametrize("name", CASES)
def test_it_keeps_every_rule(name):
    target = TARGETS[name]
    cases = [case for case in cases_of(target) if re.search(CASES[name], case.name)]
    assert cases
    for case in cases:
        problems = check(compile_for(case.spec).audit, target, case.expectations)
        assert problems == [], case.name
