"""Tests bad arguments of `grouped_matmul_dynamic_scaled_nvfp4`, which must be named before anything
is computed, and unusual arguments that are valid."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from tilewright.ops import ArgumentError
from tilewright.ops.grouped import nvfp4_matmul as op
from tilewright.ops.moe import moe
from tilewright.ops.moe.cases import MoeCase

CASE = op.Nvfp4Case("case", (31, 97, 63), (0, 3, 2))
FP8 = torch.float8_e4m3fn


def with_offsets(*offsets):
    return lambda a: replace(a, group_offsets=torch.tensor(offsets, dtype=torch.int32))


def with_ids(*ids):
    return lambda a: replace(a, expert_ids=torch.tensor(ids, dtype=torch.int32))


def cut(a, columns):
    """Returns both operands with this many bytes per row."""
    return replace(a, a=a.a[:, :columns].contiguous(), b=a.b[..., :columns].contiguous())


# For each fault: (the argument that is named, words of the message, a function that makes the
# arguments wrong).
BAD = {
    "offsets decrease": ("group_offsets", "non-decreasing", with_offsets(0, 128, 31, 191)),
    "offsets beyond the rows": ("group_offsets", "at most 191 rows", with_offsets(0, 31, 128, 192)),
    "offsets start late": ("group_offsets", "0 as the first", with_offsets(1, 31, 128, 191)),
    "too few offsets": (
        "group_offsets", "at least 6 elements for 5 groups",
        lambda a: replace(a, num_active_experts=5),
    ),
    "offsets of floats": (
        "group_offsets", "dtype", lambda a: replace(a, group_offsets=a.group_offsets.float()),
    ),
    "an expert that is none of them": ("expert_ids", "to 4, got 5 at", with_ids(0, 5, 2)),
    "an expert below none": ("expert_ids", "from -1", with_ids(0, -2, 2)),
    "experts of uint32": (
        "expert_ids", "dtype", lambda a: replace(a, expert_ids=a.expert_ids.to(torch.uint32)),
    ),
    "absolute scale blocks": (
        "group_scale_offsets", "the delta 1 for group 2",
        lambda a: replace(a, group_scale_offsets=torch.tensor([0, 1, 2], dtype=torch.int32)),
    ),
    "scale blocks of an empty group": (
        "group_scale_offsets", "the delta 1 for group 1",
        lambda a: replace(
            with_offsets(0, 31, 31, 191)(a),
            group_scale_offsets=torch.tensor([0, 7, 1], dtype=torch.int32),
        ),
    ),
    "too few scale blocks": (
        "a_scales", "3 blocks of 128 rows",
        lambda a: replace(a, a_scales=a.a_scales[:2].contiguous()),
    ),
    "row-major activation scales": (
        "a_scales", "shape", lambda a: replace(a, a_scales=torch.zeros(191, 10, dtype=FP8)),
    ),
    "scales of too few columns": (
        "b_scales", "shape", lambda a: replace(a, b_scales=a.b_scales[:, :, :2].contiguous()),
    ),
    "scales of too few rows": (
        "b_scales", "shape", lambda a: replace(a, b_scales=a.b_scales[:, :1].contiguous()),
    ),
    "scales of fewer experts": (
        "b_scales", "shape", lambda a: replace(a, b_scales=a.b_scales[:4].contiguous()),
    ),
    "MXFP4's scales": (
        "b_scales", "dtype", lambda a: replace(a, b_scales=a.b_scales.view(torch.uint8)),
    ),
    "scales with gaps": (
        "a_scales", "contiguous", lambda a: replace(a, a_scales=a.a_scales.mT),
    ),
    "float activations": (
        "a", "dtype", lambda a: replace(a, a=torch.zeros(191, 80)),
    ),
    "K of whole scales, not of whole 16 bytes": (
        "a", "K that 32 divides (rows of whole 16 bytes), got K = 144", lambda a: cut(a, 72),
    ),
    "K that 16 does not divide": ("a", "K that 32 divides", lambda a: cut(a, 77)),
    "another K for the weights": (
        "b", "shape", lambda a: replace(a, b=a.b[..., :64].contiguous()),
    ),
    "weights stored [E, K, N]": (
        "b", "contiguous last dimension",
        lambda a: replace(a, b=a.b.mT.contiguous().mT),
    ),
    "factors of groups, not of experts": (
        "expert_scales", "shape", lambda a: replace(a, expert_scales=torch.ones(3)),
    ),
    "factors in half precision": (
        "expert_scales", "dtype", lambda a: replace(a, expert_scales=a.expert_scales.bfloat16()),
    ),
    "a result of integers": ("out_dtype", "float", lambda a: replace(a, out_dtype=torch.int8)),
}  # fmt: skip


def bytes_of(a):
    values = [getattr(a, field.name) for field in fields(a)]
    return [v.contiguous().view(torch.uint8).clone() for v in values if isinstance(v, torch.Tensor)]


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_named_and_nothing_is_written(what):
    argument, words, wrong = BAD[what]
    a = wrong(op.sample_inputs(CASE))
    before = bytes_of(a)
    with pytest.raises(ArgumentError) as error:
        op.OP.call(a)
    assert error.value.argument == argument, error.value
    assert words in str(error.value)
    assert all(map(torch.equal, before, bytes_of(a)))


def test_a_quantised_tensor_needs_its_scales():
    a = op.sample_inputs(CASE)
    for name in ("a_scales", "b_scales", "expert_scales"):
        with pytest.raises(ArgumentError, match=f": {name}: expected a tensor, got None"):
            op.OP.call(replace(a, **{name: None}))
    for name in ("gate", "up", "down"):
        weights = moe.sample_inputs(MoeCase("nvfp4", weight_format="nvfp4", inner=96))
        with pytest.raises(
            ArgumentError, match=f"{name}_.*scale: expected a tensor, since weights are nvfp4"
        ):
            moe.OP.call(replace(weights, **{f"{name}_scale": None}))


def test_a_graph_traces_with_what_only_values_show():
    """A graph can be traced although only values would show the fault: a fake tensor has only
    metadata. The values are checked when the op runs."""
    a = with_ids(0, 9, 2)(op.sample_inputs(CASE))
    meta = {f.name: getattr(a, f.name) for f in fields(a)}
    meta = {n: v.to("meta") if isinstance(v, torch.Tensor) else v for n, v in meta.items()}
    assert op.OP.call(op.Nvfp4MatmulArguments(**meta)).shape == (191, 144)


def test_all_rows_on_one_expert_and_no_groups_at_all_are_ordinary():
    one = op.Nvfp4Case("one", (300,), (4,))
    a = op.sample_inputs(one)
    assert op.OP.call(a).count_nonzero() == a.a.shape[0] * a.b.shape[1]
    assert op.OP.call(replace(a, num_active_experts=0)).count_nonzero() == 0
    none = op.sample_inputs(op.Nvfp4Case("none", (0, 0, 0), (0, 1, 2)))
    assert op.OP.call(none).shape == (0, 144)


def test_buffers_may_be_longer_than_the_groups_in_use():
    """The op does not read the memory behind the active groups."""
    a = op.sample_inputs(CASE)
    tail = torch.tensor([-77], dtype=torch.int32)
    longer = {
        name: torch.cat((getattr(a, name), tail))
        for name in ("group_offsets", "group_scale_offsets", "expert_ids")
    }
    want = op.OP.call(a)
    assert torch.equal(op.OP.call(replace(a, **longer, num_active_experts=3)), want)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint32])
def test_offsets_of_every_dtype(dtype):
    a = op.sample_inputs(CASE)
    names = ("group_offsets", "group_scale_offsets")
    other = {name: getattr(a, name).to(dtype) for name in names}
    assert torch.equal(op.OP.call(replace(a, **other)), op.OP.call(a))


def test_rows_that_tma_cannot_reach_go_to_the_reference():
    a = op.sample_inputs(CASE)
    wide = torch.zeros(191, 88, dtype=torch.uint8)
    wide[:, :80] = a.a
    odd = replace(a, a=wide[:, :80])
    assert "a: strides [88] are not multiples of 16 bytes" in op.OP.plan_for(odd, "sm100").reason
    assert torch.equal(op.OP.call(odd), op.OP.call(a))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
@pytest.mark.parametrize("sizes", [(31, 97, 63), (131, 97, 263)], ids=["swapped", "tiled"])
def test_gpu_indices_that_nothing_checks_reach_no_other_memory(sizes, monkeypatch):
    """On a GPU, values are checked only on request. Bad indices must reach no other memory, and
    groups whose own numbers are good must give right results."""
    a = op.sample_inputs(replace(CASE, sizes=sizes, ids=(0, 3, 2)), "cuda")
    want = op.OP.call(a)
    whole, rest = sum(sizes), sum(sizes[:2])

    def changed(name, place, value):
        tensor = getattr(a, name).clone()
        tensor[place] = value
        return replace(a, **{name: tensor})

    # `good` is the number of rows, from the first on, whose results do not change.
    for wrong, good in (
        (changed("group_offsets", -1, 1 << 20), whole),
        (changed("group_offsets", 2, 20), 20),
        (changed("group_offsets", 1, -(1 << 20)), 0),
        (changed("group_scale_offsets", 2, 1 << 20), rest),
        (changed("group_scale_offsets", 2, -(1 << 20)), rest),
        (changed("expert_ids", 2, 77), rest),
    ):
        got = op.OP.call(wrong)
        assert torch.equal(got[:good], want[:good])
        assert wrong.expert_ids[2] != 77 or not got[rest:].any()
        monkeypatch.setenv("TILEWRIGHT_DEBUG", "1")
        with pytest.raises(ArgumentError):
            op.OP.call(wrong)
        monkeypatch.delenv("TILEWRIGHT_DEBUG")
