"""Tests the LoRA ops: Modular MAX's test table, cases that it leaves out, and bad input."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tilewright.ops import ArgumentError, lora_expand_add, shrink_qkv_permute_3mn
from tilewright.ops.lora import expand as lora_expand
from tilewright.ops.lora import shrink as shrink_op
from tilewright.ops.lora.cases import EXPAND_CASES, SHRINK_CASES

# The sizes of the groups, their adapters, and the number of rows of the base model after them, as
# in MAX's tests.
MAX_TABLE = [
    ((16,), (0,), 0),
    ((8, 12, 10), (0, 0, 0), 0),
    ((8, 107, 72, 14), (0, 1, 2, 0), 0),
    ((8, 10, 12), (0, 1, 2), 30),
    ((8, 127, 35, 14), (0, 1, 1, 2), 900),
]
WHAT_IT_LEAVES_OUT = [
    ((4, 5), (-1, 1), 0),
    ((3, 0, 0, 6, 0), (2, 0, -1, 1, 2), 3),
    ((0, 0), (0, 1), 4),
    ((1,) * 9, (2, -1, 0, 0, 2, 1, -1, 1, 0), 0),
]


def groups(sizes):
    return torch.tensor([0, *sizes]).cumsum(0).to(torch.int32)


def grouped(sizes, ids, base_rows, hidden, rank):
    generator = torch.Generator().manual_seed(0)
    total = sum(sizes) + base_rows
    a = torch.randn(total, hidden, generator=generator, dtype=torch.float64)
    b = torch.randn(max(ids) + 1, 3 * rank, hidden, generator=generator, dtype=torch.float64)
    return a, b, groups(sizes), torch.tensor(ids, dtype=torch.int32)


@pytest.mark.parametrize(("hidden", "rank"), [(256, 8), (512, 16)])
@pytest.mark.parametrize(("sizes", "ids", "base_rows"), MAX_TABLE + WHAT_IT_LEAVES_OUT)
def test_shrink_is_a_linear_of_each_group(sizes, ids, base_rows, hidden, rank):
    a, b, offsets, adapters = grouped(sizes, ids, base_rows, hidden, rank)
    out = shrink_qkv_permute_3mn(a, b, offsets, adapters, num_rows=sum(sizes))
    assert out.shape == (3, sum(sizes), rank)
    for group, adapter in enumerate(ids):
        rows = slice(int(offsets[group]), int(offsets[group + 1]))
        weight = torch.zeros_like(b[0]) if adapter < 0 else b[adapter]
        expected = F.linear(a[rows], weight).view(-1, 3, rank).permute(1, 0, 2)
        torch.testing.assert_close(out[:, rows], expected)


def test_buffers_may_be_longer_than_the_groups_in_use():
    a, b, offsets, adapters = grouped((3, 4), (1, 0), 0, 32, 8)
    longer = torch.cat((offsets, offsets.new_tensor([99, 7])))
    ids = torch.cat((adapters, adapters.new_tensor([55])))
    out = shrink_qkv_permute_3mn(a, b, longer, ids, num_active_experts=2)
    assert torch.equal(out, shrink_qkv_permute_3mn(a, b, offsets, adapters))


def test_all_forms_of_rows_mean_the_same():
    a, b, offsets, ids = grouped((2, 2, 2), (0, 1, 2), 0, 32, 8)
    by_group = shrink_qkv_permute_3mn(a, b, offsets, ids)
    per_row = torch.tensor([0, 0, 1, 1, 2, 2])
    forms = [
        {"expert_ids": per_row},
        {"expert_ids": torch.arange(3)},
        {"a_offsets": offsets},
        {"a_offsets": offsets[1:], "inclusive_offsets": True},
    ]
    for form in forms:
        assert torch.equal(shrink_qkv_permute_3mn(a, b, **form), by_group), form
    order = torch.tensor([5, 0, 3, 1, 4, 2])
    mixed = shrink_qkv_permute_3mn(a[order], b, expert_ids=per_row[order])
    assert torch.equal(mixed, by_group[:, order])


def test_expand_adds_to_each_projection_and_copies_what_has_no_adapter():
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    s, q, v = normal(2, 4, 8), normal(6, 10), normal(6, 5)
    q_weight, v_weight = normal(3, 10, 8), normal(3, 5, 6)
    ids = torch.tensor([2, -1, 0, 2])
    scales = torch.tensor([0.5, 1.0, 2.0])
    weights = (q_weight, None, v_weight)
    made = lora_expand_add(s, (q, None, v), weights, expert_ids=ids, scales=scales)
    assert made[1].numel() == 0
    for out, base, plane, weight in ((made[0], q, 0, q_weight), (made[2], v, 1, v_weight)):
        expected = base.clone()
        for row, adapter in enumerate(ids.tolist()):
            if adapter >= 0:
                rank = weight.shape[2]
                expected[row] += scales[adapter] * (weight[adapter] @ s[plane, row, :rank])
        torch.testing.assert_close(out, expected)
        assert torch.equal(out[[1, 4, 5]], base[[1, 4, 5]])


def test_without_adapters_a_row_is_its_base():
    """Before any adapter is loaded into the pool, a row of the result is its base."""
    s, base, weight = torch.ones(1, 3, 8), torch.randn(3, 5), torch.ones(0, 5, 8)
    ids, scales = torch.full((3,), -1), torch.ones(0)
    made = lora_expand_add(
        s, (base, None, None), (weight, None, None), expert_ids=ids, scales=scales
    )
    assert torch.equal(made[0], base)


def test_packed_is_the_projections_side_by_side():
    case = next(case for case in EXPAND_CASES if case.name == "packed")
    a = lora_expand.sample_inputs(case)
    packed = lora_expand.OP.call(a)
    apart = lora_expand.OP.call(replace(a, packed=False))
    assert torch.equal(packed[0], torch.cat(apart, 1))
    assert packed[1].numel() == packed[2].numel() == 0


def offsets_of(*values):
    return {"a_offsets": torch.tensor(values), "expert_ids": torch.tensor([0, 1, 2])}


SHRINK = shrink_op.sample_inputs(next(c for c in SHRINK_CASES if c.name == "rows"))
STACKED = shrink_op.sample_inputs(next(c for c in SHRINK_CASES if c.name == "four_groups"))
BAD_SHRINK = {
    "offsets decrease": (SHRINK, offsets_of(0, 5, 3, 11), "a_offsets", "non-decreasing"),
    "offsets pass M": (SHRINK, offsets_of(0, 5, 7, 12), "a_offsets", "at most 11 rows"),
    "offsets begin late": (SHRINK, offsets_of(1, 5, 7, 11), "a_offsets", "0 as the first"),
    "too few offsets": (
        SHRINK, {**offsets_of(0, 4, 9), "num_active_experts": 3}, "a_offsets", "at least 4",
    ),
    "too few ids": (SHRINK, {**offsets_of(0, 1, 2, 3, 4)}, "expert_ids", "at least 4"),
    "id past G": (SHRINK, {"expert_ids": torch.tensor([4] * 11)}, "expert_ids", "to 3, got 4"),
    "id below -1": (SHRINK, {"expert_ids": torch.tensor([-2] * 11)}, "expert_ids", "from -1"),
    "ids do not divide": (SHRINK, {"expert_ids": torch.arange(3)}, "expert_ids", "11 rows"),
    "no ids": (SHRINK, {"expert_ids": None}, "expert_ids", "because there are 4 adapters"),
    "ids of floats": (SHRINK, {"expert_ids": torch.zeros(11)}, "expert_ids", "torch.int32"),
    "K": (SHRINK, {"k_weight": SHRINK.k_weight[..., 1:]}, "k_weight", r"\[4, \*, 96\]"),
    "G": (SHRINK, {"v_weight": SHRINK.v_weight[1:]}, "v_weight", r"\[4, \*, 96\]"),
    "dtypes": (SHRINK, {"q_weight": SHRINK.q_weight.half()}, "q_weight", "torch.bfloat16"),
    "no weight": (STACKED, {"b": None}, "b", "one of q_weight, k_weight and"),
    "both": (STACKED, {"q_weight": STACKED.b}, "q_weight", "None, because b has all three"),
    "not three": (STACKED, {"b": STACKED.b[:, 1:]}, "b", "as many rows of q as"),
    "num_rows": (STACKED, {"num_rows": 999}, "num_rows", "201 rows"),
    "sparse rows": (STACKED, {"a": STACKED.a.T.contiguous().T}, "a", "stride 1"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("good", "change", "argument", "words"), BAD_SHRINK.values(), ids=BAD_SHRINK
)
def test_shrink_refuses(good, change, argument, words):
    shrink_op.OP.call(good)
    with pytest.raises(ArgumentError, match=words) as refused:
        shrink_op.OP.call(replace(good, **change))
    assert refused.value.argument == argument


EXPAND = lora_expand.sample_inputs(next(c for c in EXPAND_CASES if c.name == "rows_many"))
BAD_EXPAND = {
    "rank": (
        {"k_weight": EXPAND.k_weight.repeat(1, 1, 2)}, "k_weight", "rank of at most 16, .* got 32",
    ),
    "planes": ({"k_weight": None}, "s", r"\[2, \*, \*\]"),
    "no weights": (
        {"q_weight": None, "k_weight": None, "v_weight": None}, "q_weight", "at least one of",
    ),
    "width": ({"q": EXPAND.q[:, 1:]}, "q", r"\[\*, 160\]"),
    "rows of the bases": ({"v": EXPAND.v[1:]}, "v", r"\[70, \*\]"),
    "fewer rows than s": (
        {n: getattr(EXPAND, n)[:60] for n in ("q", "k", "v")}, "q", "70 rows of s",
    ),
    "dtypes": ({"v": EXPAND.v.float()}, "v", "torch.bfloat16"),
    "scales": ({"scales": EXPAND.scales[1:]}, "scales", r"\[9\]"),
    "scale": ({"scale": [1.0, 2.0]}, "scale", "one or three"),
    "infinite scale": ({"scale": [float("inf")]}, "scale", "finite"),
    "id past G": ({"expert_ids": torch.full((70,), 9)}, "expert_ids", "to 8, got 9"),
}  # fmt: skip


@pytest.mark.parametrize("bad", BAD_EXPAND.values(), ids=BAD_EXPAND)
def test_expand_refuses(bad):
    change, argument, words = bad
    lora_expand.OP.call(EXPAND)
    with pytest.raises(ArgumentError, match=words) as refused:
        lora_expand.OP.call(replace(EXPAND, **change))
    assert refused.value.argument == argument
