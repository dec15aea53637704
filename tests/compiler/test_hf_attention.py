"""Tests attention of Hugging Face models over a static cache: after an encoder, step by step, and
with masks that hold the lowest number of a dtype. Keys are not repeated for the heads that share
them.

`test_hf_models.py` tests each model with each kind of mask.
"""

import pytest
import torch

from tests.agreement import assert_no_worse
from tests.found import matches_of, misses_of
from tilewright.compiler import lower, reports

pytest.importorskip("transformers", reason="Hugging Face models need the extra [models]")

from tests.models.hf import (
    CACHE_LENGTH,
    build_encoder_decoder,
    build_hf,
    in_float64,
    with_mask,
)

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.mark.parametrize(
    ("name", "masks"),
    [
        # The position bias and the masks of this model are numbers that are added. Attention to the
        # source is masked, too.
        ("t5", ["tensor"] * 4),
        # Attention to the source has no mask, so that the op would gain nothing there.
        ("whisper", ["causal by position"] * 2),
    ],
)
def test_decoders_with_an_encoder(name, masks):
    ours, eager, exact = (
        build_encoder_decoder(name, dtype)
        for dtype in (torch.bfloat16, torch.bfloat16, torch.float64)
    )
    expected, reference = (case.model(**case.kwargs).logits for case in (eager, exact))
    compiled = torch.compile(ours.model, backend="tilewright", options={"inner": "eager"})
    logits = compiled(**ours.kwargs).logits
    found = reports()[-1]
    assert [m.shapes["mask"] for m in matches_of(found, "attention")] == masks
    assert misses_of(found, "attention") == []
    assert_no_worse(logits, expected, reference, f"{name} logits")


@pytest.mark.parametrize("name", ["gemma3", "llama4"])
def test_several_steps_on_one_cache(name):
    """Positions advance. If they are Python numbers, they become symbols."""
    ours, eager = (build_hf(name) for _ in range(2))
    compiled = torch.compile(ours.model, backend="tilewright", options={"inner": "eager"})
    for step in range(4):
        token = torch.full_like(ours.args[0], 3 + step)
        a = compiled(token, **ours.kwargs).logits
        b = eager.model(token, **eager.kwargs).logits
        assert (a.float() - b.float()).abs().max() < 0.05
    found = reports()[-1]
    assert len(matches_of(found, "cache_attention")) == 2, misses_of(found, "cache_attention")


@pytest.mark.parametrize(
    ("name", "mask", "phase"),
    [
        ("gemma2", "tensor", "prefill"),
        ("gemma2", "padding", "decode"),
        ("gpt_oss", "tensor", "decode"),
        ("gpt_oss", "padding", "prefill"),
    ],
)
def test_lowest_numbers_of_eager_masks_hide(name, mask, phase, graphs_kept):
    """The masks are passed as `generate()` passes them, or made inside the model. The second
    sequence is padded."""
    ours, eager, exact = (
        with_mask(build_hf(name, phase=phase, attn_implementation="eager"), mask) for _ in range(3)
    )
    expected = eager.model(*eager.args, **eager.kwargs).logits
    compiled = torch.compile(ours.model, backend="tilewright", options={"inner": "eager"})
    logits = compiled(*ours.args, **ours.kwargs).logits
    (found,) = reports()
    assert len(matches_of(found, "cache_attention")) == 2, misses_of(found, "cache_attention")
    lists = [n for n in found.after.graph.nodes if "mask_blocks" in str(n.target)]
    assert [n.kwargs for n in lists] == [{"hide_lowest": True}] * 2
    assert_no_worse(logits, expected, in_float64(exact), f"{name} logits")


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
    """Returns the size of the second-to-last dimension of a tensor of keys, or None if it has fewer
    dimensions."""
    shape = node.meta["example_value"].shape
    return shape[-2] if len(shape) > 3 else None
