"""Attention of Hugging Face models over a static cache: every layer fused, however the mask comes,
nothing repeated for the heads that share keys, and no worse than eager against float64."""

import pytest
import torch

from tests.agreement import assert_no_worse
from tests.found import matches_of, misses_of
from tilewright.compiler import lower, reports

pytest.importorskip("transformers", reason="Hugging Face models need the extra [models]")

from tests.models.hf import CACHE_LENGTH, build_hf, in_float64, with_mask

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

#: Models whose second layer is another than the first: a sliding window, chunks.
UNLIKE_LAYERS = ("gemma2", "gemma3", "gpt_oss", "llama4")
NAMES = (
    "llama", "mistral", "qwen3", "gemma2", "gemma3", "gpt_oss", "qwen3_moe", "phi3", "llama4",
    "granite", "cohere", "olmo2", "gpt2", "falcon_7b",
)  # fmt: skip


def layers_of(name):
    return 2 if name in UNLIKE_LAYERS else 1


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("mask", ["tensor", "padding", "none"])
@pytest.mark.parametrize("name", NAMES)
def test_every_layer_is_fused_and_right(name, mask, phase):
    layers = layers_of(name)
    ours, eager, exact = (
        with_mask(build_hf(name, phase=phase, num_hidden_layers=layers), mask) for _ in range(3)
    )
    expected = eager.model(*eager.args, **eager.kwargs).logits
    reference = in_float64(exact)
    compiled = torch.compile(
        ours.model, backend="tilewright", fullgraph=True, options={"inner": "eager"}
    )
    logits = compiled(*ours.args, **ours.kwargs).logits
    found = reports()[-1]
    sites = matches_of(found, "cache_attention")
    assert len(sites) == layers, misses_of(found, "cache_attention")
    assert misses_of(found, "cache_attention") == []
    assert len(matches_of(found, "qkv_cache")) == layers
    assert_no_worse(logits, expected, reference, f"{name} logits")


@pytest.mark.parametrize("name", ["llama"])
@pytest.mark.parametrize("dynamic", [None, True])
def test_no_head_of_the_cache_is_repeated(name, dynamic):
    case = with_mask(build_hf(name), "tensor")
    (graph,) = lower(case.model, case.args, case.kwargs, dynamic=dynamic).graphs
    assert CACHE_LENGTH not in map(keys_of, nodes_of(graph.after, "expand", "clone", "repeat"))
    assert CACHE_LENGTH in map(keys_of, nodes_of(graph.before, "expand"))


def test_layers_that_share_a_mask_share_its_blocks():
    case = with_mask(build_hf("llama"), "tensor")
    (graph,) = lower(case.model, case.args, case.kwargs).graphs
    called = [n.target for n in graph.after.graph.nodes]
    assert called.count(torch.ops.tilewright.cache_attention.default) == 2
    assert called.count(torch.ops.tilewright.mask_blocks.default) == 1


def nodes_of(gm, *methods):
    return [n for n in gm.graph.nodes if n.op == "call_method" and n.target in methods]


def keys_of(node):
    """The length before the last of a tensor of keys; None for one with fewer dimensions."""
    shape = node.meta["example_value"].shape
    return shape[-2] if len(shape) > 3 else None
