"""Tests some random programs of every family. `python -m tests.programs` runs more of them.

None of the seeds here is in the stored runs.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.models.attention import Axes
from tests.models.qkv_idioms import paged
from tests.programs import breakages, in_place
from tests.programs.families import FAMILIES
from tests.programs.known import MENDED
from tests.programs.quantised.codes import AWQ
from tests.programs.quantised.draws import linear_of
from tests.programs.quantised.floats import Floats
from tests.programs.quantised.integers import Integers
from tests.programs.quantised.parts import Gated, normal
from tests.programs.run import (
    PER_MODEL,
    Program,
    capture,
    captured,
    compared,
    copied,
    judged,
    program,
    run,
    task,
)
from tests.programs.tally import Tally
from tilewright.compiler import fuse
from tilewright.compiler.verify import clone_inputs
from tilewright.patterns.quantised import experts, scales

FIRST = 10_000_000
SEEDS = [FIRST + PER_MODEL * model + i for model in range(4) for i in range(8)]
#: The verdicts that must occur: at least one of the seeds below must have one of them.
SOUGHT = {
    "attention": {"qkv_cache"},
    "cache_store": {"cache_store"},
    "moe": {"moe"},
    "lora": {"lora_qkv"},
    "mla": {"mla_latent_store"},
    "mlp": {"linear_activation", "linear_residual"},
    "wild": {"cache_attention"},
    "dtypes": {"cache_attention"},
    "coded": {"qkv_cache", "cache_attention"},
    "large": {"qkv_cache"},
    "quantised": {"qkv_cache", "mla_prefill", "linear_activation", "grouped_gemm"},
    "products": {"linear_activation", "linear_residual"},
}
#: The number of seeds of each family, eight for each model. A family has enough seeds for the
#: fusions that the test expects.
COUNTS = dict.fromkeys(FAMILIES, 8) | {"moe": 24, "mlp": 32, "quantised": 32, "coded": 4}
COUNTS |= dict.fromkeys(("large", "products"), 16)


@pytest.mark.parametrize("family", FAMILIES)
def test_broken_models_give_what_eager_gives(family):
    seeds = SEEDS[: COUNTS[family]]
    every = PER_MODEL * (3 if len(seeds) > PER_MODEL else 1)
    tally = run(family, seeds, dynamo_every=every)
    assert not tally.found, tally.found
    assert tally.verdicts["same"] >= len(seeds) // 8, tally
    assert tally.broken >= len(seeds) * 5 // 8
    assert SOUGHT[family] <= set(tally.patterns)
    assert tally.through_dynamo == Counter(same=sum(s % every == 0 for s in seeds))


#: Two models of each family. If one of the family's first four models is fused differently with
#: in-place changes, it is among them.
IN_PLACE = dict.fromkeys(FAMILIES, (1, 2)) | dict.fromkeys(("mla", "mlp", "dtypes"), (2, 3))
#: How many nodes of these models can at least be written in place.
LEAST_IN_PLACE = 3


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in ("coded", "large", "products")])
def test_arithmetic_in_place_is_fused_alike(family):
    with torch.no_grad():
        found = [in_place.beside(family, n, captured(family, n)) for n in IN_PLACE[family]]
    found = [both for both in found if both is not None]
    assert all(both.same for both in found), found
    assert sum(len(both.spelled) for both in found) >= LEAST_IN_PLACE


@pytest.mark.parametrize(("family", "seed"), MENDED)
def test_a_seed_that_was_wrong_once_is_right(family, seed):
    assert not run(family, [seed]).found


def test_a_rule_that_is_left_out_is_found(monkeypatch):
    """The control: without the checks of order and memory, wrong programs occur, and the run
    reports them."""
    monkeypatch.setattr(fuse, "check_legality", lambda match, flow: None)
    tally = run("attention", SEEDS[:16])
    assert tally.verdicts["wrong"] >= 2, tally


INT4 = Integers("int4 words", AWQ, zero=(8, torch.int32), block="group")
TWO_SWAPPED = Floats("nf4, two swapped", order=(1, 0), scale="float")


@pytest.mark.parametrize(
    ("axes", "module", "name", "read"),
    [(INT4, scales, "_order", []), (TWO_SWAPPED, experts, "_decoded_as", ("nf4", 1.0))],
    ids=["order", "table"],
)
def test_a_format_that_is_read_wrongly_is_found(axes, module, name, read, monkeypatch):
    """The control: a format that is read wrongly is found. Either the order of the nibbles in a
    word is lost, or a table is mistaken for another."""
    monkeypatch.setattr(module, name, lambda given: read)
    draw, shapes = random.Random(0), [(96, 64), (96, 64), (64, 96)]
    linears = [linear_of(axes, *shape, torch.bfloat16, draw) for shape in shapes]
    mlp = Gated(linears, {"joined": False, "activation": F.silu, "written": None})
    with torch.no_grad():
        model = capture(mlp, [normal(draw, torch.bfloat16, 3, 64) for _ in range(2)], "")
        inputs = clone_inputs(model.inputs)
        result = model.module.forward(*inputs)
        outcome = compared(Program(model.module, model.inputs, "", ()), result, inputs)
    assert outcome.verdict == "wrong", outcome


@pytest.mark.parametrize(("at", "verdict"), [(0, "unstable"), (1, "wrong")])
def test_nan_is_a_fault_but_where_a_rounding_makes_eager_nan(at, verdict):
    """NaN counts as a fault, unless a rounding makes eager's result NaN, too. The first difference
    is one rounding, after which zero is divided by zero."""

    def forward(x, y):
        return ((x - y) / y.new_zeros(())).clamp(-1, 1)

    x, y = torch.tensor([1 + 2**-10, 3.0]).half(), torch.ones(2).half()
    made = Program(torch.fx.symbolic_trace(forward), (x, y), "", ())
    eager = forward(x, y)
    assert eager.tolist() == [1, 1]
    fused = eager.clone()
    fused[at] = torch.nan
    assert judged(made, [fused, x, y], [eager, x, y])[0] == verdict


def test_a_seed_is_a_program():
    model = captured("attention", 7)
    with torch.no_grad():
        first, again = (program("attention", 143, model)[0] for _ in range(2))
        other = program("attention", 144, model)[0]
    assert first.broken == again.broken
    assert str(first.module.graph) == str(again.module.graph) != str(other.module.graph)


def test_no_module_of_tests_changes_a_table_of_another():
    """If a module changed a table that another module owns, a seed would give another program in a
    process that has imported the module."""
    changes = []
    for path in Path(__file__).resolve().parents[1].rglob("*.py"):
        text = path.read_text("utf-8")
        imported = {
            name
            for names in re.findall(r"^from tests\S* import (\([^)]*\)|.*)$", text, re.MULTILINE)
            for name in re.findall(r"\w+", names)
        }
        changed = re.findall(r"^ *(\w+)[\w.]*(?:\[.*\] =| \|=) ", text, re.MULTILINE)
        changes += [f"{path.name}: {name}" for name in changed if name in imported]
    assert not changes


def test_fake_tensors_are_what_the_program_makes():
    """Compares the fake tensors of a changed graph with a run on real tensors, node by node: shapes
    and dtypes."""

    class Checked(torch.fx.Interpreter):
        def run_node(self, node):
            result = super().run_node(node)
            if isinstance(result, torch.Tensor):
                fake = breakages.held(node)
                assert (result.shape, result.dtype) == (fake.shape, fake.dtype), node
            return result

    model = captured("attention", FIRST)
    with torch.no_grad():
        for seed in range(20):
            made, _, _ = program("attention", seed, model)
            Checked(made.module).run(*made.inputs)


def test_counts_add_up():
    both, parts = Tally(), [task("cache_store", a, a + 3, 0) for a in (0, 3)]
    for part in parts:
        both.add(part)
    whole = task("cache_store", 0, 6, 0)
    assert both.programs == 6 == sum(both.verdicts.values())
    assert both.verdicts == whole.verdicts
    assert both.misses == whole.misses


@pytest.mark.parametrize("breakage", dict.fromkeys(breakages.BREAKAGES))
def test_every_breakage_changes_a_program(breakage):
    draw = random.Random(0)
    with torch.no_grad():
        graphs = (copied(the_model().module.graph) for _ in range(100))
        assert any(is_changed(graph, breakage, draw) for graph in graphs)


def is_changed(graph, breakage, draw):
    before = str(graph)
    try:
        said = breakage(draw, graph)
        breakages.told_again(graph)
        graph.lint()
    except Exception:  # the change is not valid here, so another change is drawn
        return False
    return said is not None and str(graph) != before


@cache
def the_model():
    """Returns a model with casts, flags, numbers and two writes."""
    axes = replace(Axes(), num_layers=1, norm="rms_spelled", rope="half_chunk", num_kv_heads=4)
    module, args = paged("page_offset", axes)
    return capture(module.layers[0]["self_attn"], args, "")
