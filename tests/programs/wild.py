"""Random models in the styles of public code: attention, mixtures, latents and adapters."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn

from tests.models import cached_styles, mla_absorbed
from tests.wild import (
    adapters,
    attention,
    expert_activations,
    expert_loops,
    latents,
    mixtures,
)

Built = tuple[nn.Module, Any]


def _attention(draw: random.Random, dtype: torch.dtype) -> tuple[str, Built]:
    name = draw.choice(tuple(attention.STYLES))
    return name, attention.build(name, dtype)


def _cached(draw: random.Random, dtype: torch.dtype) -> tuple[str, Built]:
    name, phase = draw.choice(tuple(cached_styles.STYLES)), draw.choice(("decode", "prefill"))
    return f"{name} {phase}", cached_styles.build(name, phase, dtype)


def _mixture(draw: random.Random, dtype: torch.dtype) -> tuple[str, Built]:
    styles = draw.choice((mixtures.STYLES, expert_activations.STYLES, expert_loops.STYLES))
    name = draw.choice(tuple(styles))
    return name, mixtures.build(name, dtype, styles)


def _latents(draw: random.Random, dtype: torch.dtype) -> tuple[str, Built]:
    name, tokens = draw.choice(tuple(latents.STYLES)), draw.choice((1, latents.SEQ))
    return f"{name} {tokens}", latents.build(name, tokens, dtype)


def _absorbed(draw: random.Random, dtype: torch.dtype) -> tuple[str, Built]:
    name = draw.choice(tuple(mla_absorbed.SPELLINGS))
    return name, mla_absorbed.build(name, dtype=dtype)


def _adapters(draw: random.Random, dtype: torch.dtype) -> tuple[str, Built]:
    name = draw.choice(tuple(adapters.STYLES))
    return name, adapters.build(name, dtype)


KINDS = (_attention, _attention, _cached, _mixture, _mixture, _latents, _absorbed, _adapters)


def build(draw: random.Random, dtype: torch.dtype) -> tuple[nn.Module, tuple[Any, ...], str]:
    kind = draw.choice(KINDS)
    name, (module, args) = kind(draw, dtype)
    return module.requires_grad_(False), tuple(args), f"{kind.__name__} {name} {dtype}"
