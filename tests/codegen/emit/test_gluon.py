"""Tests kernels written in Gluon: what the emitted file holds, and what a template must not
import."""

from __future__ import annotations

import ast
from dataclasses import replace

import pytest

from tests.ops.mlp.test_mixed import case_of, planned
from tilewright.codegen.emit import emit, gluon
from tilewright.codegen.emit.source import EmitError, JitFunction, Library
from tilewright.ops.mlp import linear_activation


def spec_of_pair():
    case = case_of("int4", 1024, 512, 1024, layout="separate")
    (spec,) = planned(case, linear_activation).specs
    return spec


def test_the_file_holds_the_functions_of_imported_templates_and_imports_only_triton():
    tree = ast.parse(emit(spec_of_pair()))
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert {"activate", "sigmoid", "mixed_linear", spec_of_pair().name} <= functions
    imported = {node.module for node in tree.body if isinstance(node, ast.ImportFrom)}
    imported |= {alias.name for node in tree.body if isinstance(node, ast.Import)
                 for alias in node.names}  # fmt: skip
    assert {name.partition(".")[0] for name in imported} == {"triton"}
    numbers = [n for n, type_ in spec_of_pair().signature if type_ in ("i32", "i64")]
    assert numbers
    assert f"@gluon.jit(do_not_specialize={numbers!r})" in emit(spec_of_pair())


def test_another_template_may_have_only_functions():
    spec, library = spec_of_pair(), Library()
    own = library.load(spec.module)
    other = library.load("tilewright.codegen.templates.activation")
    other.constants["ROWS"] = ast.Constant(64)
    try:
        with pytest.raises(
            EmitError, match=r"activation: a Gluon template must not import \['ROWS'"
        ):
            gluon.body(spec, JitFunction(own, own.functions[spec.kernel]), library)
    finally:
        del other.constants["ROWS"]  # the parsed text is cached


def test_arguments_must_be_those_of_the_kernel():
    spec, library = spec_of_pair(), Library()
    own = library.load(spec.module)
    wrong = replace(spec, constants=tuple(sorted((*spec.constants, ("UNKNOWN", 1)))))
    with pytest.raises(EmitError, match="unknown arguments \\['UNKNOWN'\\]"):
        gluon.body(wrong, JitFunction(own, own.functions[spec.kernel]), library)
