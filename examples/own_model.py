"""Defines a GPT that allocates its own cache once, so that tilewright can fuse the model.

    python examples/own_model.py
    tilewright inspect examples/own_model.py:decode      # the same at a true size, on meta tensors

The model does not depend on tilewright. Three properties of the model make the fusion possible
(docs/cookbook.md): the cache has a fixed size, the model writes the cache in place at positions
that a tensor holds, and the mask compares positions. A prompt and a decode step are two calls of
one compiled model.

The exit status is 1 if a layer is not fused, or if the logits are less accurate than eager's.
"""

from __future__ import annotations

import copy
import sys
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tilewright import reports


@dataclass(frozen=True)
class Config:
    vocabulary: int = 512
    hidden: int = 256
    inner: int = 512
    layers: int = 2
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 32
    longest: int = 128


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates [1, heads, tokens, head dim]; cos and sin are [tokens, head dim]."""
    one, two = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-two, one], dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        columns = (config.heads + 2 * config.kv_heads) * config.head_dim
        self.qkv = nn.Linear(config.hidden, columns, bias=False)
        self.out = nn.Linear(config.heads * config.head_dim, config.hidden, bias=False)
        shape = 1, config.kv_heads, config.longest, config.head_dim
        self.register_buffer("keys", torch.zeros(shape), persistent=False)
        self.register_buffer("values", torch.zeros(shape), persistent=False)

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        c = self.config
        heads = self.qkv(x).view(1, x.shape[1], -1, c.head_dim).transpose(1, 2)
        q, k, v = heads.split((c.heads, c.kv_heads, c.kv_heads), dim=1)
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        self.keys.index_copy_(2, positions, k)
        self.values.index_copy_(2, positions, v)
        seen = torch.arange(c.longest, device=x.device) <= positions[:, None]
        y = functional.scaled_dot_product_attention(
            q, self.keys, self.values, attn_mask=seen, enable_gqa=True
        )
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.first_norm, self.second_norm = (nn.RMSNorm(config.hidden, eps=1e-6) for _ in "12")
        self.attention = Attention(config)
        self.gate, self.up = (nn.Linear(config.hidden, config.inner, bias=False) for _ in "12")
        self.down = nn.Linear(config.inner, config.hidden, bias=False)

    def forward(self, x: torch.Tensor, *places: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.first_norm(x), *places)
        y = self.second_norm(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Gpt(nn.Module):
    """Computes logits [1, tokens, vocabulary] of tokens [1, tokens] at positions [tokens]."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocabulary, config.hidden)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden, eps=1e-6)
        self.head = nn.Linear(config.hidden, config.vocabulary, bias=False)
        powers = torch.arange(0, config.head_dim, 2) / config.head_dim
        angles = torch.arange(config.longest)[:, None] * 10000.0**-powers
        angles = torch.cat([angles, angles], dim=-1)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        cos, sin = self.cos[positions], self.sin[positions]
        for block in self.blocks:
            x = block(x, positions, cos, sin)
        return self.head(self.norm(x))


def logits_of(step: Any, prompt: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Computes the logits of a prompt [1, T], and then the logits of the given new tokens [N], one
    token at a time."""
    device = prompt.device
    found = [step(prompt, torch.arange(prompt.shape[1], device=device))]
    for number, token in enumerate(new, start=prompt.shape[1]):
        found.append(step(token.view(1, 1), torch.full((1,), number, device=device)))
    return torch.cat(found, dim=1)


def decode() -> tuple[nn.Module, tuple[torch.Tensor, ...], dict[str, Any]]:
    """Returns a decode step at a realistic size, for `tilewright inspect`."""
    large = Config(32000, 4096, 14336, 2, 32, 8, 128, 4096)
    with torch.device("meta"):
        model = Gpt(large).to(torch.bfloat16).requires_grad_(False)
        places = torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    return model, places, {}


def error(made: torch.Tensor, exact: torch.Tensor) -> float:
    return ((made.double() - exact).norm() / exact.norm()).item()


def main() -> int:
    gpu = torch.cuda.is_available()
    torch.manual_seed(0)
    config = Config()
    model = Gpt(config).to("cuda" if gpu else "cpu", torch.bfloat16).requires_grad_(False)
    tokens = torch.randint(config.vocabulary, (16,), device=model.head.weight.device)
    given = tokens[None, :12], tokens[12:]
    exact = logits_of(copy.deepcopy(model).double(), *given)
    eager = error(logits_of(model, *given), exact)

    # Without a GPU the fused ops run as their PyTorch references.
    options = {} if gpu else {"everywhere": True, "inner": "eager"}
    step = torch.compile(model, backend="tilewright", dynamic=False, options=options)
    fused = error(logits_of(step, *given), exact)
    report = reports()[-1]
    print(report)
    print(f"error against float64: eager {eager:.4f}, fused {fused:.4f}")
    found = Counter(site.pattern for site in report.matches)
    wanted = ("qkv_cache", "cache_attention", "linear_activation")
    lost = [name for name in wanted if found[name] != config.layers]
    return 1 if lost or fused > 1.25 * eager + 2.0**-8 else 0


if __name__ == "__main__":
    sys.exit(main())
