"""`lora_expand_add`: the second half of multi-LoRA, whose result is added to the projections q, k
and v."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch

from tilewright.ops.checks import (
    FLOAT_DTYPES,
    ArgumentError,
    check_number,
    check_operand,
    check_shape,
    check_tensor,
    holds,
)
from tilewright.ops.contract import FusedOp, emitted_kernel, register
from tilewright.ops.formats.expert_weight import ExpertWeight
from tilewright.ops.lora.cases import EXPAND_CASES, sample_expand
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

NAME = "lora_expand_add"
Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class ExpandArguments:
    """The arguments of `lora_expand_add`, for T rows, of which the first M may have adapters, and G
    adapters. A projection has W columns.

    - `s` [P, M, N], with a contiguous last dimension: the result of `shrink_qkv_permute_3mn`. It
      has one plane [M, N] for each weight that is given.
    - `q_weight`, `k_weight`, `v_weight` [G, W, R] with R <= N, and with any strides; None for a
      projection without an adapter. Weights and bases have s's dtype.
    - `q`, `k`, `v` [T, W], with a contiguous last dimension: the bases, to which the deltas are
      added. T >= M, and rows from M on are copied. If a base is None, the result is the delta
      alone, and T = M.
    - `scales` [G], any float dtype: a factor for each adapter.
    - `scale`: one number, or one number for each of q, k and v. If it is empty, the scale is 1.
    - `a_offsets`, `expert_ids`, `inclusive_offsets`, `num_active_experts`: as in ops.lora.rows.
    - `packed`: whether the first result is [T, W_q + W_k + W_v], with the columns of q, k and v
      side by side. The other results then have shape [0].

    The results are [T, W] for q, k and v. The result of a projection without a weight is a copy of
    its base. The result of a projection without a weight and without a base has shape [0]. Bad
    values raise errors as in ShrinkArguments.
    """

    s: torch.Tensor
    q: torch.Tensor | None
    k: torch.Tensor | None
    v: torch.Tensor | None
    q_weight: torch.Tensor | None
    k_weight: torch.Tensor | None
    v_weight: torch.Tensor | None
    a_offsets: torch.Tensor | None = None
    expert_ids: torch.Tensor | None = None
    _: KW_ONLY
    scales: torch.Tensor | None = None
    scale: Sequence[float] = ()
    inclusive_offsets: bool = False
    num_active_experts: SymInt | None = None
    packed: bool = False

    @property
    def weights(self) -> tuple[torch.Tensor | None, ...]:
        return self.q_weight, self.k_weight, self.v_weight

    @property
    def bases(self) -> tuple[torch.Tensor | None, ...]:
        return self.q, self.k, self.v

    @property
    def factors(self) -> tuple[float, float, float]:
        """The numbers by which the deltas of q, k and v are multiplied."""
        given = tuple(self.scale) or (1.0,)
        return (given * 3)[:3] if len(given) == 1 else given  # type: ignore[return-value]

    @property
    def widths(self) -> tuple[Any, Any, Any]:
        """The numbers of columns of q, k and v; 0 if there is neither a base nor a weight."""
        pairs = zip(self.weights, self.bases, strict=True)
        widths = [
            weight.shape[1] if weight is not None else 0 if base is None else base.shape[1]
            for weight, base in pairs
        ]
        return widths[0], widths[1], widths[2]

    @property
    def num_tokens(self) -> Any:
        """T, the number of rows of the results."""
        base = next((base for base in self.bases if base is not None), None)
        return self.s.shape[1] if base is None else base.shape[0]


def validate(a: ExpandArguments) -> None:
    planes = sum(weight is not None for weight in a.weights)
    if planes == 0:
        raise ArgumentError(
            NAME, "q_weight", "at least one of q_weight, k_weight and v_weight", None
        )
    check_operand(NAME, "s", a.s, "[P, M, N]", (planes, None, None), FLOAT_DTYPES, dense=True)
    first = next(weight for weight in a.weights if weight is not None)
    num_adapters = first.shape[0] if first.dim() else None
    for letter, weight, base in zip("qkv", a.weights, a.bases, strict=True):
        if weight is not None:
            _check_weight(a, f"{letter}_weight", weight, num_adapters)
        if base is not None:
            _check_base(a, letter, base, None if weight is None else weight.shape[1])
    if not holds(a.num_tokens >= a.s.shape[1]):
        expected = f"at least the {a.s.shape[1]} rows of s"
        raise ArgumentError(NAME, "q", expected, f"{a.num_tokens} rows")
    if len(a.scale) not in (0, 1, 3):
        raise ArgumentError(NAME, "scale", "no, one or three finite numbers", list(a.scale))
    for factor in a.scale:
        check_number(NAME, "scale", factor)
    if a.scales is not None:
        check_operand(NAME, "scales", a.scales, "[G]", (num_adapters,), FLOAT_DTYPES, a.s.device)
    check_rows(NAME, a, a.s.shape[1], num_adapters, a.s.device)


def _check_weight(a: ExpandArguments, name: str, weight: torch.Tensor, num_adapters: Any) -> None:
    sizes, dtypes = (num_adapters, None, None), (a.s.dtype,)
    check_operand(NAME, name, weight, "[G, W, R]", sizes, dtypes, a.s.device)
    if not holds(weight.shape[2] <= a.s.shape[2]):
        expected = f"a rank of at most {a.s.shape[2]}, the rank of s"
        raise ArgumentError(NAME, name, expected, weight.shape[2])


def _check_base(a: ExpandArguments, name: str, base: torch.Tensor, width: Any) -> None:
    check_shape(NAME, name, base, "[T, W]", (None, width))
    sizes, dtypes = (a.num_tokens, None), (a.s.dtype,)
    check_operand(NAME, name, base, "[T, W]", sizes, dtypes, a.s.device, dense=True)


def validate_values(a: ExpandArguments) -> None:
    weight = next(w for w in a.weights if w is not None)
    check_row_values(NAME, a, a.s.shape[1], weight.shape[0])


def result_shapes(a: ExpandArguments) -> tuple[tuple[Any, ...], ...]:
    """Returns the shapes of the three results."""
    tokens, widths = a.num_tokens, a.widths
    if a.packed:
        return (tokens, sum(widths)), (0,), (0,)
    given = [w is not None or b is not None for w, b in zip(a.weights, a.bases, strict=True)]
    pairs = zip(widths, given, strict=True)
    return tuple([(tokens, width) if there else (0,) for width, there in pairs])


def fake(a: ExpandArguments) -> Outputs:
    q, k, v = (a.s.new_empty(shape) for shape in result_shapes(a))
    return q, k, v


def reference(a: ExpandArguments) -> Outputs:
    """Computes the following in fp32 (float64 for float64 s) for each projection p (q, k or v) and
    row t:

        out_p[t] = base_p[t] + scale_p * scales[e] * (s[p, t, :R] @ weight_p[e]^T)

    e is the adapter of row t. base_p is the argument `q`, `k` or `v` (0 if it is None). weight_p is
    `q_weight`, `k_weight` or `v_weight`. A row without an adapter equals its base.
    """
    outputs = fake(a)
    widths = a.widths
    targets = outputs[0].split(widths, dim=1) if a.packed else outputs
    num_rows = a.s.shape[1]
    adapter = adapter_of_rows(a, num_rows, a.s.device)
    compute = torch.promote_types(a.s.dtype, torch.float32)
    planes = iter(a.s)
    parts = zip(targets, a.weights, a.bases, a.factors, strict=True)
    for target, weight, base, factor in parts:
        if base is None and weight is None:
            continue
        total = target.new_zeros(target.shape, dtype=compute) if base is None else base.to(compute)
        if weight is not None:
            delta = _deltas(a, next(planes).to(compute), adapter, weight, factor)
            total = total.index_add(0, torch.arange(num_rows, device=a.s.device), delta)
        target.copy_(total)
    return outputs


def _deltas(
    a: ExpandArguments,
    rows: torch.Tensor,
    adapter: torch.Tensor,
    weight: torch.Tensor,
    factor: float,
) -> torch.Tensor:
    """Returns the scaled deltas [M, W] of one projection. They have the precision of `rows` [M,
    N]."""
    deltas = multiply_by_expert(rows[:, : weight.shape[2]], adapter, ExpertWeight(weight))
    if a.scales is None:
        return factor * deltas
    each = ExpertWeight(a.scales.to(rows.dtype)[:, None, None])
    return factor * multiply_by_expert(rows.new_ones(len(rows), 1), adapter, each) * deltas


def unsupported(a: ExpandArguments) -> str | None:
    """Returns why the emitted kernel cannot compute a call; None if it can. Reads only metadata."""
    wide = a.scales is not None and a.scales.dtype == torch.float64
    return "no kernel for scales of torch.float64" if wide else None


sample_inputs = sampler_of(ExpandArguments, sample_expand)


OP = register(
    FusedOp(
        name=NAME,
        arguments=ExpandArguments,
        returns="(Tensor, Tensor, Tensor)",
        validate=validate,
        validate_values=validate_values,
        fake=fake,
        reference=reference,
        lowerings=(
            emitted_kernel("tilewright.ops.lora.lowering:expand_steps", unsupported, KERNEL_DTYPES),
        ),
        cases=EXPAND_CASES,
        sample_inputs=sample_inputs,
        moving=frozenset({"s"}),
        tolerances=TOLERANCES,
        error_model=ERROR_MODEL,
    )
)


def lora_expand_add(
    s: torch.Tensor,
    bases: Sequence[torch.Tensor | None],
    weights: Sequence[torch.Tensor | None],
    a_offsets: torch.Tensor | None = None,
    expert_ids: torch.Tensor | None = None,
    **options: Any,
) -> Outputs:
    """Calls the op: multiplies the result of `shrink_qkv_permute_3mn` by the B matrices of q, k and
    v, and adds the products to q, k and v.

    ExpandArguments explains the arguments and options. Raises ArgumentError. The op is not
    differentiable.
    """
    for name, three in (("bases", bases), ("weights", weights)):
        if not isinstance(three, (list, tuple)) or len(three) != 3:
            actual = f"{len(three)}" if isinstance(three, (list, tuple)) else repr(three)
            raise ArgumentError(NAME, name, "three, of q, k and v (tensors or None)", actual)
        for one in three:
            if one is not None:
                check_tensor(NAME, name, one, "tensors or None")
    return OP.torch_op(s, *bases, *weights, a_offsets, expert_ids, **options)
