"""Tests that the idioms agree with each other, and that a call changes only new slots."""

from __future__ import annotations

import pytest
import torch

from tests.models.cache_writes import BATCHED, PAGED
from tests.models.qkv_idioms import IDIOMS, axes_of, build

# The idioms that differ in the cache. (How a model projects does not matter for the cache.)
OWN = {name for name in IDIOMS if not name.startswith("p_")}
EXACT = sorted(PAGED.keys() - {"masked", "where"})


def caches_of(args):
    """Returns all floating-point inputs except the activations, which come first."""
    return [arg for arg in args if isinstance(arg, torch.Tensor) and arg.is_floating_point()][1:]


def answer(name):
    """Returns the result of two layers, computed from caches that hold the same number
    everywhere."""
    module, args = build(name, dtype=torch.float32, num_layers=2)
    for cache in caches_of(args):
        cache.fill_(0.25)
    with torch.no_grad():
        return module(*args)


@pytest.mark.parametrize("name", EXACT)
def test_every_paged_form_gives_the_same_answer(name):
    torch.testing.assert_close(answer(name), answer("page_offset"))


@pytest.mark.parametrize("name", sorted(BATCHED))
def test_every_batched_form_gives_the_same_answer(name):
    torch.testing.assert_close(answer(name), answer("static_cache"))


PLAIN = {"paged": "page_offset", "static": "static_cache"}


@pytest.mark.parametrize("form", PLAIN)
@pytest.mark.parametrize("axis", ["bias", "norm_rms_module", "rope_none", "rope_interleaved"])
def test_an_axis_that_means_something_else_changes_the_answer(axis, form):
    assert not torch.allclose(answer(f"{axis}_{form}"), answer(PLAIN[form]), atol=1e-2)


@pytest.mark.parametrize("form", PLAIN)
@pytest.mark.parametrize(
    ("axis", "same"),
    [
        ("packed_split", None),
        ("packed_slice", "packed_split"),
        ("table_gathered", None),
        ("rope_half_chunk", "table_gathered"),
        ("norm_rms_spelled", "norm_rms_module"),
    ],
)
def test_an_axis_that_only_spells_it_otherwise_does_not(axis, same, form):
    usual = PLAIN[form] if same is None else f"{same}_{form}"
    torch.testing.assert_close(answer(f"{axis}_{form}"), answer(usual))


@pytest.mark.parametrize("name", sorted(OWN - {"out_of_place"}))
def test_a_step_changes_the_new_slots_and_no_others(name):
    module, args = build(name)
    before = [cache.clone() for cache in caches_of(args)]
    with torch.no_grad():
        module(*args)
    axes = axes_of(name)
    tokens = axes.num_tokens - 1 if name == "masked" else axes.num_tokens
    most = axes.num_layers * 2 * tokens * axes.num_kv_heads * axes.head_dim
    changed = sum(
        int((a.view(torch.uint8) != b.view(torch.uint8)).view(*a.shape, -1).any(-1).sum())
        for a, b in zip(caches_of(args), before, strict=True)
    )
    assert 0.7 * most < changed <= most


def test_out_of_place_leaves_its_inputs():
    module, args = build("out_of_place")
    before = [cache.clone() for cache in caches_of(args)]
    module(*args)
    for cache, old in zip(caches_of(args), before, strict=True):
        assert torch.equal(cache, old)


@pytest.mark.parametrize("name", ["custom_op", "out_of_place"])
def test_an_idiom_that_is_not_fused_is_one_graph(name):
    """tests/patterns/running.py checks the same for idioms that are fused."""
    torch._dynamo.reset()
    module, args = build(name)
    eager_module, eager_args = build(name)
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    with torch.no_grad():
        out = torch.compile(module, backend=backend, fullgraph=True)(*args)
        expected = eager_module(*eager_args)
    assert torch.equal(out, expected)
    assert len(graphs) == 1


def test_masked_breaks_the_graph():
    module, args = build("masked")
    with torch.no_grad():
        assert torch._dynamo.explain(module)(*args).graph_count > 1
