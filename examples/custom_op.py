"""Declares the operator of a library in plain PyTorch, so that tilewright fuses the site around the
operator.

    python examples/custom_op.py

`engine::rotate` stands for a kernel of a library. No pattern knows what this operator computes, so
the operations around it are not fused. The program calls `declare` to say, in plain PyTorch, what
the operator computes. docs/tutorials/declare-an-op.md explains more.

The exit status is 1 if the declaration is not used, or if the result differs.
"""

from __future__ import annotations

import sys

import torch
from torch import nn

from tilewright import declare, lower, reports, undeclare

HEADS, KV_HEADS, HEAD_DIM, SLOTS = 4, 2, 64, 128


@torch.library.custom_op("engine::rotate", mutates_args=())
def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Computes a rotary embedding of x [tokens, heads, head dim]; cos and sin are [tokens, head
    dim]."""
    return rotate_meaning(x, cos, sin)


@rotate.register_fake
def _(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def rotate_meaning(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Computes in plain PyTorch what `engine::rotate` computes. The arguments have the names in the
    operator's schema."""
    one, two = x.chunk(2, dim=-1)
    turned = torch.cat([-two, one], dim=-1)
    return x * cos[:, None] + turned * sin[:, None]


class Attention(nn.Module):
    def __init__(self, hidden: int = 256) -> None:
        super().__init__()
        self.q_proj = nn.Linear(hidden, HEADS * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(hidden, KV_HEADS * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(hidden, KV_HEADS * HEAD_DIM, bias=False)
        self.register_buffer("keys", torch.zeros(SLOTS, KV_HEADS, HEAD_DIM))
        self.register_buffer("values", torch.zeros(SLOTS, KV_HEADS, HEAD_DIM))

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        q, k, v = (
            project(x).view(x.shape[0], -1, HEAD_DIM)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        self.keys[slots] = torch.ops.engine.rotate(k, cos, sin)
        self.values[slots] = v
        return torch.ops.engine.rotate(q, cos, sin)


def found(model: nn.Module, args: tuple[torch.Tensor, ...]) -> list[str]:
    """Returns the fused ops of a model's report."""
    torch._dynamo.reset()
    lowered = lower(model, args)
    for miss in lowered.lost:
        print(f"  {miss}")
    return [site.op for site in lowered.matches]


def main() -> int:
    torch.manual_seed(0)
    model = Attention().requires_grad_(False)
    angles = torch.rand(3, HEAD_DIM // 2).repeat(1, 2)
    args = torch.randn(3, 256), angles.cos(), angles.sin(), torch.tensor([5, 40, 2])
    expected = model(*args), model.keys.clone()

    print("before:")
    before = found(model, args)
    print(f"  {before}")
    declare("engine::rotate", rotate_meaning)
    try:
        print("declared:")
        after = found(model, args)
        print(f"  {after}")
        torch._dynamo.reset()
        model.keys.zero_()
        options = {"everywhere": True, "inner": "eager"}  # runs the references if there is no GPU
        compiled = torch.compile(model, backend="tilewright", options=options)
        q = compiled(*args)
        ran = [site.op for site in reports()[-1].matches]
    finally:
        undeclare("engine::rotate")
    print(f"largest difference: {max(map(difference, (q, model.keys), expected)):.1e}")
    good = all(
        torch.allclose(a, b, atol=1e-5) for a, b in zip((q, model.keys), expected, strict=True)
    )
    return 0 if good and before != after == ran == ["fused_qkv_paged"] else 1


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return (one - other).abs().max().item()


if __name__ == "__main__":
    sys.exit(main())
