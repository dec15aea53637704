"""Tests groups of arguments: the fields that an op's record has from them, and declarations that
are invalid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace

import pytest
import torch

from tilewright.ops.groups import ArgumentGroup, Group, OptionalGroup
from tilewright.ops.schema import schema_of


@dataclass(frozen=True)
class Scaled(ArgumentGroup):
    data: torch.Tensor
    scale: torch.Tensor | None = None
    block: Sequence[int] = (1, 1)


@dataclass(frozen=True)
class Arguments:
    weight: torch.Tensor
    up_weight: torch.Tensor | None
    _: KW_ONLY
    up_scale: torch.Tensor | None = None
    block: Sequence[int] = ()

    gate = Group(Scaled, data="weight")
    up = OptionalGroup(Scaled, data="up_weight", scale="up_scale")


WEIGHT, UP, SCALE = (torch.full((2,), float(n)) for n in range(3))
GIVEN = Arguments(WEIGHT, UP, up_scale=SCALE, block=[4, 4])


def test_a_group_has_what_its_arguments_have():
    assert GIVEN.up is not None
    assert GIVEN.up.data is UP
    assert GIVEN.up.scale is SCALE
    assert GIVEN.up.block == [4, 4]


def test_what_the_op_has_no_argument_for_is_the_default():
    assert GIVEN.gate.data is WEIGHT
    assert GIVEN.gate.scale is None


@dataclass(frozen=True)
class Joint:
    weight: torch.Tensor
    up_weight: torch.Tensor
    scales: torch.Tensor | None = None

    gate = Group(Scaled, data="weight", scale="scales[0]")
    up = Group(Scaled, data="up_weight", scale="scales[1]")


def test_groups_have_elements_of_an_argument():
    joint = Joint(WEIGHT, UP, torch.tensor([2.0, 3.0]))
    assert (joint.gate.scale, joint.up.scale) == (2, 3)
    assert Joint(WEIGHT, UP).up.scale is None


def test_a_group_without_its_first_argument_is_none():
    assert replace(GIVEN, up_weight=None).up is None


def test_a_group_is_of_the_record_it_is_read_from():
    """A group that is read from a replaced record has the fields of this record, not of the first
    record."""
    assert GIVEN.gate.data is WEIGHT
    assert replace(GIVEN, weight=UP).gate.data is UP


def test_a_group_made_by_hand_has_the_names_of_its_fields():
    made = Scaled(WEIGHT, None, [4, 4])
    assert (made.data, made.scale, made.block) == (WEIGHT, None, [4, 4])
    assert made.named("data") == "data"
    assert isinstance(GIVEN.gate, Scaled)
    assert GIVEN.gate.named("data") == "weight"


def test_fields_have_the_names_of_the_arguments():
    assert GIVEN.up is not None
    assert [GIVEN.up.named(name) for name in ("data", "scale", "block")] == [
        "up_weight",
        "up_scale",
        "block",
    ]


def test_a_group_is_no_argument():
    names = ["weight", "up_weight", "up_scale", "block"]
    assert [field.name for field in fields(Arguments)] == names
    assert GIVEN.up is not None
    assert list(vars(GIVEN)) == names
    assert "gate" not in schema_of(Arguments, "()")


def test_a_subclass_has_its_own_arguments():
    @dataclass(frozen=True)
    class More(Arguments):
        _: KW_ONLY
        scale: torch.Tensor | None = None

    assert More(WEIGHT, None, scale=SCALE).gate.scale is SCALE
    assert GIVEN.gate.scale is None


@pytest.mark.parametrize(
    ("group", "what"),
    [
        (Group(Scaled, data="weigth"), "needs an argument weigth"),
        (Group(Scaled), "needs an argument data"),
        (Group(Scaled, data="weight", scale="gate_scale"), "needs an argument gate_scale"),
        (Group(Scaled, data="weight", zero="block"), r"no fields \['zero'\]"),
    ],
    ids=["typo", "no argument", "a default does not hide a typo", "no such field"],
)
def test_a_declaration_that_says_nothing_raises(group, what):
    with pytest.raises(TypeError, match=what):
        group.__get__(GIVEN)
