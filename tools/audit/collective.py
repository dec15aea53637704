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
TOKEN_COUNTS = (1, 1024)


def collective_cases(target: Target) -> list[AuditCase]:
    return distinct([*_model_cases(target), *_odd_cases(target)])


def _model_cases(target: Target) -> Iterator[AuditCase]:
    for name, columns in MODELS.items():
        for ranks in RANKS:
            for tokens in TOKEN_COUNTS:
                yield _case(f"{name} {ranks} ranks T={tokens}", columns, ranks, tokens, target)


def _odd_cases(target: Target) -> Iterator[AuditCase]:
    """Rows that fill no power of two, in float16, with a weight in float32."""
    for tokens in TOKEN_COUNTS:
        name = f"float16 T={tokens}"
        yield _case(name, 2880, 2, tokens, target, "fp16", norm_dtype="fp32", offset=1.0)


def _case(
    name: str,
    columns: int,
    ranks: int,
    tokens: int,
    target: Target,
    dtype: str = "bf16",
    *,
    norm_dtype: str = "bf16",
    offset: float = 0.0,
) -> AuditCase:
    rows = Operand(dtype, (columns,))
    weight = Operand(norm_dtype, (1,))
    problem = ReduceProblem(columns, ranks, rows, rows, weight, 1e-5, offset)
    spec = reduce_spec(problem, reduce_config(problem, tokens, target), target.name)
    return AuditCase(f"collective {name}", spec, Expectations())
