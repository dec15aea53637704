"""Tests that `lower` shows everything and changes nothing."""

from __future__ import annotations

import inspect

import pytest
import torch

from tests.compiler.running import (
    assert_close,
    build,
    copies,
    patterns_used,
    same_bits,
)
from tests.found import matches_of, patterns_in
from tilewright.compiler import lower
from tilewright.compiler._compat import tracing

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.mark.parametrize("name", ["page_offset", "max_blocks", "static_cache"])
def test_lower_writes_nothing_and_changes_nothing(name):
    model, args = build(name)
    before = copies(args)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    lowered = lower(model, args)
    assert patterns_in(lowered, "qkv") == ["qkv_cache"]
    assert same_bits(args, before)
    assert same_bits(model.state_dict().values(), state.values())
    assert not torch.is_grad_enabled()  # the fixture's setting has not changed
    with torch.enable_grad():
        lower(model, args)
        assert torch.is_grad_enabled()


def test_lower_works_on_meta_tensors():
    model, args = build("page_offset", num_layers=2)
    model = model.to("meta")
    lowered = lower(model, [a.to("meta") for a in args])
    assert [m.scope for m in matches_of(lowered, "qkv")] == [
        "layers.0.self_attn",
        "layers.1.self_attn",
    ]


def test_a_model_that_asks_for_autocast_on_its_device_is_lowered_on_meta():
    """Tests a model that asks whether autocast is on for the device of its arguments. torch raises
    an error for the meta device, and answers for other devices."""
    said = []

    def model(x):
        enabled = torch.is_autocast_enabled(x.device.type)
        said.append((x.device.type, enabled))
        return x + 1 if enabled else x

    asked = torch.is_autocast_enabled
    assert len(lower(model, (torch.ones(2, device="meta"),)).graphs) == 0
    with torch.autocast("cpu"):
        assert len(lower(model, (torch.ones(2),)).graphs) == 1
    assert said == [("meta", False), ("cpu", True)]
    assert torch.is_autocast_enabled is asked


def test_a_tensor_made_of_a_number_on_meta_is_traced():
    """Tests a tensor that is made of a number on the meta device. torch makes a plain tensor there,
    even under fake tensors, and then refuses to compute with it."""

    def model(mask):
        return torch.where(mask, torch.tensor(0.0, device=mask.device, dtype=torch.half), -1.0)

    ran = torch._dynamo.utils.run_node
    mask = torch.empty(2, 3, dtype=torch.bool, device="meta")
    (graph,) = lower(model, (mask,)).graphs
    nodes = list(graph.before.graph.nodes)[:-1]
    values = [node.meta["example_value"] for node in nodes]
    assert [(v.device.type, tuple(v.shape), v.dtype) for v in values] == [
        ("meta", (2, 3), torch.bool),
        ("meta", (), torch.half),
        ("meta", (2, 3), torch.half),
    ]
    assert torch._dynamo.utils.run_node is ran


def test_lower_again_and_again_never_runs_the_model():
    model, args = build("page_offset")
    before = copies(args)
    with torch._dynamo.config.patch(recompile_limit=2):
        for _ in range(4):
            assert len(matches_of(lower(model, args), "qkv")) == 1
    assert same_bits(args, before)


@pytest.mark.skipif(
    "isolate_recompiles" not in inspect.signature(torch.compile).parameters,
    reason="this torch counts every compilation of a function towards one limit",
)
def test_lower_leaves_later_compilation_alone():
    model, args = build("page_offset")
    with torch._dynamo.config.patch(recompile_limit=2):
        for _ in range(3):
            lower(model, args)
        assert_close(model, args)
    assert patterns_used() == ["qkv_cache"]


@pytest.mark.parametrize("context", [tracing.autocast_off_on_meta, tracing.numbers_fake_on_meta])
def test_what_is_replaced_in_torch_comes_back_whichever_thread_leaves_first(context):
    before = torch.is_autocast_enabled, torch._dynamo.utils.run_node
    one, other = context(), context()
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    assert (torch.is_autocast_enabled, torch._dynamo.utils.run_node) != before
    other.__exit__(None, None, None)
    assert (torch.is_autocast_enabled, torch._dynamo.utils.run_node) == before
