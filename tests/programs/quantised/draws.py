"""Draws linears of one format, one of which may differ from the others."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from tests.programs.quantised import floats, integers
from tests.programs.quantised.linear import Coded


@dataclass(frozen=True)
class Kind:
    """A kind of codes.

    draw: a function that draws the axes of a linear.
    apart: the axes in which one of several linears may differ.
    made: a function that makes the linear.
    """

    draw: Callable[[random.Random], Any]
    apart: Mapping[str, Callable[[random.Random], Any]]
    made: type[Coded]


INTEGERS = Kind(integers.draw_integers, integers.APART, integers.IntegerLinear)
FLOATS = Kind(floats.draw_floats, floats.APART, floats.FloatLinear)
KINDS = (INTEGERS, INTEGERS, FLOATS)


def linear_of(axes: Any, rows: int, columns: int, dtype: torch.dtype, draw: random.Random) -> Coded:
    kind = FLOATS if isinstance(axes, floats.Floats) else INTEGERS
    return kind.made(axes, rows, columns, dtype, draw.randrange(1 << 20))


def like(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.shape, one.dtype) == (other.shape, other.dtype)


def draw_linears(
    draw: random.Random, shapes: list[tuple[int, int]], dtype: torch.dtype
) -> list[Coded]:
    """Returns linears of one format. One of them may differ, or use a tensor that belongs to
    another."""
    kind = draw.choice(KINDS)
    axes = [kind.draw(draw)] * len(shapes)
    if draw.random() < 0.3:
        name, one = draw.choice(tuple(kind.apart)), draw.randrange(len(axes))
        axes[one] = replace(axes[one], **{name: kind.apart[name](draw)})
        if draw.random() < 0.1:
            axes[one] = draw.choice(KINDS).draw(draw)
    made = [linear_of(a, *shape, dtype, draw) for a, shape in zip(axes, shapes, strict=True)]
    if len(made) > 1 and draw.random() < 0.15:
        name = draw.choice(("scale", "zero", "codes"))
        one, other = draw.sample(made, 2)
        given, old = getattr(one, name), getattr(other, name)
        if given is not None and old is not None and like(given, old):
            setattr(other, name, given)
    if draw.random() < 0.8:  # a static scale of their input
        for linear in made[1:-1]:
            linear.step = made[0].step
    return made
