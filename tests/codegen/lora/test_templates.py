"""The emitted LoRA kernels against the ops' references in float64, on Triton's interpreter. What
runs is the very source emitted for SM100."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from tilewright.codegen.build import load_interpreted
from tilewright.codegen.lora import expand_specs as lora_expand_kernels
from tilewright.codegen.lora import shrink_specs as lora_shrink_kernels
from tilewright.codegen.lora import specs as lora_kernels
from tilewright.ops.lora import expand as lora_expand
from tilewright.ops.lora import shrink as lora_shrink
from tilewright.ops.lora.cases import EXPAND_CASES, SHRINK_CASES
from tilewright.ops.lora.operands import expand_problem, row_counts, shrink_problem

KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# A short K is as good a test of indices, and the interpreter is slow.
SHRINK = [
    replace(c, hidden=min(c.hidden, 96))
    for c in SHRINK_CASES
    if c.dtype in KERNEL_DTYPES and c.total_rows
]
EXPAND = [c for c in EXPAND_CASES if c.dtype in KERNEL_DTYPES and c.total_rows]
SHRINK_CONFIGS = {
    "tiled": lora_shrink_kernels.TiledShrink(16, 64, 1, 4, 2),
    "split": lora_shrink_kernels.TiledShrink(32, 16, 3, 4, 2, (16,)),
    "split_parts": lora_shrink_kernels.TiledShrink(16, 32, 2, 4, 2, (16, 32)),
    "few": lora_shrink_kernels.FewShrink(16, 8, 16, 2, 2, 2),
    "row": lora_shrink_kernels.RowShrink(1, 16, 64, 4),
    "rows": lora_shrink_kernels.RowShrink(4, 8, 64, 4),
}
# A program for each row.
FEW_ROWS = 30
# Parts are exchanged alike whatever the rank; the interpreter takes long for high ones.
EXCHANGES = ("split", "split_parts")
EXPAND_CONFIGS = {
    "row": lora_expand_kernels.ExpandConfig(1, 32, 16, 4),
    "tile": lora_expand_kernels.ExpandConfig(16, 64, 16, 4),
}


def run(spec, grid, values):
    load_interpreted(spec)[grid](**{name: values[name] for name, _ in spec.signature})


def as_double(a):
    values = {f.name: getattr(a, f.name) for f in fields(a)}
    return replace(
        a,
        **{
            name: value.double()
            for name, value in values.items()
            if isinstance(value, torch.Tensor) and value.is_floating_point()
        },
    )


def as_it_is(problem, counts, values):
    return problem


def shrunk(a, config, prepare=as_it_is):
    """What the kernel of one config makes of a call, in memory that held NaN."""
    out = lora_shrink.fake(a).fill_(torch.nan)
    counts = row_counts(a, out.shape[1], out.shape[1])
    problem, values = shrink_problem(a, counts)
    problem = prepare(problem, counts, values)
    grid = lora_shrink_kernels.shrink_grid(problem, config, counts)
    values["out_ptr"] = out
    elements, places = lora_shrink_kernels.shrink_scratch(problem, config, counts)
    values["workspace_ptr"] = torch.full((elements,), torch.nan)
    values["counters_ptr"] = torch.zeros(places, dtype=torch.int32)
    run(lora_shrink_kernels.shrink_spec(problem, config, "sm100"), grid, values)
    assert not values["counters_ptr"].any()
    return out


def sort_first(problem, counts, values):
    """As `shrink_problem` would have it for more rows than programs sort by themselves."""
    form = replace(problem.form, addressing="sorted", offset_dtype="i32", inclusive=True, rows=1)
    config = lora_kernels.OrderConfig(16, 32, 8)
    values["order_ptr"] = torch.full((counts.total_rows,), -7, dtype=torch.int32)
    values["ends_ptr"] = torch.full((form.num_adapters,), -7, dtype=torch.int32)
    grid = lora_kernels.order_grid(config, counts.total_rows)
    run(lora_kernels.order_spec(form, config, "sm100"), grid, values)
    values |= {"offsets_ptr": values["ends_ptr"], "num_groups": form.num_adapters}
    return replace(problem, form=form)


def with_form(problem, **changes):
    return replace(problem, form=replace(problem.form, **changes))


@pytest.mark.parametrize(
    ("case", "config"),
    [
        pytest.param(case, config, id=f"{case.name}-{name}")
        for case in SHRINK
        for name, config in SHRINK_CONFIGS.items()
        if config.block_m > 1 or case.total_rows <= FEW_ROWS
        if name not in EXCHANGES or max(case.ranks) <= 64
    ],
)
def test_shrink_computes_the_op(case, config):
    a = lora_shrink.sample_inputs(case)
    exact = lora_shrink.reference(as_double(a))
    problem = lora_shrink.OP.tolerances[case.dtype].problem(shrunk(a, config), exact)
    assert problem is None, problem


def expanded(a, config, prepare=as_it_is):
    outputs = tuple(out.fill_(torch.nan) for out in lora_expand.fake(a))
    counts = row_counts(a, a.s.shape[1], a.num_tokens)
    problem, values = expand_problem(a, counts, outputs)
    problem = prepare(problem, counts, values)
    grid = lora_expand_kernels.expand_grid(problem, config, counts)
    run(lora_expand_kernels.expand_spec(problem, config, "sm100"), grid, values)
    return outputs


def check_expanded(case, a, outputs):
    exact = lora_expand.reference(as_double(a))
    for out, expected in zip(outputs, exact, strict=True):
        problem = lora_expand.OP.tolerances[case.dtype].problem(out, expected)
        assert problem is None, problem


@pytest.mark.parametrize(
    ("case", "config"),
    [
        pytest.param(case, config, id=f"{case.name}-{name}")
        for case in EXPAND
        for name, config in EXPAND_CONFIGS.items()
        if config.block_m > 1 or case.total_rows <= FEW_ROWS
    ],
)
def test_expand_computes_the_op(case, config):
    a = lora_expand.sample_inputs(case)
    check_expanded(case, a, expanded(a, config))


def test_factors_of_adapters_may_lie_anywhere():
    """One number for all of them, and a column of a table."""
    case = next(case for case in EXPAND if case.name == "rows_many")
    a = lora_expand.sample_inputs(case)
    column = torch.arange(3.0 * case.num_adapters).view(case.num_adapters, 3)[:, 1]
    for scales in (torch.tensor(0.5).expand(case.num_adapters), column):
        given = replace(a, scales=scales)
        check_expanded(case, given, expanded(given, EXPAND_CONFIGS["tile"]))


@pytest.mark.parametrize("name", ["rows", "groups"])
@pytest.mark.parametrize("config", EXPAND_CONFIGS)
def test_a_token_without_rows_is_copied_and_no_id_is_read(name, config):
    case = next(case for case in EXPAND if case.name == name)
    a = lora_expand.sample_inputs(case)
    bases = {letter: None if (t := getattr(a, letter)) is None else t[:1] for letter in "qkv"}
    ids = None if a.expert_ids is None else a.expert_ids[:0]
    offsets = None if a.a_offsets is None else a.a_offsets[:1] * 0
    a = replace(a, **bases, s=a.s[:, :0], expert_ids=ids, a_offsets=offsets)
    lora_expand.validate(a)
    problem, _ = expand_problem(a, row_counts(a, 0, 1), lora_expand.fake(a))
    spec = lora_expand_kernels.expand_spec(problem, EXPAND_CONFIGS[config], "sm90")
    assert not {"ids_ptr", "offsets_ptr"} & dict(spec.signature).keys()
    check_expanded(case, a, expanded(a, EXPAND_CONFIGS[config]))


SHRINK_ROWS = [c for c in SHRINK if c.rows in ("rows", "sequences")]


def by_sequences(problem, counts, values):
    return with_form(problem, addressing="sequences")


@pytest.mark.parametrize("case", SHRINK_ROWS, ids=lambda case: case.name)
@pytest.mark.parametrize("prepare", [sort_first, by_sequences])
def test_shrink_of_many_rows(case, prepare):
    a = lora_shrink.sample_inputs(case)
    exact = lora_shrink.reference(as_double(a))
    out = shrunk(a, SHRINK_CONFIGS["tiled"], prepare)
    problem = lora_shrink.OP.tolerances[case.dtype].problem(out, exact)
    assert problem is None, problem


@pytest.mark.parametrize("name", ["rows_many", "packed", "sequences"])
@pytest.mark.parametrize("prepare", [sort_first, by_sequences])
def test_expand_of_many_rows(name, prepare):
    case = next(case for case in EXPAND if case.name == name)
    a = lora_expand.sample_inputs(case)
    check_expanded(case, a, expanded(a, EXPAND_CONFIGS["tile"], prepare))


def test_rows_are_sorted_by_adapter_and_stay_in_order():
    a = lora_shrink.sample_inputs(SHRINK_ROWS[1])
    counts = row_counts(a, a.rows, a.rows)
    problem, values = shrink_problem(a, counts)
    sort_first(problem, counts, values)
    ids = a.expert_ids.tolist()
    adapters = [*range(problem.form.num_adapters), -1]
    assert values["order_ptr"].tolist() == [r for e in adapters for r in range(70) if ids[r] == e]
    assert values["ends_ptr"].tolist() == [
        sum(0 <= i <= e for i in ids) for e in range(problem.form.num_adapters)
    ]
