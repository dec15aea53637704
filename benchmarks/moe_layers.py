"""Defines the dims, routing and random layers of mixtures of experts that the benchmarks share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import silu

from tilewright.ops.moe.arguments import FusedMoeArguments

# The argument sets of a graph together must exceed the L2 cache (60 MB).
COLD_BYTES = 250e6
# The bytes of one element of a weight, including scales.
WEIGHT_BYTES = {
    "dense": 2.0,
    "fp8": 1.0,
    "fp8fp8": 1.0,
    "int4": 0.5 + 2 / 128,
    "nvfp4": 0.5625,
    "mxfp4": 0.53125,
}
INT4_GROUP = 128
ZIPF_EXPONENT = 1.0
CLAMP = 7.0


@dataclass(frozen=True)
class MoeShape:
    """The sizes of one model's experts.

    `oss` says whether the layout is that of gpt-oss: gate and up are interleaved and stored as [E,
    H, 2I], with biases and clamped SwiGLU. Otherwise they are halves of [E, 2I, H], with SiLU.
    """

    name: str
    hidden: int
    inner: int
    num_experts: int
    num_slots: int
    oss: bool = False

    @property
    def expert_elements(self) -> int:
        return 3 * self.hidden * self.inner

    def argument_sets(self, num_tokens: int, form: str) -> int:
        """Returns the number of argument sets, each with other random routes, that keeps the L2
        cache cold."""
        share = 1 - (1 - self.num_slots / self.num_experts) ** num_tokens
        read = share * self.num_experts * self.expert_elements * WEIGHT_BYTES[form]
        return max(2, -(-int(COLD_BYTES) // int(read)))


SHAPES = (
    MoeShape("qwen3-30b-a3b", 2048, 768, 128, 8),
    MoeShape("mixtral-8x7b", 4096, 14336, 8, 2),
    MoeShape("deepseek-v3 over 8 GPUs", 7168, 256, 256, 8),
    MoeShape("gpt-oss-120b", 2880, 2880, 128, 4, oss=True),
)
# One GPU's share of the experts, with all columns of these experts. It is measured with activations
# of codes.
EXPERT_SHARE = MoeShape("32 experts of deepseek-v3", 7168, 2048, 32, 8)
BY_NAME = {shape.name: shape for shape in (*SHAPES, EXPERT_SHARE)}


def routes(
    shape: MoeShape, num_tokens: int, kind: str, device: str = "cuda"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (expert_ids int64 [T, S], weights bf16 [T, S]), the top-k of random scores.

    With `kind` "random", all experts are equally likely. With "zipf", the odds of an expert are 1 /
    (its rank).
    """
    scores = torch.rand(num_tokens, shape.num_experts, device=device)
    if kind == "zipf":
        rank = 1 + torch.randperm(shape.num_experts, device=device).float()
        # With Gumbel noise, the top scores are a draw without replacement.
        scores = -ZIPF_EXPONENT * rank.log() - (-scores.clamp(1e-9, 1 - 1e-7).log()).log()
    top, ids = scores.topk(shape.num_slots)
    return ids, top.softmax(-1).bfloat16()


def dense(*shape: int, device: str = "cuda") -> torch.Tensor:
    """Returns normal bf16 weights [..., K] with variance 1 / K. They are made in parts to save
    memory."""
    out = torch.empty(shape, dtype=torch.bfloat16, device=device)
    for part in out:
        part.copy_(torch.randn(shape[1:], device=device).mul_(shape[-1] ** -0.5))
    return out


def coded(
    form: str, *shape: int, device: str = "cuda"
) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Returns (codes, scales, scale_block) of random values about as large as those of `dense`."""
    experts, rows, columns = shape
    size = columns**-0.5
    per_byte = 1 if form == "fp8" else 2
    codes = torch.randint(
        0, 256, (experts, rows, columns // per_byte), dtype=torch.uint8, device=device
    )

    def scales(*blocks: int) -> torch.Tensor:
        return 0.5 + torch.rand(experts, *blocks, device=device)

    if form == "fp8":
        codes = torch.where(codes & 0x7F == 0x7F, codes ^ 1, codes).view(torch.float8_e4m3fn)
        return codes, scales(-(-rows // 128), -(-columns // 128)) * size / 120, [128, 128]
    if form == "int4":
        group = INT4_GROUP if columns % INT4_GROUP == 0 else 64
        return codes, (scales(rows, columns // group) * size / 5).bfloat16(), [1, group]
    if form == "nvfp4":
        return codes, scales(rows, columns // 16).to(torch.float8_e4m3fn), []
    exponents = torch.randint(-7, -4, (experts, rows, columns // 32), device=device) + 127
    return codes, exponents.to(torch.uint8), []


@dataclass(frozen=True)
class Experts:
    """The weights of a layer.

    given: the arguments of `fused_moe`.
    gate_up, down: the tensors as a dense checkpoint stores them; None if they are quantised.
    gate_up_bias, down_bias: [E, 2I] and [E, H], or None.
    """

    given: dict[str, Any]
    gate_up: torch.Tensor | None
    down: torch.Tensor | None
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None


def make_experts(shape: MoeShape, form: str = "dense", device: str = "cuda") -> Experts:
    """Returns random weights in a format of ops.formats.expert_weight.

    "fp8fp8" stands for fp8 weights with quantised activations. On the device "meta", the weights
    have only shapes.
    """
    e, h, i = shape.num_experts, shape.hidden, shape.inner
    rows = "fp8" if form == "fp8fp8" else "dense"
    form = form.removesuffix("fp8") if rows == "fp8" else form
    given: dict[str, Any] = {"weight_format": form, "activation_format": rows}
    gate_up = down = gate_up_bias = down_bias = None
    if shape.oss:
        gate_up_bias, down_bias = dense(e, 2 * i, device=device), dense(e, h, device=device)
        given |= {
            "activation": "clamped_swiglu", "limit": CLAMP, "down_bias": down_bias,
            "gate_bias": gate_up_bias[:, 0::2], "up_bias": gate_up_bias[:, 1::2],
        }  # fmt: skip
    if form == "dense" and shape.oss:
        gate_up, down = dense(e, h, 2 * i, device=device), dense(e, i, h, device=device)
        turned = gate_up.mT
        given |= {"gate_weight": turned[:, 0::2], "up_weight": turned[:, 1::2]}
        given["down_weight"] = down.mT
    elif form == "dense":
        gate_up, down = dense(e, 2 * i, h, device=device), dense(e, h, i, device=device)
        given |= dict(zip(("gate_weight", "up_weight"), gate_up.chunk(2, 1), strict=True))
        given["down_weight"] = down
    else:
        codes, scale, block = coded(form, e, 2 * i, h, device=device)
        down_codes, down_scale, _ = coded(form, e, h, i, device=device)
        parts = (slice(0, None, 2), slice(1, None, 2)) if shape.oss else (slice(i), slice(i, None))
        for name, part in zip(("gate", "up"), parts, strict=True):
            given[f"{name}_weight"] = codes[:, part]
            given[f"{name}_scale"] = scale[:, part]
        if form == "fp8":
            given["gate_scale"], given["up_scale"] = scale.chunk(2, 1)
        given |= {"down_weight": down_codes, "down_scale": down_scale, "scale_block": block}
        if form == "nvfp4":
            factor = torch.full((e,), 1 / 3, device=device)
            for name, columns in (("gate", h), ("up", h), ("down", i)):
                given[f"{name}_expert_scale"] = factor * columns**-0.5
    return Experts(given, gate_up, down, gate_up_bias, down_bias)


def arguments(
    shape: MoeShape, experts: Experts, num_tokens: int, kind: str = "random", device: str = "cuda"
) -> FusedMoeArguments:
    """Returns one call over a layer's weights, with new random tokens and routes."""
    x = torch.randn(num_tokens, shape.hidden, device=device).bfloat16()
    ids, weights = routes(shape, num_tokens, kind, device)
    return FusedMoeArguments(x, ids, weights, **experts.given)


def glu(shape: MoeShape, both: torch.Tensor) -> torch.Tensor:
    """Computes the activation of gate_up's output [..., 2I] as Hugging Face does."""
    if not shape.oss:
        gate, up = both.chunk(2, -1)
        return silu(gate) * up
    gate, up = both[..., 0::2].clamp(max=CLAMP), both[..., 1::2].clamp(-CLAMP, CLAMP)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)
