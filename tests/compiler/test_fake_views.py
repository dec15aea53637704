"""Tests that views of fake tensors that are made in the quick way equal the views that FakeTensor
makes."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

from tilewright.compiler import _compat

MODE = FakeTensorMode()
VIEWS = [
    ("permute", (0, 2, 1, 3)),
    ("reshape", (8, -1)),
    ("narrow", (2, 5, 7)),
    ("select", (1, 3)),
    ("expand", (5, 8, 20, 4)),
    ("unsqueeze", (0,)),
    ("unflatten", (2, [2, 10])),
    ("unfold", (2, 4, 4)),
    ("movedim", (1, 2)),
]


def node_of(name, args, device="cpu", dense=True):
    with MODE:
        held = torch.empty(1, 8, 20, 4, dtype=torch.bfloat16, device=device)
    held = held if dense else held.transpose(1, 2)
    graph = fx.Graph()
    source = graph.placeholder("x")
    source.meta["example_value"] = held
    return held, graph.call_method(name, (source, *args))


@pytest.mark.parametrize("device", ["cpu", "meta", "cuda"])
@pytest.mark.parametrize(("name", "args"), VIEWS)
def test_a_view_has_the_layout_device_and_storage_that_it_should(name, args, device):
    held, node = node_of(name, args, device)
    assert _compat._is_quick(node)
    made = _compat.run_fake(node)
    with MODE, torch.no_grad():
        expected = getattr(held, name)(*args)
    assert type(made) is type(expected)
    assert made.fake_mode is MODE
    for fact in ("shape", "dtype", "device", "layout", "requires_grad"):
        assert getattr(made, fact) == getattr(expected, fact)
    assert made.stride() == expected.stride()
    assert made.storage_offset() == expected.storage_offset()
    assert _compat.storage_keys(made) == _compat.storage_keys(held)
    if device != "cuda":  # a sum asks for the device, which this machine may lack
        with MODE:
            assert (made + 1).device == held.device


def test_what_may_copy_goes_the_long_way():
    held, node = node_of("reshape", (8, -1), dense=False)
    assert not _compat._is_quick(node)
    assert _compat.storage_keys(_compat.run_fake(node)) != _compat.storage_keys(held)
    assert not _compat._is_quick(node_of("contiguous", ())[1])


def test_what_is_made_again_has_memory_of_its_own():
    held, _ = node_of("permute", (0, 2, 1, 3), dense=False)
    (again, number), alone = _compat.made_again((held, 3)), _compat.made_again(held)
    assert number == 3
    for made in (again, alone):
        assert type(made) is type(held)
        assert made.fake_mode is MODE
        for fact in ("shape", "dtype", "device", "layout", "requires_grad"):
            assert getattr(made, fact) == getattr(held, fact)
        assert made.stride() == held.stride()
    assert len({*map(_compat.storage_keys, (held, again, alone))}) == 3


def test_symbols_go_the_long_way_also_where_only_the_offset_has_one():
    mode = FakeTensorMode(shape_env=ShapeEnv())
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    held = mode.from_tensor(torch.empty(5, 8), symbolic_context=context)
    last = held[-1]
    assert last.shape == (8,)
    _, node = node_of("reshape", (2, 4))
    for tensor in (held, last):
        node.args[0].meta["example_value"] = tensor
        assert not _compat._is_quick(node)
    assert _compat.run_fake(node).shape == (2, 4)
