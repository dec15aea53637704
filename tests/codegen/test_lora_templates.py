"""The emitted LoRA kernels against the ops' references in float64, on Triton's interpreter. What
runs is the very source emitted for SM100."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from tilewright.codegen import lora_kernels as kernels
from tilewright.codegen.build import load_interpreted
from tilewright.ops import lora_expand, lora_shrink
from tilewright.ops.lora_problems import expand_problem, row_counts, shrink_problem
from tilewright.ops.lora_samples import EXPAND_CASES, SHRINK_CASES

KERNEL_DTYPES = (torch.bfloat16, torch.float16)
SHRINK = [c for c in SHRINK_CASES if c.dtype in KERNEL_DTYPES and c.total_rows]
EXPAND = [c for c in EXPAND_CASES if c.dtype in KERNEL_DTYPES and c.total_rows]
SHRINK_CONFIGS = {
    "tiled": kernels.TiledShrink(16, 64, 1, 4, 2),
    "split": kernels.TiledShrink(32, 16, 3, 4, 2),
    "few": kernels.FewShrink(16, 8, 16, 2, 2, 2),
    "row": kernels.RowShrink(4, 64, 4),
}
EXPAND_CONFIGS = {
    "row": kernels.ExpandConfig(1, 32, 16, 4),
    "tile": kernels.ExpandConfig(16, 64, 16, 4),
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


def shrunk(a, config):
    """What the kernel of one config makes of a call, in memory that held NaN."""
    out = lora_shrink.fake(a).fill_(torch.nan)
    counts = row_counts(a, out.shape[1], out.shape[1])
    problem, values = shrink_problem(a, counts)
    grid = kernels.shrink_grid(problem, config, counts)
    values["out_ptr"] = out
    if isinstance(config, kernels.TiledShrink):
        elements = grid[1] * kernels.scratch_elements(problem, config)
        values["workspace_ptr"] = torch.full((elements,), torch.nan)
        values["counters_ptr"] = torch.zeros(grid[1], dtype=torch.int32)
    run(kernels.shrink_spec(problem, config, "sm100"), grid, values)
    if isinstance(config, kernels.TiledShrink):
        assert not values["counters_ptr"].any()
    return out


@pytest.mark.parametrize("config", SHRINK_CONFIGS.values(), ids=SHRINK_CONFIGS)
@pytest.mark.parametrize("case", SHRINK, ids=lambda case: case.name)
def test_shrink_computes_the_op(case, config):
    a = lora_shrink.sample_inputs(case)
    exact = lora_shrink.reference(as_double(a))
    problem = lora_shrink.OP.tolerances[case.dtype].problem(shrunk(a, config), exact)
    assert problem is None, problem


@pytest.mark.parametrize("config", EXPAND_CONFIGS.values(), ids=EXPAND_CONFIGS)
@pytest.mark.parametrize("case", EXPAND, ids=lambda case: case.name)
def test_expand_computes_the_op(case, config):
    a = lora_expand.sample_inputs(case)
    exact = lora_expand.reference(as_double(a))
    outputs = tuple(out.fill_(torch.nan) for out in lora_expand.fake(a))
    counts = row_counts(a, a.s.shape[1], a.num_tokens)
    problem, values = expand_problem(a, counts, outputs)
    grid = kernels.expand_grid(problem, config, counts)
    run(kernels.expand_spec(problem, config, "sm100"), grid, values)
    for out, expected in zip(outputs, exact, strict=True):
        problem = lora_expand.OP.tolerances[case.dtype].problem(out, expected)
        assert problem is None, problem
