"""Experts that decode their weights in the forward pass, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import nn


class CodedExperts(nn.Module):
    """The experts of a mixture. A call takes x [T, K], the chosen experts [T, S] and their weights
    [T, S], and returns [T, K].

    There is a subclass for each way of storing codes; it implements `of_rows`. Dimension letters: T
    tokens, S slots, K columns.
    """

    num_experts: int

    def of_rows(self, x: torch.Tensor, ends: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        """Returns the result [T * S, K] for rows that are sorted by expert. `ends` has the end of
        each expert's rows, and `expert` the expert of each row."""
        raise NotImplementedError

    def forward(
        self, x: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        num_slots = top_k_index.shape[-1]
        expert, order = torch.sort(top_k_index.reshape(-1))
        # On a CPU, `histc` rejects integers; on a GPU, it is deterministic only for integers.
        numbers = expert.float() if x.device.type == "cpu" else expert.int()
        counts = torch.histc(numbers, bins=self.num_experts, min=0, max=self.num_experts - 1)
        ends = counts.cumsum(0, dtype=torch.int32)
        y = self.of_rows(x[order // num_slots], ends, expert)
        y = y * top_k_weights.reshape(-1)[order].unsqueeze(-1)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order), device=order.device)
        return y[inverse].view(*top_k_index.shape, -1).sum(1).to(x.dtype)
