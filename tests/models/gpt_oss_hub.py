"""gpt-oss in MXFP4 as transformers loads it for a GPU, with a stand-in for the hub's kernels.

The modules are transformers' own (`integrations/mxfp4.py`), and load a file's bytes as they do on a
GPU. The stand-in has the names, objects and arithmetic of `gpt-oss-triton-kernels` that they use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from tests.models import moe_dequant

PROJECTIONS = ("gate_up_proj", "down_proj")


class StridedLayout:
    """A layout that keeps the bytes in their order."""

    def __init__(self, shape=None):
        self.shape = shape

    def swizzle_data(self, data):
        return data

    def unswizzle_data(self, data):
        return data


class HopperMXValueLayout(StridedLayout):
    """A layout that reorders and pads the bytes. Like the real layout, it can be undone."""

    def swizzle_data(self, data):
        padded = nn.functional.pad(data, (0, 64 - data.shape[-1] % 64))
        tiles = padded.unflatten(-1, (-1, 4)).transpose(-1, -2)
        return tiles.flip(-2).flatten(-2).contiguous()

    def unswizzle_data(self, data):
        tiles = data.unflatten(-1, (4, -1)).flip(-2).transpose(-1, -2)
        return tiles.flatten(-2)[..., : self.shape[-1]].contiguous()


class WrongLayout(HopperMXValueLayout):
    def unswizzle_data(self, data):
        return super().unswizzle_data(data).flip(-1)


class UnknownLayout(StridedLayout):
    pass


WrongLayout.__name__ = "HopperMXValueLayout"


@dataclass
class Storage:
    data: torch.Tensor
    layout: Any


@dataclass
class Tensor:
    """The hub's tensor class, which is not a tensor of PyTorch."""

    storage: Storage
    dtype: Any = None
    shape: Any = None


def hub(value_layout: Callable[..., Any], compute: torch.dtype = torch.float32) -> SimpleNamespace:
    """Returns the stand-in for the hub's module.

    `value_layout` is the layout of codes of a shape. `compute` is the dtype of the module's
    arithmetic.
    """

    def convert_layout(tensor, layout, **options):
        made = layout(tensor.storage.data.shape)
        tensor.storage = Storage(made.swizzle_data(tensor.storage.data), made)
        return tensor

    layouts = SimpleNamespace(
        StridedLayout=StridedLayout,
        make_default_matmul_mxfp4_w_layout=lambda mx_axis: (value_layout, {"mx_axis": mx_axis}),
    )
    tensors = SimpleNamespace(
        FP4="fp4",
        wrap_torch_tensor=lambda data, dtype=None: Tensor(Storage(data, None), dtype, data.shape),
        convert_layout=convert_layout,
    )
    products = SimpleNamespace(
        PrecisionConfig=SimpleNamespace,
        FlexCtx=SimpleNamespace,
        InFlexData=SimpleNamespace,
        FnSpecs=lambda name, function, names: (name, names),
        FusedActivation=lambda specs, arguments, reduction: arguments,
        matmul_ogs=partial(matmul_ogs, compute),
    )
    return SimpleNamespace(
        matmul_ogs=products,
        tensor=tensors,
        tensor_details=SimpleNamespace(layout=layouts),
        swiglu=SimpleNamespace(swiglu_fn=None),
        routing=SimpleNamespace(routing=routing),
    )


def routing(logits, k):
    """Returns the chosen experts [T, S] with their weights, and two placeholders for the orders of
    rows."""
    top, index = logits.topk(k, -1)
    return SimpleNamespace(index=index, gate_scal=top.softmax(-1)), None, None


def decoded(weight, precision) -> torch.Tensor:
    """Decodes a weight to [E, K, N] in fp32, code by code."""
    codes, scales = (
        t.storage.layout.unswizzle_data(t.storage.data) for t in (weight, precision.weight_scale)
    )
    table = torch.tensor(moe_dequant.TABLE, device=codes.device)
    numbers = table[torch.stack([codes & 15, codes >> 4], 2).long()]
    exponents = scales.double() - 127
    return numbers.flatten(1, 2).double() * torch.exp2(exponents).repeat_interleave(32, 1)


def matmul_ogs(
    compute, x, weight, bias, routes, precision_config, gammas, gather_indx=None,
    scatter_indx=None, fused_activation=None,
):  # fmt: skip
    """Computes the product in fp32 and rounds it once to x's dtype, as the kernel does. If
    `compute` is float64, the result is not rounded."""
    dtype = torch.promote_types(x.dtype, compute) if compute == torch.float64 else x.dtype
    w, expert = decoded(weight, precision_config).to(compute), routes.index.flatten()
    slots = routes.index.shape[1]
    rows = x.to(compute) if fused_activation is None else x.to(compute).repeat_interleave(slots, 0)
    acc = torch.stack([row @ w[e] for row, e in zip(rows, expert, strict=True)])
    acc = acc + bias[expert].to(compute)
    if fused_activation is not None:
        alpha, limit = fused_activation
        gate, up = acc[:, ::2].clamp(max=limit), acc[:, 1::2].clamp(-limit, limit)
        return (gate / (1 + torch.exp(-alpha * gate)) * (up + 1)).to(dtype)
    acc = acc * gammas.flatten()[:, None].to(compute)
    return acc.view(-1, slots, acc.shape[1]).sum(1).to(dtype)


def load(model: nn.Module, layout: Callable[[Any], Any], seed: int = 0) -> None:
    """Replaces a model's mixtures by transformers' modules for MXFP4, with random codes."""
    from transformers.integrations import mxfp4

    mxfp4.triton_kernels_hub = hub(layout)
    for name, module in list(model.named_modules()):
        if type(module).__name__ != "GptOssMLP":
            continue
        with torch.device("meta"):
            experts = mxfp4.Mxfp4GptOssExperts(model.config)
        made = torch.Generator(torch.get_default_device()).manual_seed(seed)
        for own in PROJECTIONS:
            codes, scales, _ = moe_dequant.stored("mxfp4", seed, _shape(experts, own))
            # An index is needed, because in a build for GPUs "cpu" alone would stand for the
            # missing GPU.
            mxfp4.swizzle_mxfp4_convertops(
                codes.unflatten(-1, (-1, 16)), scales, experts, own, f"{codes.device.type}:0",
                mxfp4.triton_kernels_hub,
            )  # fmt: skip
            bias = torch.randn(experts.num_experts, scales.shape[1], generator=made) / 10
            setattr(experts, f"{own}_bias", nn.Parameter(bias, requires_grad=False))
        model.set_submodule(name, mxfp4.Mxfp4GptOssMLP(module.router, experts))


def _shape(experts: Any, name: str) -> tuple[int, int, int]:
    e, h, i = experts.num_experts, experts.hidden_size, experts.intermediate_size
    return (e, 2 * i, h) if name == "gate_up_proj" else (e, h, i)
