"""Tests which calls of `mla_prefill` are computed in absorbed form, and that this gives the same
results.

These calls have few queries and many keys, in any kind of memory.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.interpreted import interpret
from tests.ops.test_contract import as_double, clone
from tilewright.ops.contract import get_op
from tilewright.ops.mla.arguments import FP8
from tilewright.ops.mla.cases import PrefillCase
from tilewright.ops.mla.decode import lowering
from tilewright.ops.mla.decode.gains import is_faster
from tilewright.ops.mla.decode.lowering import absorbed_call

RAGGED = PrefillCase(
    "ragged", num_pages=60, page_size=32, cached_tokens=(300, 0, 557, 400), new_tokens=(2, 0, 1, 3)
)
STATIC = PrefillCase(
    "static", keys="pages", pool="static", slots="per_sequence", runs=True, new_tokens=(2, 2),
    cached_tokens=(270, 270), page_size=300, rope_style="half", table_width="full",
)  # fmt: skip
CASES = {
    "counted keys": RAGGED,
    "a table by position": replace(
        RAGGED, by_position=True, pool="layers", index_dtype=torch.uint32
    ),
    "all keys of a table": replace(
        RAGGED, ragged_keys=False, slots="block_table", norm=False, rope_style="none"
    ),
    "fp8 weight": replace(RAGGED, weight="fp8", rank=160, mask="sliding_window", window=40),
    "static cache": STATIC,
    "mask": replace(STATIC, mask="none", attn_mask="bool"),
    "mask of numbers": replace(STATIC, mask="none", attn_mask="float", dtype=torch.float16),
}  # fmt: skip


def assert_absorbed(op, a):
    """Asserts that a call is computed in absorbed form, and that it writes the same cache as the
    other form."""
    given, expected = clone(a), as_double(clone(a))
    want = op.reference(expected)
    program = interpret(op, given)
    kernels = [spec.kernel for spec in program.specs]
    assert "attention_decode" in kernels
    out = program.outcome.result
    problem = op.tolerances[out.dtype].problem(out, want)
    assert problem is None, problem
    if given.latent_cache is not None:
        problem = op.tolerances[out.dtype].problem(given.latent_cache, expected.latent_cache)
        assert problem is None, problem


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_few_queries_of_a_cache_are_absorbed(case):
    op = get_op("mla_prefill")
    assert_absorbed(op, op.sample_inputs(case))


def given_latents():
    """Returns 300 latents for each of two sequences."""
    case = PrefillCase(
        "given", keys="given", slots="none", runs=True, new_tokens=(300, 300), norm=False,
        cached_tokens=(0, 0), rope_on="q", rope_style="half", table_width="full", num_pages=100,
    )  # fmt: skip
    return get_op("mla_prefill_dense").sample_inputs(case)


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("by_position", [False, True])
def test_few_queries_of_given_latents_are_absorbed(queries, by_position):
    a = given_latents()
    rows = 300 if by_position else 2 * queries
    q = a.q.unflatten(0, (2, -1))[:, :queries].flatten(0, 1)
    positions = torch.arange(queries) + 250
    a = replace(a, q=q, cos=a.cos[:rows], sin=a.sin[:rows], rope_by_position=by_position)
    assert_absorbed(get_op("mla_prefill_dense"), replace(a, positions=positions))


@pytest.mark.parametrize(
    "case",
    [
        replace(STATIC, cached_tokens=(150, 150), page_size=200),
        replace(RAGGED, keys="slots", slots="flat", pool="pair"),
        replace(RAGGED, weight="quantized", rank=128),
        replace(RAGGED, attention_dtype=FP8),
    ],
    ids=["few keys", "keys anywhere", "quantised latents", "8-bit attention"],
)
def test_others_are_not(case):
    assert absorbed_call(get_op("mla_prefill").sample_inputs(case)) is None


def test_as_many_queries_as_keys_are_not():
    assert absorbed_call(given_latents()) is None


@pytest.mark.parametrize(
    ("case", "queries", "keys"), [(RAGGED, 2, 315), (STATIC, 2, 300)], ids=["counted", "static"]
)
def test_the_sizes_of_the_call_decide(case, queries, keys, monkeypatch):
    """Sequences of different lengths count with their mean."""
    decided = []
    monkeypatch.setattr(lowering, "is_faster", lambda **sizes: decided.append(sizes))
    a = get_op("mla_prefill").sample_inputs(case)
    assert absorbed_call(a) is None
    widths = {"nope": case.nope, "rope": case.rope_dim, "v_dim": case.v_dim, "rank": case.rank}
    counts = {"queries": queries, "keys": keys, "heads": case.num_heads}
    assert decided == [widths | counts | {"sequences": len(case.new_tokens)}]


def lite(queries: int, sequences: int = 0, keys: int = 4096) -> bool:
    """Whether the plan says that absorbed attention is faster for DeepSeek-V2-Lite."""
    return is_faster(
        queries=queries,
        keys=keys,
        heads=16,
        nope=128,
        rope=64,
        v_dim=128,
        rank=512,
        sequences=sequences,
    )


def test_what_the_plan_says_of_a_published_model():
    """Tests the plan for a decode step, some drafted tokens, and a prefill."""
    assert lite(1)
    assert lite(4)
    assert not lite(512)
    assert not lite(1, keys=128)


def test_few_sequences_have_not_enough_keys_to_expand():
    """Tests the plan at the sizes that were measured on an H200: 64 queries behind 1900 tokens."""
    assert lite(64, sequences=1, keys=2048)
    assert lite(64, sequences=2, keys=2048)
    assert not lite(64, sequences=8, keys=2048)
    assert not lite(128, sequences=2, keys=2048)


@pytest.mark.parametrize(("queries", "faster"), [(16, True), (32, False)])
def test_rows_that_fill_no_tile_count(queries, faster):
    """Each tile of MiniCPM3 has one query, and its 40 heads take 64 rows (an H200, 2 sequences)."""
    sizes = {"heads": 40, "nope": 64, "rope": 32, "v_dim": 64, "rank": 256, "keys": 2048}
    assert is_faster(queries=queries, sequences=2, **sizes) == faster
