"""Tests launches by name: which calls share a spec, and which values a launch gets."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.codegen.test_kernel import GATHER, Tiles
from tilewright.codegen.operand import Operand
from tilewright.codegen.targets import SM90
from tilewright.ops.runtime.kernels import launch

GRID = (4,)


def values(rows=4, columns=64, **changed):
    x = torch.zeros(rows, columns, dtype=torch.bfloat16)
    given = {"x": x, "ids": torch.zeros(rows, dtype=torch.int64), "out": torch.empty_like(x)}
    return {**given, "num_rows": rows, "not_the_kernels": None, **changed}


def spec_of(given, kernel=GATHER, **constants):
    return launch(kernel, SM90, GRID, given, Tiles(), **constants).spec


def test_a_launch_is_given_the_values_by_parameter():
    given = values()
    made = launch(GATHER, SM90, GRID, given, Tiles())
    assert made.given == (given["x"], given["ids"], given["out"], 4)
    assert made.spec.constant("X_STRIDES") == (64, 1)


def test_calls_that_differ_in_nothing_static_share_a_spec():
    kernel = replace(GATHER)
    assert spec_of(values(4), kernel) is spec_of(values(5), kernel)
    # For a spec, only the declared strides of a tensor count, and only declared addresses.
    ids = torch.zeros(9, dtype=torch.int64)[1:]
    assert ids.data_ptr() % 16
    assert spec_of(values(ids=ids), kernel) is spec_of(values(), kernel)
    assert len(kernel.specs) == 1


@pytest.mark.parametrize(
    "changed",
    [{"rows": 16}, {"columns": 128}, {"x": torch.zeros(4, 64)}, {"bias": torch.zeros(64)},
     {"out": torch.zeros(65, dtype=torch.bfloat16)[1:]}, {"num_rows": None}],
    ids=str,
)  # fmt: skip
def test_what_is_static_makes_another_spec(changed):
    """Tests facts that make another spec: 16 rows are a multiple of 16, and one bf16 element
    further on, an address is no multiple of 16 bytes."""
    assert spec_of(values(**changed)) != spec_of(values())


def test_constants_that_python_holds_equal_are_told_apart():
    made = [spec_of(values(), BLOCK=block) for block in (1, True, 1.0)]
    assert len(set(made)) == 3


def test_an_operand_stands_for_a_tensor():
    x = values()["x"]
    assert spec_of(values(x=Operand("bf16", x.stride()))) == spec_of(values())


@pytest.mark.parametrize("name", ["x", "num_rows"])
def test_what_is_missing_is_named(name):
    given = values()
    del given[name]
    with pytest.raises(KeyError, match=name):
        launch(GATHER, SM90, GRID, given, Tiles())


STEPPED = replace(GATHER, launch_strides={"num_rows": ("x", 0)}, types={}, divisible=())


@pytest.mark.parametrize(
    ("kernel", "x", "stride"),
    [
        (STEPPED, torch.zeros(4, 64), 64),
        (STEPPED, torch.zeros(1, 24), 24),
        (replace(STEPPED, broadcast=("x",)), torch.zeros(1, 24), 0),
        (replace(STEPPED, launch_strides={"num_rows": ("x", -3)}), torch.zeros(4, 24), 0),
        (replace(STEPPED, launch_strides={"num_rows": ("bias", 0)}), torch.zeros(4, 24), 0),
    ],
)
def test_a_stride_known_at_the_launch_is_its_tensors(kernel, x, stride):
    given = values(x=x, bias=None)
    del given["num_rows"]
    made = launch(kernel, SM90, GRID, given, Tiles())
    assert made.given[-1] == stride
    assert dict(made.spec.signature)["num_rows"] == "i64"
    assert ("num_rows" in made.spec.divisible16) == (stride % 16 == 0)
    told = launch(replace(kernel, unaligned=("num_rows",)), SM90, GRID, given, Tiles())
    assert "num_rows" not in told.spec.divisible16
