"""Tests dequantised stacked weights: a recognised format gives the same numbers, and a graph that
only looks like a format is refused by name."""

from __future__ import annotations

import pytest
import torch

from tests.experts import dequantized
from tests.models.moe_dequant import (
    NEAR_MISSES,
    SPELLINGS,
    E,
    N,
    by_block,
    look_up,
    scales_of_the_next_block,
    stored,
)
from tilewright.compiler.dataflow.build import build_view
from tilewright.compiler.rewrite.materialise import Materialiser
from tilewright.ops.formats import nvfp4
from tilewright.ops.formats.expert_weight import ExpertWeight
from tilewright.patterns import effects
from tilewright.patterns.dataflow import View
from tilewright.patterns.language import Reject
from tilewright.patterns.quantised.expert_arguments import expert_arguments
from tilewright.patterns.quantised.experts import match_dequantized_experts, match_dequantized_rows


def traced(function, args, look):
    """Returns the result of `look(view of the result, emit)` at trace time, and the results of the
    views that it emitted."""
    answers, results = [], []

    def backend(gm, inputs):
        flow, output = build_view(gm.graph), list(gm.graph.nodes)[-1]
        materialiser = Materialiser(gm.graph, flow)
        materialiser.serving = output

        def emit(*items):
            with gm.graph.inserting_before(output):
                output.args = ((*output.args[0], *(materialiser.argument(i) for i in items)),)
            gm.recompile()

        answers.append(look(flow.outputs[0], emit))

        def run(*inputs):
            results.append(gm.forward(*inputs))
            return results[-1][:1]

        return run

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(function, backend=backend)(*args)
    return answers[0], results[0]


def as_expert_weight(rows):
    def look(view, emit):
        part = View(view.value, rows(view.effect))
        found = match_dequantized_experts(part)
        if found is None:
            return None
        given = expert_arguments({("codes", "scale", "factor"): found})
        emit(given["codes"], given["scale"], given.get("factor"))
        return given

    return look


ROWS = {
    "all": (lambda effect: effect, slice(None)),
    "half": (lambda effect: effects.narrow(effect, 1, 0, N // 2), slice(0, N // 2)),
    "every_other": (lambda effect: effects.narrow(effect, 1, 1, N // 2, 2), slice(1, N, 2)),
}


CUT = ("nvfp4_table", "mxfp4_ldexp", "fp8_blocks", "int4_groups")
CASES = [(n, "all") for n in SPELLINGS] + [(n, r) for n in CUT for r in ("half", "every_other")]


@pytest.mark.parametrize(("name", "rows"), CASES)
def test_every_spelling_is_its_format_with_the_same_numbers(name, rows):
    wanted, function = SPELLINGS[name]
    cut, places = ROWS[rows]
    given, (weight, data, scale, factor) = traced(function, stored(wanted), as_expert_weight(cut))
    assert given["weight_format"] == wanted
    block = given.get("scale_block", ())
    held = ExpertWeight(data, wanted, scale, tuple(block), expert_scale=factor)
    ours = dequantized(held, torch.float64)
    # The graph rounds the weight to bfloat16, and the format is exact.
    rounded = ours.to(torch.bfloat16)
    torch.testing.assert_close(rounded, weight[:, places], rtol=2**-7, atol=1e-6)
    if wanted != "fp8" and factor is None:
        assert torch.equal(rounded, weight[:, places])


@pytest.mark.parametrize("change", NEAR_MISSES, ids=lambda f: f.__name__)
def test_what_only_looks_like_a_format_is_refused(change):
    name, code = NEAR_MISSES[change]

    def look(view, emit):
        with pytest.raises(Reject) as caught:
            match_dequantized_experts(view)
        return caught.value.miss

    miss, _ = traced(change, stored(name), look)
    assert miss.code == code
    if change.__name__ == "table_of_the_model":
        assert "torch.tensor" in miss.hint


def test_scales_that_the_graph_moves_are_taken_where_they_are_moved_to():
    given, (weight, data, scale, _) = traced(
        scales_of_the_next_block, stored("nvfp4"), as_expert_weight(lambda effect: effect)
    )
    ours = dequantized(ExpertWeight(data, given["weight_format"], scale), torch.float32)
    assert torch.equal(ours.bfloat16(), weight)


def test_a_weight_without_codes_is_none():
    def look(view, emit):
        return match_dequantized_experts(view)

    found, _ = traced(lambda w: w * 0.5, (torch.randn(E, N, 32),), look)
    assert found is None


def quantized_rows(x):
    packed, scales = nvfp4.quantize(x)
    return nvfp4.dequantize(packed, scales, dtype=torch.bfloat16)


def quantized_rows_with_a_factor(x, factor):
    packed, scales = nvfp4.quantize(x, 4.0)
    return (by_block(look_up(packed), scales.float()) * factor).bfloat16()


@pytest.mark.parametrize("function", [quantized_rows, quantized_rows_with_a_factor])
def test_activations_quantised_in_the_graph_show_their_codes(function):
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    args = (x,) if function is quantized_rows else (x, torch.tensor(0.25))

    def look(view, emit):
        found = match_dequantized_rows(view)
        emit(found.data, found.scale, found.expert_scale())
        return found

    found, (rows, data, scale, factor) = traced(function, args, look)
    assert found.format == "nvfp4"
    assert data.shape == (5, 32)
    values = nvfp4.dequantize(data, scale[:, ::16], dtype=torch.float32)
    values = values if factor is None else values * factor[:, None]
    assert torch.equal(values.bfloat16(), rows)


def test_activations_that_are_not_quantised_are_none():
    found, _ = traced(
        lambda x: x * 2, (torch.randn(4, 32),), lambda v, _: match_dequantized_rows(v)
    )
    assert found is None
