"""Sample inputs of `fused_moe`. The cases are small and random, and together they use every
option."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from tilewright.ops.formats.sample_experts import quantized_weight
from tilewright.ops.moe.arguments import FusedMoeArguments
from tilewright.ops.sampling import Sampler


@dataclass(frozen=True)
class MoeCase:
    """One case of `fused_moe`.

    Attributes:
        name: The name of the case.
        num_tokens: The number of tokens, T.
        hidden: The number of columns of x, H.
        inner: The number of inner columns, I.
        num_experts: The number of experts, E.
        num_slots: The number of experts of each token, S.
        dtype: The dtype of x.
        layout: How gate and up are stored: "halves" or "interleaved" rows of one tensor [E, 2I, H],
            "transposed" halves of [E, H, 2I] (down is then [E, I, H]), "up_first" halves,
            "separate" tensors, or "plain" (there is no up).
        activation, limit, weight_on_input, weight_format, activation_format: The arguments of the
            op with the same names.
        bias: Whether the weights have biases.
        routing: "random", "one" (every route has the same expert) or "none" (some slots have expert
            -1).
    """

    name: str
    num_tokens: int = 7
    hidden: int = 64
    inner: int = 48
    num_experts: int = 5
    num_slots: int = 2
    dtype: torch.dtype = torch.bfloat16
    layout: str = "halves"
    activation: str = "silu"
    limit: float = 0.0
    bias: bool = False
    weight_on_input: bool = False
    weight_format: str = "dense"
    activation_format: str = "dense"
    routing: str = "random"


MOE_CASES = (
    MoeCase("halves"),
    MoeCase("interleaved_clamped", layout="interleaved", activation="clamped_swiglu", limit=1.0,
            bias=True),
    MoeCase("clamped", limit=0.5),
    MoeCase("transposed", layout="transposed", activation="gelu_tanh", dtype=torch.float16),
    MoeCase("separate", layout="separate", activation="gelu", dtype=torch.float32),
    MoeCase("plain", layout="plain", activation="relu_squared", bias=True),
    MoeCase("up_first", layout="up_first", weight_format="fp8", hidden=160, inner=144),
    MoeCase("one_expert", routing="one", num_slots=1),
    MoeCase("no_expert", routing="none", bias=True),
    MoeCase("no_tokens", num_tokens=0),
    MoeCase("weight_on_input", weight_on_input=True, activation="relu"),
    MoeCase("double", dtype=torch.float64, layout="transposed"),
    MoeCase("fp8", weight_format="fp8", hidden=160, inner=144),
    MoeCase("fp8_fp8", weight_format="fp8", activation_format="fp8", hidden=160, inner=144,
            dtype=torch.float32),
    MoeCase("fp8_fp8_interleaved", weight_format="fp8", activation_format="fp8", hidden=256,
            inner=256, layout="interleaved", activation="clamped_swiglu", limit=1.0, bias=True,
            dtype=torch.float32),
    MoeCase("int4", weight_format="int4", inner=64),
    MoeCase("nvfp4", weight_format="nvfp4", inner=96),
    MoeCase("mxfp4", weight_format="mxfp4", inner=64, layout="separate"),
)  # fmt: skip


def sample_moe(case: MoeCase, device: str | torch.device, seed: int) -> dict[str, Any]:
    """Returns arguments of `fused_moe` by name."""
    sampler = Sampler(device, seed)
    routes = (case.num_tokens, case.num_slots)
    weights = sampler.normal(*routes, dtype=torch.float64).sigmoid().to(case.dtype)
    return {
        "x": sampler.normal(case.num_tokens, case.hidden, dtype=case.dtype),
        "expert_ids": sample_experts(case.routing, routes, case.num_experts, sampler),
        "expert_weights": weights,
        **_joint_weights(case, sampler),
        "activation": case.activation,
        "limit": case.limit,
        "weight_on_input": case.weight_on_input,
        "activation_format": case.activation_format,
    }


def sample_experts(
    routing: str, shape: tuple[int, int], num_experts: int, sampler: Sampler
) -> torch.Tensor:
    """Returns experts [T, S], which are distinct within a token; see MoeCase.routing."""
    rows = [sampler.permutation(num_experts)[: shape[1]] for _ in range(shape[0])]
    ids = torch.stack(rows) if rows else torch.zeros(shape, dtype=torch.int64)
    if routing == "one":
        ids = torch.full(shape, 2)
    elif routing == "none":
        ids[::2, 0] = -1
    return ids.to(sampler.device)


def _joint_weights(case: MoeCase, sampler: Sampler) -> dict[str, Any]:
    shapes = dict.fromkeys(("gate", "up"), (case.inner, case.hidden))
    shapes |= {"down": (case.hidden, case.inner)}
    if case.layout == "plain":
        del shapes["up"]
    made: dict[str, Any] = {"up_weight": None}
    for name, (rows, columns) in shapes.items():
        shape, scale = (case.num_experts, rows, columns), columns**-0.5
        dense = sampler.normal(*shape, dtype=case.dtype, scale=scale)
        weight = quantized_weight(case.weight_format, dense)
        if case.bias:
            bias = sampler.normal(case.num_experts, rows, dtype=case.dtype)
            weight = replace(weight, bias=bias)
        made |= getattr(FusedMoeArguments, name).arguments(weight)
    return _laid_out(case.layout, made)


def _laid_out(layout: str, made: dict[str, Any]) -> dict[str, Any]:
    """If the layout requires it, makes gate and up views of one tensor."""
    gate, up = made["gate_weight"], made["up_weight"]
    if layout == "halves":
        made["gate_weight"], made["up_weight"] = torch.cat((gate, up), 1).chunk(2, 1)
    elif layout == "up_first":
        made["up_weight"], made["gate_weight"] = torch.cat((up, gate), 1).chunk(2, 1)
    elif layout == "interleaved":
        joint = torch.stack((gate, up), 2).flatten(1, 2)
        made["gate_weight"], made["up_weight"] = joint[:, 0::2], joint[:, 1::2]
    elif layout == "transposed":
        joint = torch.cat((gate, up), 1).mT.contiguous().mT
        made["gate_weight"], made["up_weight"] = joint.chunk(2, 1)
        made["down_weight"] = made["down_weight"].mT.contiguous().mT
    return made
