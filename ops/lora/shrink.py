"""`shrink_qkv_permute_3mn`: the first half of multi-LoRA on an attention layer's projections.

All projections are computed in one pass over `a`, and stored as planes. Modular MAX has an op of
the same name, which does not write rows without an adapter. This op sets such rows to zero.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Any

import torch

from tilewright.codegen.lora.plan import takes_row_kernel
from tilewright.ops.checks import FLOAT_DTYPES, ArgumentError, check_operand, holds
from tilewright.ops.contract import FusedOp, emitted_kernel, register
from tilewright.ops.formats.expert_weight import ExpertWeight
from tilewright.ops.lora.cases import SHRINK_CASES, sample_shrink
from tilewright.ops.lora.rows import (
    ERROR_MODEL,
    KERNEL_DTYPES,
    TOLERANCES,
    adapter_of_rows,
    check_row_values,
    check_rows,
)
from tilewright.ops.reference.expert_matmul import multiply_by_expert
from tilewright.ops.sampling import sampler_of
from tilewright.ops.schema import SymInt

NAME = "shrink_qkv_permute_3mn"


@dataclass(frozen=True)
class ShrinkArguments:
    """The arguments of `shrink_qkv_permute_3mn`, for M rows, K columns and G adapters of rank N.

    - `a` [M_a, K] with M_a >= M, and with a contiguous last dimension.
    - `b` [G, 3N, K]: the rows of q, then k, then v.
    - `q_weight`, `k_weight`, `v_weight` [G, R, K]: some or all of the three weights, instead of
      `b`. Their ranks R may differ. Weights have a's dtype and any strides, so that transposed
      weights and parts of one stack can be passed as views. If an adapter has a lower rank than R,
      its other rows are zeros.
    - `a_offsets`, `expert_ids`, `inclusive_offsets`, `num_active_experts`: the rows of each
      adapter, as in ops.lora.rows.
    - `num_rows`: M. If it is None, M = M_a.

    The result is [P, M, N] of a's dtype. It has one plane [M, N] for each weight that is given, in
    the order q, k, v. N is the largest rank, and columns past a smaller rank are zero. Bad values
    are offsets that decrease or exceed M, and adapters that do not exist. Bad values raise
    ArgumentError. If they are on a GPU, they are checked only with TILEWRIGHT_DEBUG=1. Without this
    check, the rows that a bad value belongs to have no adapter.
    """

    a: torch.Tensor
    b: torch.Tensor | None = None
    a_offsets: torch.Tensor | None = None
    expert_ids: torch.Tensor | None = None
    _: KW_ONLY
    q_weight: torch.Tensor | None = None
    k_weight: torch.Tensor | None = None
    v_weight: torch.Tensor | None = None
    inclusive_offsets: bool = False
    num_active_experts: SymInt | None = None
    num_rows: SymInt | None = None

    @cached_property
    def weights(self) -> tuple[torch.Tensor | None, ...]:
        """The weights [G, R, K] of q, k and v. A weight that is not given is None."""
        if self.b is None:
            return self.q_weight, self.k_weight, self.v_weight
        rank = self.b.shape[1] // 3
        return tuple(self.b[:, i * rank : (i + 1) * rank] for i in range(3))

    @property
    def rows(self) -> Any:
        """M, the number of rows."""
        return self.a.shape[0] if self.num_rows is None else self.num_rows

    @property
    def rank(self) -> Any:
        """N, the largest rank."""
        return max(weight.shape[1] for weight in self.weights if weight is not None)


def validate(a: ShrinkArguments) -> None:
    check_operand(NAME, "a", a.a, "[M_a, K]", (None, None), FLOAT_DTYPES, dense=True)
    num_adapters = _check_weights(a)
    if not (holds(a.rows >= 0) and holds(a.rows <= a.a.shape[0])):
        raise ArgumentError(NAME, "num_rows", f"at most the {a.a.shape[0]} rows of a", a.num_rows)
    check_rows(NAME, a, a.rows, num_adapters, a.a.device)


def _check_weights(a: ShrinkArguments) -> Any:
    """Checks the weights and returns the number of adapters. Raises ArgumentError."""
    given = [n for n in ("q_weight", "k_weight", "v_weight") if getattr(a, n) is not None]
    if a.b is not None:
        if given:
            raise ArgumentError(NAME, given[0], "None, because b has all three weights", "a tensor")
        given = ["b"]
    if not given:
        raise ArgumentError(
            NAME, "b", "b, or at least one of q_weight, k_weight and v_weight", None
        )
    num_adapters = getattr(a, given[0]).shape[0] if getattr(a, given[0]).dim() else None
    for name in given:
        weight = getattr(a, name)
        letters = "[G, 3N, K]" if name == "b" else "[G, R, K]"
        sizes = (num_adapters, None, a.a.shape[1])
        check_operand(NAME, name, weight, letters, sizes, (a.a.dtype,), a.a.device)
    if a.b is not None and not holds(a.b.shape[1] % 3 == 0):
        expected = "as many rows of q as of k and of v"
        raise ArgumentError(NAME, "b", expected, f"{a.b.shape[1]} rows")
    return num_adapters


def validate_values(a: ShrinkArguments) -> None:
    weight = next(w for w in a.weights if w is not None)
    check_row_values(NAME, a, a.rows, weight.shape[0])


def result_shape(a: ShrinkArguments) -> tuple[Any, Any, Any]:
    """Returns the shape of the result, [P, M, N]."""
    return sum(weight is not None for weight in a.weights), a.rows, a.rank


def fake(a: ShrinkArguments) -> torch.Tensor:
    return a.a.new_empty(result_shape(a))


def reference(a: ShrinkArguments) -> torch.Tensor:
    """Computes the following in fp32 (float64 for float64 a) for each projection p (q, k or v) and
    row m:

        out[p, m] = a[m] @ weight_p[e]^T

    e is the adapter of row m. weight_p is `q_weight`, `k_weight` or `v_weight`, or a third of `b`.
    A row without an adapter is zero.
    """
    out = fake(a).zero_()
    compute = torch.promote_types(a.a.dtype, torch.float32)
    adapter = adapter_of_rows(a, a.rows, a.a.device)
    weights = [weight for weight in a.weights if weight is not None]
    x = a.a[: a.rows].to(compute)
    for plane, weight in zip(out, weights, strict=True):
        plane[:, : weight.shape[1]] = multiply_by_expert(x, adapter, ExpertWeight(weight))
    return out


def slower(*, rows: Any, columns: int, hidden: Any, dtype: torch.dtype) -> str | None:
    """Returns why cuBLAS is faster than a kernel; None if a kernel is faster.

    The product has `rows` rows of `hidden` numbers, and weights with `columns` columns in total. In
    float32, a symbolic number of rows counts as a large number.
    """
    known = isinstance(rows, int) and isinstance(hidden, int)
    if dtype != torch.float32 or (known and takes_row_kernel(rows, columns, hidden)):
        return None
    return f"{rows} rows in float32: no tensor core multiplies them"


sample_inputs = sampler_of(ShrinkArguments, sample_shrink)


OP = register(
    FusedOp(
        name=NAME,
        arguments=ShrinkArguments,
        validate=validate,
        validate_values=validate_values,
        fake=fake,
        reference=reference,
        lowerings=(
            emitted_kernel("tilewright.ops.lora.lowering:shrink_steps", dtypes=KERNEL_DTYPES),
        ),
        cases=SHRINK_CASES,
        sample_inputs=sample_inputs,
        moving=frozenset({"a"}),
        tolerances=TOLERANCES,
        error_model=ERROR_MODEL,
        slower=slower,
    )
)
