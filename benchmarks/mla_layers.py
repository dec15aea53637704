"""Makes the inputs of one MLA layer's prefill, and computes the prefill in plain PyTorch and in
float64."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from tilewright.ops.formats import fp8_block
from tilewright.ops.formats.paged_cache import CacheWindow
from tilewright.ops.mla.arguments import MlaBranchArguments, MlaPrefillArguments

RANK, ROPE, NOPE, V_DIM, PAGE = 512, 64, 128, 128, 128
SCALE = (NOPE + ROPE) ** -0.5
EPS = 1e-6
CHECKED_ROWS = 256
HEADS_AT_ONCE = 8


def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates neighbouring pairs of columns of x [T, .., ROPE]. cos and sin are [T, .., ROPE /
    2]."""
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)


def stock(
    q: torch.Tensor, latents: torch.Tensor, norm: torch.Tensor, cos: torch.Tensor,
    sin: torch.Tensor, weight: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor,
    lengths: tuple[int, ...],
) -> torch.Tensor:  # fmt: skip
    """Computes the branch [T, H, V] for q [T, H, N + R] as serving code does, one sequence after
    the other.

    Also writes the entries of `pool` [P, PAGE, L + R] at `slots`.
    """
    heads, flat = q.shape[1], pool.view(-1, RANK + ROPE)
    latent = F.rms_norm(latents[:, :RANK], (RANK,), norm, EPS)
    flat[slots] = torch.cat((latent, turn(latents[:, RANK:], cos, sin)), -1)
    q = torch.cat((q[..., :NOPE], turn(q[..., NOPE:], cos[:, None], sin[:, None])), -1)
    entries = flat[slots]
    kv = F.linear(entries[:, :RANK], weight).unflatten(-1, (heads, NOPE + V_DIM))
    rope = entries[:, None, RANK:].expand(-1, heads, -1)
    k, v = torch.cat((kv[..., :NOPE], rope), -1), kv[..., NOPE:]
    outs, first = [], 0
    for length in lengths:
        parts = (x[first : first + length].transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        out = F.scaled_dot_product_attention(*parts, is_causal=True, scale=SCALE)
        outs.append(out.squeeze(0).transpose(0, 1))
        first += length
    return torch.cat(outs) if len(outs) > 1 else outs[0].contiguous()


class Layer:
    """The tensors of a layer for new sequences of the given lengths, and the arguments of the fused
    ops."""

    def __init__(self, heads: int, lengths: tuple[int, ...], device: str) -> None:
        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=device).bfloat16()

        tokens, batch = sum(lengths), len(lengths)
        pages = [-(-length // PAGE) for length in lengths]
        self.heads, self.lengths, self.tokens = heads, lengths, tokens
        self.q, self.latents = normal(tokens, heads, NOPE + ROPE), normal(tokens, RANK + ROPE)
        self.norm = torch.ones(RANK, device=device).bfloat16()
        angles = torch.rand(max(pages) * PAGE, ROPE // 2, device=device) * 6.28
        self.freqs = torch.stack((angles.cos(), angles.sin()), -1).flatten(-2).bfloat16()
        self.weight = normal(heads * (NOPE + V_DIM), RANK) * RANK**-0.5
        self.blocks = normal(sum(pages), 1, 1, PAGE, 1, RANK + ROPE)
        order = torch.randperm(sum(pages)).split(pages)
        table = torch.zeros(batch, max(pages), dtype=torch.int32)
        for row, own in zip(table, order, strict=True):
            row[: len(own)] = own
        places = [torch.arange(length) for length in lengths]
        slots = [own[p // PAGE] * PAGE + p % PAGE for own, p in zip(order, places, strict=True)]
        self.table = table.to(device)
        self.slots, self.positions = torch.cat(slots).to(device), torch.cat(places).to(device)
        ends = torch.tensor((0, *lengths)).cumsum(0)
        self.offsets = ends.to(torch.int32).to(device)
        self.cached = torch.zeros(batch, dtype=torch.int32, device=device)

    def stock(self) -> tuple[Any, ...]:
        rows = self.freqs[self.positions]
        tables = rows[:, ::2].contiguous(), rows[:, 1::2].contiguous()
        pool = self.blocks[:, 0, 0, :, 0]
        return (self.q, self.latents, self.norm, *tables, self.weight, pool, self.slots,
                self.lengths)  # fmt: skip

    def bf16(self) -> MlaPrefillArguments:
        entries = self.blocks[:, 0, 0]
        return MlaPrefillArguments(
            q=self.q, latent=self.latents[:, :RANK], k_rope=self.latents[:, RANK:],
            kv_b_weight=self.weight, latent_cache=self.blocks,
            latent_window=CacheWindow.of(entries[..., :RANK], self.blocks).to_ints(),
            rope_window=CacheWindow.of(entries[..., RANK:], self.blocks).to_ints(),
            v_dim=V_DIM, scale=SCALE, row_offsets=self.offsets, keys="table",
            key_offsets=self.offsets, num_keys=self.tokens, slots="ragged",
            lookup_table=self.table, cache_lengths=self.cached, norm_weight=self.norm,
            norm_eps=EPS, cos=self.freqs[:, ::2], sin=self.freqs[:, 1::2],
            rope_style="interleaved", rope_by_position=True,
        )  # fmt: skip

    def fp8(self, core: torch.dtype | None = None) -> MlaBranchArguments:
        codes, scale = fp8_block.quantize_blocks(self.weight)
        return MlaBranchArguments(
            q=self.q, latents=self.latents, input_row_offsets=self.offsets, freqs_cis=self.freqs,
            kv_norm_gamma=self.norm, blocks=self.blocks, cache_lengths=self.cached,
            lookup_table=self.table, layer_idx=0, scale=SCALE, epsilon=EPS,
            buffer_row_offsets=self.offsets, cache_offsets=self.cached,
            buffer_length=[self.tokens], kv_b_proj=codes, kv_b_proj_scale=scale, v_dim=V_DIM,
            attention_dtype=core,
        )  # fmt: skip

    def checked_rows(self) -> torch.Tensor:
        """Returns the tokens whose results are compared. They are evenly spaced and include the
        first and the last."""
        count = min(CHECKED_ROWS, self.tokens)
        return torch.linspace(0, self.tokens - 1, count, device=self.q.device).long()

    def exact(self, rows: torch.Tensor) -> torch.Tensor:
        """Computes the branch [rows, H, V] in float64, without rounding or quantisation."""
        table = self.freqs[self.positions].double()
        cos, sin = table[:, ::2], table[:, 1::2]
        latent = F.rms_norm(self.latents[:, :RANK].double(), (RANK,), self.norm.double(), EPS)
        k_rope = turn(self.latents[:, RANK:].double(), cos, sin)
        q = self.q[rows].double()
        q_rope = turn(q[..., NOPE:], cos[rows, None], sin[rows, None])
        weight = self.weight.double().view(self.heads, NOPE + V_DIM, RANK)
        out = q.new_empty((len(rows), self.heads, V_DIM))
        ends = torch.tensor((0, *self.lengths)).cumsum(0).tolist()
        for first in range(0, self.heads, HEADS_AT_ONCE):
            part = slice(first, first + HEADS_AT_ONCE)
            kv = torch.einsum("tl,hdl->htd", latent, weight[part])
            for start, end in pairwise(ends):
                mine = ((rows >= start) & (rows < end)).nonzero().flatten()
                if len(mine) == 0:
                    continue
                scores = torch.einsum("rhd,hkd->hrk", q[mine, part, :NOPE], kv[:, start:end, :NOPE])
                scores += torch.einsum("rhd,kd->hrk", q_rope[mine, part], k_rope[start:end])
                keys = torch.arange(start, end, device=rows.device)
                scores.masked_fill_(keys > rows[mine, None], float("-inf"))
                weights = (scores * SCALE).softmax(-1)
                out[mine, part] = torch.einsum("hrk,hkd->rhd", weights, kv[:, start:end, NOPE:])
        return out


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Returns the root mean square of the difference, divided by that of the exact result."""
    return float((got.double() - want).square().mean().sqrt() / want.square().mean().sqrt())
