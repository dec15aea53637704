"""Sample inputs of linears: small, random, and together reaching every option."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tilewright.ops.sampling import Sampler


@dataclass(frozen=True)
class LinearCase:
    """One setting.

    layout: how the weights lie: "separate" tensors, "halves" of one, "up_first" halves,
    "interleaved" rows of one, "n_major" tensors; "plain": one weight, "plain_n_major": with rows
    contiguous. norm: "", "rms", "weightless".
    """

    name: str
    num_tokens: int = 5
    k: int = 64
    n: int = 48
    dtype: torch.dtype = torch.bfloat16
    layout: str = "plain"
    bias: bool = False
    activation: str = "silu"
    norm: str = ""
    norm_offset: float = 0.0
    scale: float = 1.0


ACTIVATION_CASES = (
    LinearCase("separate", layout="separate"),
    LinearCase("split", layout="separate", num_tokens=1, k=1032, n=80, norm="rms"),
    LinearCase("packed", layout="halves", activation="gelu_tanh", dtype=torch.float16, bias=True),
    LinearCase("up_first", layout="up_first", num_tokens=17, activation="gelu", norm="rms",
               norm_offset=1.0),
    LinearCase("interleaved", layout="interleaved", norm="weightless", bias=True, num_tokens=64),
    LinearCase("n_major", layout="n_major", activation="relu", k=520),
    LinearCase("plain", activation="relu_squared", bias=True, norm="rms", num_tokens=33),
    LinearCase("many_tokens", layout="halves", num_tokens=70, norm="rms", bias=True),
    LinearCase("many_plain", num_tokens=70, activation="gelu"),
    LinearCase("no_tokens", num_tokens=0, layout="separate"),
    LinearCase("half_normed", dtype=torch.float16, norm="rms"),
    LinearCase("float", dtype=torch.float32, layout="separate", norm="rms"),
    LinearCase("double", dtype=torch.float64, layout="halves"),
)  # fmt: skip
RESIDUAL_CASES = (
    LinearCase("plain"),
    LinearCase("split", num_tokens=3, k=2056, n=80, bias=True),
    LinearCase("scaled", num_tokens=17, scale=0.22, bias=True, dtype=torch.float16),
    LinearCase("n_major", layout="plain_n_major", num_tokens=64, k=520),
    LinearCase("many_tokens", num_tokens=70, scale=0.22),
    LinearCase("no_tokens", num_tokens=0),
    LinearCase("float", dtype=torch.float32),
    LinearCase("double", dtype=torch.float64, bias=True),
)


def sample_linear(case: LinearCase, device: str | torch.device, seed: int) -> dict[str, Any]:
    """What both ops take, by name."""
    sampler = Sampler(device, seed)
    return {
        "x": sampler.normal(case.num_tokens, case.k, dtype=case.dtype),
        "weight": _weight(case, sampler),
        "bias": _bias(case, sampler),
    }


def sample_up(case: LinearCase, device: str | torch.device, seed: int) -> dict[str, Any]:
    """What `linear_activation` takes besides; the weight again, where it shares memory."""
    sampler = Sampler(device, seed + 1)
    given: dict[str, Any] = {
        "activation": case.activation,
        "rms_norm": case.norm != "",
        "norm_offset": case.norm_offset,
    }
    if case.norm == "rms":
        given["norm_weight"] = sampler.normal(case.k, dtype=case.dtype) + (1 - case.norm_offset)
    if case.layout.startswith("plain"):
        return given
    gate, up = _weight(case, sampler), _weight(case, sampler)
    if case.layout == "halves":
        gate, up = torch.cat((gate, up)).chunk(2)
    elif case.layout == "up_first":
        up, gate = torch.cat((up, gate)).chunk(2)
    elif case.layout == "interleaved":
        joint = torch.stack((gate, up), 1).flatten(0, 1)
        gate, up = joint[0::2], joint[1::2]
    return given | {"weight": gate, "up_weight": up, "up_bias": _bias(case, sampler)}


def sample_residual(case: LinearCase, device: str | torch.device, seed: int) -> dict[str, Any]:
    """What `linear_residual` takes besides."""
    sampler = Sampler(device, seed + 1)
    residual = sampler.normal(case.num_tokens, case.n, dtype=case.dtype)
    return {"residual": residual, "scale": case.scale}


def _weight(case: LinearCase, sampler: Sampler) -> torch.Tensor:
    made = sampler.normal(case.n, case.k, dtype=case.dtype, scale=case.k**-0.5)
    return made.mT.contiguous().mT if case.layout.endswith("n_major") else made


def _bias(case: LinearCase, sampler: Sampler) -> torch.Tensor | None:
    return sampler.normal(case.n, dtype=case.dtype) if case.bias else None
