"""Sums over ranks that every compiler release is tried on."""

from __future__ import annotations

from collections.abc import Iterator

from tilewright.codegen.audit import Expectations
from tilewright.codegen.collective.plan import reduce_config
from tilewright.codegen.collective.problem import ReduceProblem
from tilewright.codegen.collective.specs import reduce_spec
from tilewright.codegen.operand import Operand
from tilewright.codegen.targets import Target
from tilewright.tools.audit.cases import AuditCase, distinct

# name -> hidden size.
MODELS = {"Llama-3-8B": 4096, "DeepSeek-V3": 7168, "Llama-3-70B": 8192}
RANKS = (1, 2, 8)


def collective_cases(target: Target) -> list[AuditCase]:
    return distinct([*_model_cases(target), *_odd_case(target)])


def _model_cases(target: Target) -> Iterator[AuditCase]:
    for name, columns in MODELS.items():
        for ranks in RANKS:
            yield _case(f"{name} {ranks} ranks", columns, ranks, target)


def _odd_case(target: Target) -> Iterator[AuditCase]:
    """Rows that fill no power of two, in float16, with a weight in float32."""
    yield _case("float16", 2880, 2, target, "fp16", norm_dtype="fp32", offset=1.0)


def _case(
    name: str,
    columns: int,
    ranks: int,
    target: Target,
    dtype: str = "bf16",
    *,
    norm_dtype: str = "bf16",
    offset: float = 0.0,
) -> AuditCase:
    rows = Operand(dtype, (columns,))
    weight = Operand(norm_dtype, (1,))
    problem = ReduceProblem(columns, ranks, rows, rows, weight, 1e-5, offset)
    spec = reduce_spec(problem, reduce_config(problem, target), target.name)
    return AuditCase(f"collective {name}", spec, Expectations())
