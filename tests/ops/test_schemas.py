"""Tests the schema that a dataclass of arguments gives. docs/op-reference.md has the schemas of the
ops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field, make_dataclass, replace

import pytest
import torch

from tilewright.ops.contract import get_op, register
from tilewright.ops.schema import SymInt, Written, schema_of


@dataclass(frozen=True)
class Everything:
    x: torch.Tensor
    xs: Sequence[torch.Tensor]
    bias: torch.Tensor | None
    cache: Written
    rows: SymInt
    device: torch.device
    _: KW_ONLY
    spare: Written | None = None
    window: Sequence[SymInt] = (1, 2)
    eps: float = 1e-06
    style: str = "none"
    tune: bool = False
    block: list[int] | None = None
    dtype: torch.dtype | None = None


EVERYTHING = (
    "(Tensor x, Tensor[] xs, Tensor? bias, Tensor(a!) cache, SymInt rows, Device device, *, "
    'Tensor(b!)? spare=None, SymInt[] window=[1, 2], float eps=1e-06, str style="none", '
    "bool tune=False, int[]? block=None, ScalarType? dtype=None) -> ()"
)


@dataclass(frozen=True, kw_only=True)
class _Shared:
    eps: float
    rows: int = 1


@dataclass(frozen=True)
class _Inheriting(_Shared):
    x: torch.Tensor
    _: KW_ONLY
    style: str = "none"


def test_inherited_keywords_come_after_the_positional_ones_and_before_the_others():
    """The constructor takes them in this order, and an op splits them in this order."""
    assert schema_of(_Inheriting, "()") == (
        '(Tensor x, *, float eps, int rows=1, str style="none") -> ()'
    )
    x = torch.zeros(1)
    assert _Inheriting(x, eps=2.0).x is x


def test_a_schema_is_read_from_the_fields():
    assert schema_of(Everything, "()") == EVERYTHING
    torch._C.parse_schema("op" + EVERYTHING)


@dataclass(frozen=True)
class Unwritten(Everything):
    cache: torch.Tensor


def test_a_field_that_is_stated_anew_keeps_its_place():
    expected = EVERYTHING.replace("(a!)", "").replace("(b!)", "(a!)")
    assert schema_of(Unwritten, "()") == expected


@pytest.mark.parametrize(
    ("kind", "default", "message"),
    [
        (complex, (), "Arguments.odd: expected a type that schema_of knows, got <class 'complex'>"),
        (tuple[int, ...], (), r"Arguments.odd: expected a type .* got tuple\[int, ...\]"),
        (int | float, (), r"Arguments.odd: expected a type .* got int \| float"),
        (Sequence[int], (field(default_factory=list),), "Arguments.odd: expected a tuple as the"),
    ],
)
def test_a_field_without_a_word_is_refused(kind, default, message):
    arguments = make_dataclass("Arguments", [("odd", kind, *default)])
    with pytest.raises(ValueError, match=message):
        register(replace(get_op("paged_kv_store"), name="odd", arguments=arguments))


def test_a_schema_that_is_given_stands_for_what_the_fields_say():
    given = "(Tensor(a!) k, Tensor(a!) v) -> Tensor(a!)"
    assert (
        replace(get_op("paged_kv_store"), name="mine", schema=given).declaration == f"mine{given}"
    )
