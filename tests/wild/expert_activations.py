"""Operations between the two products of a mixture with biases, as in public code bases: see
`mixtures`."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.wild.mixtures import EXPERTS, SLOTS, TOKENS, Style, multiplied, softmax_choice


def _clamped_once(gate, lin):
    return gate.clamp(max=7.0), lin.clamp(min=-7.0, max=7.0)


def _clamped(m, x, join, clamps=_clamped_once):
    weights, ids = softmax_choice(m, x)
    order = torch.argsort(ids.view(-1), stable=True)
    counts = torch.histc(ids.view(-1).float(), bins=EXPERTS, min=0, max=EXPERTS)
    ends = torch.cumsum(counts, 0, dtype=torch.int32)
    h = multiplied(x[order // SLOTS], m.gate_up, ends)
    gate, lin = clamps(h[..., ::2], h[..., 1::2])
    glu = gate * torch.sigmoid(1.702 * gate)
    y = multiplied(join(glu, lin), m.down_t, ends)
    y = y * weights.view(-1)[order][:, None].to(y.dtype)
    return torch.zeros_like(x).index_add(0, order // SLOTS, y)


def added_product(m, x):
    """Computes addcmul(glu, glu, lin), which is glu * (lin + 1), as torchtitan's gpt-oss does."""
    return _clamped(m, x, lambda glu, lin: torch.addcmul(glu, glu, lin))


def _biased_by_count(m, x, repeats=lambda counts: counts):
    weights, ids = softmax_choice(m, x)
    order = torch.argsort(ids.view(-1), stable=True)
    counts = torch.zeros(TOKENS, EXPERTS, dtype=torch.bool).scatter_(-1, ids, True).sum(0)
    ends = torch.cumsum(counts, 0, dtype=torch.int32)
    left = (TOKENS * SLOTS - ends[-1]).unsqueeze(0).to(counts.dtype)
    times = torch.cat([repeats(counts), left]).long()

    def biased(rows, bias):
        wide = torch.cat([bias, bias.new_zeros(1, bias.shape[-1])])
        return rows + wide.repeat_interleave(times, dim=0, output_size=TOKENS * SLOTS)

    h = biased(multiplied(x[order // SLOTS], m.gate_up, ends), m.gate_up[:, 0])
    gate, lin = _clamped_once(h[..., ::2], h[..., 1::2])
    glu = gate * torch.sigmoid(1.702 * gate)
    y = biased(multiplied(torch.addcmul(glu, glu, lin), m.down_t, ends), m.down_t[:, 0])
    y = y * weights.view(-1)[order][:, None].to(y.dtype)
    return torch.zeros_like(x).index_add(0, order // SLOTS, y)


def biased_by_count(m, x):
    """Repeats each expert's bias for each of its rows, as torchtitan's gpt-oss does."""
    return _biased_by_count(m, x)


def biased_by_other_count(m, x):
    """Near miss: repeats each expert's bias by the number of another expert's rows."""
    return _biased_by_count(m, x, lambda counts: counts.flip(0))


def added_product_of_others(m, x):
    """Near miss: computes glu * lin + lin."""
    return _clamped(m, x, lambda glu, lin: torch.addcmul(lin, glu, lin))


def clamped_twice(m, x):
    """Clamps to one bound at a time, and to one of them twice, as gpt-oss's remote code does."""
    return _clamped(
        m,
        x,
        lambda glu, lin: glu * (lin + 1),
        lambda gate, lin: (
            gate.clamp(max=0.6).clamp(max=0.4),
            lin.clamp(min=-0.4).clamp(max=0.4),
        ),
    )


def clamped_twice_unlike(m, x):
    """Near miss: clamps the gate to the smaller bound."""
    return _clamped(
        m,
        x,
        lambda glu, lin: glu * (lin + 1),
        lambda gate, lin: (gate.clamp(max=0.6).clamp(max=0.4), lin.clamp(-0.6, 0.6)),
    )


def added_half_product(m, x):
    """Near miss: computes glu + glu * lin / 2."""
    return _clamped(m, x, lambda glu, lin: torch.addcmul(glu, glu, lin, value=0.5))


def _clamped_silu(m, x, up_limit):
    weights, ids = softmax_choice(m, x)
    order = torch.argsort(ids.view(-1), stable=True)
    counts = torch.histc(ids.view(-1).float(), bins=EXPERTS, min=0, max=EXPERTS)
    ends = torch.cumsum(counts, 0, dtype=torch.int32)
    gate, up = multiplied(x[order // SLOTS], m.gate_up, ends).chunk(2, -1)
    h = F.silu(gate.clamp(max=1.0)) * up.clamp(min=-up_limit, max=up_limit)
    y = multiplied(h, m.down_t, ends) * weights.view(-1)[order][:, None].to(x.dtype)
    return torch.zeros_like(x).index_add(0, order // SLOTS, y)


def clamped_silu(m, x):
    """Computes a plain SwiGLU of a gate that is clamped above and an up that is clamped on both
    sides, as DeepSeek-V4 does."""
    return _clamped_silu(m, x, 1.0)


def clamped_silu_unlike(m, x):
    """Near miss: there are two limits."""
    return _clamped_silu(m, x, 0.5)


STYLES = {
    step.__name__: Style(step)
    for step in (
        added_product, biased_by_count, biased_by_other_count, added_product_of_others,
        clamped_twice, clamped_twice_unlike, added_half_product, clamped_silu,
        clamped_silu_unlike,
    )
}  # fmt: skip
