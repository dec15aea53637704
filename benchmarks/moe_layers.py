"""Mixture-of-experts dims, routing and random layers that the benchmarks share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import silu

from tilewright.ops.moe.arguments import FusedMoeArguments

# All argument sets of a graph together must not fit the L2 cache (60 MB).
COLD_BYTES = 250e6
# Bytes of a weight, scales included.
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
    """Dims of one model's experts. oss: gate and up interleaved and stored [E, H, 2I], biases,
    clamped SwiGLU, as gpt-oss has them; else halves of [E, 2I, H] and SiLU."""

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
        """Returns the number of draws of routes that keeps the L2 cache cold."""
        share = 1 - (1 - self.num_slots / self.num_experts) ** num_tokens
        read = share * self.num_experts * self.expert_elements * WEIGHT_BYTES[form]
        return max(2, -(-int(COLD_BYTES) // int(read)))


SHAPES = (
    MoeShape("qwen3-30b-a3b", 2048, 768, 128, 8),
    MoeShape("mixtral-8x7b", 4096, 14336, 8, 2),
    MoeShape("deepseek-v3 over 8 GPUs", 7168, 256, 256, 8),
    MoeShape("gpt-oss-120b", 2880, 2880, 128, 4, oss=True),
)
# A GPU's share of the experts, all of their columns: measured where activations are codes.
EXPERT_SHARE = MoeShape("32 experts of deepseek-v3", 7168, 2048, 32, 8)
BY_NAME = {shape.name: shape for shape in (*SHAPES, EXPERT_SHARE)}


def routes(
    shape: MoeShape, num_tokens: int, kind: str, device: str = "cuda"
) -> tuple[torch.Tensor, torch.Tensor]:
    """(expert_ids int64 [T, S], bf16 weights): top-k of scores that are uniform ("random"), or of
    experts drawn by their rank to the power -1 ("zipf")."""
    scores = torch.rand(num_tokens, shape.num_experts, device=device)
    if kind == "zipf":
        rank = 1 + torch.randperm(shape.num_experts, device=device).float()
        # Gumbel's trick: the largest are a draw without replacement.
        scores = -ZIPF_EXPONENT * rank.log() - (-scores.clamp(1e-9, 1 - 1e-7).log()).log()
    top, ids = scores.topk(shape.num_slots)
    return ids, top.softmax(-1).bfloat16()


def dense(*shape: int, device: str = "cuda") -> torch.Tensor:
    """Normal bf16 weights [..., K] of variance 1 / K, made by parts: fp32 of it all is too much."""
    out = torch.empty(shape, dtype=torch.bfloat16, device=device)
    for part in out:
        part.copy_(torch.randn(shape[1:], device=device).mul_(shape[-1] ** -0.5))
    return out


def coded(
    form: str, *shape: int, device: str = "cuda"
) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """(codes, scales, scale_block) of random codes, values of about the size of `dense`'s."""
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
    """Weights of a layer: `given` are arguments of `fused_moe`; gate_up and down the tensors as a
    dense checkpoint stores them (None where quantised), biases [E, 2I] and [E, H]."""

    given: dict[str, Any]
    gate_up: torch.Tensor | None
    down: torch.Tensor | None
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None


def make_experts(shape: MoeShape, form: str = "dense", device: str = "cuda") -> Experts:
    """Random weights in a format of ops.formats.expert_weight; "fp8fp8": fp8, with activations
    quantised too. device "meta": shapes alone."""
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
    """One call over a layer's weights: tokens and routes drawn anew."""
    x = torch.randn(num_tokens, shape.hidden, device=device).bfloat16()
    ids, weights = routes(shape, num_tokens, kind, device)
    return FusedMoeArguments(x, ids, weights, **experts.given)


def glu(shape: MoeShape, both: torch.Tensor) -> torch.Tensor:
    """The activation of gate_up's output [..., 2I], as Hugging Face spells it."""
    if not shape.oss:
        gate, up = both.chunk(2, -1)
        return silu(gate) * up
    gate, up = both[..., 0::2].clamp(max=CLAMP), both[..., 1::2].clamp(-CLAMP, CLAMP)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)
