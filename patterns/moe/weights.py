"""The weights of a mixture's experts as an op takes them: stored as they are, or codes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tilewright.patterns.dataflow import View
from tilewright.patterns.language import Stage, register_code, reject
from tilewright.patterns.moe.products import DenseGemm
from tilewright.patterns.quantised.expert_arguments import DequantizedExperts, expert_arguments
from tilewright.patterns.quantised.experts import match_dequantized_experts
from tilewright.patterns.recognise.activation import Activation
from tilewright.patterns.recognise.grouped_gemm import ExpertGemm

register_code("EXPERT_WEIGHT", "an expert weight is computed in the graph in an unknown way")


def layer_arguments(
    gemms: Mapping[str, ExpertGemm | DenseGemm | None], activation: Activation
) -> dict[str, Any]:
    """The op's arguments beside x and the routes, of GEMMs by name (gate, up, down), None where
    there is none: weights, biases and the activation between them. Raises what _weight_arguments
    raises.
    """
    views = {name: gemm.weight for name, gemm in gemms.items() if gemm is not None}
    biases = {f"{name}_bias": gemm and gemm.bias for name, gemm in gemms.items()}
    numbers = {"alpha": activation.alpha, "limit": activation.limit}
    weights = {"up_weight": None, **_weight_arguments(views)}
    return {**weights, **biases, "activation": activation.name, **numbers}


def _weight_arguments(views: Mapping[str, View]) -> dict[str, Any]:
    """The op's arguments for weights by name (gate, up, down), views [E, N, K]: all dense as they
    are stored, or all of one format.

    Raises Reject. EXPERT_WEIGHT: computed of no codes. WEIGHT_FORMAT, SCALE_BLOCK: of codes that
    the op does not take together.
    """
    found = {name: _codes_of(view) for name, view in views.items()}
    quantised = {name: weight for name, weight in found.items() if weight is not None}
    if not quantised:
        return {f"{name}_weight": view for name, view in views.items()}
    if len(quantised) != len(found):
        dense = ", ".join(name for name in found if name not in quantised)
        reject(
            "WEIGHT_FORMAT",
            Stage.GUARDS,
            f"of the experts' weights {', '.join(quantised)} are quantised, {dense} are not",
            *(views[name] for name in quantised),
        )
    given = expert_arguments(quantised)
    arguments: dict[str, Any] = {"weight_format": given.format}
    if given.block is not None:
        arguments["scale_block"] = list(given.block)
    for part, items in (("weight", given.data), ("scale", given.scale),
                        ("expert_scale", given.expert_scale)):  # fmt: skip
        arguments |= {f"{name}_{part}": item for name, item in items.items()}
    return arguments


def _codes_of(weight: View) -> DequantizedExperts | None:
    """What a weight is dequantised from; None for one that is stored as it is."""
    if weight.value.op in ("constant", "input"):
        return None
    found = match_dequantized_experts(weight)
    if found is None:
        reject(
            "EXPERT_WEIGHT",
            Stage.GUARDS,
            f"the expert weight is {weight.value}, computed in the graph",
            weight,
        )
    return found
