"""A mixture whose graph quantises activations to e4m3, in front of weights in fp8 blocks.

SPELLINGS[name](x) quantises x [M, K] per row and 128 columns, and decodes it again.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tilewright.ops.formats import fp8_block

EXPERTS, HIDDEN, INNER, SLOTS, TOKENS = 4, 256, 128, 2, 12
BLOCK = 128


def codes_of(values):
    return values.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)


def divided(x):
    blocks = x.float().view(x.shape[0], -1, BLOCK)
    scale = blocks.abs().amax(-1, keepdim=True) / 448.0
    return (codes_of(blocks / scale).float() * scale).view(x.shape).to(x.dtype)


def bounded(x):
    """Quantises as DeepSeek does. No scale of a block is zero, and nothing is clamped, because no
    number exceeds 448."""
    blocks = x.view(-1, BLOCK).float()
    scale = blocks.abs().amax(1, keepdim=True).clamp(1e-4) / 448.0
    codes = (blocks / scale).to(torch.float8_e4m3fn)
    return (codes.to(torch.float32) * scale).view(x.shape).to(x.dtype)


def reciprocal(x):
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    scale = (blocks.abs().max(-1).values * (1 / 448)).clamp_min(1e-12)
    codes = codes_of(blocks * scale.reciprocal().unsqueeze(-1))
    return (codes.float() * scale.unsqueeze(-1)).flatten(-2).to(x.dtype)


def repeated(x):
    """Quantises with scales [M, K / 128], in the form that kernels take."""
    scale = x.abs().float().unflatten(-1, (-1, BLOCK)).amax(-1) / 448.0
    wide = scale.repeat_interleave(BLOCK, 1)
    return (codes_of(x.float() / wide).float() * wide).to(x.dtype)


SPELLINGS = {f.__name__: f for f in (divided, bounded, reciprocal, repeated)}


def blocks_of_64(x):
    blocks = x.float().unflatten(-1, (-1, 64))
    scale = blocks.abs().amax(-1, keepdim=True) / 448.0
    return (codes_of(blocks / scale).float() * scale).flatten(-2).to(x.dtype)


def powers_of_two(x):
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    scale = torch.exp2(torch.ceil(torch.log2(blocks.abs().amax(-1, keepdim=True) / 448.0)))
    return (codes_of(blocks / scale).float() * scale).flatten(-2).to(x.dtype)


def smaller_range(x):
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    scale = blocks.abs().amax(-1, keepdim=True) / 240.0
    return (codes_of(blocks / scale).float() * scale).flatten(-2).to(x.dtype)


def scale_of_the_next_row(x):
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    scale = blocks.roll(1, 0).abs().amax(-1, keepdim=True) / 448.0
    return (codes_of(blocks / scale).float() * scale).flatten(-2).to(x.dtype)


def scale_of_the_next_block(x):
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    scale = (blocks.abs().amax(-1, keepdim=True) / 448.0).flip(1)
    return (codes_of(blocks / scale).float() * scale).flatten(-2).to(x.dtype)


def decoded_with_another_scale(x):
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    scale = blocks.abs().amax(-1, keepdim=True) / 448.0
    return (codes_of(blocks / scale).float() * (2 * scale)).flatten(-2).to(x.dtype)


def cut_off(x):
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    scale = blocks.abs().amax(-1, keepdim=True) / 448.0
    codes = (blocks / scale).clamp(-100.0, 100.0).to(torch.float8_e4m3fn)
    return (codes.float() * scale).flatten(-2).to(x.dtype)


def by_tensor(x):
    scale = x.float().abs().amax() / 448.0
    return (codes_of(x.float() / scale).float() * scale).to(x.dtype)


def rounded_reciprocal(x):
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    scale = blocks.abs().amax(-1, keepdim=True) / 448.0
    codes = codes_of(blocks * torch.div(1, scale, rounding_mode="floor"))
    return (codes.float() * scale).flatten(-2).to(x.dtype)


NEAR_MISSES = (
    blocks_of_64, powers_of_two, smaller_range, scale_of_the_next_row, scale_of_the_next_block,
    decoded_with_another_scale, cut_off, by_tensor, rounded_reciprocal,
)  # fmt: skip


class CodedMoe(nn.Module):
    """A mixture of experts whose activations are quantised.

    rows, hidden: the functions that quantise the rows of the two GEMMs.
    first: whether tokens are quantised before they are gathered.
    """

    def __init__(self, rows, hidden, *, first=False, dense=False) -> None:
        super().__init__()
        self.rows, self.hidden, self.first, self.dense = rows, hidden, first, dense
        generator = torch.Generator().manual_seed(0)
        router = torch.randn(EXPERTS, HIDDEN, generator=generator) * 0.3
        self.register_buffer("router", router.bfloat16())
        shapes = {"gate_up": (2 * INNER, HIDDEN), "down": (HIDDEN, INNER)}
        for name, (n, k) in shapes.items():
            weight = torch.randn(EXPERTS, n, k, generator=generator) * k**-0.5
            codes, scale = fp8_block.quantize_blocks(weight)
            self.register_buffer(name, weight.bfloat16() if dense else codes)
            self.register_buffer(f"{name}_scale", scale)

    def weight(self, name):
        if self.dense:
            return getattr(self, name)
        scale = getattr(self, f"{name}_scale").repeat_interleave(BLOCK, 1)
        return (getattr(self, name).float() * scale.repeat_interleave(BLOCK, 2)).bfloat16()

    def forward(self, x):
        weights, ids = (x @ self.router.T).float().softmax(-1).topk(SLOTS, -1)
        ids_sorted, order = ids.reshape(-1).sort()
        ends = torch.histc(ids_sorted.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
        ends = ends.cumsum(0, dtype=torch.int32)
        rows = self.rows(x)[order // SLOTS] if self.first else self.rows(x[order // SLOTS])
        both = torch._grouped_mm(rows, self.weight("gate_up").mT, offs=ends)
        gate, up = both.chunk(2, -1)
        hidden = self.hidden(F.silu(gate) * up)
        y = torch._grouped_mm(hidden, self.weight("down").mT, offs=ends)
        y = y * weights.reshape(-1)[order][:, None]
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.numel())
        return y[inverse].view(*ids.shape, -1).sum(1).to(x.dtype)

    def exact(self, x):
        """Computes the result in float64, with only the weights quantised."""
        weights, ids = (x @ self.router.T).float().softmax(-1).topk(SLOTS, -1)
        gate_up, down = (self.weight(name).double() for name in ("gate_up", "down"))
        out = torch.zeros(x.shape, dtype=torch.float64)
        for t in range(x.shape[0]):
            for s in range(SLOTS):
                e = int(ids[t, s])
                gate, up = (gate_up[e] @ x[t].double()).chunk(2)
                out[t] += weights[t, s].double() * (down[e] @ (F.silu(gate) * up))
        return out


def tokens(seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16()


class SeparateMoe(CodedMoe):
    """A mixture with gate and up as two GEMMs. `rows` and `up_rows` are the functions that quantise
    the rows of each."""

    def __init__(self, rows, up_rows, hidden) -> None:
        super().__init__(rows, hidden)
        self.up_rows = up_rows

    def forward(self, x):
        weights, ids = (x @ self.router.T).float().softmax(-1).topk(SLOTS, -1)
        ids_sorted, order = ids.reshape(-1).sort()
        ends = torch.histc(ids_sorted.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
        ends = ends.cumsum(0, dtype=torch.int32)
        rows, both = x[order // SLOTS], self.weight("gate_up").mT
        gate = torch._grouped_mm(self.rows(rows), both[..., :INNER], offs=ends)
        up = torch._grouped_mm(self.up_rows(rows), both[..., INNER:], offs=ends)
        hidden = self.hidden(F.silu(gate) * up)
        y = torch._grouped_mm(hidden, self.weight("down").mT, offs=ends)
        y = y * weights.reshape(-1)[order][:, None]
        return y[order.argsort()].view(*ids.shape, -1).sum(1).to(x.dtype)


@torch.library.custom_op("tilewright_tests::fp8_grouped_matmul", mutates_args=())
def fp8_grouped_matmul(
    rows: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """Stands for the hub's kernel as Hugging Face's experts call it. No graph shows what it
    computes."""
    return rows.new_zeros(rows.shape[0], weight.shape[1])


@fp8_grouped_matmul.register_fake
def _(rows, weight, scale, offsets):
    return rows.new_empty(rows.shape[0], weight.shape[1])


class KernelMoe(CodedMoe):
    """Computes like `fp8_grouped_mm_experts_forward` of transformers'
    integrations/finegrained_fp8.py."""

    def __init__(self) -> None:
        super().__init__(None, None)

    def forward(self, x):
        weights, ids = (x @ self.router.T).float().softmax(-1).topk(SLOTS, -1)
        ids_sorted, order = ids.reshape(-1).sort()
        ends = torch.histc(ids_sorted.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
        ends = ends.cumsum(0, dtype=torch.int32)
        rows = x[order // SLOTS]
        both = fp8_grouped_matmul(rows, self.gate_up, self.gate_up_scale, ends)
        gate, up = both.chunk(2, -1)
        y = fp8_grouped_matmul(F.silu(gate) * up, self.down, self.down_scale, ends)
        y = y * weights.reshape(-1)[order].to(y.dtype).unsqueeze(-1)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.numel())
        return y[inverse].view(*ids.shape, -1).sum(1).to(x.dtype)
