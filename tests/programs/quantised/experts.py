"""Mixtures of experts whose weights and activations are codes."""

from __future__ import annotations

import random
from typing import Any

from torch import nn

from tests.models import moe_coded, moe_dequant
from tests.programs.quantised.activations import draw_floats_of_four_bits


class Experts(moe_coded.CodedMoe):
    """A mixture. For each weight, `spelled` has (format, function of `moe_dequant`), or None for
    e4m3 blocks."""

    def __init__(self, rows, hidden, spelled: dict[str, Any], seed: int) -> None:
        super().__init__(rows, hidden)
        self.spelled = spelled
        for name, (form, _) in spelled.items():
            shape = getattr(self, name).shape
            parts = moe_dequant.stored(form, seed, shape)
            for part, tensor in zip(("codes", "scales", "factor"), parts, strict=True):
                self.register_buffer(f"{name}_{part}", tensor)

    def weight(self, name):
        if name not in self.spelled:
            return super().weight(name)
        _, decode = self.spelled[name]
        return decode(*(getattr(self, f"{name}_{part}") for part in ("codes", "scales", "factor")))


_EXPERTS = [*moe_dequant.SPELLINGS.values()]
_EXPERTS += [
    (form, function)
    for function, (form, _) in moe_dequant.NEAR_MISSES.items()
    if "stacked" not in function.__name__ and form != "fp8"
]


def unrounded(rows):
    return rows


def said(rounding: Any) -> str:
    return getattr(rounding, "__name__", str(rounding))


def experts(draw: random.Random) -> tuple[nn.Module, tuple[Any, ...], str]:
    known = (*moe_coded.SPELLINGS.values(),)
    four = draw_floats_of_four_bits(draw)
    choices = (unrounded, unrounded, *(four,) * 8, *known, *moe_coded.NEAR_MISSES)
    rows = hidden = draw.choice(choices)
    if draw.random() < 0.2:
        hidden = draw.choice(choices[1:])
    spelled = {}
    if draw.random() < 0.7:
        spelled = dict.fromkeys(("gate_up", "down"), draw.choice(_EXPERTS))
        if draw.random() < 0.2:
            spelled[draw.choice(tuple(spelled))] = draw.choice(_EXPERTS)
    names = {name: function.__name__ for name, (_, function) in spelled.items()}
    module = Experts(rows, hidden, spelled, draw.randrange(1 << 20))
    args = (moe_coded.tokens(draw.randrange(1 << 20)),)
    return module, args, f"experts {names} {said(rows)} {said(hidden)}"
