"""Tests offsets, lengths, ids and positions that are every other element of a tensor. The results
must not change."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from tests.interpreted import Interpreter, interpret
from tests.ops.test_lowerings import MOST_PROGRAMS, allowed, programs_of, results_of
from tilewright.codegen.targets import SM90
from tilewright.ops import ArgumentError
from tilewright.ops.contract import all_ops

OPS = [
    op
    for op in all_ops()
    if op.namespace == "tilewright" and any(lowering.build for lowering in op.lowerings)
]


def vectors_of(a):
    """Returns the integer vectors of a call, by name."""
    named = {field.name: getattr(a, field.name) for field in fields(a)}
    return {
        name: t
        for name, t in named.items()
        if isinstance(t, torch.Tensor) and t.dim() == 1 and len(t) > 1 and not t.is_floating_point()
    }


def apart(vector):
    """Returns the same numbers with other numbers between them in memory."""
    held = torch.full((len(vector), 3), 7).to(vector.dtype)
    held[:, 0] = vector
    return held[:, 0]


def cases(op):
    """Returns enough cases of the op so that each of its vectors is strided once."""
    left: set[str] = set()
    for case in op.cases:
        a = op.sample_inputs(case)
        names = set(vectors_of(a))
        if not names - left or op.choose("cuda", a).lowering.name == "reference":
            continue
        if programs_of(op, a, SM90) <= MOST_PROGRAMS:
            left |= names
            yield case


def check(op, case):
    given, expected = op.sample_inputs(case), op.sample_inputs(case)
    given = replace(given, **{name: apart(t) for name, t in vectors_of(given).items()})
    refused = ""
    try:
        op.validate(given)
    except ArgumentError as error:
        refused = error.argument
    if refused:
        assert refused in vectors_of(given), case.name
        return
    if op.choose("cuda", given).lowering.name == "reference":
        return
    program = interpret(op, given, SM90, Interpreter().target.num_sms)
    wanted = op.reference(expected)
    for got, want in zip(results_of(program.outcome.result), results_of(wanted), strict=True):
        assert allowed(op, program, want.dtype).problem(got, want) is None, case.name
    for name in op.mutated:
        got, want = getattr(given, name), getattr(expected, name)
        if want is not None:
            assert allowed(op, program, want.dtype).problem(got, want) is None, (case.name, name)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_vectors_may_have_any_stride(op):
    """The op takes such vectors as they are, copies them, or refuses them by name. It never reads
    them as if their elements were adjacent."""
    for case in cases(op):
        check(op, case)


def test_most_ops_have_a_vector():
    having = [op for op in OPS if any(vectors_of(op.sample_inputs(case)) for case in op.cases)]
    assert len(having) > len(OPS) / 2
