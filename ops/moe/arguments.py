"""The arguments of `fused_moe`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

import torch

from tilewright.ops.formats.expert_weight import ExpertWeight
from tilewright.ops.groups import Group, OptionalGroup


def _names(prefix: str) -> dict[str, str]:
    """Returns the names of the arguments that are the fields of one weight."""
    fields = {"data": "weight", "scale": "scale", "expert_scale": "expert_scale", "bias": "bias"}
    return {field: f"{prefix}_{name}" for field, name in fields.items()}


@dataclass(frozen=True)
class FusedMoeArguments:
    """The arguments of `fused_moe`, for T tokens, H hidden columns, S slots (top-k), E experts and
    I inner columns.

    - `x` [T, H]: the input.
    - `expert_ids` int [T, S], `expert_weights` float [T, S]: the experts of each token, and the
      weights of their results.
    - `gate_weight`, `up_weight` [E, I, H], `down_weight` [E, H, I]. If up_weight is None, the
      activation is not gated. Weights may have any strides, so that a joint weight, concatenated or
      interleaved, transposed or not, can be passed as two views of one tensor.
    - `gate_bias`, `up_bias` [E, I], `down_bias` [E, H]: the biases.
    - `activation`: one of ACTIVATIONS.
    - `alpha`: a parameter of the activation clamped_swiglu.
    - `limit`: if it is not 0, the gate is clamped to at most limit, and the up projection to
      [-limit, limit].
    - `weight_on_input`: whether expert_weights multiply x instead of the results.
    - `weight_format`, `scale_block`, `*_scale`, `*_expert_scale`: the format and the scales of all
      weights, as in ops.formats.expert_weight.
    - `activation_format`: one of ACTIVATION_FORMATS, to which the op quantises x and the hidden
      activation. "fp8" requires weights of the format "fp8" with blocks of 128 columns.

    The result is [T, H] of x's dtype.
    """

    x: torch.Tensor
    expert_ids: torch.Tensor
    expert_weights: torch.Tensor
    gate_weight: torch.Tensor
    up_weight: torch.Tensor | None
    down_weight: torch.Tensor
    _: KW_ONLY
    gate_bias: torch.Tensor | None = None
    up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    activation: str = "silu"
    alpha: float = 1.702
    limit: float = 0.0
    weight_on_input: bool = False
    weight_format: str = "dense"
    scale_block: Sequence[int] = ()
    gate_scale: torch.Tensor | None = None
    up_scale: torch.Tensor | None = None
    down_scale: torch.Tensor | None = None
    gate_expert_scale: torch.Tensor | None = None
    up_expert_scale: torch.Tensor | None = None
    down_expert_scale: torch.Tensor | None = None
    activation_format: str = "dense"

    gate = Group(ExpertWeight, **_names("gate"))
    up = OptionalGroup(ExpertWeight, **_names("up"))
    down = Group(ExpertWeight, **_names("down"))
