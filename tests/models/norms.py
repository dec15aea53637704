"""Norms of attention heads [..., H, D] and of rows [..., K], as models write them."""

from __future__ import annotations

import torch
from torch import nn

#: Names of norms of heads before the rotation, and after it.
BEFORE = (
    "none", "rms_module", "rms_spelled", "rms_default_eps", "gemma", "mixed", "row", "layer_module",
    "layer_by_head",
)  # fmt: skip
AFTER = ("rms_after_rope", "l2_after_rope")


def wide(x):
    """Returns a tensor in fp32, or unchanged if it is fp64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class SpelledRMSNorm(nn.Module):
    """RMSNorm as Hugging Face models write it, with a cast to fp32 and back."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x):
        y = wide(x)
        variance = y.pow(2).mean(-1, keepdim=True)
        y = y * torch.rsqrt(variance + self.eps)
        return self.weight * y.to(x.dtype)


class GemmaRMSNorm(nn.Module):
    """RMSNorm that multiplies by 1 + weight (Gemma)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x):
        y = wide(x)
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (y * (1.0 + wide(self.weight))).type_as(x)


class RowRMSNorm(SpelledRMSNorm):
    """RMSNorm over all heads together, before they are split (OLMo 2)."""

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__(num_heads * head_dim)

    def forward(self, x):
        return super().forward(x.flatten(-2)).view(x.shape)


class LayerNormByHead(nn.Module):
    """LayerNorm of each head, where each head has a separate weight (Cohere)."""

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_heads, head_dim))

    def forward(self, x):
        y = wide(x)
        mean = y.mean(-1, keepdim=True)
        variance = (y - mean).pow(2).mean(-1, keepdim=True)
        y = (y - mean) * torch.rsqrt(variance + 1e-5)
        return (wide(self.weight) * y).to(x.dtype)


class WeightlessNorm(nn.Module):
    """RMS norm without a weight. Llama 4 calls it its L2 norm."""

    def forward(self, x):
        y = wide(x)
        return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).type_as(x)


def head_norm(form: str, num_heads: int, head_dim: int, is_key: bool) -> nn.Module:
    """Returns the norm of q or k."""
    makers = {
        "none": nn.Identity,
        "rms_module": lambda: nn.RMSNorm(head_dim, eps=1e-6),
        "rms_spelled": lambda: SpelledRMSNorm(head_dim),
        "rms_default_eps": lambda: nn.RMSNorm(head_dim),
        "gemma": lambda: GemmaRMSNorm(head_dim),
        "mixed": lambda: (GemmaRMSNorm if is_key else SpelledRMSNorm)(head_dim),
        "row": lambda: RowRMSNorm(num_heads, head_dim),
        "layer_module": lambda: nn.LayerNorm(head_dim, bias=False),
        "layer_by_head": lambda: LayerNormByHead(num_heads, head_dim),
        "rms_after_rope": lambda: SpelledRMSNorm(head_dim),
        "l2_after_rope": WeightlessNorm,
    }
    return makers[form]()


class HeadNorms(nn.Module):
    """Normalises q and k before the rotation, or after it (`after=True`), or leaves them as they
    are."""

    def __init__(
        self, form: str, heads: tuple[int, int], head_dim: int, after: bool = False
    ) -> None:
        super().__init__()
        here = form if (form in AFTER) == after else "none"
        self.q, self.k = (
            head_norm(here, count, head_dim, is_key)
            for count, is_key in zip(heads, (False, True), strict=True)
        )

    def forward(self, q, k):
        return self.q(q), self.k(k)


def hf_row_norm(x, weight, eps=1e-5):
    """Normalises a row as most models of transformers do."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def gemma_row_norm(x, weight, eps=1e-5):
    """Normalises a row as Gemma does, with 1 + weight and one rounding."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * (1.0 + weight.float())).to(x.dtype)
