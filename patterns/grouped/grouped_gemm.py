"""A grouped GEMM that is not a part of a complete mixture of experts.

    grouped_mm(x [M, K], weight [E, K, N], ends [E])     ⇒   grouped_matmul
    grouped_mm of x and weight both in NVFP4             ⇒   grouped_matmul_dynamic_scaled_nvfp4

The weight is either dense (stored or computed) or dequantised in the graph. x counts as NVFP4 if
the graph decodes it from codes and e4m3 scales. These may be inputs of the graph, or the graph may
compute them. The op reads these codes and scales, so it keeps the graph's rounding. The NVFP4 op
ignores the signs of block scales, as the tensor core does. Therefore it is used only if the graph
shows that no scale is negative.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from tilewright.codegen.formats import WEIGHT_FORMATS
from tilewright.ops.checks import HALVES
from tilewright.ops.formats.nvfp4 import layout_scales, place_scales
from tilewright.ops.formats.row_groups import ends_in_order, experts_in_order
from tilewright.ops.formats.scale_layout import group_scale_offsets
from tilewright.patterns import effects
from tilewright.patterns.dataflow import Computed, Dataflow, Value, View
from tilewright.patterns.effects import Atom
from tilewright.patterns.language import (
    Match,
    Reject,
    Result,
    Sought,
    Stage,
    register,
    reject,
)
from tilewright.patterns.quantised.blocks import unrepeated
from tilewright.patterns.quantised.expert_arguments import (
    DequantizedExperts,
    cut_scale,
    expert_arguments,
)
from tilewright.patterns.quantised.experts import match_dequantized_experts, match_dequantized_rows
from tilewright.patterns.recognise.dtypes import check_dtypes, dtype_name
from tilewright.patterns.recognise.grouped_gemm import ExpertGemm, match_grouped

# The number of columns in an NVFP4 block.
NVFP4_BLOCK = 16
# The number of columns of NVFP4 codes that the op loads at a time.
NVFP4_COLUMNS = 32
# A row of codes must take a multiple of this number of bytes.
ALIGNED_BYTES = 16
# Torch's kernel computes a bfloat16 product that has fewer inner columns than this and has many
# rows. On an H200, torch's kernel was faster for 256 inner columns and 256 rows in a group. It was
# not faster for 768 columns or for fewer rows.
SHORT_INNER = 512
# The average number of rows in a group from which a product has many rows.
MANY_ROWS = 160


@dataclass(frozen=True)
class GroupedGemm:
    """Matches a grouped GEMM that is not a part of a complete mixture of experts."""

    name: str = "grouped_gemm"
    op: str = "grouped_matmul"
    takes_leftovers: bool = True
    sought: ClassVar[Sought] = Sought(
        "rows in groups times a weight for each group",
        frozenset({"aten._grouped_mm", "aten.bmm", "aten.einsum"}),
    )

    def anchors(self, flow: Dataflow) -> Iterator[Value]:
        """Yields products of groups of rows, in which each group has its own weight."""
        for value in flow.values:
            gemm = match_grouped(value)
            if gemm is not None and len(gemm.x.shape) == 2:
                yield value

    def match(self, anchor: Value, flow: Dataflow) -> Match:
        gemm = match_grouped(anchor)
        assert gemm is not None
        _guard(gemm)
        weight = match_dequantized_experts(gemm.weight)
        rows = _rows_of(gemm, weight)
        both = None if rows is None or weight is None else _both_quantised(gemm, weight, rows)
        if both is not None:
            op, arguments = "grouped_matmul_dynamic_scaled_nvfp4", both
        else:
            op, arguments = self.op, _weight_only(gemm, weight)
        return Match(
            op=op,
            anchor=anchor,
            arguments=arguments,
            results=(Result(anchor, effects.identity(anchor.shape)),),
            absorbed=gemm.absorbed,
            facts=_facts(gemm, weight, quantised_rows=both is not None),
            scope=anchor.scope,
        )


def _rows_of(gemm: ExpertGemm, weight: DequantizedExperts | None) -> DequantizedExperts | None:
    """Returns the NVFP4 rows of a product whose weight is NVFP4; None if there are none."""
    if weight is None or weight.format != "nvfp4":
        return None
    return match_dequantized_rows(gemm.x)


def _guard(gemm: ExpertGemm) -> None:
    options = gemm.end.kwargs
    if isinstance(options.get("bias"), View):
        reject("UNSUPPORTED", Stage.GUARDS, "a bias inside the grouped product", gemm.end)
    dtypes = {gemm.x.value.dtype, gemm.weight.value.dtype, gemm.end.dtype}
    check_dtypes(dtypes, "rows, weights and result", gemm.end, HALVES)


def _weight_only(gemm: ExpertGemm, weight: DequantizedExperts | None) -> dict[str, Any]:
    """Returns the arguments of `grouped_matmul`."""
    arguments: dict[str, Any] = {"x": gemm.x, "group_offsets": gemm.ends, "end_offsets": True}
    if weight is None:
        _check_gain(gemm)
        return {**arguments, "weight": gemm.weight}
    row_bytes = weight.shape[2] // WEIGHT_FORMATS[weight.format].per_byte
    if row_bytes % ALIGNED_BYTES:
        found = f"a row of {weight.format} codes has {row_bytes} bytes"
        message = f"{found}, which is not a multiple of {ALIGNED_BYTES}"
        reject("UNSUPPORTED", Stage.CAPABILITY, message, gemm.weight)
    names = ("weight", "weight_scale", "weight_expert_scale")
    return arguments | expert_arguments({names: weight})


def _check_gain(gemm: ExpertGemm) -> None:
    """Raises Reject (NO_GAIN) for bfloat16 products with a small K and many rows, for which torch's
    kernel is as fast."""
    rows, inner = gemm.x.shape
    experts = gemm.weight.shape[0]
    known = all(isinstance(size, int) for size in (rows, inner, experts))
    short = known and inner < SHORT_INNER and rows >= MANY_ROWS * experts
    if short and gemm.x.value.dtype == torch.bfloat16:
        message = (
            f"K is {inner} and a group has {rows // experts} rows, and torch's kernel is as "
            "fast for these sizes"
        )
        reject("NO_GAIN", Stage.CAPABILITY, message, gemm.end)


def _both_quantised(
    gemm: ExpertGemm, weight: DequantizedExperts, rows: DequantizedExperts
) -> dict[str, Any] | None:
    """Returns the arguments of the NVFP4 op. Returns None if the op cannot read the rows, or if
    scales may be negative."""
    factor = _factors_of(weight, rows)
    if factor is None or not (weight.has_natural_scale and rows.has_natural_scale):
        return None
    # The op ignores signs, so the graph need not clear them.
    weight, rows = replace(weight, unsigned=False), replace(rows, unsigned=False)
    given = expert_arguments({("b", "b_scales", "factor"): weight})
    num_experts, device = weight.shape[0], weight.device
    # The op requires ascending ends, while slices in PyTorch accept any order.
    num_rows = gemm.x.shape[0]
    offsets = Computed("pad", (Computed(ends_in_order, (gemm.ends, num_rows)), [1, 0]))
    experts = Computed(experts_in_order, (gemm.ends, num_rows))
    factors = [f for f in (given.get("factor"), *factor) if f is not None]
    scale: Any = Computed(
        "full", ([num_experts], 1.0), (("dtype", torch.float32), ("device", device))
    )
    for item in factors:
        scale = item if item is factors[0] else Computed("mul", (scale, item))
    return {
        "a": Computed("contiguous", (rows.data,)),
        "b": given["b"],
        "a_scales": Computed(place_scales, (cut_scale(rows, (NVFP4_BLOCK,)), offsets)),
        "b_scales": Computed(layout_scales, (given["b_scales"],)),
        "group_offsets": offsets,
        "group_scale_offsets": Computed(group_scale_offsets, (offsets,)),
        "expert_ids": experts,
        "expert_scales": scale,
        "out_dtype": gemm.end.dtype,
    }


def _factors_of(weight: DequantizedExperts, rows: DequantizedExperts) -> list[Computed] | None:
    """Returns tensors [E] whose product has, for every expert, the factor that all rows share.
    Returns None if the op does not support the blocks or the factors of the rows."""
    assert rows.scale is not None
    own = unrepeated(rows.scale.effect.dims[1])[1]
    if (own or weight.shape[2]) % NVFP4_BLOCK or weight.shape[2] % NVFP4_COLUMNS:
        return None
    return _by_expert(rows, weight.shape[0])


def _by_expert(rows: DequantizedExperts, num_experts: int) -> list[Computed] | None:
    """Returns tensors [E] whose product has, for every expert, the factor that all rows share.
    Returns None if rows have different factors."""
    views = (*rows.factors, *rows.divisors)
    if not all(effects.repeats(view.effect.dims[0]) for view in views):
        return None
    again = (Atom(None, 0, num_experts),)

    def moved(views: tuple[View, ...]) -> tuple[View, ...]:
        return tuple(v.with_dims(again) for v in views)

    factor = replace(
        rows,
        shape=(num_experts,),
        factors=moved(rows.factors),
        divisors=moved(rows.divisors),
    ).expert_scale()
    return [] if factor is None else [factor]


def _facts(
    gemm: ExpertGemm, weight: DequantizedExperts | None, *, quantised_rows: bool
) -> dict[str, Any]:
    sizes = (gemm.x.shape[0], *gemm.weight.shape)
    rows, experts, outer, inner = (
        size if isinstance(size, int) else letter
        for letter, size in zip("MENK", sizes, strict=True)
    )
    kind = "nvfp4" if quantised_rows else dtype_name(gemm.x.value.dtype)
    return {
        "experts": experts,
        "x": f"{kind}[{rows},{inner}]",
        "outer": outer,
        "weights": "dense" if weight is None else weight.format,
    }


@dataclass(frozen=True)
class SignedScales:
    """Reports products of NVFP4 rows and weights whose scales may be negative, as far as the graph
    shows.

    This pattern never matches. :class:`GroupedGemm` matches these products, with rows that the
    graph decodes.
    """

    name: str = "grouped_gemm_nvfp4"
    op: str = "grouped_matmul_dynamic_scaled_nvfp4"
    asked_before: ClassVar[tuple[str, ...]] = ("grouped_gemm",)
    takes_leftovers: bool = True
    sought: ClassVar[Sought] = Sought(
        "a grouped product of NVFP4 rows and weights whose scales may be negative",
        frozenset({"aten._grouped_mm"}),
    )

    def anchors(self, flow: Dataflow) -> Iterator[Value]:
        """Yields products that the NVFP4 op could compute if the graph showed that no scale is
        negative."""
        for value in GroupedGemm().anchors(flow):
            if _signed_in(value):
                yield value

    def match(self, anchor: Value, flow: Dataflow) -> Match:
        message = (
            f"the NVFP4 scales of the {_signed_in(anchor)} may be negative, and the tensor core "
            "ignores their signs; therefore the rows are decoded, and only the weights are "
            "read as codes"
        )
        hint = "call scale.abs() where codes are decoded, if no scale is negative"
        reject("SCALE_SIGN", Stage.CAPABILITY, message, anchor, hint=hint)


def _signed_in(anchor: Value) -> str:
    """Returns a description of the operands whose scales may be negative. Returns "" if there are
    none, or if the NVFP4 op cannot compute the product for another reason."""
    gemm = match_grouped(anchor)
    assert gemm is not None
    try:
        weight = match_dequantized_experts(gemm.weight)
        rows = _rows_of(gemm, weight)
    except Reject:
        return ""
    if weight is None or rows is None or _factors_of(weight, rows) is None:
        return ""
    operands = (("weights", weight), ("rows", rows))
    return " and the ".join(what for what, part in operands if not part.has_natural_scale)


register(SignedScales())
register(GroupedGemm())
