"""Tests the emitted LoRA kernels with given tiles against the ops' references in float64, on
Triton's interpreter. The interpreter runs exactly the source that is emitted for SM100."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.interpreted import Interpreter
from tests.ops.test_contract import as_double
from tilewright.codegen.lora.kernels import ExpandConfig, FewShrink, RowShrink, TiledShrink
from tilewright.codegen.targets import SM100
from tilewright.ops.lora import expand, shrink
from tilewright.ops.lora.cases import EXPAND_CASES, SHRINK_CASES, LoraCase
from tilewright.ops.lora.lowering import expand_steps, shrink_steps
from tilewright.ops.runtime.program import Launch, SplitK, drive

KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# K is short: a short K tests the indices as well as a long one, and the interpreter is slow.
SHRINK = [
    replace(c, hidden=min(c.hidden, 96))
    for c in SHRINK_CASES
    if c.dtype in KERNEL_DTYPES and c.total_rows
]
EXPAND = [c for c in EXPAND_CASES if c.dtype in KERNEL_DTYPES and c.total_rows]
SHRINK_CONFIGS = {
    "tiled": TiledShrink(16, 64, 1, 4, 2),
    "split": TiledShrink(32, 16, 3, 4, 2, (16,)),
    "split_parts": TiledShrink(16, 32, 2, 4, 2, (16, 32)),
    "few": FewShrink(16, 8, 16, 2, 2, 2),
    "row": RowShrink(1, 16, 64, 4),
    "rows": RowShrink(4, 8, 64, 4),
}
# Each row has its own program.
FEW_ROWS = 30
# These kernels run with low ranks only. They find the columns in the same way for every rank, and
# the interpreter is slow for high ranks.
OF_LOW_RANK = ("split", "split_parts", "few", "rows")


def in_turn(number: int, name: str) -> bool:
    """Whether a case runs with a configuration. Each case runs with both plain configurations, and
    with two of the other four in turn."""
    return name not in OF_LOW_RANK or OF_LOW_RANK.index(name) % 2 == number % 2


EXPAND_CONFIGS = {"row": ExpandConfig(1, 32, 16, 4), "tile": ExpandConfig(16, 64, 16, 4)}


def performed(steps):
    """Performs the steps, and checks that split-K left its counters at zero."""
    program = drive(steps, Interpreter(SM100))
    for step, answer in program.steps:
        assert not isinstance(step, SplitK) or not answer[1].any()
    return program


def check_shrunk(case, config):
    a = shrink.sample_inputs(case)
    out = performed(shrink_steps(a, SM100, config)).outcome.result
    problem = shrink.OP.tolerances[case.dtype].problem(out, shrink.reference(as_double(a)))
    assert problem is None, problem


def check_expanded(a, config):
    program = performed(expand_steps(a, SM100, config))
    exact = expand.reference(as_double(a))
    for out, expected in zip(program.outcome.result, exact, strict=True):
        problem = expand.OP.tolerances[a.s.dtype].problem(out, expected)
        assert problem is None, problem
    return program


@pytest.mark.parametrize(
    ("case", "config"),
    [
        pytest.param(case, config, id=f"{case.name}-{name}")
        for number, case in enumerate(SHRINK)
        for name, config in SHRINK_CONFIGS.items()
        if in_turn(number, name)
        if config.block_m > 4 or case.total_rows <= FEW_ROWS
        if name not in OF_LOW_RANK or max(case.ranks) <= 64
    ],
)
def test_shrink_computes_the_op(case, config):
    check_shrunk(case, config)


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
    check_expanded(expand.sample_inputs(case), config)


def test_factors_of_adapters_may_lie_anywhere():
    """Tests one factor for all adapters, and factors that are a column of a table."""
    case = next(case for case in EXPAND if case.name == "rows_many")
    a = expand.sample_inputs(case)
    column = torch.arange(3.0 * case.num_adapters).view(case.num_adapters, 3)[:, 1]
    for scales in (torch.tensor(0.5).expand(case.num_adapters), column):
        check_expanded(replace(a, scales=scales), EXPAND_CONFIGS["tile"])


@pytest.mark.parametrize("name", ["rows", "groups"])
@pytest.mark.parametrize("config", EXPAND_CONFIGS)
def test_a_token_without_rows_is_copied_and_no_id_is_read(name, config):
    case = next(case for case in EXPAND if case.name == name)
    a = expand.sample_inputs(case)
    bases = {letter: None if (t := getattr(a, letter)) is None else t[:1] for letter in "qkv"}
    ids = None if a.expert_ids is None else a.expert_ids[:0]
    offsets = None if a.a_offsets is None else a.a_offsets[:1] * 0
    a = replace(a, **bases, s=a.s[:, :0], expert_ids=ids, a_offsets=offsets)
    expand.validate(a)
    (spec,) = check_expanded(a, EXPAND_CONFIGS[config]).specs
    assert not {"ids_ptr", "offsets_ptr"} & dict(spec.signature).keys()


# There are more rows than the programs search. So the rows are sorted first, or they are in long
# sequences.
MANY = LoraCase("sorted", num_rows=600, num_adapters=9, hidden=24, none_every=7, widths=(40, 17, 9))
MANY_ROWS = {
    "sorted": MANY,
    "short sequences, sorted": replace(MANY, rows="sequences", num_sequences=200),
    "long sequences": replace(MANY, rows="sequences", num_rows=640, num_sequences=8),
    "adapters that are low": replace(MANY, num_adapters=2, none_every=2, layout="transposed"),
}
BEHIND = replace(MANY, name="rows of the base model behind", base_rows=9, bases="packed")


@pytest.mark.parametrize("name", MANY_ROWS)
def test_shrink_of_many_rows(name):
    check_shrunk(MANY_ROWS[name], SHRINK_CONFIGS["tiled"])


@pytest.mark.parametrize("case", [*MANY_ROWS.values(), replace(BEHIND, packed=True)])
def test_expand_of_many_rows(case):
    check_expanded(expand.sample_inputs(case), EXPAND_CONFIGS["tile"])


def test_rows_are_sorted_by_adapter_and_stay_in_order():
    a = shrink.sample_inputs(MANY)
    program = performed(shrink_steps(a, SM100, SHRINK_CONFIGS["tiled"]))
    sort = next(step for step, _ in program.steps if isinstance(step, Launch))
    ids = a.expert_ids.tolist()
    adapters = [*range(MANY.num_adapters), -1]
    in_order = [row for e in adapters for row in range(MANY.num_rows) if ids[row] == e]
    assert sort.values["order_ptr"].tolist() == in_order
    ends = [sum(0 <= i <= e for i in ids) for e in range(MANY.num_adapters)]
    assert sort.values["ends_ptr"].tolist() == ends
