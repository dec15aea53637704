"""Gated MLPs whose linears multiply codes by codes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.models import finegrained
from tests.programs.quantised.codes import E4M3, random_words
from tests.programs.quantised.parts import Gated, draw_written, normal


class Product(nn.Module):
    """Multiplies x, rounded to e4m3, by e4m3 codes [N, K]. `form` is a key of FORMS."""

    def __init__(self, form: str, rows: int, columns: int, seed: int) -> None:
        super().__init__()
        self.form, self.width = form, rows
        generator = torch.Generator().manual_seed(seed)
        grid = FORMS[form][0](rows, columns)
        values = (
            random_words((rows, columns), E4M3, generator),
            torch.rand(grid, generator=generator),
        )
        self.codes = nn.Parameter(values[0], requires_grad=False)
        # The scales of blocks differ by more than any rounding.
        scale = (0.01 + values[1] ** 4) * columns**-0.5
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.step = nn.Parameter(torch.tensor([0.01]), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return FORMS[self.form][1](self, x)


def scaled_mm(by_row: bool) -> Callable[..., torch.Tensor]:
    """Returns a product by `torch._scaled_mm` with a scale for each row of both sides, or for all
    rows."""

    def run(layer: Product, x: torch.Tensor) -> torch.Tensor:
        size = x.float().abs()
        size = size.amax(-1, keepdim=True) if by_row else size.amax()
        codes = (x.float() / (size / 448)).clamp(-448, 448).to(E4M3)
        scale = layer.scale.t() if by_row else layer.scale
        return torch._scaled_mm(
            codes, layer.codes.t(), scale_a=size / 448, scale_b=scale, out_dtype=x.dtype
        )

    return run


def by_block(layer: Product, x: torch.Tensor) -> torch.Tensor:
    return finegrained.block_dynamic(x, layer.codes, layer.scale, finegrained.BLOCK, x.dtype)


def by_tensor(layer: Product, x: torch.Tensor) -> torch.Tensor:
    return finegrained.tensor_dynamic(x, layer.codes, layer.scale, x.dtype)


def static(layer: Product, x: torch.Tensor) -> torch.Tensor:
    given = layer.codes, layer.scale, layer.step, finegrained.BLOCK, x.dtype
    return finegrained.block_static(x, *given)


#: For each form: (the shape of its scales, the function that computes the product).
FORMS: dict[str, tuple[Callable[..., tuple[int, ...]], Callable[..., torch.Tensor]]] = {
    "scaled_mm by rows": (lambda n, k: (n, 1), scaled_mm(True)),
    "scaled_mm": (lambda n, k: (), scaled_mm(False)),
    "blocks": (lambda n, k: (-(-n // 128), -(-k // 128)), by_block),
    "library's tensor": (lambda n, k: (), by_tensor),
    "static blocks": (lambda n, k: (-(-n // 128), -(-k // 128)), static),
}


def products(draw: random.Random) -> tuple[nn.Module, tuple[Any, ...], str]:
    """Draws a gated MLP whose linears multiply codes by codes."""
    hidden, inner = draw.choice((128, 192, 256)), draw.choice((64, 128, 192, 256, 448))
    joined, form = draw.random() < 0.3, draw.choice(tuple(FORMS))
    shapes = [(2 * inner, hidden)] if joined else [(inner, hidden)] * 2
    shapes += [(hidden, inner)]
    forms = [form if draw.random() < 0.9 else draw.choice(tuple(FORMS)) for _ in shapes]
    drawn = {
        "joined": joined,
        "activation": draw.choice((F.silu, F.gelu)),
        "written": draw_written(draw, len(shapes)),
    }
    made = [
        Product(f, *shape, draw.randrange(1 << 20)) for f, shape in zip(forms, shapes, strict=True)
    ]
    if draw.random() < 0.8:
        for layer in made[1:-1]:
            layer.step = made[0].step
    tokens = draw.choice((1, 3))
    dtype = torch.bfloat16 if "_mm" in "".join(forms) else torch.float16
    args = tuple(normal(draw, dtype, tokens, hidden) for _ in range(2))
    return Gated(made, drawn), args, f"{forms} {shapes} {drawn}"
