"""Adds adapters (LoRA) to the models in `steps_models.py`, in the two ways in which users have
adapters.

`Adapters.of_sequences` is 0 for a model with one adapter, made by PEFT. Otherwise, it is the number
of adapters that a batch shares: each sequence has one of these adapters, and the projections q, k
and v take the adapter's matrices from stacks by an index, as servers of several adapters do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

QKV = ("q_proj", "k_proj", "v_proj")
#: The number of sequences for which a shared index has room.
MOST_SEQUENCES = 256


@dataclass(frozen=True)
class Adapters:
    """The adapters of a model.

    rank: the rank of each adapter.
    targets: the names of the linears that have adapters, or "all-linear".
    of_sequences: the number of adapters that a batch shares, or 0.
    """

    rank: int
    targets: tuple[str, ...] | str
    of_sequences: int = 0


class SharedLinear(nn.Module):
    """A linear that adds the delta of each sequence's own adapter.

    a: [adapters, rank, columns].
    b: [adapters, rows, rank].
    index: a buffer with the adapter of each sequence, which all linears of a model share. It has
        room for more sequences than a batch has.
    """

    def __init__(self, base: nn.Linear, adapters: Adapters, index: torch.Tensor) -> None:
        super().__init__()
        self.base = base
        like: dict[str, Any] = {"dtype": base.weight.dtype, "device": base.weight.device}
        number, rank = adapters.of_sequences, adapters.rank
        self.a = nn.Parameter(torch.empty(number, rank, base.in_features, **like))
        self.b = nn.Parameter(torch.empty(number, base.out_features, rank, **like))
        self.register_buffer("index", index, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own = self.index[: x.shape[0]]
        low = torch.bmm(x, self.a[own].transpose(1, 2))
        return self.base(x) + torch.bmm(low, self.b[own].transpose(1, 2))


def with_adapters(model: Any, adapters: Adapters) -> Any:
    """Returns the model with adapters, whose weights are not initialised."""
    if adapters.of_sequences:
        return _shared(model, adapters)
    import peft

    named = isinstance(adapters.targets, str)
    config = peft.LoraConfig(
        r=adapters.rank,
        lora_alpha=2 * adapters.rank,
        target_modules=adapters.targets if named else [*adapters.targets],
    )
    return peft.get_peft_model(model, config, autocast_adapter_dtype=False)


def _shared(model: Any, adapters: Adapters) -> Any:
    index = torch.arange(MOST_SEQUENCES, device=model.device) % adapters.of_sequences
    found = [
        (module, name)
        for module in model.modules()
        for name in adapters.targets
        if isinstance(getattr(module, name, None), nn.Linear)
    ]
    for module, name in found:
        setattr(module, name, SharedLinear(getattr(module, name), adapters, index))
    return model
