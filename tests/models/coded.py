"""Unmodified Hugging Face models whose linears and experts hold codes.

    case = build_coded("llama", ["awq", "fp8_block"])      # a layer of each format

Each linear of a layer is a `QuantizedLinear`, which decodes in PyTorch as loaders of such
checkpoints do; stacked experts decode where the model reads a weight. Embeddings, heads, norms and
routers stay in bfloat16, as in checkpoints.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tests.models import hf, moe_dequant, quantized
from tests.models.quantized import QuantizedLinear

_LAYER = re.compile(r"\b(?:layers|h)\.(\d+)\.")

#: Fields that differ from those of `hf`: codes have blocks of 32 columns, and an op's linear has 64
#: columns.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},  # heads share keys, and the rotation follows the projection
    "qwen2": {},  # biases
    "qwen3": {},  # norms of heads
    "phi": {},  # rotates a part of each head, and has layer norms
    "gpt_neox": {},  # one weight for q, k and v, head by head
    "gpt2": {},  # no rotation, weights [K, N]
    "gemma": {},  # one key head
    "deepseek_v3": {},  # has latent attention, a dense first layer, and shared experts
    "mixtral": {},
    "qwen3_moe": {"moe_intermediate_size": 64},
    "gpt_oss": {},
}


@dataclass(frozen=True)
class Format:
    """A quantisation format.

    linear: a form of `quantized`, or None for bfloat16.
    experts: (format, spelling) of `moe_dequant`, or None.
    """

    linear: Callable[..., Any] | None
    experts: tuple[str, Callable[..., Any]] | None = None


def _experts(name: str) -> tuple[str, Callable[..., Any]]:
    return moe_dequant.SPELLINGS[name]


PARTS = ("codes", "scales", "factor")

FORMATS: dict[str, Format] = {
    "bf16": Format(None),
    "int8": Format(quantized.int8),
    "int8_after": Format(quantized.int8_after),
    "fp8_tensor": Format(quantized.fp8_tensor, _experts("fp8_by_expert")),
    "fp8_row": Format(quantized.fp8_channel),
    "fp8_block": Format(quantized.fp8_blocks_repeated, _experts("fp8_repeated")),
    "fp8_fp8": Format(quantized.scaled_mm_token),
    "int4": Format(quantized.nibbles_low_first, _experts("int4_groups")),
    "awq": Format(quantized.awq),
    "gptq": Format(quantized.gptq_indexed),
    "nf4": Format(quantized.nf4),
    "mxfp4": Format(quantized.mxfp4, _experts("mxfp4_ldexp")),
    "nvfp4": Format(quantized.nvfp4, _experts("nvfp4_table")),
}


def build_coded(
    name: str, formats: Sequence[str], phase: str = "decode", seed: int = 0
) -> hf.HfCase:
    """Returns a model with a layer of each format. The first layer of DeepSeek's model is dense."""
    changes = MODELS[name] | {"num_hidden_layers": len(formats)}
    if "layer_types" in hf.MODELS.get(name, hf.MORE.get(name))[1]:
        changes["layer_types"] = ["full_attention"] * len(formats)
    with_codes = lambda model: quantise(model, [FORMATS[f] for f in formats])  # noqa: E731
    return hf.build_hf(name, phase=phase, seed=seed, prepare=with_codes, **changes)


def quantise(model: nn.Module, formats: Sequence[Format]) -> None:
    """Replaces a model's linears and stacked experts by layers with codes."""
    for name, module in list(model.named_modules()):
        found = _LAYER.search(name)
        if found is None:
            continue
        form = formats[int(found[1])]
        if form.linear is not None and _is_linear(module, name):
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, _coded_linear(module, form.linear, len(name)))
        elif form.experts is not None and type(module).__name__.endswith("Experts"):
            _code_experts(module, *form.experts)


def _is_linear(module: nn.Module, name: str) -> bool:
    router = name.rpartition(".")[2] in ("gate", "router")
    return type(module).__name__ in ("Linear", "Conv1D") and not router


def _coded_linear(module: nn.Module, form: Callable[..., Any], seed: int) -> QuantizedLinear:
    turned = type(module).__name__ == "Conv1D"
    rows, columns = module.weight.shape[::-1] if turned else module.weight.shape
    return QuantizedLinear(form, columns, rows, seed, bias=module.bias is not None)


def _code_experts(module: nn.Module, name: str, spelling: Callable[..., Any]) -> None:
    """Makes each stacked weight [E, N, K], or [E, K, N], a property that decodes."""
    decoded = {}
    for own, weight in list(module.named_parameters(recurse=False)):
        if weight.dim() != 3:
            continue
        turned = getattr(module, "is_transposed", False)
        shape = weight.transpose(1, 2).shape if turned else weight.shape
        delattr(module, own)
        stored = moe_dequant.stored(name, 0, shape)
        for part, tensor in zip(PARTS, stored, strict=True):
            module.register_buffer(f"{own}_{part}", tensor)
        decoded[own] = _decoded(own, spelling, turned)
    module.__class__ = type(type(module).__name__, (type(module),), decoded)


def _decoded(own: str, spelling: Callable[..., Any], turned: bool) -> property:
    def weight(module: nn.Module) -> torch.Tensor:
        parts = (getattr(module, f"{own}_{part}") for part in PARTS)
        made = spelling(*parts)
        return made.transpose(1, 2) if turned else made

    return property(weight)


def outcome_by_layer(report: Any, formats: Sequence[str]) -> dict[str, str]:
    """Returns the result of each format's layer in a report: matches by pattern, then misses by
    code."""
    said: list[Counter[str]] = [Counter() for _ in formats]
    for site in report.matches:
        _note(said, site.scope, site.pattern, 1)
    for miss in report.misses:
        _note(said, miss.scope, f"{miss.pattern} {miss.code}", miss.count)
    lines = (", ".join(f"{what} {n}" for what, n in sorted(found.items())) for found in said)
    return dict(zip(formats, lines, strict=True))


def _note(said: list[Counter[str]], scope: str, what: str, count: int) -> None:
    found = _LAYER.search(scope + ".")
    assert found is not None, f"{what} in no layer: {scope}"
    said[int(found[1])][what] += count
