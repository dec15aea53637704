"""The activations of MLPs, as the fused ops define them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch.nn import functional

#: The activations by name. Each is a function of one tensor, and computes in the tensor's dtype.
ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = MappingProxyType(
    {
        "silu": functional.silu,
        "gelu": functional.gelu,
        "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
        "relu": torch.relu,
        "relu_squared": lambda x: torch.relu(x).square(),
    }
)
