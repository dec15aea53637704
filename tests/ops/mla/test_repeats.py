"""Tests repeated MLA calls: they make every launch and library call of the first call, with new
memory."""

from __future__ import annotations

import pytest
import torch

from tests.interpreted import Interpreter, steps_of
from tests.mla_library import take_every_call
from tests.ops.test_contract import clone
from tilewright.codegen.targets import SM90
from tilewright.ops.contract import get_op
from tilewright.ops.mla.arguments import FP8
from tilewright.ops.mla.cases import BranchCase, PrefillCase
from tilewright.ops.runtime.program import drive
from tilewright.ops.runtime.replay import repeat

# The cases have keys from a static cache, without the rows past the last query; keys from pages,
# ragged; a dequantised weight; latents that are given; and quantised latents.
CASES = [
    ("mla_prefill", "static_cache"),
    ("mla_prefill", "fp8_weight"),
    ("mla_prefill_dense", "codes"),
    ("mla_prefill_branch_fp8", "plain"),
]


def called(op, a):
    """Returns (the result, a function that makes the same call again)."""
    machine = Interpreter(SM90)
    args, kwargs = op.split(a)
    program = drive(steps_of(op, a, machine.target), machine)
    return program.outcome.result, repeat(program, args, kwargs, machine)


def sample(op, name):
    return op.sample_inputs(next(case for case in op.cases if case.name == name))


@pytest.mark.parametrize(("name", "case"), CASES)
def test_a_call_made_again_is_the_same_call_over_new_memory(name, case):
    op = get_op(name)
    check_made_again(op, sample(op, case))


def test_what_a_call_fills_itself_is_filled_again():
    """A repeated call fills its own buffers again: the offsets of sequences of equal length next to
    ragged keys, and the scales of the 8-bit core."""
    op = get_op("mla_prefill")
    case = PrefillCase("8-bit core", weight="quantized", rank=128, attention_dtype=FP8,
                       new_tokens=(4, 4), cached_tokens=(3, 9))  # fmt: skip
    a = op.sample_inputs(case)
    given = {"keys": "slots", "slots": "none", "row_offsets": None, "num_sequences": 2}
    given |= {"lookup_table": None, "num_keys": 0, "k_scale": 0.5, "v_scale": 2.0}
    slots = torch.randint(0, 64, (20,))
    check_made_again(op, type(a)(**{**vars(a), **given, "key_slots": slots}))


ONE = {"new_tokens": (21,), "cached_tokens": (0,)}


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("mla_prefill", PrefillCase("joined", **ONE)),
        ("mla_prefill", PrefillCase("in a launch", **ONE, rope_on="k")),
        ("mla_prefill_branch_fp8", BranchCase("joined", **ONE, v_dim=32)),
    ],
    ids=["joined", "in a launch", "joined codes"],
)
def test_a_call_of_the_library_is_made_again(name, case, monkeypatch):
    """A repeated call also calls the library again. Joined keys are scratch memory, which the
    library and a launch write and the library reads."""
    take_every_call(monkeypatch)
    op = get_op(name)
    check_made_again(op, op.sample_inputs(case))


def check_made_again(op, a):
    args, kwargs = op.split(a)
    first, again = called(op, a)
    assert again is not None
    kept = first.clone()
    a.q.mul_(0.5)
    if args[1] is not None and args[1].is_floating_point() and args[1].itemsize > 1:
        args[1].mul_(-1)
    second = again(*args, **kwargs)
    assert torch.equal(first, kept)
    assert not torch.equal(second, kept)
    written = {n: t.clone() for n in op.mutated if (t := getattr(a, n)) is not None}
    whole, _ = called(op, a)
    assert torch.equal(second, whole)
    for n, tensor in written.items():
        assert torch.equal(tensor, getattr(a, n))


def test_a_store_made_again_writes_what_the_latents_are_then():
    op = get_op("mla_latent_store")
    a = op.sample_inputs(op.cases[0])
    args, kwargs = op.split(a)
    result, again = called(op, a)
    assert result is None
    a.latent.mul_(0.5).add_(1.0)
    expected = clone(a)
    op.reference(expected)
    assert again(*args, **kwargs) is None
    problem = op.tolerances[a.latent_cache.dtype].problem(a.latent_cache, expected.latent_cache)
    assert problem is None, problem


def test_chunks_are_not_kept_to_be_made_again():
    op = get_op("mla_prefill_branch_fp8")
    assert called(op, sample(op, "chunks"))[1] is None
