"""Lists the audit cases of sums over ranks. Their kernels are compiled with every supported release
of Triton."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tilewright.codegen.audit import Expectations
from tilewright.codegen.targets import Target
from tilewright.ops.collective.all_reduce_residual_norm import AllReduceResidualNormArguments
from tilewright.ops.collective.lowering import all_reduce_residual_norm_steps
from tilewright.ops.runtime.program import Planner, drive
from tilewright.tools.audit.cases import AuditCase, audited, distinct, meta

# The hidden size of each named model.
MODELS = {"Llama-3-8B": 4096, "DeepSeek-V3": 7168, "Llama-3-70B": 8192}
RANKS = (1, 2, 8)


@audited("collective")
def collective_cases(target: Target) -> list[AuditCase]:
    return distinct([*_model_cases(target), *_odd_case(target)])


def _model_cases(target: Target) -> Iterator[AuditCase]:
    for name, columns in MODELS.items():
        for ranks in RANKS:
            x, weight = meta(1, columns), meta(columns)
            a = AllReduceResidualNormArguments(
                x, x, weight, group="ranks", num_ranks=ranks, norm_eps=1e-5
            )
            yield _case(f"{name} {ranks} ranks", a, target)


def _odd_case(target: Target) -> Iterator[AuditCase]:
    """Yields a case in float16 with a float32 weight, whose rows have a length that is not a power
    of two."""
    x, weight = meta(1, 2880, dtype=torch.float16), meta(2880, dtype=torch.float32)
    a = AllReduceResidualNormArguments(
        x, x, weight, group="ranks", num_ranks=2, norm_eps=1e-5, norm_offset=1.0
    )
    yield _case("float16", a, target)


def _case(name: str, a: AllReduceResidualNormArguments, target: Target) -> AuditCase:
    """Plans a case without `plan_for`, because `plan_for` needs the ranks to exist."""
    program = drive(all_reduce_residual_norm_steps(a, target), Planner(target), keep=True)
    return AuditCase(f"collective {name}", program.specs[0], Expectations())
